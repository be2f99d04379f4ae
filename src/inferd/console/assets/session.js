// The session of the console: a cookie that the server made from an API key. The key itself is never stored.
// @ts-check
import { ROOT, call, get, onRefused } from "./api.js";
import { Store } from "./ui.js";

/** @typedef {{auth: "off" | "required", signed_in: boolean, tenant: string, scopes: string[], version: string, prefix?: string}} Session */

/** null: not known yet. @type {Store<Session | null>} */
export const session = new Store(null);

/**
 * What views keep while another page is shown, by the name of the view: in the memory of this page alone. It outlives
 * a session that ends by itself, so that the work goes on after the next sign-in. A sign-out, and a sign-in of another
 * tenant, forget it.
 * @type {Map<string, Record<string, any>>}
 */
export const kept = new Map();

/** The tenant whose views these are. @type {string | null} */
let owner = null;

/** Ask the server for the session, and return it. */
export async function readSession() {
  const answer = await get("console/session");
  if (answer.signed_in) {
    if (owner !== null && owner !== answer.tenant) kept.clear();
    owner = answer.tenant;
  }
  session.set(answer);
  return answer;
}

const SIGNED_IN = "signed in";
const SIGNED_OUT = "signed out";

/** @type {BroadcastChannel | null} */
let tabs = null;

/** Follow the other tabs of this server: a sign-in or sign-out in one is one in all, because they have one cookie. */
export function followTabs() {
  tabs = new BroadcastChannel("inferd " + ROOT);
  tabs.onmessage = ({ data }) => {
    if (data === SIGNED_OUT) kept.clear();
    readSession().catch(() => {});
  };
}

/** @param {string} key */
export async function signIn(key) {
  await call("POST", "console/session", { key });
  tabs?.postMessage(SIGNED_IN);
  return readSession();
}

export async function signOut() {
  await call("DELETE", "console/session");
  kept.clear();
  tabs?.postMessage(SIGNED_OUT);
  return readSession();
}

/** Whether the session may do this. @param {string} scope */
export function may(scope) {
  const now = session.value;
  return now !== null && (now.scopes || []).includes(scope);
}

/** Whether a key is needed before anything can be seen. */
export const isLockedOut = () => session.value !== null && session.value.auth === "required" && !session.value.signed_in;

onRefused.call = () => {
  // An answer 401 inside of a session means that it has ended.
  if (session.value && session.value.signed_in) readSession().catch(() => {});
};
