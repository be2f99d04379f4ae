// What this browser remembers of a viewer: the theme and the use of shortcuts. Never a key, a prompt or an answer.
// @ts-check
import { Store } from "./ui.js";

/** @param {string} name @param {string} fallback */
function stored(name, fallback) {
  try {
    return localStorage.getItem("inferd." + name) || fallback;
  } catch {
    return fallback; // storage is switched off
  }
}

/** @param {string} name @param {string} value */
function keep(name, value) {
  try {
    localStorage.setItem("inferd." + name, value);
  } catch {
    // storage is switched off: the setting holds until the page is closed
  }
}

/** auto, light or dark */
export const theme = new Store(stored("theme", "auto"));
/** on or off */
export const shortcuts = new Store(stored("shortcuts", "on"));

export function applyTheme() {
  if (theme.value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
  document.dispatchEvent(new Event("themechange"));
}

/** @param {string} value */
export function setTheme(value) {
  keep("theme", value);
  theme.set(value);
  applyTheme();
}

/** @param {string} value */
export function setShortcuts(value) {
  keep("shortcuts", value);
  shortcuts.set(value);
}
