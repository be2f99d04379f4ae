// The console: its frame, its pages, its keys.
// @ts-check
import { unescaped } from "./api.js";
import { connect, connection, disconnect } from "./live.js";
import { followTabs, isLockedOut, may, readSession, session, signOut } from "./session.js";
import { applyTheme, setShortcuts, setTheme, shortcuts, theme } from "./settings.js";
import { Dialog, Name, Problem, View, html, render } from "./ui.js";

/** The pages: the key behind `g`, the title, and the module, which is loaded when the page is first opened. */
const PAGES = {
  overview: { key: "o", title: "Overview", load: () => import("./pages/overview.js") },
  playground: { key: "p", title: "Playground", load: () => import("./pages/playground.js") },
  models: { key: "m", title: "Models", load: () => import("./pages/models.js") },
  drift: { key: "d", title: "Drift", load: () => import("./pages/drift.js") },
  requests: { key: "r", title: "Requests", load: () => import("./pages/requests.js") },
  keys: { key: "k", title: "Tenants & keys", load: () => import("./pages/keys.js") },
  events: { key: "e", title: "Events & alerts", load: () => import("./pages/events.js") },
  "sign-in": { key: "s", title: "Sign in", load: () => import("./pages/signin.js") },
};
const MENU = Object.keys(PAGES).filter((name) => name !== "sign-in");
const THEMES = { auto: "System", light: "Light", dark: "Dark" };

