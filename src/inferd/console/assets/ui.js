// The base of every view: templates, text that is safe to show, dialogs, notices.
// @ts-check
import { Component, Fragment, createRef, h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export { Component, Fragment, createRef, render };
export const html = htm.bind(h);

/** A value that views watch. @template T */
export class Store {
  /** @param {T} value */
  constructor(value) {
    this.value = value;
    /** @type {Set<() => void>} */
    this.watchers = new Set();
  }

  /** @param {T} value */
  set(value) {
    this.value = value;
    for (const watcher of [...this.watchers]) watcher();
  }

  /** @param {() => void} watcher @returns {() => void} that ends the watching */
  watch(watcher) {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }
}

/** A component that renders again when one of its stores changes, and that stops its timers when it goes. */
export class View extends Component {
  constructor(props) {
    super(props);
    /** @type {(() => void)[]} */
    this.endings = [];
    this.gone = false;
  }

  /** @param {Store<any>[]} stores */
  uses(...stores) {
    for (const store of stores) this.endings.push(store.watch(() => this.setState({})));
  }

  /** Call an asynchronous function now and every so many seconds while the page is visible. */
  every(seconds, work) {
    const run = () => document.hidden || work();
    work();
    const timer = setInterval(run, seconds * 1000);
    this.endings.push(() => clearInterval(timer));
  }

  /** setState, unless the component is gone. */
  put(state) {
    if (!this.gone) this.setState(state);
  }

  /** Each view says what it shows. @param {any} [props] @param {any} [state] @returns {any} */
  render(props, state) {
    throw new Error("A view without content. This is a bug.");
  }

  componentWillUnmount() {
    this.gone = true;
    for (const end of this.endings) end();
  }
}

// Characters that change what a reader sees without being seen: controls, marks and overrides of direction, invisible
// spaces, separators. Texts may have the joiners that several scripts and emoji need; names may not.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const HIDDEN_IN_NAMES = /[\n\t\u00ad\u034f\u115f\u1160\u180e\u200c\u200d\u3164\uffa0]/g;
const escaped = (character) => "\\u" + character.charCodeAt(0).toString(16).padStart(4, "0");

/** A text of several lines with its hidden characters written as escapes. @param {unknown} text */
export const visible = (text) => String(text ?? "").replace(HIDDEN, escaped);

/** A text of one line, such as a name, with every character that is not seen written as an escape. @param {unknown} text */
export const visibleLine = (text) => visible(text).replace(HIDDEN_IN_NAMES, escaped);

/** A name from outside: its direction cannot change that of the text around it. */
export const Name = ({ text }) => html`<bdi class="name">${visibleLine(text)}</bdi>`;

/** A word for a state, with a mark that does not depend on colours. */
export function State({ state }) {
  const kind = /^(ready|serving|active|closed|ok|loaded|passed|promoted)$/.test(state)
    ? "good"
    : /^(failed|dead|open|revoked|error|unavailable|ejected|critical|page|worse|rolled back|drifts)$/.test(state)
      ? "bad"
      : "other";
  const mark = { good: "●", bad: "▲", other: "○" }[kind];
  return html`<span class=${"state " + kind}><span aria-hidden="true">${mark}</span> ${visibleLine(state)}</span>`;
}

/** An error of a call, with what to do next. @param {{error: import("./api.js").ApiError | null, retry?: () => void}} props */
export function Problem({ error, retry }) {
  if (!error) return null;
  return html`<div class="notice bad" role="alert">
    <p><strong>${error.title}</strong> <bdi>${visible(error.message)}</bdi></p>
    ${error.next && html`<p>${error.next}</p>`}
    ${error.status === 401 || error.status === 403 ? html`<p><a href="#/sign-in">Sign in with another key</a></p>` : null}
    ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

/** A page without content yet: what it will show, and the command that makes it show something. */
export const Empty = ({ title, children, command }) => html`<div class="empty">
  <p><strong>${title}</strong></p>
  <div>${children}</div>
  ${command && html`<${Command} text=${command} />`}
</div>`;

/** A command to copy. */
export class Command extends View {
  copy() {
    copyText(this.props.text).then((done) => {
      this.put({ said: done ? "Copied." : "Select the text and copy it." });
      setTimeout(() => this.put({ said: "" }), 3000);
    });
  }

  render({ text }, { said }) {
    return html`<div class="command">
      <pre tabindex="0" aria-label="Command">${visible(text)}</pre>
      <button type="button" onClick=${() => this.copy()}>Copy</button>
      <span role="status">${said || ""}</span>
    </div>`;
  }
}

/** @param {string} text @returns {Promise<boolean>} */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // no permission, or not a secure context: the text stays selectable
  }
}

/** A modal dialog: the Escape key closes it, the focus returns to where it was. */
export class Dialog extends View {
  constructor(props) {
    super(props);
    this.element = createRef();
  }

  componentDidMount() {
    this.before = document.activeElement;
    this.element.current.showModal();
  }

  componentWillUnmount() {
    super.componentWillUnmount();
    const before = /** @type {HTMLElement | null} */ (this.before);
    this.element.current?.close(); // the rest of the page can have the focus again
    if (before && before.isConnected) before.focus();
  }

  render({ title, children, onClose }) {
    return html`<dialog ref=${this.element} aria-labelledby="dialog-title" onCancel=${(event) => (event.preventDefault(), onClose())}>
      <h2 id="dialog-title">${title}</h2>
      ${children}
    </dialog>`;
  }
}

/** A question before an action that cannot be undone. */
export class Confirm extends View {
  async confirm() {
    this.put({ busy: true, error: null });
    try {
      await this.props.action();
      this.props.onClose();
    } catch (error) {
      this.put({ busy: false, error });
    }
  }

  render({ title, verb, children, onClose }, { busy, error }) {
    return html`<${Dialog} title=${title} onClose=${onClose}>
      ${children}
      <${Problem} error=${error} />
      <div class="actions">
        <button type="button" onClick=${onClose}>Cancel</button>
        <button type="button" class="primary" disabled=${busy} onClick=${() => this.confirm()}>
          ${busy ? "Working…" : verb}
        </button>
      </div>
    <//>`;
  }
}

/** A field with its label above it and a hint below. */
export const Field = ({ label, hint, children, id }) => html`<div class="field">
  <label for=${id}>${label}</label>
  ${children}
  ${hint && html`<p class="hint" id=${id + "-hint"}>${hint}</p>`}
</div>`;

/** A table that scrolls inside its own box; a keyboard can scroll it. */
export const Table = ({ caption, head, rows, empty }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
  <table>
    <caption>${caption}</caption>
    <thead>
      <tr>${head.map((title) => html`<th scope="col">${title}</th>`)}</tr>
    </thead>
    <tbody>
      ${rows.length ? rows : html`<tr><td colspan=${head.length}>${empty || "Nothing to show."}</td></tr>`}
    </tbody>
  </table>
</div>`;
