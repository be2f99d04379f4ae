// Tenants and keys: what they may do and use; create, rotate and revoke keys.
// @ts-check
import { call, get } from "../api.js";
import { date, number } from "../format.js";
import { use } from "./models.js";
import { may, session } from "../session.js";
import { Confirm, Dialog, Empty, Field, Name, Problem, State, Table, View, copyText, html, visibleLine } from "../ui.js";

const SCOPES = { infer: "use models", models: "list models", metrics: "see charts, events and alerts", admin: "everything" };
const CLASSES = ["critical", "interactive", "normal", "batch"];
const LIMITS = { rpm: "requests per minute", tpm: "tokens per minute", max_in_flight: "requests at the same time" };

export class Page extends View {
  constructor(props) {
    super(props);
    this.state = { keys: null, tenants: [], error: null, dialog: null, secret: null, showsAll: false };
  }

  componentDidMount() {
    if (may("admin")) this.every(5, () => this.read());
  }

  async read() {
    try {
      const [{ data: keys }, { tenants, energy }] = await Promise.all([get("admin/keys"), get("admin/status")]);
      this.put({ keys, tenants, energy, error: null });
    } catch (error) {
      this.put({ error });
    }
  }

  close() {
    this.put({ dialog: null });
    this.read();
  }

  made(secret) {
    this.put({ secret });
    this.close();
  }

