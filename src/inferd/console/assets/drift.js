// The drift of one stream: its windows against the reference, and how its values are spread.
// @ts-check
import { Chart } from "./chart.js";
import { clock, count, percent, seconds } from "./format.js";
import { Name, State, Table, html, visible, visibleLine } from "./ui.js";

const TITLES = { psi: "Population stability index", mmd: "Maximum mean discrepancy" };

/** How strongly a window speaks for a change: the power of ten of 1 / p. @param {number} p 0: smaller than any number */
export const evidence = (p) => (p >= 1 ? 0 : p > 0 ? -Math.log10(p) : 308);

/** The window that decides a stream's state: the largest that alarms, else the smallest. @param {any[]} readings */
export const deciding = (readings) => readings.findLast((one) => one.is_alarm) || readings[0];

/** The sizes of windows that any stream has had, the smallest first. @param {any[]} streams */
export const sizesOf = (streams) => [...new Set(streams.flatMap((one) => one.readings.map((reading) => reading.size)))].sort((one, other) => one - other);

/** The state of a version. @param {any} report */
export const stateOf = (report) => (report.streams.some((one) => one.is_drifting) ? "drifts" : report.streams.some((one) => one.since) ? "ok" : report.state);

/** When the state of a version began: its drift with the first stream, its quiet with the last. @param {any} report */
export function sinceOf(report) {
  const isDrifting = stateOf(report) === "drifts";
  const times = report.streams.filter((one) => one.is_drifting === isDrifting && one.since).map((one) => one.since);
  return times.length ? (isDrifting ? Math.min(...times) : Math.max(...times)) : null;
}

/** @param {{stream: any, size: number}} props size: of the windows over time, where the stream has such */
export function Stream({ stream, size }) {
  const title = visibleLine(stream.stream).replaceAll("_", " ");
  const shown = deciding(stream.readings);
  const reading = stream.readings.find((one) => one.size === size) || shown;
  return html`<section class="card" aria-label=${"Stream " + title}>
    <h3>${title} <${State} state=${!shown ? "no window is full yet" : stream.is_drifting ? "drifts" : "ok"} /></h3>
    ${shown && html`<p>
      ${stream.since && `Since ${clock(stream.since)}. `}${count(stream.alarms)} ${stream.alarms === 1 ? "alarm" : "alarms"} until now.
      ${stream.is_drifting && shown.sentence && html` <bdi>${visible(title + " " + shown.sentence)}</bdi>.`}
    </p>
    <div class="grid">${charts(title, stream.measure, reading)}${stream.cells.length > 0 && mix(title, stream.cells, shown)}</div>`}
  </section>`;
}

/** The windows of one size over time. */
function charts(title, measure, { past, size }) {
  if (!past) return null;
  const span = seconds(past.at.at(-1) - past.at[0]);
  const windows = `windows of ${count(size)}`;
  return html`<${Chart} key=${"p" + size} title=${`Evidence of a change of ${title}, ${windows}`} unit="powers of ten" span=${span} isUneven
      labels=${["evidence", "alarm from here"]} table=${[past.at, past.p.map(evidence), past.level.map(evidence)]} />
    <${Chart} key=${"d" + size} title=${`${TITLES[measure]} of ${title}, ${windows}`} unit="" span=${span} isUneven
      labels=${["distance", "by chance up to"]} table=${[past.at, past.distance, past.by_chance]} />`;
}

/** The shares of the values in the reference and in a window. */
function mix(title, cells, { shares, size }) {
  const bar = (share) => html`<div class="track" aria-hidden="true"><div class="fill" style=${{ width: 100 * share + "%" }}></div></div>`;
  return html`<div class="mix"><${Table} caption=${`Shares of ${title}, in the reference and in the last ${count(size)}`} head=${["Value", "Reference", "Now"]}
    rows=${cells.map((cell, index) => html`<tr>
      <th scope="row"><${Name} text=${cell.words} /></th>
      <td class="number">${percent(cell.share)}${bar(cell.share)}</td><td class="number">${percent(shares[index])}${bar(shares[index])}</td>
    </tr>`)} /></div>`;
}
