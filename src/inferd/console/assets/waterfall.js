// Parts of a time in their order, as bars and as a table: of a request, of a load, of a start.
// @ts-check
import { seconds } from "./format.js";
import { Table, html, visibleLine } from "./ui.js";

/** What each part of a request's time means. */
const PARTS = {
  receive: "Receive the body", admission: "Key, quota, checks", load_wait: "Wait for the model to load", queue: "Wait in the queue",
  lost_attempts: "Attempts that failed", hand_over: "Prompt at another replica", remote: "At another server", tokenize: "Text to tokens", schedule_wait: "Wait for a step",
  prefill: "Own prompt", prefill_shared: "Others in the steps of the prompt", decode: "Own tokens", crowding: "Others' tokens in own steps",
  others_prefill: "Others' prompts in own steps", preempted: "Preempted", recomputed: "Computed again", masks: "Masks of structured output",
  speculation: "Gain of speculation", slowed: "Slow device or processor", decode_inputs: "Decode the inputs", batch_wait: "Wait for a batch",
  compute: "Compute", encode: "Encode the outputs", send: "Send", rest: "Rest",
};
const WAITS = new Set(["load_wait", "queue", "lost_attempts", "hand_over", "schedule_wait", "prefill_shared", "crowding", "others_prefill", "preempted", "recomputed", "slowed", "batch_wait"]);

/** @typedef {{name: string, begin_s: number, seconds: number}} Part */

/** Bars for the parts; the table beside them has the same for screen readers. @param {{parts: Part[], total: number}} props */
export function Lanes({ parts, total }) {
  const shown = parts.filter((part) => Math.abs(part.seconds) >= Math.max(total * 0.0005, 1e-6));
  const end = Math.max(total, ...parts.map((part) => part.begin_s + Math.max(0, part.seconds)), 1e-9);
  const share = (value) => Math.max(0, Math.min(100, (value / end) * 100)) + "%";
  return html`<div class="waterfall" aria-hidden="true">
    ${shown.map((part) => html`<div class="lane">
      <span>${PARTS[part.name] || visibleLine(part.name).replaceAll("_", " ")}</span>
      <div class="track"><div class=${"fill" + (part.seconds < 0 ? " gain" : WAITS.has(part.name) ? " wait" : "")} style=${{ left: share(part.begin_s + Math.min(0, part.seconds)), width: share(Math.abs(part.seconds)) }}></div></div>
      <span class="value">${seconds(part.seconds)}</span>
    </div>`)}
  </div>`;
}

/** The parts of a request's time. @param {{parts: Part[], total: number}} props */
export const Waterfall = ({ parts, total }) => html`<section class="card" aria-label="Parts of the time">
  <h2>Where the time went</h2>
  <${Lanes} parts=${parts} total=${total} />
  <p class="hint">Plain bars are the request's own work; striped bars are waiting and the work of others.</p>
  <details>
    <summary>Table of the parts</summary>
    <${Parts} caption=${`Parts of ${seconds(total)}; all parts add up to the total`} parts=${parts} total=${total} />
  </details>
</section>`;

/** @param {{caption: string, parts: Part[], total: number}} props */
export const Parts = ({ caption, parts, total }) => html`<${Table} caption=${caption} head=${["Part", "Meaning", "Begins", "Seconds", "Share"]}
  rows=${parts.map((part) => html`<tr><th scope="row">${visibleLine(part.name)}</th><td>${PARTS[part.name] || "–"}</td><td class="number">${seconds(part.begin_s)}</td>
    <td class="number">${seconds(part.seconds)}</td><td class="number">${total ? ((part.seconds / total) * 100).toFixed(1) + " %" : "–"}</td></tr>`)} />`;
