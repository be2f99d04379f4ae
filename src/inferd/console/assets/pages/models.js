// Models: states, replicas and actions.
// @ts-check
import { call, get, segment } from "../api.js";
import { bytes, clock, number, seconds } from "../format.js";
import { Rollout } from "../rollouts.js";
import { may } from "../session.js";
import { Lanes } from "../waterfall.js";
import { Command, Confirm, Empty, Name, Problem, State, Table, View, html, visible, visibleLine } from "../ui.js";

const ACTIONS = {
  load: { verb: "Load", text: "The model is loaded into memory. Other models may be unloaded for it." },
  unload: { verb: "Unload", text: "Requests in flight finish. The next request for the model loads it again." },
  restart: { verb: "Restart", text: "Its replicas are replaced one by one. A new replica is ready before an old one stops." },
};

export class Page extends View {
  constructor(props) {
    super(props);
    this.state = { status: null, rollouts: [], list: null, error: null, asked: null, said: "" };
  }

  componentDidMount() {
    this.every(2, () => this.read());
  }

  async read() {
    try {
      if (may("admin")) {
        const [status, rollouts] = await Promise.all([get("admin/status"), get("admin/rollouts")]);
        this.put({ status, rollouts: rollouts.data, error: null });
      }
      else this.put({ list: (await get("v1/models")).data, error: null });
    } catch (error) {
      this.put({ error });
    }
  }

  ask(title, verb, text, action, done) {
    this.put({
      asked: {
        title,
        verb,
        text,
        action: async () => {
          const answer = await action();
          this.put({ said: done(answer) });
          this.read();
        },
      },
    });
  }

  act(model, name) {
    const { verb, text } = ACTIONS[name];
    this.ask(`${verb} ${visibleLine(model)}?`, verb, text, () => call("POST", `admin/models/${segment(model)}/${name}`), () => `${verb}: ${visibleLine(model)} is done.`);
  }

  reload() {
    this.ask(
      "Reload the configuration?", "Reload", "The configuration file is read again. Models whose settings changed are replaced.",
      () => call("POST", "admin/reload"),
      (report) => ["Configuration reloaded.", ...(report.details || [])].join(" "),
    );
  }

  drain() {
    this.ask(
      "Shut the server down?", "Shut down", "The server accepts no further requests, finishes those in flight and ends. This page ends with it.",
      () => call("POST", "admin/drain"),
      () => "The server is shutting down.",
    );
  }

  render({ rest }, { status, rollouts, list, error, asked, said }) {
    return html`<h1 tabindex="-1">Models</h1>
      <${Problem} error=${error} retry=${() => this.read()} />
      <p role="status">${said}</p>
      ${status && this.server(status)}
      ${status && [...status.models].sort((one, other) => +(other.name === rest) - +(one.name === rest)).map((model) => this.model(model, status.energy, rollouts.find((one) => one.model === model.name)))}
      ${list && this.plain(list)}
      ${asked && html`<${Confirm} title=${asked.title} verb=${asked.verb} action=${asked.action} onClose=${() => this.put({ asked: null })}><p>${asked.text}</p><//>`}`;
  }

  server(status) {
    return html`<section class="card" aria-label="Server">
      <div class="row">
        <span><${State} state=${status.status} /></span>
        <span>Memory ${bytes(status.memory_bytes)}${status.memory_budget_bytes ? " of " + bytes(status.memory_budget_bytes) : ""}</span>
        <span>Since ${clock(status.started_at)}</span>
        ${status.config_path && html`<span>File <code>${visibleLine(status.config_path)}</code></span>`}
      </div>
      ${status.last_reload && html`<p>${status.last_reload.accepted ? "Reloaded" : "Reload refused"} at ${clock(status.last_reload.at)}: <bdi>${visible([...status.last_reload.details, ...status.last_reload.failed].join(" "))}</bdi></p>`}
      <div class="actions">
        <button type="button" disabled=${!status.config_path} onClick=${() => this.reload()}>Reload configuration</button>
        <button type="button" class="danger" onClick=${() => this.drain()}>Shut down</button>
      </div>
      ${status.start && html`<details><summary>Start of the server: ${seconds(status.start.seconds)}</summary>
        <${Lanes} parts=${status.start.phases} total=${status.start.seconds} />
        <${Table} caption="Phases of the start" head=${["Phase", "Begins", "Seconds"]} rows=${status.start.phases.map((phase) => html`<tr><th scope="row">${visibleLine(phase.name)}</th><td class="number">${seconds(phase.begin_s)}</td><td class="number">${seconds(phase.seconds)}</td></tr>`)} />
      </details>`}
      ${!status.config_path && html`<p class="hint">This server was started without a configuration file, so there is none to reload.</p>`}
    </section>`;
  }

