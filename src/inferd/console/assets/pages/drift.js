// Drift: whether requests and answers are still like a reference, per model and version.
// @ts-check
import { call, get, segment } from "../api.js";
import { Stream, sinceOf, sizesOf, stateOf } from "../drift.js";
import { clock, count, date, number } from "../format.js";
import { may } from "../session.js";
import { Confirm, Empty, Field, Name, Problem, State, Table, View, html, visibleLine } from "../ui.js";

const SETTING = "models:\n  MODEL:\n    source: ./model\n    drift: {enabled: true}";

export class Page extends View {
  constructor(props) {
    super(props);
    this.state = { list: null, report: null, error: null, size: 0, isAsked: false, said: "" };
  }

  componentDidMount() {
    if (may("admin")) this.every(5, () => this.read());
  }

  componentDidUpdate(before) {
    if (before.rest !== this.props.rest) this.read();
  }

  /** The version of the address; without one the first that drifts, else the first. */
  chosen(list) {
    const { rest } = this.props;
    return rest ? { model: rest } : list.find((one) => stateOf(one) === "drifts") || list[0];
  }

  async read() {
    const { rest } = this.props;
    try {
      const list = (await get("admin/drift")).data;
      const one = this.chosen(list);
      const report = one ? await get("admin/drift/" + segment(one.model)) : null;
      if (rest === this.props.rest) this.put({ list, report, error: null });
    } catch (error) {
      if (rest === this.props.rest) this.put({ error, report: null });
    }
  }

  async reset(model) {
    await call("POST", `admin/drift/${segment(model)}/reset`);
    this.put({ said: `The next requests of ${visibleLine(model)} are its reference.` });
    this.read();
  }

  render(_, { list, report, error, size, isAsked, said }) {
    if (!may("admin"))
      return html`<h1 tabindex="-1">Drift</h1>
        <${Empty} title="This page needs a key with the scope admin" command="inferd keys create --tenant me --scopes infer,models,metrics,admin"><p><a href="#/sign-in">Sign in</a> with one.</p><//>`;
    return html`<h1 tabindex="-1">Drift</h1>
      <${Problem} error=${error} retry=${() => this.read()} />
      <p role="status">${list || error ? said : "Loading…"}</p>
      ${list && list.length === 0 && html`<${Empty} title="The drift of no model is watched" command=${SETTING}><p>Set drift.enabled of a model and reload the configuration. Its first requests become the reference.</p><//>`}
      ${list && list.length > 0 && html`<${Table} caption="Models and versions that are watched" head=${["Model", "Version", "State", "Since", "What drifts", "Reference"]}
        rows=${list.map((one) => html`<tr>
          <th scope="row"><a href=${"#/drift/" + encodeURIComponent(one.model)} aria-current=${report && report.model === one.model ? "true" : null}><${Name} text=${one.model} /></a></th>
          <td><${Name} text=${one.version} /></td><td><${State} state=${stateOf(one)} /></td><td>${clock(sinceOf(one))}</td>
          <td>${one.streams.filter((stream) => stream.is_drifting).map((stream) => visibleLine(stream.stream).replaceAll("_", " ")).join(", ") || "–"}</td>
          <td>${one.reference_at === null ? `${count(one.requests)} of ${count(one.wanted)} requests` : html`version <bdi>${visibleLine(one.reference_version)}</bdi>, ${date(one.reference_at)}`}</td>
        </tr>`)} />`}
      ${report && this.version(report, size)}
      ${report && isAsked && html`<${Confirm} title=${`Take another reference of ${visibleLine(report.model)}?`} verb="Take another reference" action=${() => this.reset(report.model)} onClose=${() => this.put({ isAsked: false })}>
        <p>The reference and the windows of all versions are dropped.</p>
      <//>`}`;
  }

  version(report, size) {
    const sizes = sizesOf(report.streams);
    const isComplete = report.reference_at !== null;
    return html`<section aria-label=${"Drift of " + visibleLine(report.model)}>
      <h2><${Name} text=${report.model} /> <${State} state=${stateOf(report)} /></h2>
      ${isComplete
        ? html`<p>Reference: ${count(report.requests)} requests of version <${Name} text=${report.reference_version} />, complete at ${date(report.reference_at)}. At most one false alarm in ${number(report.false_alarm_days)} ${report.false_alarm_days === 1 ? "day" : "days"}, on average.</p>`
        : html`<p>${report.state === "collecting" ? "The reference is taken from the first requests" : "Another version takes the reference"}: ${count(report.requests)} of ${count(report.wanted)}.</p>
            <progress max=${report.wanted} value=${report.requests} aria-label="Requests of the reference"></progress>`}
      <div class="row">
        ${sizes.length > 1 && html`<${Field} id="size" label="Windows in the charts"><select id="size" value=${sizes.includes(size) ? size : sizes[0]} onChange=${(event) => this.put({ size: Number(event.currentTarget.value) })}>${sizes.map((one) => html`<option value=${one}>${count(one)} values</option>`)}</select><//>`}
        ${isComplete && html`<button type="button" onClick=${() => this.put({ isAsked: true })}>Take another reference</button>`}
      </div>
      ${report.streams.map((stream) => html`<${Stream} key=${report.model + " " + stream.stream} stream=${stream} size=${sizes.includes(size) ? size : sizes[0]} />`)}
    </section>`;
  }
}