  render(_, { keys, tenants, energy, error, dialog, secret, showsAll }) {
    if (!may("admin"))
      return html`<h1 tabindex="-1">Tenants & keys</h1>
        <${Empty} title="This page needs a key with the scope admin" command="inferd keys create --tenant me --scopes infer,models,metrics,admin">
          <p><a href="#/sign-in">Sign in</a> with one. On the server's machine this makes one:</p>
        <//>`;
    const shown = keys && keys.filter((key) => showsAll || key.state === "active");
    return html`<h1 tabindex="-1">Tenants & keys</h1>
      <${Problem} error=${error} retry=${() => this.read()} />
      <div class="row">
        <button type="button" class="primary" onClick=${() => this.put({ dialog: { kind: "create" } })}>Create a key</button>
        <label class="check"><input type="checkbox" checked=${showsAll} onChange=${(event) => this.put({ showsAll: event.currentTarget.checked })} /> Show revoked and expired keys</label>
      </div>
      ${secret && html`<${Secret} secret=${secret} onClose=${() => this.put({ secret: null })} />`}
      <h2>Keys</h2>
      ${shown && shown.length === 0
        ? html`<${Empty} title="No key" command="inferd keys create --tenant team-a --models demo --rpm 600"><p>Create one here, or on the server's machine:</p><//>`
        : shown && html`<${Table} caption="Keys, without their secrets" head=${["Key", "Tenant", "Name", "State", "Scopes", "Models", "Limits", "Class", "Created", "Expires", "Actions"]} rows=${shown.map((key) => this.row(key))} />`}
      <h2>Quotas and usage</h2>
      ${tenants.length === 0
        ? html`<${Empty} title="No limit is in use"><p>Tenants with limits appear here with what they use of them. Limits of a key count its requests; limits of a tenant, in the configuration file, count all its keys.</p><//>`
        : html`<${Table} caption="Tenants: limits, and what of them is in use" head=${["Tenant", "Limits", "In use"]}
            rows=${tenants.map((tenant) => html`<tr><th scope="row"><${Name} text=${tenant.name} /></th><td>${list(tenant.limits) || "none"}</td><td>${list(tenant.used) || "nothing"}</td></tr>`)} />`}
      ${energy && energy.tenants.length > 0 && html`<h2>Devices</h2>
        <${Table} caption="What tenants have used of the devices since the server started" head=${["Tenant", "Use"]}
          rows=${energy.tenants.map((one) => html`<tr><th scope="row"><${Name} text=${one.name} /></th><td>${use(one, energy.currency) || "nothing"}</td></tr>`)} />`}
      ${dialog && dialog.kind === "create" && html`<${Create} onClose=${() => this.close()} onMade=${(secret) => this.made(secret)} />`}
      ${dialog && dialog.kind === "rotate" && html`<${Rotate} info=${dialog.info} onClose=${() => this.close()} onMade=${(secret) => this.made(secret)} />`}
      ${dialog && dialog.kind === "revoke" && html`<${Confirm} title=${"Revoke " + visibleLine(dialog.info.id) + "?"} verb="Revoke" action=${() => call("DELETE", "admin/keys/" + encodeURIComponent(dialog.info.id))} onClose=${() => this.close()}>
        <p>Requests with the key <${Name} text=${dialog.info.prefix + "…"} /> of <${Name} text=${dialog.info.tenant} /> are refused from now on. This cannot be undone.</p>
      <//>`}`;
  }

  row(key) {
    const limits = Object.keys(LIMITS).filter((name) => key[name] !== null).map((name) => `${number(key[name])} ${LIMITS[name]}`);
    const id = visibleLine(key.id);
    return html`<tr key=${key.id}>
      <th scope="row"><code>${visibleLine(key.prefix)}…</code></th>
      <td><${Name} text=${key.tenant} /></td><td><${Name} text=${key.name || "–"} /></td><td><${State} state=${key.state} /></td>
      <td>${key.scopes.join(", ")}</td><td><${Name} text=${key.models.join(", ") || "every model"} /></td><td>${limits.join(", ") || "none"}</td><td>${key.priority}</td>
      <td>${date(key.created_at)}</td><td>${date(key.expires_at)}</td>
      <td>${key.state === "active" && html`<button type="button" onClick=${() => this.put({ dialog: { kind: "rotate", info: key } })}>Rotate<span class="visually-hidden"> ${id}</span></button>
        <button type="button" class="danger" onClick=${() => this.put({ dialog: { kind: "revoke", info: key } })}>Revoke<span class="visually-hidden"> ${id}</span></button>`}</td>
    </tr>`;
  }
}

const list = (values) => Object.entries(values).map(([name, value]) => `${number(value)} ${LIMITS[name] || visibleLine(name).replaceAll("_", " ")}`).join(", ");

/** A new key's text, which the server does not store. */
class Secret extends View {
  async copy() {
    this.put({ said: (await copyText(this.props.secret.key)) ? "Copied." : "Select the text and copy it." });
  }

  render({ secret, onClose }, { said }) {
    return html`<div class="notice good" role="alert">
      <p><strong>The new key. It is shown this once.</strong></p>
      <pre class="secret" tabindex="0" aria-label="The new key">${secret.key}</pre>
      <div class="actions">
        <button type="button" class="primary" onClick=${() => this.copy()}>Copy</button>
        <button type="button" onClick=${onClose}>I have stored it</button><span role="status">${said || ""}</span>
      </div>
    </div>`;
  }
}

class Create extends View {
  constructor(props) {
    super(props);
    this.state = { tenant: session.value.tenant, name: "", scopes: ["infer", "models"], models: "", rpm: "", tpm: "", max_in_flight: "", priority: "normal", days: "", error: null };
  }

  async make(event) {
    event.preventDefault();
    const form = this.state;
    const body = { tenant: form.tenant.trim(), name: form.name.trim(), scopes: form.scopes, priority: form.priority };
    const models = form.models.split(",").map((name) => name.trim()).filter((name) => name);
    if (models.length) body.models = models;
    for (const limit of Object.keys(LIMITS)) if (form[limit] !== "") body[limit] = Number(form[limit]);
    if (form.days !== "") body.expires_in_s = Number(form.days) * 86400;
    try {
      this.props.onMade(await call("POST", "admin/keys", body));
    } catch (error) {
      this.put({ error });
    }
  }

  render({ onClose }, state) {
    const bind = (name) => ({ id: "new-" + name, value: state[name], onInput: (event) => this.put({ [name]: event.currentTarget.value }) });
    return html`<${Dialog} title="Create a key" onClose=${onClose}>
      <form onSubmit=${(event) => this.make(event)}>
        <${Field} id="new-tenant" label="Tenant" hint="All keys of a tenant share its limits and its usage. A key of a tenant makes keys of this tenant alone."><input ...${bind("tenant")} required maxlength="128" /><//>
        <${Field} id="new-name" label="What it is for"><input ...${bind("name")} maxlength="128" /><//>
        <fieldset><legend>Scopes</legend>
          ${Object.entries(SCOPES).map(([scope, text]) => html`<div><label class="check"><input type="checkbox" checked=${state.scopes.includes(scope)}
            onChange=${(event) => this.put({ scopes: event.currentTarget.checked ? [...state.scopes, scope] : state.scopes.filter((one) => one !== scope) })} /> ${scope}: ${text}</label></div>`)}
        </fieldset>
        <${Field} id="new-models" label="Models" hint="Names or patterns such as team-*, with commas. Empty: every model."><input ...${bind("models")} /><//>
        <div class="row">${Object.entries(LIMITS).map(([name, text]) => html`<${Field} id=${"new-" + name} label=${"At most " + text}><input ...${bind(name)} type="number" min="1" placeholder="no limit" /><//>`)}</div>
        <div class="row">
          <${Field} id="new-priority" label="Class"><select id="new-priority" value=${state.priority} onChange=${(event) => this.put({ priority: event.currentTarget.value })}>${CLASSES.map((name) => html`<option value=${name}>${name}</option>`)}</select><//>
          <${Field} id="new-days" label="Ends after days"><input ...${bind("days")} type="number" min="0.01" step="any" placeholder="never" /><//>
        </div>
        <${Problem} error=${state.error} />
        <div class="actions"><button type="button" onClick=${onClose}>Cancel</button><button class="primary">Create</button></div>
      </form>
    <//>`;
  }
}

class Rotate extends View {
  constructor(props) {
    super(props);
    this.state = { hours: "24", error: null };
  }

  async rotate(event) {
    event.preventDefault();
    try {
      this.props.onMade(await call("POST", `admin/keys/${encodeURIComponent(this.props.info.id)}/rotate`, { overlap_s: Number(this.state.hours) * 3600 }));
    } catch (error) {
      this.put({ error });
    }
  }

  render({ info, onClose }, { hours, error }) {
    return html`<${Dialog} title=${"Rotate " + visibleLine(info.id) + "?"} onClose=${onClose}>
      <form onSubmit=${(event) => this.rotate(event)}>
        <p>A new key with the same permissions is made. The old one ends after the overlap.</p>
        <${Field} id="overlap" label="Overlap in hours" hint="0: the old key ends at once."><input id="overlap" type="number" min="0" step="any" required value=${hours} onInput=${(event) => this.put({ hours: event.currentTarget.value })} /><//>
        <${Problem} error=${error} />
        <div class="actions"><button type="button" onClick=${onClose}>Cancel</button><button class="primary">Rotate</button></div>
      </form>
    <//>`;
  }
}
