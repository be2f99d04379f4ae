// The page /docs: every endpoint of openapi.json with its fields, and a form to try it.
// @ts-check
import { ROOT, curl, events, get, unescaped } from "./api.js";
import { seconds } from "./format.js";
import { example, kindOf, resolved } from "./schema.js";
import { followTabs, readSession, session } from "./session.js";
import { applyTheme } from "./settings.js";
import { Command, Confirm, Problem, Table, View, html, render, visible, visibleLine } from "./ui.js";

const MAX_SHOWN = 200_000;
/** Words of a path that change the server or its models: the page asks before it sends them. */
const CHANGES = /drain|unload|restart|reload|keys|\/load$/;

/** @type {[string, RegExp][]} */
const GROUPS = [
  ["Text generation", /^\/v1\/(chat\/|completions)|generate|^\/(de)?tokenize/],
  ["Texts: vectors, ranks, classes", /embed|rerank|score|classify|pooling|^\/predict|^\/info/],
  ["Predictions", /infer$|stream$|invocations|:predict/],
  ["Models", /models|repository|^\/v2$/],
  ["Administration", /^\/admin/],
  ["State and figures", /./],
];

/** @typedef {{id: string, method: string, path: string, summary: string, operation: any, group: string}} Endpoint */

/** @param {any} document @returns {Endpoint[]} */
function endpointsOf(document) {
  const found = [];
  for (const [path, item] of Object.entries(document.paths))
    for (const [method, operation] of Object.entries(item)) {
      const group = /^\/admin/.test(path) ? "Administration" : GROUPS.find(([, pattern]) => pattern.test(path))[0];
      found.push({ id: operation.operationId, method: method.toUpperCase(), path, summary: operation.summary || "", operation, group });
    }
  return found;
}

class Docs extends View {
  constructor(props) {
    super(props);
    this.state = { document: null, endpoints: [], chosen: "", filter: "", models: [], error: null };
  }

  componentDidMount() {
    this.uses(session);
    followTabs();
    const moved = () => this.put({ chosen: unescaped(location.hash.slice(1)) });
    addEventListener("hashchange", moved);
    this.endings.push(() => removeEventListener("hashchange", moved));
    moved();
    this.read();
  }

  async read() {
    try {
      const document = await get("openapi.json");
      this.put({ document, endpoints: endpointsOf(document), error: null });
      this.put({ models: (await get("v1/models")).data });
    } catch (error) {
      this.put({ error });
    }
    readSession().catch(() => {}); // a server without a console has no session: requests go without one
  }

  render(_, { document, endpoints, chosen, filter, models, error }) {
    const wanted = filter.toLowerCase();
    const shown = endpoints.filter((one) => `${one.method} ${one.path} ${one.summary}`.toLowerCase().includes(wanted));
    const open = endpoints.find((one) => one.id === chosen) || endpoints[0];
    return html`<header class="top">
        <a class="brand" href="console/"><span aria-hidden="true" class="logo"></span>inferd</a>
        <div class="tools"><a href="console/">Console</a><a href="openapi.json">openapi.json</a></div>
      </header>
      <main id="main" tabindex="-1">
        <h1>HTTP API</h1>
        ${error && error.status === 401
          ? html`<div class="notice"><p>This server needs an API key. <a href="console/#/sign-in">Sign in to the console</a>, then come back: this page uses the same session.</p></div>`
          : html`<${Problem} error=${error} retry=${() => this.read()} />`}
        ${!document && !error && html`<p role="status">Reading the document…</p>`}
        ${document && html`<p>OpenAI's API with vLLM's further fields, KServe v2, and administration. The fields are those of this server, inferd ${visibleLine(document.info.version)}.</p>
          <div class="docs">
            <nav class="card list" aria-label="Endpoints" tabindex="0">
              <div class="field"><label for="filter">Find</label><input id="filter" type="search" value=${filter} onInput=${(event) => this.put({ filter: event.currentTarget.value })} /></div>
              <p role="status" class="hint">${shown.length} of ${endpoints.length} endpoints</p>
              ${GROUPS.map(([title]) => {
                const list = shown.filter((one) => one.group === title);
                return list.length > 0 && html`<section aria-label=${title}><h2>${title}</h2><ul>
                  ${list.map((one) => html`<li key=${one.id}><a href=${"#" + encodeURIComponent(one.id)} aria-current=${one === open ? "true" : null}><span class="method">${one.method}</span> <code>${one.path}</code></a></li>`)}
                </ul></section>`;
              })}
            </nav>
            ${open && html`<${One} key=${open.id} endpoint=${open} document=${document} models=${models} />`}
          </div>`}
      </main>`;
  }
}

