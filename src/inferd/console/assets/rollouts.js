// A rollout of a model: its step, what each guard says with its evidence, the copied requests and the golden set.
// @ts-check
import { count, number } from "./format.js";
import { Name, State, Table, html, visible, visibleLine } from "./ui.js";

/** What became of copied requests, in words. */
const COPIES = {
  equal: "equal", differs: "different", failed: "not answered", busy: "dropped (busy)", memory: "dropped (memory)", late: "dropped (late)",
  unavailable: "dropped (unavailable)",
};

/** Evidence from its natural logarithm, in three digits: 12.3, 4.5e+7, 1e+400. @param {number} log */
export function evidence(log) {
  if (log >= 700) return "1e+" + Math.floor(log / Math.LN10);
  const value = Math.exp(log);
  return value >= 1e6 || (value > 0 && value < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

/** What a guard says: it takes the version back, it is passed, or there is too little evidence. @param {any} reading */
export function verdict(reading) {
  if (reading.against >= reading.against_limit) return "worse";
  return reading.in_favour >= reading.in_favour_limit ? "passed" : "undecided";
}

/** The counts of copied requests, those that were compared first. @param {Record<string, number>} copies */
export function copied(copies) {
  const names = ["equal", "differs", ...Object.keys(copies).filter((name) => name !== "equal" && name !== "differs").sort()];
  return names.map((name) => ({ name, words: COPIES[name] || `not compared (${name})`, count: copies[name] || 0 }));
}

/** A step in words. @param {number} weight @param {number} shadow */
export const step = (weight, shadow) => `${number(weight)} %` + (shadow ? ` and copies of ${number(shadow)} %` : "");

/** The number of bad units and of all. @param {number} bad @param {number} units */
const part = (bad, units) => html`<td class="number">${count(bad)} of ${count(units)}</td>`;

/** @param {{report: any}} props */
export function Rollout({ report }) {
  const { progress, golden } = report;
  const state = progress.state.replaceAll("_", " ") + (progress.is_paused ? ", paused" : "");
  const steps = report.steps.map((weight, index) => step(weight, report.shadows[index] || 0));
  return html`<section aria-label=${"Rollout of " + visibleLine(report.model)}>
    <h3>Rollout from version <${Name} text=${report.stable} /> to <${Name} text=${report.new} /> <${State} state=${state} /></h3>
    <p>
      Version <${Name} text=${report.new} /> has ${number(100 * progress.share)} % of the units${progress.shadow > 0 && `, and copies of ${number(100 * progress.shadow)} %`}.
      ${progress.step >= 0 && ` Step ${progress.step + 1} of ${steps.length}.`} Steps: ${steps.join(", ")}.
      ${report.deaths > 0 && ` Its workers died ${count(report.deaths)} times.`}
    </p>
    ${progress.reason && html`<p>Last change: <bdi>${visible(progress.reason)}</bdi></p>`}
    ${report.readings.length > 0 && html`<${Table} caption=${"Guards of the rollout of " + visibleLine(report.model)}
      head=${["Guard", "Says", "Bad, new version", "Bad, stable version", "E-value against it", "withdraws at", "E-value in its favour", "passes at"]}
      rows=${report.readings.map((one) => html`<tr>
        <th scope="row">${visibleLine(one.guard)}</th><td><${State} state=${verdict(one)} /></td>
        ${part(one.bad[1], one.units[1])}${one.units[0] || one.bad[0] ? part(one.bad[0], one.units[0]) : html`<td class="number">–</td>`}
        <td class="number">${evidence(one.against)}</td><td class="number">${evidence(one.against_limit)}</td>
        <td class="number">${evidence(one.in_favour)}</td><td class="number">${evidence(one.in_favour_limit)}</td>
      </tr>`)} />`}
    ${Object.keys(report.copies).length > 0 && html`<${Table} caption=${"Copied requests of " + visibleLine(report.model) + ", at this server"} head=${["Result", "Pairs"]}
      rows=${copied(report.copies).map((one) => html`<tr><th scope="row">${visibleLine(one.words)}</th><td class="number">${count(one.count)}</td></tr>`)} />`}
    ${golden && html`<p>Golden set of ${count(golden.questions)}, at this server: ${count(golden.asked)} answers of the new version, ${count(golden.wrong)} of them wrong${golden.dropped > 0 && `, ${count(golden.dropped)} dropped`}.</p>
      ${golden.last_wrong.length > 0 && html`<details><summary>The last wrong answers<span class="visually-hidden"> of ${visibleLine(report.model)}</span></summary>
        <${Table} caption=${"Wrong answers of " + visibleLine(report.model)} head=${["Question", "Why"]}
          rows=${golden.last_wrong.map((one) => html`<tr><th scope="row"><${Name} text=${one.name} /></th><td class="wide"><bdi>${visible(one.reason)}</bdi></td></tr>`)} />
      </details>`}`}
  </section>`;
}
