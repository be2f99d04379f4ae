// A conversation: streamed answers, tools, structured output.
// @ts-check
import { ApiError, curl, events, get, messageOf, send } from "../api.js";
import { seconds } from "../format.js";
import { Markdown } from "../markdown.js";
import { resolved } from "../schema.js";
import { Command, Problem, View, createRef, html, visible, visibleLine } from "../ui.js";
import { Asking } from "./asking.js";
import { Parameters, chosen, initial } from "./parameters.js";

/** @typedef {{role: string, content: string, reasoning?: string, calls?: any[], tool_call_id?: string, name?: string, figures?: any, end?: string}} Turn */

const TOOLS = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "The weather of a city.", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 2);
const SCHEMA = JSON.stringify({ type: "object", properties: { answer: { type: "string" } }, required: ["answer"], additionalProperties: false }, null, 2);

/** What the server's own document says of tools and of structured output. @type {Promise<{tools: boolean, schema: boolean}> | null} */
let abilities = null;
function readAbilities() {
  abilities ||= get("openapi.json").then((document) => {
    const { schemas } = document.components;
    const body = document.paths["/v1/chat/completions"].post.requestBody.content["application/json"].schema;
    const fields = resolved(body, schemas).type.properties || {};
    const forms = (fields.response_format || {}).anyOf || [fields.response_format];
    return { tools: "tools" in fields, schema: forms.some((form) => "json_schema" in (resolved(form, schemas).type.properties || {})) };
  });
  abilities.catch(() => (abilities = null));
  return abilities;
}

export class Chat extends Asking {
  constructor(props) {
    const lasting = { turns: [], draft: "", system: "", values: initial(), tools: "", schema: "", showsPlain: false };
    super(props, "chat", lasting, { error: null, isBusy: false, abilities: null, said: "" });
    this.field = createRef();
  }

