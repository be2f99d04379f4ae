// A form for any predictive model, built from its contract: one part per input, and the outputs as what they are.
// @ts-check
import { ApiError, curl, quoted, segment, send } from "../api.js";
import { number, percent, seconds } from "../format.js";
import { Command, Problem, View, html, visible, visibleLine } from "../ui.js";
import * as tensors from "./tensors.js";

/** @typedef {import("./tensors.js").Contract} Contract */

const MAX_ROWS = 20;
const MAX_COLUMNS = 24;

/** The kinds of values that an input can be given. @param {Contract} input */
function kindsOf(input) {
  if (input.datatype === "BYTES") return { text: "Text", file: "File (image, audio, any)" };
  const kinds = { numbers: input.datatype === "BOOL" ? "True and false" : "Numbers" };
  if (tensors.isNumeric(input.datatype) && tensors.pictureLayout(input.shape)) kinds.image = "Image";
  if (tensors.maySound(input)) kinds.audio = "Audio";
  return kinds;
}

/** A name that suggests a file. */
const isFileName = (name) => /image|picture|photo|audio|sound|wav|speech|video|file/i.test(name);

export class Form extends View {
  constructor(props) {
    super(props);
    const inputs = props.metadata.inputs;
    const first = inputs.findIndex((input) => (input.parameters || {}).optional);
    const fields = {};
    inputs.forEach((input, index) => {
      const isOptional = Boolean((input.parameters || {}).optional);
      fields[input.name] = {
        isSent: !isOptional || index === first,
        kind: input.datatype === "BYTES" && isFileName(input.name) ? "file" : Object.keys(kindsOf(input))[0],
        text: "", lines: false, files: [], highest: tensors.isWhole(input.datatype) ? "255" : "1", isInverted: false, rate: "16000", preview: "",
      };
    });
    this.state = { fields, error: null, isBusy: false, answer: null, figures: null, said: "" };
    this.endings.push(() => Object.values(this.state.fields).forEach((field) => field.preview && URL.revokeObjectURL(field.preview)));
  }

  change(name, change) {
    this.put({ fields: { ...this.state.fields, [name]: { ...this.state.fields[name], ...change } } });
  }

  choose(name, list) {
    const field = this.state.fields[name];
    if (field.preview) URL.revokeObjectURL(field.preview);
    const files = [...list];
    const isPicture = files.length && files[0].type.startsWith("image/");
    this.change(name, { files, preview: isPicture ? URL.createObjectURL(files[0]) : "" });
  }

  /** The tensor of an input. Raises Error with what is wrong. @param {Contract} input */
  async tensor(input) {
    const field = this.state.fields[input.name];
    if (field.kind === "text") return tensors.fromTexts(input, field.lines ? field.text.split("\n").filter((line) => line) : [field.text]);
    if (field.kind === "numbers") return tensors.fromText(input, field.text);
    if (!field.files.length) throw new Error("Choose a file.");
    if (field.kind === "file") return tensors.fromBytes(input, await Promise.all(field.files.map(async (file) => new Uint8Array(await file.arrayBuffer()))));
    if (field.kind === "image") return tensors.fromPixels(input, await pixelsOf(field.files[0], input.shape), Number(field.highest), field.isInverted);
    return tensors.fromSamples(input, await samplesOf(field.files[0], Number(field.rate)));
  }

  async submit(event) {
    event.preventDefault();
    const { metadata, model } = this.props;
    this.put({ isBusy: true, error: null, said: "" });
    const made = [];
    for (const input of metadata.inputs) {
      if (!this.state.fields[input.name].isSent) continue;
      try {
        made.push(await this.tensor(input));
      } catch (raised) {
        const error = new ApiError(0, `${input.name}: ${raised.message}`);
        error.title = "Not sent.";
        error.next = `The contract wants ${input.datatype}, ${tensors.text(input.shape)}.`;
        this.put({ error, isBusy: false });
        return;
      }
    }
    const begin = performance.now();
    const request = tensors.requestOf(made);
    const path = `v2/models/${segment(model)}/infer`;
    try {
      const response = await send("POST", path, request.raw ? { raw: /** @type {any} */ (request.raw), headers: request.headers } : { body: request.body });
      const answer = await response.json();
      this.put({ answer, isBusy: false, said: "The answer is there.", figures: { total: (performance.now() - begin) / 1000, id: response.headers.get("x-request-id") || "", command: commandOf(path, request) } });
    } catch (error) {
      this.put({ error, isBusy: false });
    }
  }