/** The page of the address and the rest of it: #/requests/abc is {page: "requests", rest: "abc"}. */
function place() {
  const [page, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { page: Object.hasOwn(PAGES, page) ? page : "overview", rest: rest.map(unescaped).join("/") };
}

/** Open the stream of live figures, or close it, as the session allows. */
function stream() {
  if (isLockedOut() || !may("metrics")) disconnect();
  else connect();
}

/** The focus goes to the heading of the page that was opened. */
function arrive() {
  const heading = document.querySelector("main h1");
  if (heading instanceof HTMLElement) heading.focus();
  scrollTo(0, 0);
}

class App extends View {
  constructor(props) {
    super(props);
    this.state = { ...place(), content: null, error: null, isHelp: false };
    this.awaits = 0; // the time until which a second key of `g ...` counts
    this.turn = 0; // counts the pages that were asked for: the last one is shown, in whatever order they load
  }

  componentDidMount() {
    this.uses(session, connection, theme);
    const moved = () => this.open();
    const pressed = (event) => this.pressed(event);
    addEventListener("hashchange", moved);
    addEventListener("keydown", pressed);
    this.endings.push(session.watch(() => this.follow()));
    followTabs();
    this.endings.push(() => removeEventListener("hashchange", moved), () => removeEventListener("keydown", pressed));
    this.start();
  }

  async start() {
    this.put({ error: null });
    try {
      await readSession();
      await this.open(true);
    } catch (error) {
      this.put({ error });
    }
  }

  /** The session has changed. One that ended shows the sign-in; the address stays, and its page comes back after it. */
  follow() {
    if (!this.state.content) return; // the first page opens by itself
    if (this.state.page !== (isLockedOut() ? "sign-in" : place().page)) this.open();
    else stream();
  }

  /** Show the page of the address. @param {boolean} [isFirst] */
  async open(isFirst) {
    const { page, rest } = isLockedOut() ? { page: "sign-in", rest: "" } : place();
    const turn = (this.turn += 1);
    try {
      const { Page } = await PAGES[page].load();
      if (turn !== this.turn) return;
      this.setState({ page, rest, content: Page, error: null }, () => isFirst || arrive());
    } catch (error) {
      if (turn !== this.turn) return;
      // A browser remembers that a module did not load, until the document is loaded again.
      this.put({ error: { title: "This page did not load.", message: error.message, next: "Check the connection, then load it again.", retry: () => location.reload() } });
      return;
    }
    document.title = PAGES[page].title + " – inferd console";
    stream();
  }

  pressed(event) {
    if (shortcuts.value !== "on" || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target instanceof Element && event.target.closest("input, textarea, select, [contenteditable]")) return;
    const isSecond = Date.now() < this.awaits;
    this.awaits = 0;
    if (isSecond) {
      const page = Object.keys(PAGES).find((name) => PAGES[name].key === event.key);
      if (!page) return;
      location.hash = "#/" + page;
    } else if (event.key === "g") this.awaits = Date.now() + 5000;
    else if (event.key === "?") this.put({ isHelp: true });
    else if (event.key === "t") this.nextTheme();
    else if (event.key === "/") {
      const field = document.querySelector("main input, main textarea, main select");
      if (!(field instanceof HTMLElement)) return;
      field.focus();
    } else return;
    event.preventDefault();
  }

  nextTheme() {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(theme.value) + 1) % names.length]);
  }

  async leave() {
    try {
      await signOut();
    } catch (error) {
      this.put({ error });
      return;
    }
    disconnect();
    location.hash = "#/sign-in";
    this.open();
  }

  render(_, { page, rest, content: Content, error, isHelp }) {
    const now = session.value;
    return html`
      <header class="top">
        <a class="brand" href="#/overview"><span aria-hidden="true" class="logo"></span>inferd</a>
        <nav aria-label="Pages">
          <ul>
            ${MENU.map(
              (name) => html`<li key=${name}><a href=${"#/" + name} aria-current=${name === page ? "page" : null}>${PAGES[name].title}</a></li>`,
            )}
          </ul>
        </nav>
        <div class="tools">
          <a href="../docs">API</a>
          <button type="button" onClick=${() => this.nextTheme()} title="Theme: system, light, dark">Theme: ${THEMES[theme.value] || "System"}</button>
          <button type="button" onClick=${() => this.put({ isHelp: true })}>Shortcuts</button>
          ${now && now.signed_in
            ? html`<button type="button" onClick=${() => this.leave()}>Sign out</button>`
            : html`<a href="#/sign-in">Sign in</a>`}
        </div>
      </header>
      <main id="main" tabindex="-1">
        <${Problem} error=${error} retry=${(error && error.retry) || (() => this.start())} />
        ${Content ? html`<${Content} key=${page} rest=${rest} entered=${() => this.open()} />` : error ? null : html`<p role="status">Loading…</p>`}
      </main>
      <footer>
        <span>inferd ${now ? now.version : ""}</span>
        ${now && now.signed_in && html`<span>Tenant <${Name} text=${now.tenant || "operator"} /></span>`}
        <span role="status">${{ open: "Live", connecting: "Connecting…", lost: "The live stream is interrupted; trying again.", closed: "" }[connection.value]}</span>
      </footer>
      ${isHelp && html`<${Help} onClose=${() => this.put({ isHelp: false })} />`}
    `;
  }
}

class Help extends View {
  componentDidMount() {
    this.uses(shortcuts);
  }

  render({ onClose }) {
    const rows = [
      ...Object.values(PAGES).map(({ key, title }) => [`g ${key}`, title]),
      ["/", "First field of the page"],
      ["t", "Next theme: system, light, dark"],
      ["?", "These shortcuts"],
      ["Ctrl+Enter", "Send, in the playground"],
      ["Escape", "Stop an answer, close a dialog"],
    ];
    return html`<${Dialog} title="Shortcuts" onClose=${onClose}>
      <table>
        <thead><tr><th scope="col">Key</th><th scope="col">Action</th></tr></thead>
        <tbody>
          ${rows.map(([key, action]) => html`<tr><th scope="row">${key.split(" ").map((one) => html`<kbd>${one}</kbd> `)}</th><td>${action}</td></tr>`)}
        </tbody>
      </table>
      <label class="check">
        <input type="checkbox" checked=${shortcuts.value === "on"} onChange=${(event) => setShortcuts(event.currentTarget.checked ? "on" : "off")} />
        Shortcuts of one key are on
      </label>
      <div class="actions"><button type="button" class="primary" onClick=${onClose}>Close</button></div>
    <//>`;
  }
}

applyTheme();
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address stays that of the page
  document.getElementById("main").focus();
});
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
