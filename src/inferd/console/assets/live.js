// The live figures: one stream of server-sent events, kept as columns of numbers per resolution.
// @ts-check
import { ROOT } from "./api.js";
import { readSession } from "./session.js";
import { Store } from "./ui.js";

/**
 * @typedef {{id: string, model: string, title: string, unit: string, kind: "rate" | "gauge" | "quantile"}} Series
 * @typedef {{step_s: number, length: number, at?: number}} Resolution
 * @typedef {{at: number, level: string, text: string, model?: string, replica?: number | null, detail?: string}} FeedEvent
 */

const MAX_EVENTS = 500;

/** The figures of the server, as far as this viewer has received them. */
export class Figures {
  constructor() {
    /** @type {Series[]} */
    this.series = [];
    /** @type {Resolution[]} */
    this.resolutions = [];
    /** Values of a resolution and a series; the last value is that of the latest time. @type {(number | null)[][][]} */
    this.columns = [];
    /** The latest time of each resolution. @type {number[]} */
    this.ends = [];
    /** The ticks of the latest step of each resolution; null: that step is the snapshot's. @type {((number | null)[][] | null)[]} */
    this.pending = [];
  }

  /** @param {any} snapshot the data of the event `snapshot` */
  reset(snapshot) {
    this.series = snapshot.series;
    this.resolutions = snapshot.resolutions;
    this.columns = this.resolutions.map((_, index) =>
      this.series.map((one) => [...((snapshot.values[`${one.id}|${one.model}`] || [])[index] || [])]),
    );
    this.ends = this.resolutions.map((one) => one.at ?? Math.floor(snapshot.at / one.step_s) * one.step_s);
    this.pending = this.resolutions.map(() => null);
  }

  /** @param {{at: number, values: (number | null)[]}} tick */
  add(tick) {
    if (!this.series.length || tick.values.length !== this.series.length) return;
    this.resolutions.forEach(({ step_s, length }, index) => {
      const columns = this.columns[index];
      const passed = step_s > 1 ? Math.floor((tick.at - this.ends[index]) / step_s) : 1;
      if (passed > 0) {
        this.ends[index] = step_s > 1 ? this.ends[index] + passed * step_s : tick.at;
        this.pending[index] = [];
        for (const column of columns) {
          for (let slot = 0; slot < Math.min(passed, length); slot += 1) column.push(null);
          if (column.length > length) column.splice(0, column.length - length);
        }
      }
      const pending = this.pending[index];
      if (pending === null) return; // the step that the snapshot has a value for
      pending.push(tick.values);
      columns.forEach((column, position) => {
        const values = pending.map((one) => one[position]);
        column[column.length - 1] = this.series[position].kind === "quantile" ? highest(values) : mean(values);
      });
    });
  }

  /** Times and values of series at one resolution, of equal lengths. @param {number} resolution @param {number[]} positions */
  table(resolution, positions) {
    const columns = positions.map((position) => this.columns[resolution][position]);
    const length = Math.max(0, ...columns.map((column) => column.length));
    const { step_s } = this.resolutions[resolution];
    const end = this.ends[resolution];
    const times = Array.from({ length }, (_, index) => end - (length - 1 - index) * step_s);
    return [times, ...columns.map((column) => [...Array(length - column.length).fill(null), ...column])];
  }

  /** The latest value of a series, or null. @param {string} id @param {string} model */
  latest(id, model) {
    const position = this.series.findIndex((one) => one.id === id && one.model === model);
    const column = position < 0 ? [] : this.columns[0][position];
    return column.length ? column[column.length - 1] : null;
  }
}

/** @param {(number | null)[]} values */
const present = (values) => values.filter((value) => value !== null && value !== undefined);

/** @param {(number | null)[]} values */
function highest(values) {
  const known = present(values);
  return known.length ? Math.max(...known) : null;
}

/** @param {(number | null)[]} values */
function mean(values) {
  const known = present(values);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export const figures = new Store(new Figures());
/** @type {Store<FeedEvent[]>} */
export const feed = new Store([]);
/** closed, connecting, open or lost */
export const connection = new Store("closed");

/** @type {EventSource | null} */
let source = null;

/** Open the stream, unless it is open. */
export function connect() {
  if (source) return;
  connection.set("connecting");
  source = new EventSource(new URL("console/live", ROOT).href);
  source.onopen = () => connection.set("open");
  source.onerror = () => {
    // A browser tries again by itself, except after an answer that is no stream: then it is closed for good.
    const isClosed = source && source.readyState === EventSource.CLOSED;
    connection.set("lost");
    if (isClosed) {
      disconnect("lost");
      readSession().catch(() => {}); // a restart of the server ends the session
      setTimeout(() => connection.value === "lost" && connect(), 5000);
    }
  };
  source.addEventListener("snapshot", (event) => {
    const snapshot = JSON.parse(event.data);
    figures.value.reset(snapshot);
    if (Array.isArray(snapshot.events)) feed.set(snapshot.events.slice(-MAX_EVENTS));
    figures.set(figures.value);
  });
  source.addEventListener("tick", (event) => {
    figures.value.add(JSON.parse(event.data));
    if (!document.hidden) figures.set(figures.value);
  });
  source.addEventListener("end", () => {
    // The server ends the stream when it stops, and when the session may not see it any more.
    disconnect("lost");
    readSession().catch(() => {});
    setTimeout(() => connection.value === "lost" && connect(), 5000);
  });
  source.addEventListener("event", (event) => {
    feed.set([...feed.value.slice(1 - MAX_EVENTS), JSON.parse(event.data)]);
  });
}

/** Close the stream. @param {string} [state] */
export function disconnect(state = "closed") {
  if (source) source.close();
  source = null;
  connection.set(state);
}
