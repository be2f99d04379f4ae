// Requests: the recent, the slowest and the failed ones; and why one took its time.
// @ts-check
import { curl, get } from "../api.js";
import { clock, date, number, seconds } from "../format.js";
import { may } from "../session.js";
import { Waterfall } from "../waterfall.js";
import { Empty, Field, Name, Problem, State, Table, View, html, visible, visibleLine } from "../ui.js";

const ORDERS = { recent: "Recent", slowest: "Slowest", errors: "Errors" };
const PAGE = 50;

export class Page extends View {
  render({ rest }) {
    if (!may("metrics"))
      return html`<h1 tabindex="-1">Requests</h1>
        <${Empty} title="This page needs a key with the scope metrics" command="inferd keys create --tenant me --scopes infer,models,metrics"><p><a href="#/sign-in">Sign in</a> with one. In a terminal of the server's machine, 'inferd why' shows the same.</p><//>`;
    return rest ? html`<${One} id=${rest} key=${rest} />` : html`<${List} />`;
  }
}

class List extends View {
  constructor(props) {
    super(props);
    this.state = { order: "recent", model: "", tenant: "", data: null, error: null, isPaused: false, hasMore: false };
  }

  componentDidMount() {
    this.every(3, () => this.state.isPaused || this.read());
  }

  async read(before) {
    const { order, model, tenant, data } = this.state;
    const query = new URLSearchParams({ order, limit: String(PAGE) });
    if (model) query.set("model", model);
    if (tenant) query.set("tenant", tenant);
    if (before) query.set("before", String(before));
    try {
      const found = (await get("admin/requests?" + query)).data;
      if (order !== this.state.order || model !== this.state.model || tenant !== this.state.tenant) return; // asked again since
      this.put({ data: before ? [...data, ...found] : found, error: null, hasMore: found.length === PAGE && order !== "slowest" });
    } catch (error) {
      this.put({ error });
    }
  }

  choose(change) {
    this.setState({ ...change, data: null, isPaused: false }, () => this.read());
  }

  more() {
    const { data } = this.state;
    this.put({ isPaused: true });
    this.read(data[data.length - 1].arrived_at);
  }

  render(_, { order, model, tenant, data, error, isPaused, hasMore }) {
    return html`<h1 tabindex="-1">Requests</h1>
      <form class="row" onSubmit=${(event) => event.preventDefault()}>
        <${Field} id="order" label="Show"><select id="order" value=${order} onChange=${(event) => this.choose({ order: event.currentTarget.value })}>
          ${Object.entries(ORDERS).map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select><//>
        <${Field} id="of-model" label="Model"><input id="of-model" value=${model} placeholder="every model" onChange=${(event) => this.choose({ model: event.currentTarget.value.trim() })} /><//>
        <${Field} id="of-tenant" label="Tenant"><input id="of-tenant" value=${tenant} placeholder="every tenant" onChange=${(event) => this.choose({ tenant: event.currentTarget.value.trim() })} /><//>
        <${Field} id="of-id" label="Request id"><input id="of-id" placeholder="x-request-id" onChange=${(event) => event.currentTarget.value.trim() && (location.hash = "#/requests/" + encodeURIComponent(event.currentTarget.value.trim()))} /><//>
        <label class="check"><input type="checkbox" checked=${!isPaused} onChange=${(event) => this.put({ isPaused: !event.currentTarget.checked })} /> Keep up to date</label>
      </form>
      <${Problem} error=${error} retry=${() => this.read()} />
      ${data && data.length === 0 && this.empty(order, model || tenant)}
      ${data && data.length > 0 && html`<${Table} caption=${`${ORDERS[order]} requests; prompts and answers are never shown`}
        head=${["Time", "Request", "Model", "Tenant", "Outcome", "Total", "Usual", "First token", "Tokens", "Cause"]}
        rows=${data.map((one) => html`<tr>
          <td>${clock(one.arrived_at)}</td>
          <th scope="row"><a href=${"#/requests/" + encodeURIComponent(one.id)}><${Name} text=${one.id} /></a></th>
          <td><${Name} text=${one.model} /></td><td><${Name} text=${one.tenant || "–"} /></td>
          <td><${State} state=${one.status >= 400 ? "error" : "ok"} /> ${one.status}${one.error_code ? html` <${Name} text=${one.error_code} />` : ""}</td>
          <td class="number">${seconds(one.total_s)}</td><td class="number">${seconds(one.usual_s)}</td><td class="number">${seconds(one.ttft_s)}</td>
          <td class="number">${one.usage && one.usage.prompt_tokens ? number(one.usage.prompt_tokens) + " + " + number(one.usage.completion_tokens) : "–"}</td>
          <td>${one.cause ? visibleLine(one.cause).replaceAll("_", " ") : "–"}</td>
        </tr>`)} />`}
      ${hasMore && html`<div class="actions"><button type="button" onClick=${() => this.more()}>Older requests</button></div>`}`;
  }