  /** The body of the request for the turns so far. Raises ApiError for a field that is not JSON. */
  body(turns) {
    const { system, values, tools, schema } = this.state;
    const messages = turns.map((turn) => {
      if (turn.role === "tool") return { role: "tool", content: turn.content, tool_call_id: turn.tool_call_id };
      if (turn.calls && turn.calls.length) return { role: turn.role, content: turn.content || null, tool_calls: turn.calls.map(({ index, ...call }) => call) };
      return { role: turn.role, content: turn.content };
    });
    if (system) messages.unshift({ role: "system", content: system });
    /** @type {Record<string, any>} */
    const body = { model: this.props.model, messages, ...chosen(values), stream: true, stream_options: { include_usage: true } };
    if (tools.trim()) body.tools = json(tools, "Tools");
    if (schema.trim()) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: json(schema, "The schema") } };
    return body;
  }

  async submit(event) {
    event?.preventDefault();
    const { draft, turns, isBusy } = this.state;
    if (isBusy || !draft.trim()) return;
    await this.ask([...turns, { role: "user", content: draft }], draft);
  }

  /** @param {Turn[]} turns @param {string} [draft] given back to the field when the request is refused */
  async ask(turns, draft = "") {
    /** @type {Turn} */
    const answer = { role: "assistant", content: "", reasoning: "", calls: [] };
    let body;
    try {
      body = this.body(turns);
    } catch (error) {
      this.put({ error });
      return;
    }
    this.control = new AbortController();
    this.put({ turns: [...turns, answer], draft: "", error: null, isBusy: true, said: "The answer begins." });
    const begin = performance.now();
    let first = 0;
    let usage = null;
    let isDrawn = false;
    const draw = () => {
      if (isDrawn) return;
      isDrawn = true; // one drawing per frame, however many tokens it has
      requestAnimationFrame(() => ((isDrawn = false), this.put({})));
    };
    let error = null;
    let id = "";
    try {
      const response = await send("POST", "v1/chat/completions", { body, signal: this.control.signal });
      id = response.headers.get("x-request-id") || "";
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(500, messageOf(chunk, "").message, "", id);
        if (chunk.usage) usage = chunk.usage;
        const choice = (chunk.choices || [])[0];
        if (!choice) continue;
        const delta = choice.delta || {};
        const reasoning = delta.reasoning ?? delta.reasoning_content;
        if (!first && (delta.content || reasoning || delta.tool_calls)) first = performance.now();
        if (delta.content) answer.content += delta.content;
        if (reasoning) answer.reasoning += reasoning;
        for (const part of delta.tool_calls || []) addCall(answer.calls, part);
        if (choice.finish_reason) answer.end = choice.finish_reason;
        draw();
      }
    } catch (raised) {
      if (raised.name === "AbortError") answer.end = "stopped";
      else error = raised instanceof ApiError ? raised : new ApiError(0, "The answer was cut off: " + raised.message);
    }
    const end = performance.now();
    answer.figures = { id, first: first ? (first - begin) / 1000 : null, total: (end - begin) / 1000, usage, rate: usage && end > begin ? usage.completion_tokens / ((end - begin) / 1000) : null };
    const isEmpty = error && !answer.content && !answer.calls.length && !answer.reasoning;
    this.put({
      isBusy: false, error, turns: isEmpty ? turns.slice(0, draft ? -1 : undefined) : [...turns, answer], draft: isEmpty ? draft : this.state.draft,
      said: error ? "The answer failed." : answer.end === "stopped" ? "The answer was stopped." : "The answer is complete.",
    });
    this.field.current?.focus();
  }

  again() {
    const { turns } = this.state;
    const last = turns.map((turn) => turn.role).lastIndexOf("assistant");
    this.ask(turns.slice(0, last));
  }

  async showMore(event) {
    if (!event.currentTarget.open || this.state.abilities) return;
    try {
      this.put({ abilities: await readAbilities() });
    } catch (error) {
      this.put({ error });
    }
  }

  render({ model }, { turns, draft, system, values, tools, schema, error, isBusy, showsPlain, abilities: able, said }) {
    const last = turns[turns.length - 1];
    const open = last && last.role === "assistant" && last.calls.length && !isBusy ? last.calls : [];
    let command = "";
    try {
      command = curl("POST", "v1/chat/completions", { ...this.body(turns.length ? turns.filter((turn, index) => index < turns.length - 1 || turn.role !== "assistant") : [{ role: "user", content: draft || "Hello" }]), stream: undefined, stream_options: undefined });
    } catch {
      command = ""; // a field is not JSON yet: the send button says so
    }
    return html`<div class="chat">
      <div>
        <div aria-label="Conversation" role="log" aria-live="off" tabindex="0">
          ${turns.length === 0 && html`<div class="empty"><p><strong>Ask ${visibleLine(model)} something</strong></p><p>Answers arrive token by token; the conversation is in the memory of this page alone, until you sign out.</p></div>`}
          ${turns.map((turn, index) => html`<${TurnView} key=${index} turn=${turn} plain=${showsPlain} isBusy=${isBusy && index === turns.length - 1} />`)}
        </div>
        <p role="status" class="visually-hidden">${said}</p>
        <${Problem} error=${error} />
        ${open.length > 0
          ? html`<${Results} calls=${open} send=${(results) => this.ask([...turns, ...results])} />`
          : html`<form onSubmit=${(event) => this.submit(event)}>
              <div class="field"><label for="draft">Message</label>
                <textarea id="draft" rows="3" dir="auto" ref=${this.field} value=${draft} aria-describedby="draft-hint" onInput=${(event) => this.put({ draft: event.currentTarget.value })}
                  onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.submit(event)}></textarea>
                <p class="hint" id="draft-hint">Ctrl+Enter sends, Escape stops.</p>
              </div>
              <div class="actions">
                ${isBusy ? html`<button type="button" key="stop" class="danger" onClick=${() => this.stop()}>Stop</button>` : html`<button class="primary" key="send" disabled=${!draft.trim()}>Send</button>`}
                <button type="button" disabled=${isBusy || !turns.some((turn) => turn.role === "assistant")} onClick=${() => this.again()}>Answer again</button>
                <button type="button" disabled=${isBusy || !turns.length} onClick=${() => this.put({ turns: [], error: null })}>Clear</button>
                <label class="check"><input type="checkbox" checked=${showsPlain} onChange=${(event) => this.put({ showsPlain: event.currentTarget.checked })} /> Plain text</label>
              </div>
            </form>`}
        <details><summary>The same with curl</summary>${command && html`<${Command} text=${command} />`}</details>
      </div>
      <div>
        <div class="field"><label for="system">System prompt</label><textarea id="system" rows="3" dir="auto" value=${system} onInput=${(event) => this.put({ system: event.currentTarget.value })}></textarea></div>
        <${Parameters} values=${values} put=${(next) => this.put({ values: next })} />
        <details class="card" onToggle=${(event) => this.showMore(event)}>
          <summary>Tools and schema</summary>
          ${!able && html`<p role="status">Reading what the server has…</p>`}
          ${able && !able.tools && !able.schema && html`<p>This server has neither.</p>`}
          ${able && able.tools && html`<div class="field"><label for="tools">Tools (JSON)</label><textarea id="tools" class="code" rows="6" spellcheck="false" value=${tools} onInput=${(event) => this.put({ tools: event.currentTarget.value })}></textarea>
            <button type="button" onClick=${() => this.put({ tools: TOOLS })}>Example<span class="visually-hidden"> of tools</span></button></div>`}
          ${able && able.schema && html`<div class="field"><label for="schema">JSON schema of the answer</label><textarea id="schema" class="code" rows="6" spellcheck="false" value=${schema} onInput=${(event) => this.put({ schema: event.currentTarget.value })}></textarea>
            <button type="button" onClick=${() => this.put({ schema: SCHEMA })}>Example<span class="visually-hidden"> of a schema</span></button></div>`}
          ${able && able.tools && !able.schema && html`<p class="hint">This server has no structured output.</p>`}
        </details>
      </div>
    </div>`;
  }
}

