// Numbers, sizes and times as text.
// @ts-check

const SYMBOLS = { celsius: "°C", watts: "W" };

/** @param {number | null | undefined} value @param {string} [unit] */
export function quantity(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "s" || unit === "seconds") return seconds(value);
  if (unit === "bytes" || unit === "B") return bytes(value);
  if (unit === "ratio" || unit === "fraction") return percent(value);
  return number(value) + (unit ? " " + (SYMBOLS[unit] || unit) : "");
}

/** @param {number} value */
export function number(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return trim(value / 1e9) + " G";
  if (size >= 1e6) return trim(value / 1e6) + " M";
  if (size >= 1e4) return trim(value / 1e3) + " k";
  return trim(value);
}

/** A count, to the last digit. @param {number} value */
export const count = (value) => value.toLocaleString("en-US");

const trim = (value) => String(Number(value.toPrecision(3)));

/** @param {number | null | undefined} value */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return trim(value * 1e6) + " µs";
  if (size < 1) return trim(value * 1e3) + " ms";
  if (size < 120) return trim(value) + " s";
  if (size < 7200) return Math.round(value / 60) + " min";
  if (size < 172800) return trim(value / 3600) + " h";
  return trim(value / 86400) + " d";
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (Math.abs(value) >= 1024 && index < names.length - 1) {
    value /= 1024;
    index += 1;
  }
  return trim(value) + " " + names[index];
}

/** @param {number | null | undefined} value */
export const percent = (value) => (value === null || value === undefined ? "–" : trim(value * 100) + " %");

/** @param {number | null | undefined} at seconds since the epoch */
export function clock(at) {
  if (!at) return "–";
  const moment = new Date(at * 1000);
  const time = moment.toLocaleTimeString([], { hour12: false });
  return Date.now() / 1000 - at < 43200 ? time : moment.toLocaleDateString() + " " + time;
}

/** @param {number | null | undefined} at seconds since the epoch */
export const date = (at) => (at ? new Date(at * 1000).toLocaleString([], { hour12: false }) : "never");
