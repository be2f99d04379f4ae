// Events and alerts: what the server did, and what needs attention.
// @ts-check
import { get } from "../api.js";
import { clock } from "../format.js";
import { connection, feed } from "../live.js";
import { may } from "../session.js";
import { Empty, Field, Name, Problem, State, Table, View, html, visibleLine } from "../ui.js";

const LEVELS = ["debug", "info", "warning", "error"];

export class Page extends View {
  constructor(props) {
    super(props);
    this.state = { alerts: null, error: null, level: "info", filter: "" };
  }

  componentDidMount() {
    this.uses(feed, connection);
    if (may("metrics")) this.every(10, () => this.read());
  }

  async read() {
    try {
      this.put({ alerts: (await get("console/alerts")).data, error: null });
    } catch (error) {
      this.put({ error });
    }
  }

  render(_, { alerts, error, level, filter }) {
    const lowest = LEVELS.indexOf(level);
    const wanted = filter.toLowerCase();
    const shown = feed.value
      .filter((one) => LEVELS.indexOf(one.level) < 0 || LEVELS.indexOf(one.level) >= lowest)
      .filter((one) => [one.text, one.detail, one.model, one.replica].join(" ").toLowerCase().includes(wanted))
      .reverse();
    if (!may("metrics"))
      return html`<h1 tabindex="-1">Events & alerts</h1>
        <${Empty} title="This page needs a key with the scope metrics" command="inferd keys create --tenant me --scopes metrics,models"><p><a href="#/sign-in">Sign in</a> with one.</p><//>`;
    return html`<h1 tabindex="-1">Events & alerts</h1>
      <h2>Alerts</h2>
      <${Problem} error=${error} retry=${() => this.read()} />
      ${alerts && alerts.length === 0 && html`<${Empty} title="No alert" command="inferd alerts inferd.yaml > inferd.rules.yml"><p>The console checks a few general conditions. Alerts on your objectives are rules for Prometheus, written from the configuration:</p><//>`}
      ${alerts && alerts.length > 0 && html`<${Table} caption="Alerts" head=${["Alert", "Severity", "Model", "Since", "What", "Runbook"]}
        rows=${alerts.map((one) => html`<tr>
          <th scope="row">${visibleLine(one.name)}</th><td><${State} state=${one.severity} /></td><td><${Name} text=${one.model || "–"} /></td>
          <td>${clock(one.since)}</td><td class="wide"><bdi>${visibleLine(one.summary)}</bdi></td><td>${runbook(one.runbook)}</td>
        </tr>`)} />`}
      <h2>Events</h2>
      <div class="row">
        <${Field} id="level" label="From level"><select id="level" value=${level} onChange=${(event) => this.put({ level: event.currentTarget.value })}>${LEVELS.map((name) => html`<option value=${name}>${name}</option>`)}</select><//>
        <${Field} id="filter" label="With the text"><input id="filter" value=${filter} onInput=${(event) => this.put({ filter: event.currentTarget.value })} /><//>
      </div>
      ${shown.length === 0
        ? html`<${Empty} title="No event"><p>${feed.value.length ? "None fits the filter." : "Loads, restarts, reloads and refusals appear here as they happen."}</p><//>`
        : html`<${Table} caption="Events, the newest first" head=${["Time", "Level", "Model", "Replica", "What"]}
            rows=${shown.map((one) => html`<tr><td>${clock(one.at)}</td><td>${visibleLine(one.level)}</td><td><${Name} text=${one.model || "–"} /></td><td><${Name} text=${one.replica ?? "–"} /></td><td class="wide"><bdi>${visibleLine(one.text)}</bdi>${one.detail && html`<br /><bdi class="hint">${visibleLine(one.detail)}</bdi>`}</td></tr>`)} />`}`;
  }
}

/** A link where the runbook is an address, else its name. */
function runbook(text) {
  if (!text) return "–";
  return /^https?:\/\//.test(text) ? html`<a href=${text} rel="noopener noreferrer">Runbook</a>` : html`<code>${visibleLine(text)}</code>`;
}
