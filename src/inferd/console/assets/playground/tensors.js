// Tensors of KServe v2: from texts, numbers and files to inputs, and the shapes that fit a contract.
// @ts-check

/** @typedef {{name: string, datatype: string, shape: number[], parameters?: {optional?: boolean, labels?: string[]}}} Contract */
/** @typedef {{name: string, datatype: string, shape: number[], data?: any[], bytes?: Uint8Array[]}} Tensor */

const WHOLE = /^U?INT/;
export const isNumeric = (datatype) => datatype !== "BYTES" && datatype !== "BOOL";
export const isWhole = (datatype) => WHOLE.test(datatype);

/**
 * The shape of `count` values for a contract: open dimensions are 1, except for the last of them.
 * Raises Error where no shape fits.
 * @param {number[]} shape @param {number} count
 */
export function shapeFor(shape, count) {
  const open = shape.lastIndexOf(-1);
  const fixed = shape.reduce((product, size) => (size < 0 ? product : product * size), 1);
  // A first open dimension counts rows where every other dimension is fixed; else it is one row.
  if (open < 0) {
    if (count !== fixed) throw new Error(`The shape ${text(shape)} needs ${fixed} values; there are ${count}.`);
    return [...shape];
  }
  if (fixed === 0 || count % fixed || (count === 0 && fixed > 1))
    throw new Error(`The shape ${text(shape)} needs a multiple of ${fixed} values; there are ${count}.`);
  return shape.map((size, index) => (size >= 0 ? size : index === open ? count / fixed : 1));
}

/** A shape as text: [-1, 64] is "? × 64". @param {number[]} shape */
export const text = (shape) => (shape.length ? shape.map((size) => (size < 0 ? "?" : size)).join(" × ") : "one value");

/** Number of values of the smallest input that fits. @param {number[]} shape */
export const smallest = (shape) => shape.reduce((product, size) => product * (size < 0 ? 1 : size), 1);

/** @param {any} value @returns {number[]} the shape of nested lists */
function nesting(value) {
  const shape = [];
  for (let inner = value; Array.isArray(inner); inner = inner[0]) shape.push(inner.length);
  return shape;
}

/**
 * Values as a person writes them: nested or flat JSON, or numbers with commas, blanks and line breaks between them.
 * Raises Error with what is wrong.
 * @param {Contract} contract @param {string} written @returns {Tensor}
 */