/** One endpoint: its fields and the form. */
class One extends View {
  constructor(props) {
    super(props);
    const { operation } = props.endpoint;
    const { schemas } = props.document.components;
    this.schema = operation.requestBody ? operation.requestBody.content["application/json"].schema : null;
    const model = (props.models[0] || {}).id || "MODEL";
    const values = {};
    for (const parameter of operation.parameters || []) values[parameter.name] = parameter.name === "model" ? model : parameter.in === "path" ? "" : "";
    this.state = {
      values, body: this.schema ? JSON.stringify(example(props.endpoint.path, this.schema, schemas, model), null, 2) : "",
      answer: null, error: null, isBusy: false, isAsked: false,
    };
    this.endings.push(() => this.control && this.control.abort());
  }

  componentDidUpdate(before) {
    // The list of models arrives after the document.
    if (before.models === this.props.models || !this.props.models.length) return;
    const model = this.props.models[0].id;
    const { values, body } = this.state;
    this.put({ values: "model" in values && values.model === "MODEL" ? { ...values, model } : values, body: body.replace('"MODEL"', () => JSON.stringify(model)) });
  }

  /** The path with its parameters, or null where one is missing. */
  path() {
    const { path, operation } = this.props.endpoint;
    let filled = path;
    const query = new URLSearchParams();
    for (const parameter of operation.parameters || []) {
      const value = this.state.values[parameter.name];
      if (parameter.in === "path") {
        if (!value) return null;
        filled = filled.replace(`{${parameter.name}}`, value.split("/").map(encodeURIComponent).join("/"));
      } else if (value) query.set(parameter.name, value);
    }
    return filled.slice(1) + (query.size ? "?" + query : "");
  }

  submit(event) {
    event.preventDefault();
    const { method, path } = this.props.endpoint;
    if (method !== "GET" && CHANGES.test(path)) this.put({ isAsked: true });
    else this.send();
  }

  async send() {
    const { method } = this.props.endpoint;
    const path = this.path();
    const { body } = this.state;
    if (path === null) return;
    if (body.trim()) {
      try {
        JSON.parse(body);
      } catch (raised) {
        this.put({ error: { title: "Not sent.", message: `The body must be JSON: ${raised.message}`, next: "Correct the text, or empty it." } });
        return;
      }
    }
    this.control = new AbortController();
    this.put({ isBusy: true, error: null, answer: null });
    const begin = performance.now();
    const answer = { status: 0, headers: [], text: "", total: 0, first: 0 };
    try {
      const response = await fetch(new URL(path, ROOT), { method, headers: body.trim() ? { "content-type": "application/json" } : {}, body: body.trim() || undefined, signal: this.control.signal, cache: "no-store" });
      answer.status = response.status;
      answer.first = (performance.now() - begin) / 1000;
      answer.headers = [...response.headers];
      this.put({ answer });
      if ((response.headers.get("content-type") || "").startsWith("text/event-stream")) {
        for await (const data of events(response)) {
          if (answer.text.length < MAX_SHOWN) answer.text += "data: " + data + "\n\n";
          this.put({ answer });
        }
      } else {
        const text = await response.text();
        answer.text = pretty(text).slice(0, MAX_SHOWN);
      }
    } catch (raised) {
      if (raised.name !== "AbortError") this.put({ error: { title: "No answer.", message: "The server did not answer.", next: "Check that it runs." } });
    }
    answer.total = (performance.now() - begin) / 1000;
    this.put({ answer: answer.status ? answer : null, isBusy: false });
  }

