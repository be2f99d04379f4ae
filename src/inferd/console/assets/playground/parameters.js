// The sampling parameters of chats and completions.
// @ts-check
import { html } from "../ui.js";

/** Name, label, step, lowest, highest, and the value that the field begins with. */
export const PARAMETERS = [
  { name: "max_tokens", label: "Most tokens", step: 1, min: 1, begin: "256" },
  { name: "temperature", label: "Temperature", step: 0.05, min: 0, max: 2 },
  { name: "top_p", label: "Top p", step: 0.01, min: 0, max: 1 },
  { name: "top_k", label: "Top k", step: 1, min: -1 },
  { name: "min_p", label: "Min p", step: 0.01, min: 0, max: 1 },
  { name: "seed", label: "Seed", step: 1 },
  { name: "presence_penalty", label: "Presence penalty", step: 0.1, min: -2, max: 2 },
  { name: "frequency_penalty", label: "Frequency penalty", step: 0.1, min: -2, max: 2 },
  { name: "repetition_penalty", label: "Repetition penalty", step: 0.05, min: 0.01, max: 100 },
];

export const initial = () => Object.fromEntries([...PARAMETERS.map((one) => [one.name, one.begin || ""]), ["stop", ""]]);

/** The parameters that have a value, as the API takes them. @param {Record<string, string>} values */
export function chosen(values) {
  const body = {};
  for (const { name } of PARAMETERS) if (values[name] !== "") body[name] = Number(values[name]);
  const stops = values.stop.split("\n").filter((line) => line);
  if (stops.length) body.stop = stops;
  return body;
}

/** @param {{values: Record<string, string>, put: (values: Record<string, string>) => void}} props */
export const Parameters = ({ values, put }) => html`<details class="card" open=${innerWidth > 896}>
  <summary>Parameters</summary>
  <p class="hint">An empty field leaves the model's own value.</p>
  ${PARAMETERS.map(({ name, label, step, min, max }) => html`<div class="field">
    <label for=${"parameter-" + name}>${label}</label>
    <input id=${"parameter-" + name} type="number" step=${step} min=${min} max=${max} value=${values[name]} onInput=${(event) => put({ ...values, [name]: event.currentTarget.value })} />
  </div>`)}
  <div class="field"><label for="parameter-stop">Stop texts, one per line</label>
    <textarea id="parameter-stop" rows="2" value=${values.stop} onInput=${(event) => put({ ...values, stop: event.currentTarget.value })}></textarea></div>
</details>`;
