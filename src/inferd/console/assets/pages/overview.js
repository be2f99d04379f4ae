// Overview: states, alerts and live charts.
// @ts-check
import { curl, get } from "../api.js";
import { Chart } from "../chart.js";
import { bytes, clock, quantity, seconds } from "../format.js";
import { connection, figures } from "../live.js";
import { may } from "../session.js";
import { Empty, Name, Problem, State, View, html, visibleLine } from "../ui.js";

/** The charts: each shows the series whose id is one of these, in this order. */
const PANELS = [
  { title: "Requests", ids: ["requests_s", "errors_s"] },
  { title: "Tokens per second", ids: ["tokens_s", "prompt_tokens_s"] },
  { title: "Time to first token", ids: ["ttft_p50", "ttft_p95", "ttft_p99"] },
  { title: "Time per output token", ids: ["tpot_p50", "tpot_p95", "tpot_p99"] },
  { title: "Time of a request", ids: ["total_p50", "total_p95", "total_p99"] },
  { title: "Queue", ids: ["queue", "running"] },
  { title: "Batch size", ids: ["batch_rows"] },
  { title: "KV cache in use", ids: ["kv_use"] },
  { title: "Prefix cache hits", ids: ["prefix_hits"] },
  { title: "Speculation accepted", ids: ["speculation_accepted"] },
];
const MACHINE = [
  { title: "Processor", ids: ["cpu"] },
  { title: "Memory", ids: ["memory_used", "memory_limit"] },
  { title: "Device duty cycle", ids: ["device_duty"] },
  { title: "Device memory", ids: ["device_memory"] },
  { title: "Device temperature", ids: ["device_temperature"] },
  { title: "Device power", ids: ["device_power"] },
];
const KNOWN = new Set([...PANELS, ...MACHINE].flatMap((panel) => panel.ids));
const MAX_LINES = 6;

/** A series of one device among several has the id of the figure, a colon, and the device. @param {string} id */
const figureOf = (id) => id.split(":", 1)[0];

const spanText = (resolution) => seconds(resolution.step_s * resolution.length).replace(/^300 s$/, "5 min");

export class Page extends View {
  constructor(props) {
    super(props);
    this.state = { model: "", range: 0, status: null, alerts: [], error: null };
  }

  componentDidMount() {
    this.uses(figures, connection);
    this.every(5, () => this.read());
  }

  async read() {
    const [alerts, status] = await Promise.allSettled([may("metrics") ? get("console/alerts") : { data: [] }, may("admin") ? get("admin/status") : null]);
    this.put({ error: [alerts, status].map((one) => (one.status === "rejected" ? one.reason : null)).find((reason) => reason) || null });
    if (alerts.status === "fulfilled") this.put({ alerts: alerts.value.data });
    if (status.status === "fulfilled") this.put({ status: status.value });
  }

  /** The charts of some panels for one model, or for all models with a line per model. */
  charts(panels, model, isMachine) {
    const now = figures.value;
    const { range } = this.state;
    const span = spanText(now.resolutions[range]);
    return panels.map(({ title, ids }) => {
      let found = now.series.map((one, position) => ({ ...one, position })).filter((one) => ids.includes(figureOf(one.id)) || ids.includes(one.id));
      found = found.filter((one) => (isMachine ? one.model === "" : model ? one.model === model : one.model !== ""));
      if (!isMachine && !model) {
        // A line per model: of quantiles the 95th, else the first figure.
        const id = ids.find((one) => one.endsWith("_p95")) || ids[0];
        found = found.filter((one) => one.id === id);
      }
      found = found.filter((one) => now.columns[range][one.position].some((value) => value !== null)); // absent stays absent
      found = found.slice(0, MAX_LINES).sort((one, other) => ids.indexOf(figureOf(one.id)) - ids.indexOf(figureOf(other.id)));
      const table = found.length ? now.table(range, found.map((one) => one.position)) : [];
      if (!found.length || !table[0].length) return null;
      const labels = found.map((one) => (isMachine || model ? visibleLine(one.title) : visibleLine(one.model)));
      const suffix = !isMachine && !model && ids.some((one) => one.endsWith("_p95")) ? ", 95th percentile" : "";
      return html`<${Chart} key=${title + model} title=${title + suffix} unit=${found[0].unit} labels=${labels} table=${table} span=${span} />`;
    });
  }