  render({ metadata, model }, { fields, error, isBusy, answer, figures, said }) {
    return html`<form class="card" onSubmit=${(event) => this.submit(event)}>
        <h2>Inputs of <bdi>${visibleLine(model)}</bdi></h2>
        ${metadata.inputs.length === 0 && html`<p>The model takes no inputs.</p>`}
        ${metadata.inputs.map((input, index) => this.input(input, fields[input.name], index))}
        <${Problem} error=${error} />
        <div class="actions"><button class="primary" disabled=${isBusy}>${isBusy ? "Computing…" : "Predict"}</button><span role="status">${said}</span></div>
      </form>
      ${answer && html`<section class="card" aria-label="Outputs">
        <h2>Outputs</h2>
        ${(answer.outputs || []).map((output) => html`<${Output} output=${output} contract=${metadata.outputs.find((one) => one.name === output.name)} />`)}
        <p class="figures">total ${seconds(figures.total)}${figures.id && html`, <a href=${"#/requests/" + encodeURIComponent(figures.id)}>where the time went</a>`}</p>
        <details><summary>JSON</summary><pre tabindex="0" aria-label="The answer as JSON">${visible(shortJson(answer))}</pre></details>
        <details><summary>The same with curl</summary><${Command} text=${figures.command} /></details>
      </section>`}`;
  }

  /** @param {Contract} input */
  input(input, field, index) {
    const kinds = kindsOf(input);
    const id = "input-" + index;
    const isOptional = Boolean((input.parameters || {}).optional);
    const change = (name) => (event) => this.change(input.name, { [name]: event.currentTarget.value });
    return html`<fieldset class="card" key=${input.name}>
      <legend><strong><bdi>${visibleLine(input.name)}</bdi></strong> <span class="hint">${input.datatype}, ${tensors.text(input.shape)}${isOptional ? ", optional" : ""}</span></legend>
      ${isOptional && html`<label class="check"><input type="checkbox" checked=${field.isSent} onChange=${(event) => this.change(input.name, { isSent: event.currentTarget.checked })} /> Send this input</label>`}
      ${field.isSent && Object.keys(kinds).length > 1 && html`<div class="row" role="radiogroup" aria-label=${"Kind of " + visibleLine(input.name)}>
        ${Object.entries(kinds).map(([kind, title]) => html`<label class="check"><input type="radio" name=${id + "-kind"} checked=${field.kind === kind} onChange=${() => this.change(input.name, { kind })} /> ${title}</label>`)}</div>`}
      ${field.isSent && field.kind === "text" && html`<div class="field"><label for=${id}>Text</label><textarea id=${id} rows="3" dir="auto" value=${field.text} onInput=${change("text")}></textarea></div>
        ${input.shape.includes(-1) && html`<label class="check"><input type="checkbox" checked=${field.lines} onChange=${(event) => this.change(input.name, { lines: event.currentTarget.checked })} /> Each line is a text of its own</label>`}`}
      ${field.isSent && field.kind === "numbers" && html`<div class="field"><label for=${id}>Values, as numbers or as JSON</label><textarea id=${id} class="code" rows="4" spellcheck="false" value=${field.text} onInput=${change("text")}></textarea></div>
        <div class="actions"><button type="button" onClick=${() => this.change(input.name, { text: example(input, () => 0) })}>Zeros</button>
          <button type="button" onClick=${() => this.change(input.name, { text: example(input, () => (tensors.isWhole(input.datatype) ? Math.floor(Math.random() * 10) : Number(Math.random().toFixed(3)))) })}>Random values</button></div>`}
      ${field.isSent && (field.kind === "file" || field.kind === "image" || field.kind === "audio") && html`<div class="field"><label for=${id}>File</label>
        <input id=${id} type="file" accept=${{ image: "image/*", audio: "audio/*" }[field.kind] || null} multiple=${field.kind === "file" && input.shape.includes(-1)} onChange=${(event) => this.choose(input.name, event.currentTarget.files)} /></div>
        ${field.preview && html`<img class="preview" src=${field.preview} alt="The chosen picture" />`}`}
      ${field.isSent && field.kind === "image" && html`<div class="row"><div class="field"><label for=${id + "-highest"}>Value of white</label><input id=${id + "-highest"} type="number" step="any" value=${field.highest} onInput=${change("highest")} /></div>
        <label class="check"><input type="checkbox" checked=${field.isInverted} onChange=${(event) => this.change(input.name, { isInverted: event.currentTarget.checked })} /> Invert</label></div>`}
      ${field.isSent && field.kind === "audio" && html`<div class="field"><label for=${id + "-rate"}>Samples per second</label><input id=${id + "-rate"} type="number" min="3000" max="384000" value=${field.rate} onInput=${change("rate")} /></div>`}
    </fieldset>`;
  }
}

