// A chart over time with uPlot: its summary for screen readers, and its table.
// @ts-check
import { clock, quantity, seconds } from "./format.js";
import { Name, View, createRef, html, visibleLine } from "./ui.js";

/** uPlot, whose script the page loads beside its modules; it is there at the latest when the page has loaded. */
const load = () => new Promise((resolve) => (globalThis.uPlot ? resolve(globalThis.uPlot) : addEventListener("load", () => resolve(globalThis.uPlot), { once: true })));

const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [5, 5], [1, 4]];
const HEIGHT = 150;
/** Units that change how a number is written; the others are in the legend. */
const AXIS_UNITS = new Set(["s", "bytes", "ratio"]);
const TABLE_ROWS = 12;

/** The marks of time on the axis, in the reader's zone. */
const clockText = (at, range) =>
  new Date(at * 1000).toLocaleString([], range > 172800 ? { month: "numeric", day: "numeric" } : { hour: "2-digit", minute: "2-digit", hour12: false, ...(range < 900 ? { second: "2-digit" } : {}) });

/**
 * @param {{title: string, unit: string, labels: string[], table: (number | null)[][], span: string, isUneven?: boolean}} props
 * table: times, then the values of each label. isUneven: the times have no common step.
 */
export class Chart extends View {
  constructor(props) {
    super(props);
    this.box = createRef();
    this.plot = null;
    this.drawn = "";
  }

  componentDidMount() {
    this.draw();
    const resized = new ResizeObserver(() => {
      const width = this.box.current.clientWidth;
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
    });
    resized.observe(this.box.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => ((this.drawn = ""), this.draw());
    dark.addEventListener("change", redraw);
    document.addEventListener("themechange", redraw);
    this.endings.push(
      () => resized.disconnect(),
      () => dark.removeEventListener("change", redraw),
      () => document.removeEventListener("themechange", redraw),
      () => this.plot && this.plot.destroy(),
    );
  }

  componentDidUpdate() {
    this.draw();
  }

  async draw() {
    const Plot = await load();
    if (this.gone) return;
    const { labels, table, unit } = this.props;
    const shape = JSON.stringify([labels, unit]);
    if (this.plot && shape === this.drawn) {
      this.plot.setData(table);
      return;
    }
    if (this.plot) this.plot.destroy();
    this.drawn = shape;
    const styles = getComputedStyle(document.documentElement);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const span = (plot) => plot.scales.x.max - plot.scales.x.min;
    this.plot = new Plot(
      {
        width: this.box.current.clientWidth || 300,
        height: HEIGHT,
        legend: { show: false },
        cursor: { drag: { x: false, y: false } },
        scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high ?? 0) > 0 ? high * 1.1 : 1] } },
        axes: [
          { ...axis, space: 70, values: (plot, marks) => marks.map((at) => clockText(at, span(plot))) },
          { ...axis, size: 62, values: (_, marks) => marks.map((value) => quantity(value, AXIS_UNITS.has(unit) ? unit : "")) },
        ],
        series: [
          {},
          ...labels.map((label, index) => ({
            label,
            stroke: colour(COLOURS[index % COLOURS.length]),
            dash: DASHES[index % DASHES.length],
            width: 1.75,
            points: { size: 4 }, // a value between absent ones is a point
          })),
        ],
      },
      table,
      this.box.current,
    );
  }

  /** The figures of the chart in one sentence. */
  summary() {
    const { title, unit, labels, table, span } = this.props;
    const parts = labels.map((label, index) => {
      const known = table[index + 1].filter((value) => value !== null);
      if (!known.length) return `${label}: no value yet`;
      const latest = quantity(known[known.length - 1], unit);
      return `${label}: ${latest} now, ${quantity(Math.min(...known), unit)} to ${quantity(Math.max(...known), unit)}`;
    });
    return `${title}, last ${span}. ${parts.join("; ")}.`;
  }

  render({ title, unit, labels, table, span, isUneven }, { isOpen, isFocused }) {
    const times = table[0];
    // A row stands for several values where there are many; it has the highest, so that no peak is lost.
    const stride = isUneven ? 1 : Math.max(1, Math.ceil(times.length / TABLE_ROWS));
    const step = times.length > 1 && !isUneven ? Math.round((times[1] - times[0]) * stride) : 0;
    const rows = [];
    for (let index = times.length - 1; index >= 0 && isOpen; index -= stride) rows.push(index);
    const highest = (values, last) => values.slice(Math.max(0, last - stride + 1), last + 1).reduce((one, other) => (one === null || (other !== null && other > one) ? other : one), null);
    const summary = visibleLine(this.summary());
    return html`<figure class="chart" aria-label=${title} onFocusIn=${() => this.put({ isFocused: true })} onFocusOut=${() => this.put({ isFocused: false })}>
      <figcaption>
        <h3>${title}</h3>
        <ul class="legend">
          ${labels.map((label, index) => {
            const column = table[index + 1];
            return html`<li class=${"key key-" + ((index % COLOURS.length) + 1)}>
              <${Name} text=${label} /> <output>${quantity(column[column.length - 1], unit)}</output>
            </li>`;
          })}
        </ul>
      </figcaption>
      <div class="plot" ref=${this.box} role="img" aria-label=${title + ", chart; the table below has its values"}></div>
      <p class="visually-hidden" aria-live=${isFocused ? "polite" : "off"}>${summary}</p>
      <details onToggle=${(event) => this.put({ isOpen: event.currentTarget.open })}>
        <summary>Table<span class="visually-hidden"> of ${title}</span></summary>
        ${isOpen &&
        html`<div class="scroll" tabindex="0" role="region" aria-label=${"Table of " + title}>
          <table>
            <caption>${title}, last ${span}${step ? `, ${stride > 1 ? "the highest of " : ""}every ${seconds(step)}` : ""}${AXIS_UNITS.has(unit) || !unit ? "" : ", in " + unit}</caption>
            <thead><tr><th scope="col">Time</th>${labels.map((label) => html`<th scope="col"><${Name} text=${label} /></th>`)}</tr></thead>
            <tbody>
              ${rows.map((row) => html`<tr>
                <th scope="row">${isUneven ? clock(times[row]) : new Date(times[row] * 1000).toLocaleTimeString([], { hour12: false })}</th>
                ${labels.map((_, index) => html`<td>${quantity(highest(table[index + 1], row), AXIS_UNITS.has(unit) ? unit : "")}</td>`)}
              </tr>`)}
            </tbody>
          </table>
        </div>`}
      </details>
    </figure>`;
  }
}