  render(_, { model, range, status, alerts, error }) {
    const now = figures.value;
    const models = [...new Set(now.series.map((one) => one.model).filter((name) => name))];
    const chosen = models.includes(model) ? model : "";
    const others = now.series.filter((one) => !KNOWN.has(figureOf(one.id))).map((one) => ({ title: one.title, ids: [one.id] }));
    const sum = (id) => {
      const values = models.map((name) => now.latest(id, name)).filter((value) => value !== null);
      return values.length ? values.reduce((total, value) => total + value, 0) : null;
    };
    const hasTraffic = models.some((name) => now.latest("requests_s", name) !== null);
    return html`<h1 tabindex="-1">Overview</h1>
      <${Problem} error=${error} retry=${() => this.read()} />
      ${alerts.length > 0 &&
      html`<section class="notice bad" aria-label="Alerts">
        <h2>Alerts</h2>
        <ul>${alerts.map((alert) => html`<li><strong>${visibleLine(alert.name)}</strong> ${alert.model && html`<${Name} text=${alert.model} />`} <bdi>${visibleLine(alert.summary)}</bdi></li>`)}</ul>
        <a href="#/events">Alerts and events</a>
      </section>`}
      <dl class="tiles">
        <div class="tile"><dt>Requests</dt><dd>${quantity(sum("requests_s"), "/s")}</dd></div>
        <div class="tile"><dt>Tokens</dt><dd>${quantity(sum("tokens_s"), "/s")}</dd></div>
        <div class="tile"><dt>Waiting</dt><dd>${quantity(sum("queue"))}</dd></div>
        <div class="tile"><dt>Running</dt><dd>${quantity(sum("running"))}</dd></div>
        ${status && html`<div class="tile"><dt>Memory of models</dt><dd>${bytes(status.memory_bytes)}</dd></div>`}
        ${status && html`<div class="tile"><dt>Running since</dt><dd>${clock(status.started_at)}</dd></div>`}
      </dl>
      ${status &&
      html`<section class="card" aria-label="States of the models">
        <ul class="legend">${status.models.map((one) => html`<li><a href=${"#/models/" + encodeURIComponent(one.name)}><${Name} text=${one.name} /></a> <${State} state=${one.state} /> ${one.replicas_ready} of ${one.replicas.length}</li>`)}</ul>
      </section>`}
      ${now.series.length === 0
        ? html`<${Empty} title=${connection.value === "lost" || !may("metrics") ? "No live figures" : "Waiting for the first figures"}>
            <p>${!may("metrics") ? "They need a key with the scope metrics." : connection.value === "lost" ? "The live stream is interrupted; the page tries again every few seconds." : "They arrive once a second."}</p>
          <//>`
        : html`<div class="row">
              <div class="field"><label for="model">Model</label>
                <select id="model" value=${chosen} onChange=${(event) => this.put({ model: event.currentTarget.value })}>
                  <option value="">All models</option>
                  ${models.map((name) => html`<option value=${name}>${visibleLine(name)}</option>`)}
                </select>
              </div>
              <fieldset class="ranges"><legend class="visually-hidden">Range</legend>
                ${now.resolutions.map((one, index) => html`<label class="check"><input type="radio" name="range" checked=${range === index} onChange=${() => this.put({ range: index })} /> ${spanText(one)}</label> `)}
              </fieldset>
            </div>
            ${!hasTraffic &&
            html`<${Empty} title="No request yet" command=${curl("POST", "v1/chat/completions", { model: models[0] || "MODEL", messages: [{ role: "user", content: "Hello" }] })}>
              <p>Send one, or open the <a href="#/playground">playground</a>:</p>
            <//>`}
            <h2>Models</h2>
            <div class="grid">${this.charts(PANELS, chosen, false)}</div>
            <h2>Machine</h2>
            <div class="grid">${this.charts(MACHINE, "", true)}</div>
            ${others.length > 0 && html`<h2>More figures</h2><div class="grid">${this.charts(others, "", true)}${this.charts(others, chosen, false)}</div>`}`}`;
  }
}