/** @param {string} text @param {string} name */
function json(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    const problem = new ApiError(0, `${name} must be JSON: ${error.message}`);
    problem.title = "Not sent.";
    problem.next = "Correct the text, or empty the field.";
    throw problem;
  }
}

/** Add a piece of a tool call to the calls so far. Its index is any value of a model or a server elsewhere. @param {any[]} calls @param {any} part */
export function addCall(calls, part) {
  const index = part.index ?? calls.length;
  let call = calls.find((one) => one.index === index);
  if (!call) calls.push((call = { index, id: String(part.id || "call-" + index), type: "function", function: { name: "", arguments: "" } }));
  if (part.id) call.id = String(part.id);
  call.function.name += (part.function || {}).name || "";
  call.function.arguments += (part.function || {}).arguments || "";
}

const TITLES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

function TurnView({ turn, plain, isBusy }) {
  const { figures } = turn;
  return html`<article class=${"turn " + turn.role}>
    <h2>${TITLES[turn.role]}${turn.name ? html` <bdi>${visibleLine(turn.name)}</bdi>` : ""}</h2>
    ${turn.reasoning && html`<details><summary>Reasoning</summary><div class="plain" dir="auto">${visible(turn.reasoning)}</div></details>`}
    ${turn.role === "assistant" && !plain ? html`<${Markdown} text=${turn.content} />` : html`<div class="plain" dir="auto">${visible(turn.content)}</div>`}
    ${(turn.calls || []).map((call) => html`<div><strong>Call of <bdi>${visibleLine(call.function.name)}</bdi></strong><pre tabindex="0" aria-label="Arguments">${visible(call.function.arguments)}</pre></div>`)}
    ${isBusy && html`<p class="figures busy">Writing…</p>`}
    ${figures && html`<p class="figures">
      ${[figures.first !== null && "first token " + seconds(figures.first), "total " + seconds(figures.total), figures.rate && Number(figures.rate.toPrecision(3)) + " tokens/s in all",
        figures.usage && `${figures.usage.prompt_tokens} + ${figures.usage.completion_tokens} tokens`, turn.end && "end: " + turn.end].filter((one) => one).join(", ")}
      ${figures.id && html`, <a href=${"#/requests/" + encodeURIComponent(figures.id)}>where the time went</a>`}
    </p>`}
  </article>`;
}

/** The results of the calls that an answer asks for, written by hand. */
class Results extends View {
  send(event) {
    event.preventDefault();
    this.props.send(this.props.calls.map((call, index) => ({ role: "tool", name: call.function.name, tool_call_id: call.id, content: this.state[index] || "" })));
  }

  render({ calls }, state) {
    return html`<form class="card" onSubmit=${(event) => this.send(event)}>
      <h2>The model asks for tools</h2>
      ${calls.map((call, index) => html`<div class="field"><label for=${"result-" + index}>Result of <bdi>${visibleLine(call.function.name)}</bdi></label>
        <textarea id=${"result-" + index} rows="2" value=${state[index] || ""} onInput=${(event) => this.put({ [index]: event.currentTarget.value })}></textarea></div>`)}
      <div class="actions"><button class="primary">Send the results</button></div>
    </form>`;
  }
}