  empty(order, isFiltered) {
    if (isFiltered) return html`<${Empty} title="No request fits"><p>Clear the filters: a name must be complete.</p><//>`;
    if (order === "errors") return html`<${Empty} title="No errors"><p>No request has failed since the server began to keep records.</p><//>`;
    return html`<${Empty} title="No request yet" command=${curl("POST", "v1/chat/completions", { model: "MODEL", messages: [{ role: "user", content: "Hello" }] })}>
      <p>Send one. Its x-request-id (curl -D - shows it) is its id here, and 'inferd why ID' tells the same in a terminal.</p>
    <//>`;
  }
}

class One extends View {
  componentDidMount() {
    this.read();
  }

  async read() {
    try {
      this.put({ one: await get("admin/requests/" + encodeURIComponent(this.props.id)), error: null });
    } catch (error) {
      if (error.status === 404) error.next = "The record may have been replaced by newer ones: the server keeps a fixed number of them.";
      this.put({ error });
    }
  }

  render({ id }, { one, error }) {
    return html`<p><a href="#/requests">All requests</a></p>
      <h1 tabindex="-1">Request <${Name} text=${id} /></h1>
      <${Problem} error=${error} retry=${() => this.read()} />
      ${one && this.record(one)}`;
  }

  record(one) {
    const facts = [
      ["Arrived", date(one.arrived_at)], ["Model", one.model], ["Replica", one.replica], ["Tenant", one.tenant], ["Key", one.key_id],
      ["Route", one.route + (one.stream ? ", streamed" : "")], ["Class", one.class], ["Outcome", `${one.status} ${one.outcome} ${one.error_code || ""}`],
      ["Total", seconds(one.total_s)], ["Usual", one.usual_s === null ? "too few requests to say" : seconds(one.usual_s)], ["First token", seconds(one.ttft_s)],
      ["Per output token", seconds(one.tpot_s)],
      ["Tokens", one.usage ? `${one.usage.prompt_tokens} in the prompt (${one.usage.cached_tokens} from the cache), ${one.usage.completion_tokens} generated` : ""],
      ["Attempts", one.attempts], ["Preemptions", one.num_preemptions], ["Trace", one.trace_id],
    ].filter(([, value]) => value !== "" && value !== null && value !== undefined);
    return html`<div class="card">
        <p class="sentence"><bdi>${visible(one.sentence)}</bdi></p>
        ${one.causes.length > 0 && html`<h2>Causes</h2><ol>${one.causes.map((cause) => html`<li><bdi>${visible(cause.sentence)}</bdi></li>`)}</ol>`}
        ${one.causes.length === 0 && html`<p class="hint">No cause stands out.</p>`}
      </div>
      <${Waterfall} parts=${one.parts} total=${one.total_s} />
      <${Table} caption="The record of the request" head=${["Fact", "Value"]} rows=${facts.map(([name, value]) => html`<tr><th scope="row">${name}</th><td><${Name} text=${value} /></td></tr>`)} />
      <div class="actions"><button type="button" onClick=${() => this.read()}>Read again</button></div>`;
  }
}
