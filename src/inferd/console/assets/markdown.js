// Markdown as nodes. A text becomes a tree of plain objects, and the tree becomes elements from a fixed set: no text is
// ever read as HTML, and only http, https and mailto addresses become links.
// @ts-check
import { html, visible } from "./ui.js";

/** @typedef {{type: string, text?: string, href?: string, level?: number, items?: Node[][], children?: Node[], head?: Node[][], rows?: Node[][][]}} Node */

const MAX_CHARS = 200_000;
const MAX_DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t](.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const BULLET = /^( {0,3})([-*+])[ \t]+(.*)$/;
const NUMBERED = /^( {0,3})(\d{1,9})[.)][ \t]+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** The blocks of a text. @param {string} text @param {number} [depth] @returns {Node[]} */
export function parse(text, depth = 0) {
  if (depth === 0 && text.length > MAX_CHARS) return [{ type: "code", text }];
  const lines = text.split("\n");
  /** @type {Node[]} */
  const blocks = [];
  let index = 0;
  while (index < lines.length) {
    const line = lines[index];
    const fence = FENCE.exec(line);
    if (fence) {
      const body = [];
      index += 1;
      while (index < lines.length && !closes(lines[index], fence[1])) body.push(lines[index++]);
      index += 1; // the closing fence, or the end of a text that is still arriving
      blocks.push({ type: "code", text: body.join("\n") });
      continue;
    }
    if (!line.trim()) {
      index += 1;
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      blocks.push({ type: "heading", level: heading[1].length, children: inline(heading[2].trim()) });
      index += 1;
      continue;
    }
    if (RULE.test(line)) {
      blocks.push({ type: "rule" });
      index += 1;
      continue;
    }
    if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const body = [];
      for (let quote; index < lines.length && (quote = QUOTE.exec(lines[index])); index += 1) body.push(quote[1]);
      blocks.push({ type: "quote", children: parse(body.join("\n"), depth + 1) });
      continue;
    }
    const isNumbered = NUMBERED.test(line);
    if ((isNumbered || BULLET.test(line)) && depth < MAX_DEPTH) {
      const marker = isNumbered ? NUMBERED : BULLET;
      const items = [];
      const start = isNumbered ? Number(NUMBERED.exec(line)[2]) : 1;
      for (let item; index < lines.length && (item = marker.exec(lines[index])); ) {
        const body = [item[3]];
        index += 1;
        while (index < lines.length && (/^(?: {2,}|\t)\S/.test(lines[index]) || isContinued(lines, index))) {
          body.push(lines[index].replace(/^(?: {1,4}|\t)/, ""));
          index += 1;
        }
        items.push(parse(body.join("\n"), depth + 1));
      }
      blocks.push({ type: isNumbered ? "numbers" : "bullets", items, level: start });
      continue;
    }
    if (line.includes("|") && index + 1 < lines.length && lines[index + 1].includes("-") && DIVIDER.test(lines[index + 1])) {
      const head = cells(line);
      const rows = [];
      index += 2;
      while (index < lines.length && lines[index].includes("|")) rows.push(cells(lines[index++]));
      blocks.push({ type: "table", head, rows });
      continue;
    }
    const body = [line];
    index += 1;
    while (index < lines.length && lines[index].trim() && !begins(lines[index])) body.push(lines[index++]);
    blocks.push({ type: "paragraph", children: inline(body.join("\n")) });
  }
  return blocks;
}

/** @param {string} line @param {string} fence */
function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

/** Whether an empty line belongs to a list item, because an indented line follows. @param {string[]} lines @param {number} index */
const isContinued = (lines, index) => !lines[index].trim() && index + 1 < lines.length && /^(?: {2,}|\t)\S/.test(lines[index + 1]);

const begins = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || BULLET.test(line) || NUMBERED.test(line);

const cells = (line) =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .split("|")
    .slice(0, 50)
    .map((cell) => inline(cell.trim()));