export function fromText(contract, written) {
  const { name, datatype, shape } = contract;
  let values;
  let given = null;
  if (/^\s*\[/.test(written)) {
    const nested = JSON.parse(written);
    given = nesting(nested);
    values = nested.flat(Infinity);
    if (given.reduce((product, size) => product * size, 1) !== values.length) throw new Error("The lists have different lengths.");
  } else {
    values = written.split(/[\s,;]+/).filter((word) => word).map((word) => ({ true: true, false: false })[word] ?? word);
  }
  values = values.map((value) => {
    if (datatype === "BOOL" && (typeof value === "boolean" || value === 0 || value === 1 || value === "0" || value === "1")) return value === true || Number(value) === 1;
    const number = typeof value === "number" ? value : Number(value);
    if (datatype === "BOOL" || !Number.isFinite(number) || value === "" || value === null) throw new Error(`${JSON.stringify(value)} is no ${datatype === "BOOL" ? "true or false" : "number"}.`);
    if (isWhole(datatype) && !Number.isInteger(number)) throw new Error(`${number} is no whole number, as ${datatype} needs.`);
    return number;
  });
  const fits = given && given.length === shape.length && given.every((size, index) => shape[index] < 0 || shape[index] === size);
  return { name, datatype, shape: fits ? given : shapeFor(shape, values.length), data: values };
}

/** @param {Contract} contract @param {string[]} texts @returns {Tensor} */
export const fromTexts = (contract, texts) => ({ name: contract.name, datatype: "BYTES", shape: shapeFor(contract.shape, texts.length), data: texts });

/** @param {Contract} contract @param {Uint8Array[]} files @returns {Tensor} */
export const fromBytes = (contract, files) => ({ name: contract.name, datatype: "BYTES", shape: shapeFor(contract.shape, files.length), bytes: files });

/**
 * Where height, width and channels of a picture are in a shape, or null. -1 is the picture's own size.
 * @param {number[]} shape @returns {{height: number, width: number, channels: number, isChannelsFirst: boolean, shape: number[]} | null}
 */
export function pictureLayout(shape) {
  const lead = shape.length && shape[0] < 0 ? 1 : 0;
  const sizes = shape.slice(lead);
  while (sizes.length > 3 && sizes[0] === 1) sizes.shift();
  const isChannels = (size) => size === 1 || size === 3 || size === 4;
  if (sizes.length === 3 && isChannels(sizes[0])) return { channels: sizes[0], height: sizes[1], width: sizes[2], isChannelsFirst: true, shape };
  if (sizes.length === 3 && isChannels(sizes[2])) return { channels: sizes[2], height: sizes[0], width: sizes[1], isChannelsFirst: false, shape };
  if (sizes.length === 2) return { channels: 1, height: sizes[0], width: sizes[1], isChannelsFirst: false, shape };
  const side = Math.sqrt(sizes[0] ?? 0);
  if (sizes.length === 1 && sizes[0] > 1 && Number.isInteger(side)) return { channels: 1, height: side, width: side, isChannelsFirst: false, shape };
  return null;
}

/**
 * A picture's pixels as a tensor.
 * @param {Contract} contract @param {{width: number, height: number, data: Uint8ClampedArray}} pixels RGBA, of the layout's size
 * @param {number} highest the value of a white pixel @param {boolean} isInverted @returns {Tensor}
 */
export function fromPixels(contract, pixels, highest, isInverted) {
  const layout = pictureLayout(contract.shape);
  const { channels, isChannelsFirst } = layout;
  const { width, height, data } = pixels;
  const count = width * height;
  const values = new Array(count * channels);
  for (let at = 0; at < count; at += 1) {
    for (let channel = 0; channel < channels; channel += 1) {
      const base = at * 4;
      let value = channels === 1 ? 0.299 * data[base] + 0.587 * data[base + 1] + 0.114 * data[base + 2] : data[base + channel];
      if (isInverted && channel < 3) value = 255 - value;
      value = (value / 255) * highest;
      values[isChannelsFirst ? channel * count + at : at * channels + channel] = isWhole(contract.datatype) ? Math.round(value) : value;
    }
  }
  const sizes = contract.shape.map((size, index) => {
    if (size >= 0) return size;
    if (index === 0 && contract.shape.length !== 2 + (channels > 1 ? 1 : 0)) return 1;
    const first = contract.shape.length - (contract.shape.length >= 3 ? 3 : 2);
    const place = index - first - (isChannelsFirst ? 1 : 0);
    return place === 0 ? height : width;
  });
  return { name: contract.name, datatype: contract.datatype, shape: fixed(sizes, values.length), data: values };
}

/** @param {number[]} shape @param {number} count */
const fixed = (shape, count) => (shape.reduce((product, size) => product * size, 1) === count ? shape : shapeFor(shape.map((size, index) => (index ? size : -1)), count));

/** Samples of a sound as a tensor. @param {Contract} contract @param {Float32Array} samples @returns {Tensor} */
export function fromSamples(contract, samples) {
  const values = isWhole(contract.datatype) ? Array.from(samples, (value) => Math.round(Math.max(-1, Math.min(1, value)) * 32767)) : Array.from(samples);
  return { name: contract.name, datatype: contract.datatype, shape: shapeFor(contract.shape, values.length), data: values };
}

/** Whether a tensor may hold a sound: numbers with an open last dimension. @param {Contract} contract */
export const maySound = ({ datatype, shape }) => /^(FP|INT16|BF16)/.test(datatype) && shape.length > 0 && shape.length <= 3 && (shape[shape.length - 1] < 0 || shape[shape.length - 1] >= 1000);

/**
 * The body of a request: JSON, or, where an input has bytes, JSON with the bytes behind it.
 * @param {Tensor[]} tensors @returns {{body: any, raw?: Uint8Array, headers?: Record<string, string>}}
 */
export function requestOf(tensors) {
  const body = { inputs: tensors.map(({ name, datatype, shape, data, bytes }) => (bytes ? { name, datatype, shape, parameters: { binary_data_size: bytes.reduce((sum, one) => sum + 4 + one.length, 0) } } : { name, datatype, shape, data })) };
  if (!tensors.some((tensor) => tensor.bytes)) return { body };
  const head = new TextEncoder().encode(JSON.stringify(body));
  const parts = /** @type {Uint8Array[]} */ ([head]);
  for (const tensor of tensors) {
    for (const one of tensor.bytes || []) {
      const length = new Uint8Array(4);
      new DataView(length.buffer).setUint32(0, one.length, true);
      parts.push(length, one);
    }
  }
  const raw = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    raw.set(part, at);
    at += part.length;
  }
  return { body, raw, headers: { "content-type": "application/octet-stream", "inference-header-content-length": String(head.length) } };
}

/** The rows of an output: lists of its last dimension's length. @param {{shape: number[], data: any[]}} output @returns {any[][]} */
export function rowsOf(output) {
  const width = output.shape.length > 1 ? output.shape[output.shape.length - 1] : output.shape.length ? output.data.length : 1;
  const rows = [];
  for (let at = 0; at < output.data.length; at += Math.max(1, width)) rows.push(output.data.slice(at, at + Math.max(1, width)));
  return rows;
}