  render({ endpoint, document }, { values, body, answer, error, isBusy, isAsked }) {
    const { method, path, summary, operation } = endpoint;
    const { schemas } = document.components;
    const isSocket = "101" in operation.responses;
    const where = this.path();
    const scopes = (operation.security[0] || {}).apiKey;
    let command = "";
    try {
      command = where === null ? "" : curl(method, where, body.trim() ? JSON.parse(body) : undefined);
    } catch {
      command = ""; // the body is not JSON yet
    }
    const answered = Object.entries(operation.responses).find(([status]) => Number(status) < 300);
    const response = answered && answered[1].content && answered[1].content["application/json"];
    return html`<div>
      <section class="card" aria-label=${method + " " + path}>
        <h2><span class="method">${method}</span> <code>${path}</code></h2>
        <p>${visibleLine(summary)} ${scopes ? html`<span class="hint">Scope: ${scopes.join(", ")}.</span>` : html`<span class="hint">Needs no key.</span>`}</p>
        ${isSocket
          ? html`<p>This is a WebSocket; a form cannot show it. The guide of streams has programs to try it with.</p>`
          : html`<form onSubmit=${(event) => this.submit(event)}>
              <div class="row">${(operation.parameters || []).map((parameter) => html`<div class="field"><label for=${"at-" + parameter.name}>${parameter.name}${parameter.required ? " (needed)" : ""}</label>
                <input id=${"at-" + parameter.name} value=${values[parameter.name]} required=${Boolean(parameter.required)} onInput=${(event) => this.put({ values: { ...values, [parameter.name]: event.currentTarget.value } })} /></div>`)}</div>
              ${this.schema && html`<div class="field"><label for="body">Body (JSON)${operation.requestBody.required ? "" : ", may be empty"}</label>
                <textarea id="body" class="code" rows=${Math.min(24, body.split("\n").length + 2)} spellcheck="false" value=${body} onInput=${(event) => this.put({ body: event.currentTarget.value })}
                  onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.submit(event)}></textarea></div>`}
              <div class="actions"><button class="primary" disabled=${isBusy}>${isBusy ? "Waiting…" : "Send"}</button>${isBusy && html`<button type="button" onClick=${() => this.control.abort()}>Stop</button>`}</div>
            </form>`}
        <${Problem} error=${error} />
        ${command && html`<details><summary>With curl</summary><${Command} text=${command} /></details>`}
      </section>
      ${answer && html`<section class="card" aria-label="Answer">
        <h2>Answer</h2>
        <p role="status">Status <strong>${answer.status}</strong>${answer.total ? `, headers after ${seconds(answer.first)}, all of it after ${seconds(answer.total)}` : ""}</p>
        <details><summary>${answer.headers.length} headers</summary><${Table} caption="Headers" head=${["Name", "Value"]} rows=${answer.headers.map(([name, value]) => html`<tr><th scope="row">${visibleLine(name)}</th><td><bdi>${visibleLine(value)}</bdi></td></tr>`)} /></details>
        <pre tabindex="0" aria-label="Body of the answer" dir="auto">${visible(answer.text)}</pre>
      </section>`}
      ${this.schema && html`<section class="card" aria-label="Fields of the request"><h2>Request</h2><${Fields} schema=${this.schema} schemas=${schemas} /></section>`}
      ${response && html`<div class="card"><${Inside} title=${"Fields of the answer with status " + answered[0]} schema=${response.schema} schemas=${schemas} /></div>`}
      <section class="card" aria-label="Statuses"><h2>Statuses</h2><ul>${Object.entries(operation.responses).map(([status, one]) => html`<li><strong>${status}</strong> ${visibleLine(one.description)}</li>`)}</ul></section>
      ${isAsked && html`<${Confirm} title=${`${method} ${path}?`} verb="Send" action=${async () => void this.send()} onClose=${() => this.put({ isAsked: false })}><p>This changes the server or its models.</p><//>`}
    </div>`;
  }
}

/** The fields of a schema; a type inside opens below it. */
function Fields({ schema, schemas, depth = 0 }) {
  const { name, type } = resolved(schema, schemas);
  const fields = Object.entries(type.properties || {});
  if (!fields.length) return html`<p><code>${kindOf(schema)}</code></p>`;
  return html`${type.description && html`<p class="hint">${visibleLine(type.description)}</p>`}
    <${Table} caption=${(name || "Fields") + ", a star marks a needed field"} head=${["Field", "Type", "Default", "Meaning"]}
      rows=${fields.map(([field, one]) => html`<tr>
        <th scope="row"><code>${field}${(type.required || []).includes(field) ? " *" : ""}</code></th>
        <td>${kindOf(one)}</td><td><code>${one.default === undefined ? "" : JSON.stringify(one.default)}</code></td><td>${visibleLine(one.description || "")}</td>
      </tr>`)} />
    ${depth < 3 && inner(type, schemas).map((inside) => html`<${Inside} key=${inside} title=${inside} schema=${{ $ref: "#/components/schemas/" + inside }} schemas=${schemas} depth=${depth + 1} />`)}`;
}

/** Fields that are made when they are opened: all of them would be thousands of elements. */
class Inside extends View {
  render({ title, ...props }, { isOpen }) {
    return html`<details onToggle=${(event) => this.put({ isOpen: event.currentTarget.open })}><summary>${title}</summary>${isOpen && html`<${Fields} ...${props} />`}</details>`;
  }
}

/** The names of the types that the fields of a type have. @param {any} type @param {any} schemas */
function inner(type, schemas) {
  const names = [...JSON.stringify(type.properties).matchAll(/"\$ref":"#\/components\/schemas\/([^"]+)"/g)].map((match) => match[1]);
  return [...new Set(names)].filter((name) => (schemas[name] || {}).properties);
}

/** JSON with line breaks; any other text as it is. @param {string} text */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

applyTheme();
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${Docs} />`, root);