// One alternative per kind of span. None repeats a group that repeats, so the time is linear in the length of a line.
const SPAN = /\\([!-\/:-@[-`{-~])|(`+)(?!`)|(\*\*|__)(?=\S)|([*_])(?=\S)|(~~)(?=\S)|\[([^\[\]\n]{1,1000})\]\(([^()\s]{1,2000})\)|<?(https?:\/\/[^\s<>"'`]{1,2000})>?/g;

/** The spans of a line. @param {string} text @param {number} [depth] @returns {Node[]} */
export function inline(text, depth = 0) {
  /** @type {Node[]} */
  const spans = [];
  const matcher = new RegExp(SPAN.source, "g");
  /** Delimiters without a partner behind them; each is searched for once. @type {Set<string>} */
  const unpaired = new Set();
  let end = 0;
  const push = (until) => until > end && spans.push({ type: "text", text: text.slice(end, until) });
  for (let match; (match = matcher.exec(text)); ) {
    const [whole, literal, ticks, strong, emphasis, strike, label, target, url] = match;
    const at = match.index;
    const delimiter = ticks || strong || emphasis || strike;
    if (literal) {
      push(at);
      spans.push({ type: "text", text: literal });
      end = at + whole.length;
    } else if (delimiter) {
      const begin = at + delimiter.length;
      const isInWord = delimiter[0] === "_" && /\w/.test(text[at - 1] || "");
      const close = unpaired.has(delimiter) || isInWord ? -1 : partner(text, delimiter, begin);
      if (close < 0) {
        if (!isInWord) unpaired.add(delimiter);
        matcher.lastIndex = begin;
        continue;
      }
      if (!ticks && depth >= MAX_DEPTH) continue;
      push(at);
      const inside = text.slice(begin, close);
      if (ticks) spans.push({ type: "mono", text: inside });
      else spans.push({ type: strong ? "strong" : emphasis ? "emphasis" : "strike", children: inline(inside, depth + 1) });
      end = matcher.lastIndex = close + delimiter.length;
    } else {
      const href = safeLink(target || url);
      push(at);
      if (!href) spans.push({ type: "text", text: whole });
      else spans.push({ type: "link", href, children: label ? [{ type: "text", text: label }] : [{ type: "text", text: url }] });
      end = at + whole.length;
    }
  }
  push(text.length);
  return spans;
}

/** Where the closing delimiter begins, or -1. @param {string} text @param {string} delimiter @param {number} begin */
function partner(text, delimiter, begin) {
  const mark = delimiter[0];
  for (let at = text.indexOf(delimiter, begin); at >= 0; ) {
    let after = at;
    while (text[after] === mark) after += 1;
    const length = after - at;
    const isWordEnd = mark !== "_" || !/\w/.test(text[after] || "");
    if (mark === "`" ? length === delimiter.length : at > begin && !/\s/.test(text[at - 1]) && isWordEnd && length >= delimiter.length) {
      if (delimiter.length === 2 || length !== 2) return mark === "`" ? at : after - delimiter.length;
    }
    at = text.indexOf(delimiter, after);
  }
  return -1;
}

/** An address that a link may have, or "". @param {string} text */
export function safeLink(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return ""; // a relative address would lead into this server's own API
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) && !url.username && !url.password ? url.href : "";
}

/** A text of a model as elements. @param {{text: string}} props */
export const Markdown = ({ text }) => html`<div class="markdown" dir="auto">${parse(text).map(block)}</div>`;

/** @param {Node} node */
function block(node) {
  if (node.type === "code") return html`<pre tabindex="0" aria-label="Code"><code>${visible(node.text)}</code></pre>`;
  if (node.type === "rule") return html`<hr />`;
  if (node.type === "quote") return html`<blockquote>${node.children.map(block)}</blockquote>`;
  if (node.type === "bullets") return html`<ul>${node.items.map((item) => html`<li>${item.map(block)}</li>`)}</ul>`;
  if (node.type === "numbers")
    return html`<ol start=${node.level}>${node.items.map((item) => html`<li>${item.map(block)}</li>`)}</ol>`;
  if (node.type === "table")
    return html`<div class="scroll" tabindex="0" role="region" aria-label="Table">
      <table>
        <thead><tr>${node.head.map((cell) => html`<th scope="col">${cell.map(span)}</th>`)}</tr></thead>
        <tbody>${node.rows.map((row) => html`<tr>${row.map((cell) => html`<td>${cell.map(span)}</td>`)}</tr>`)}</tbody>
      </table>
    </div>`;
  // Headings of an answer are no headings of the page, so that its outline stays the page's own.
  if (node.type === "heading") return html`<p class=${"heading level-" + node.level}>${node.children.map(span)}</p>`;
  return html`<p>${node.children.map(span)}</p>`;
}

/** @param {Node} node */
function span(node) {
  if (node.type === "mono") return html`<code>${visible(node.text)}</code>`;
  if (node.type === "strong") return html`<strong>${node.children.map(span)}</strong>`;
  if (node.type === "emphasis") return html`<em>${node.children.map(span)}</em>`;
  if (node.type === "strike") return html`<del>${node.children.map(span)}</del>`;
  if (node.type === "link")
    return html`<a href=${node.href} rel="noopener noreferrer nofollow" target="_blank" title=${node.href}>${node.children.map(span)}</a>`;
  return visible(node.text);
}
