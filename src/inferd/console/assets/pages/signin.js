// Sign in: a key is exchanged for a session.
// @ts-check
import { session, signIn } from "../session.js";
import { Command, Field, Name, Problem, View, html } from "../ui.js";

export class Page extends View {
  constructor(props) {
    super(props);
    this.state = { key: "", error: null, isBusy: false };
  }

  componentDidMount() {
    this.uses(session);
  }

  async enter(event) {
    event.preventDefault();
    this.put({ isBusy: true, error: null });
    try {
      const now = await signIn(this.state.key.trim());
      this.put({ key: "", isBusy: false });
      if (now.signed_in) {
        if (location.hash.replace(/^#\/?/, "") in { "": 1, "sign-in": 1 }) location.hash = "#/overview";
        else this.props.entered();
      }
    } catch (error) {
      this.put({ error, isBusy: false });
    }
  }

  render(_, { key, error, isBusy }) {
    const now = session.value;
    return html`<h1 tabindex="-1">Sign in</h1>
      <div class="card">
        ${now && now.signed_in && html`<p class="notice good">Signed in: tenant <${Name} text=${now.tenant || "operator"} />, scopes ${now.scopes.join(", ")}.</p>`}
        ${now && now.auth === "off" && html`<p>This server answers requests without a key. Administration needs a key with the scope admin.</p>`}
        <form onSubmit=${(event) => this.enter(event)}>
          <${Field} id="key" label="API key" hint="It begins with sk-inf-. The browser keeps a session, never the key.">
            <input id="key" type="password" autocomplete="off" spellcheck="false" required aria-describedby="key-hint"
              value=${key} onInput=${(event) => this.put({ key: event.currentTarget.value })} />
          <//>
          <${Problem} error=${error && { ...error, title: error.title, message: error.message, next: error.status === 401 ? "Check that the key is complete and neither revoked nor expired." : error.next }} />
          <div class="actions"><button class="primary" disabled=${isBusy || !key.trim()}>${isBusy ? "Signing in…" : "Sign in"}</button></div>
        </form>
      </div>
      <h2>No key?</h2>
      <p>Make one on the server's machine:</p>
      <${Command} text="inferd keys create --tenant me --scopes infer,models,metrics,admin" />
      <p>The scope metrics shows charts, events and alerts; models lists the models; infer has the playground; admin shows and does everything.</p>`;
  }
}