  model(model, energy, rollout) {
    const used = energy && energy.models.find((one) => one.name === model.name);
    const isLocal = model.replicas.some((replica) => replica.kind === "local") || !model.replicas.length;
    return html`<section class="card" key=${model.name} aria-label=${"Model " + visibleLine(model.name)}>
      <h2><${Name} text=${model.name} /> <${State} state=${model.state} /></h2>
      <p>
        Version <${Name} text=${model.version} />${model.aliases.length > 0 && html`, also <${Name} text=${model.aliases.join(", ")} />`}${model.share !== null && `, ${model.share} of the requests`}; ${model.replicas_ready} of ${model.replicas.length} replicas ready; ${model.waiting} waiting, ${model.in_flight} in flight; ${bytes(model.memory_bytes)}.
        ${model.load === "on_demand" && " Loaded on demand."}
      </p>
      ${used && use(used, energy.currency) && html`<p>Used since the server started: ${use(used, energy.currency)}.</p>`}
      ${model.detail && html`<p class="notice"><bdi>${visible(model.detail)}</bdi></p>`}
      ${model.not_batched && html`<p class="hint">Not batched: <bdi>${visible(model.not_batched)}</bdi></p>`}
      ${model.answer_format && html`<p class=${model.answer_format.includes("MISMATCH") ? "notice" : "hint"}>Tool calls and reasoning: <bdi>${visible(model.answer_format)}</bdi></p>`}
      ${rollout && html`<${Rollout} report=${rollout} />`}
      <${Table} caption=${"Replicas of " + visibleLine(model.name)} empty="No replica is loaded."
        head=${["Replica", "State", "In flight", "Breaker", "Restarts", "Memory", "Process", "Content", "Last load"]}
        rows=${model.replicas.map((replica) => html`<tr>
          <th scope="row"><${Name} text=${replica.name} />${replica.role !== "both" && html` (${replica.role})`}${replica.layout && html`<br /><${Name} text=${replica.layout} />`}${replica.node && html`<br />on <${Name} text=${replica.node} />`}${replica.rank_nodes.map((one) => html`<br />ranks on <${Name} text=${one} />`)}${replica.detail && html`<br /><bdi>${visible(replica.detail)}</bdi>`}</th>
          <td><${State} state=${replica.state} /></td><td>${replica.in_flight}</td><td><${State} state=${replica.breaker} /></td>
          <td>${replica.restarts}</td><td>${replica.memory_bytes ? bytes(replica.memory_bytes) : "–"}</td><td>${replica.pid ?? "–"}</td>
          <td><code>${visibleLine(replica.artifact) || "–"}</code></td><td>${load(replica)}</td>
        </tr>`)} />
      <div class="actions">
        <a href=${"#/playground/" + encodeURIComponent(model.name)}>Open in the playground</a>
        ${isLocal && Object.keys(ACTIONS).map((name) => html`<button type="button" class=${name === "load" ? "" : "danger"} onClick=${() => this.act(model.name, name)}>${ACTIONS[name].verb}<span class="visually-hidden"> ${visibleLine(model.name)}</span></button>`)}
      </div>
    </section>`;
  }

  plain(list) {
    if (!list.length) return html`<${Empty} title="No model"><p>The key may use none of the models, or the server serves none.</p><//>`;
    return html`<p class="hint">Replicas and actions need a key with the scope admin. <a href="#/sign-in">Sign in</a></p>
      <${Table} caption="Models that this session may use" head=${["Model", "State", "Tasks", "Longest text"]}
        rows=${list.map((model) => html`<tr>
          <th scope="row"><a href=${"#/playground/" + encodeURIComponent(model.id)}><${Name} text=${model.id} /></a></th>
          <td><${State} state=${model.ready ? "ready" : "not ready"} /></td>
          <td>${(model.tasks || []).join(", ")}</td><td>${model.max_model_len ? model.max_model_len + " tokens" : "–"}</td>
        </tr>`)} />
      <${Command} text="inferd keys create --tenant me --scopes infer,models,metrics,admin" />`;
  }
}

/** The last load of a replica. */
function load(replica) {
  const one = replica.load;
  if (!one) return "–";
  const caption = `Phases of the ${one.cause} of ${visibleLine(replica.name)} at ${clock(one.begun_at)}`;
  return html`<details><summary>${seconds(one.seconds)}, ${visibleLine(one.state)}<span class="visually-hidden">: phases of the load</span></summary>
    ${one.reason && html`<p><bdi>${visible(one.reason)}</bdi></p>`}
    <${Lanes} parts=${one.phases} total=${one.seconds} />
    <${Table} caption=${caption} head=${["Phase", "Begins", "Seconds"]} rows=${one.phases.map((phase) => html`<tr><th scope="row">${visibleLine(phase.name)}</th><td class="number">${seconds(phase.begin_s)}</td><td class="number">${seconds(phase.seconds)}</td></tr>`)} />
  </details>`;
}

/** What a model has used of devices, where known. */
export function use(one, currency) {
  return [
    one.device_s > 0 && seconds(one.device_s) + " of a device", one.energy_j !== null && number(one.energy_j) + " J", one.tokens > 0 && number(one.tokens) + " tokens",
    one.energy_j_per_1000_tokens !== null && number(one.energy_j_per_1000_tokens) + " J per 1,000 tokens", one.cost !== null && number(one.cost) + " " + visibleLine(currency),
  ].filter((text) => text).join(", ");
}