/** Values of the smallest input that fits, as text. @param {Contract} input @param {() => number} value */
function example(input, value) {
  const count = Math.min(tensors.smallest(input.shape), 100_000);
  return Array.from({ length: count }, value).map((one) => (input.datatype === "BOOL" ? Boolean(one) : one)).join(", ");
}

/** A picture's pixels in the size that the shape wants. @param {File} file @param {number[]} shape */
async function pixelsOf(file, shape) {
  const layout = tensors.pictureLayout(shape);
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error("The file is no picture that this browser reads.");
  }
  const width = layout.width > 0 ? layout.width : picture.width;
  const height = layout.height > 0 ? layout.height : picture.height;
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const drawing = canvas.getContext("2d", { willReadFrequently: true });
  drawing.imageSmoothingQuality = "high";
  drawing.drawImage(picture, 0, 0, width, height);
  return drawing.getImageData(0, 0, width, height);
}

/** The samples of a sound, as one channel. @param {File} file @param {number} rate */
async function samplesOf(file, rate) {
  let sound;
  try {
    sound = await new OfflineAudioContext(1, 1, rate).decodeAudioData(await file.arrayBuffer());
  } catch {
    throw new Error("The file is no sound that this browser reads.");
  }
  const mixed = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) sound.getChannelData(channel).forEach((value, at) => (mixed[at] += value / sound.numberOfChannels));
  return mixed;
}

/** A command that sends the same tensors. A file's bytes do not fit into a line: the command names the format. */
function commandOf(path, request) {
  if (!request.raw) return curl("POST", path, request.body);
  const length = request.headers["inference-header-content-length"];
  return `# body.bin: ${length} bytes of JSON, then per file its length (4 bytes, little-endian) and its bytes\n` +
    curl("POST", path) + ` \\\n  -H 'inference-header-content-length: ${length}' --data-binary @body.bin\n# the JSON: ${quoted(JSON.stringify(request.body))}`;
}

/** JSON with long lists cut. @param {any} value */
const shortJson = (value) => JSON.stringify(value, (_, one) => (Array.isArray(one) && one.length > 200 ? [...one.slice(0, 200), `… ${one.length - 200} more`] : one), 1);

/** One output: classes as bars, numbers as a table, texts as texts. */
function Output({ output, contract }) {
  const labels = ((contract || {}).parameters || {}).labels;
  const rows = tensors.rowsOf(output);
  const isNumbers = output.datatype !== "BYTES";
  const width = rows.length ? rows[0].length : 0;
  const title = html`<h3><bdi>${visibleLine(output.name)}</bdi> <span class="hint">${output.datatype}, ${tensors.text(output.shape)}</span></h3>`;
  if (isNumbers && labels && labels.length === width)
    return html`<div>${title}${rows.slice(0, MAX_ROWS).map((row) => html`<div role="list" aria-label="Classes, the most likely first">${classes(row, labels)}</div>`)}</div>`;
  if (!isNumbers)
    return html`<div>${title}${output.data.slice(0, 200).map((text) => html`<pre tabindex="0" aria-label="Text" dir="auto">${visible(text)}</pre>`)}</div>`;
  return html`<div>${title}
    ${output.shape.length > 1 && width > 32 && html`<p class="hint">Vectors of ${width} numbers; length of the first: ${number(Math.sqrt(rows[0].reduce((sum, value) => sum + value * value, 0)))}</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label=${"Values of " + visibleLine(output.name)}><table>
      <tbody>${rows.slice(0, MAX_ROWS).map((row, index) => html`<tr><th scope="row">${index}</th>${row.slice(0, MAX_COLUMNS).map((value) => html`<td class="number">${typeof value === "number" ? Number(value.toPrecision(5)) : String(value)}</td>`)}${row.length > MAX_COLUMNS && html`<td>… ${row.length - MAX_COLUMNS} more</td>`}</tr>`)}</tbody>
    </table></div>
    ${rows.length > MAX_ROWS && html`<p class="hint">${rows.length - MAX_ROWS} more rows in the JSON.</p>`}</div>`;
}

function classes(row, labels) {
  const high = Math.max(...row.map(Math.abs), 1e-9);
  const scale = row.every((value) => value >= 0 && value <= 1) ? 1 : high;
  return row.map((value, index) => ({ value, label: labels[index] })).sort((one, other) => other.value - one.value).slice(0, 10).map(({ value, label }) => html`<div class="bar" role="listitem">
    <bdi>${visibleLine(label)}</bdi><div class="track"><div class="fill" style=${{ width: Math.max(0, (value / scale) * 100) + "%" }}></div></div><output>${scale === 1 ? percent(value) : Number(value.toPrecision(4))}</output>
  </div>`);
}
