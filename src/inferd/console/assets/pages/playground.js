// The playground: a conversation, a completion, or a form built from the contract of a model.
// @ts-check
import { get, segment } from "../api.js";
import { Empty, Name, Problem, State, View, html, visibleLine } from "../ui.js";
import { Chat } from "../playground/chat.js";
import { Completion } from "../playground/completion.js";
import { Form } from "../playground/form.js";

/** The ways to use a model, by its tasks. */
function waysOf(metadata) {
  const tasks = String((metadata.parameters || {}).tasks || "").split(",");
  const ways = [];
  if (tasks.includes("chat")) ways.push({ id: "chat", title: "Chat", view: Chat });
  if (tasks.includes("generate")) ways.push({ id: "completion", title: "Completion", view: Completion });
  if (!tasks.includes("generate")) ways.push({ id: "form", title: "Form", view: Form });
  return ways;
}

export class Page extends View {
  constructor(props) {
    super(props);
    this.state = { models: null, metadata: null, way: "", error: null };
  }

  async componentDidMount() {
    try {
      const models = (await get("v1/models")).data;
      this.put({ models });
      if (!this.props.rest && models.length) this.read(models[0].id);
      else if (this.props.rest) this.read(this.props.rest);
    } catch (error) {
      this.put({ error });
    }
  }

  componentDidUpdate(before) {
    if (before.rest !== this.props.rest && this.props.rest) this.read(this.props.rest);
  }

  async read(name) {
    this.put({ name, metadata: null, error: null });
    try {
      const metadata = await get("v2/models/" + segment(name));
      if (name === this.state.name) this.put({ metadata, way: "" });
    } catch (error) {
      if (name === this.state.name) this.put({ error });
    }
  }

  /** Arrow keys move between the tabs. */
  moved(event, ways, index) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = ways[(index + step + ways.length) % ways.length];
    this.put({ way: next.id });
    event.currentTarget.parentElement.children[ways.indexOf(next)].focus();
    event.preventDefault();
  }

  render(_, { models, name, metadata, way, error }) {
    const ways = metadata ? waysOf(metadata) : [];
    const chosen = ways.find((one) => one.id === way) || ways[0];
    const state = metadata && (metadata.parameters || {}).state;
    return html`<h1 tabindex="-1">Playground</h1>
      <${Problem} error=${error} />
      ${models && models.length === 0 && html`<${Empty} title="No model" command="inferd serve demo"><p>The server has no model that this session may use. This serves the bundled ones:</p><//>`}
      ${models && models.length > 0 && html`<div class="row">
        <div class="field"><label for="playground-model">Model</label>
          <select id="playground-model" value=${name} onChange=${(event) => (location.hash = "#/playground/" + encodeURIComponent(event.currentTarget.value))}>
            ${models.map((model) => html`<option value=${model.id}>${visibleLine(model.id)}</option>`)}
          </select>
        </div>
        ${state && html`<span><${State} state=${state} /></span>`}
        ${state && state !== "ready" && html`<span class="hint">The first request loads it, or see <a href=${"#/models/" + encodeURIComponent(name)}>its replicas</a>.</span>`}
      </div>`}
      ${ways.length > 1 && html`<div class="tabs" role="tablist" aria-label="Ways to use the model">
        ${ways.map((one, index) => html`<button type="button" role="tab" id=${"tab-" + one.id} aria-controls="tab-panel" aria-selected=${String(one === chosen)} tabindex=${one === chosen ? 0 : -1}
          onClick=${() => this.put({ way: one.id })} onKeyDown=${(event) => this.moved(event, ways, index)}>${one.title}</button>`)}
      </div>`}
      ${chosen && html`<div id="tab-panel" role=${ways.length > 1 ? "tabpanel" : null} aria-labelledby=${ways.length > 1 ? "tab-" + chosen.id : null}><${chosen.view} key=${name + chosen.id} model=${name} metadata=${metadata} /></div>`}
      ${metadata && !chosen && html`<p>The server tells of no way to use <${Name} text=${name} />. <a href="../docs">Try an endpoint by hand</a>.</p>`}`;
  }
}
