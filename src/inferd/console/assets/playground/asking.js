// What the views that stream an answer share: the answer is stopped by Escape, and when the view goes; what the person
// wrote and read is there when the view comes back.
// @ts-check
import { kept } from "../session.js";
import { View } from "../ui.js";

export class Asking extends View {
  /** @param {any} props @param {string} kind of the view @param {Record<string, any>} lasting @param {Record<string, any>} passing */
  constructor(props, kind, lasting, passing) {
    super(props);
    const name = kind + " " + props.model;
    if (!kept.has(name)) kept.set(name, lasting);
    /** The part of the state that comes back, shared with the views of this model that went and that will come. */
    this.lasting = kept.get(name);
    this.state = { ...passing, ...this.lasting };
    /** Stops the request in flight. @type {AbortController | null} */
    this.control = null;
    this.endings.push(() => this.stop());
  }

  componentDidMount() {
    const pressed = (event) => event.key === "Escape" && this.state.isBusy && !document.querySelector("dialog[open]") && this.stop();
    addEventListener("keydown", pressed);
    this.endings.push(() => removeEventListener("keydown", pressed));
  }

  /** The lasting part is noted also when the view is gone: a refusal that ends the session comes after it. */
  put(state) {
    for (const name of Object.keys(state)) if (Object.hasOwn(this.lasting, name)) this.lasting[name] = state[name];
    super.put(state);
  }

  stop() {
    if (this.control) this.control.abort();
  }
}
