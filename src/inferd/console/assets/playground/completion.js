// A completion, with the probability of every token.
// @ts-check
import { ApiError, curl, events, messageOf, send } from "../api.js";
import { percent, seconds } from "../format.js";
import { Command, Problem, html, visible, visibleLine } from "../ui.js";
import { Asking } from "./asking.js";
import { Parameters, chosen, initial } from "./parameters.js";

const TOP = 5;

export class Completion extends Asking {
  constructor(props) {
    const lasting = { prompt: "", values: initial(), tokens: [], text: "", figures: null };
    super(props, "completion", lasting, { selected: -1, error: null, isBusy: false, said: "" });
  }

  body() {
    return { model: this.props.model, prompt: this.state.prompt, ...chosen(this.state.values), logprobs: TOP };
  }

  async submit(event) {
    event.preventDefault();
    if (this.state.isBusy) return;
    this.control = new AbortController();
    const tokens = [];
    let text = "";
    let usage = null;
    let id = "";
    let error = null;
    const begin = performance.now();
    this.put({ tokens, text, error: null, isBusy: true, selected: -1, figures: null, said: "The text begins." });
    try {
      const response = await send("POST", "v1/completions", { body: { ...this.body(), stream: true, stream_options: { include_usage: true } }, signal: this.control.signal });
      id = response.headers.get("x-request-id") || "";
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(500, messageOf(chunk, "").message, "", id);
        if (chunk.usage) usage = chunk.usage;
        const choice = (chunk.choices || [])[0];
        if (!choice) continue;
        text += choice.text;
        const found = choice.logprobs;
        if (found) found.tokens.forEach((token, index) => tokens.push({ token, logprob: found.token_logprobs[index], top: (found.top_logprobs || [])[index] || {} }));
        this.put({ text });
      }
    } catch (raised) {
      if (raised.name !== "AbortError") error = raised instanceof ApiError ? raised : new ApiError(0, "The text was cut off: " + raised.message);
    }
    this.put({ isBusy: false, error, figures: { id, usage, total: (performance.now() - begin) / 1000 }, said: error ? "The text failed." : "The text is complete." });
  }

  render(_, { prompt, values, tokens, text, selected, error, isBusy, figures, said }) {
    const token = tokens[selected];
    return html`<div class="chat">
      <div>
        <form onSubmit=${(event) => this.submit(event)}>
          <div class="field"><label for="prompt">Text to continue</label>
            <textarea id="prompt" rows="4" dir="auto" value=${prompt} onInput=${(event) => this.put({ prompt: event.currentTarget.value })}
              onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.submit(event)}></textarea></div>
          <div class="actions">${isBusy ? html`<button type="button" key="stop" class="danger" onClick=${() => this.stop()}>Stop</button>` : html`<button class="primary" key="send" disabled=${!prompt}>Continue the text</button>`}</div>
        </form>
        <p role="status" class="visually-hidden">${said}</p>
        <${Problem} error=${error} />
        ${(text || tokens.length > 0) && html`<section class="card" aria-label="Continuation">
          ${tokens.length === 0 && html`<div class="tokens" dir="auto">${visible(text)}</div>`}
          ${tokens.length > 0 && html`<p class="hint">Each token is a button that shows its probability. The line below a token: solid and green from 80 %, dashed and red below 40 %.</p>
            <div class="tokens" dir="auto">${tokens.map((one, index) => html`<button type="button" key=${index} class=${"token p" + level(one.logprob)} aria-pressed=${String(index === selected)}
              aria-label=${visibleLine(one.token) + ", " + percent(probability(one.logprob))} onClick=${() => this.put({ selected: index === selected ? -1 : index })}>${visible(one.token).replaceAll("\n", "↵\n")}</button>`)}</div>`}
          ${token && html`<div><h2>Alternatives at token ${selected + 1}</h2>${bars(token)}</div>`}
          ${tokens.length > 0 && html`<details><summary>Table of the tokens</summary><div class="scroll" tabindex="0" role="region" aria-label="Tokens"><table>
            <thead><tr><th scope="col">Token</th><th scope="col">Probability</th><th scope="col">Alternatives</th></tr></thead>
            <tbody>${tokens.slice(0, 500).map((one) => html`<tr><th scope="row"><code>${visibleLine(one.token)}</code></th><td>${percent(probability(one.logprob))}</td>
              <td>${Object.entries(one.top).map(([other, value]) => visibleLine(other) + " " + percent(probability(value))).join(", ")}</td></tr>`)}</tbody></table></div></details>`}
          ${figures && html`<p class="figures">total ${seconds(figures.total)}${figures.usage ? `, ${figures.usage.prompt_tokens} + ${figures.usage.completion_tokens} tokens` : ""}${figures.id && html`, <a href=${"#/requests/" + encodeURIComponent(figures.id)}>where the time went</a>`}</p>`}
        </section>`}
        <details><summary>The same with curl</summary><${Command} text=${curl("POST", "v1/completions", this.body())} /></details>
      </div>
      <div><${Parameters} values=${values} put=${(next) => this.put({ values: next })} /></div>
    </div>`;
  }
}

const probability = (logprob) => (logprob === null || logprob === undefined ? null : Math.exp(logprob));
const level = (logprob) => Math.min(4, Math.floor((probability(logprob) ?? 0) * 5));

function bars(token) {
  const top = { ...token.top };
  if (!(token.token in top) && token.logprob !== null) top[token.token] = token.logprob;
  return Object.entries(top).sort((one, other) => other[1] - one[1]).map(([text, value]) => html`<div class="bar">
    <code>${visibleLine(text)}</code><div class="track"><div class="fill" style=${{ width: percent(probability(value)).replace(" ", "") }}></div></div><output>${percent(probability(value))}</output>
  </div>`);
}
