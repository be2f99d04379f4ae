// Tests of the console's modules that need no browser. Run by test_assets.py: node --test modules.test.mjs
import assert from "node:assert/strict";
import { test } from "node:test";

const assets = new URL("../../src/inferd/console/assets/", import.meta.url);
const load = (path) => import(new URL(path, assets).href);
const { parse, inline, safeLink, Markdown } = await load("markdown.js");
const { visible, visibleLine } = await load("ui.js");
const { Figures } = await load("live.js");
const tensors = await load("playground/tensors.js");
const { events, quoted, messageOf } = await load("api.js");
const format = await load("format.js");
const { example } = await load("schema.js");
const rollouts = await load("rollouts.js");
const drift = await load("drift.js");

/** All nodes of a tree. */
function* walk(nodes) {
  for (const node of nodes) {
    yield node;
    yield* walk(node.children || []);
    for (const item of node.items || []) yield* walk(item);
    for (const cell of node.head || []) yield* walk(cell);
    for (const row of node.rows || []) for (const cell of row) yield* walk(cell);
  }
}

const types = (text) => [...walk(parse(text))].map((node) => node.type);
const plain = (text) => [...walk(parse(text))].map((node) => node.text || "").join("");

test("Markdown has the usual blocks and spans", () => {
  assert.deepEqual(types("# A\n\ntext **b** *c* `d` ~~e~~ [f](https://g.h/)"), [
    "heading", "text", "paragraph", "text", "strong", "text", "text", "emphasis", "text", "text", "mono", "text", "strike", "text", "text", "link", "text",
  ]);
  assert.deepEqual(types("- a\n- b\n  - c").filter((type) => type === "bullets"), ["bullets", "bullets"]);
  assert.equal(parse("3. a\n4. b")[0].level, 3);
  assert.deepEqual(parse("```py\n<b>\n```"), [{ type: "code", text: "<b>" }]);
  assert.deepEqual(parse("```\nstill arriving"), [{ type: "code", text: "still arriving" }]);
  assert.equal(parse("|a|b|\n|-|-|\n|1|2|")[0].rows.length, 1);
  assert.deepEqual(types("snake_case_name"), ["paragraph", "text"]);
});

test("markup in a text stays text", () => {
  for (const text of ["<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<svg/onload=alert(1)>", "&lt;b&gt;"]) {
    assert.deepEqual(new Set(types(text)), new Set(["paragraph", "text"]));
    assert.equal(plain(text), text);
  }
});

test("only addresses of the web and of mail become links", () => {
  for (const text of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "file:///etc/passwd", "//evil.example", "/admin/drain", "java\tscript:x", "blob:https://a.b/c", "https://user:secret@a.b/"]) {
    assert.equal(safeLink(text), "", text);
    assert.ok(!types(`[x](${text})`).includes("link"), text);
  }
  assert.equal(safeLink("https://a.b/c"), "https://a.b/c");
  assert.equal(inline("see https://a.b/c.").find((node) => node.type === "link").href, "https://a.b/c.");
});

test("random texts give only known nodes and safe links, and lose no letter", () => {
  let seed = 7;
  const random = (most) => (seed = (seed * 1103515245 + 12345) % 2147483648) % most;
  const pieces = ["*", "**", "_", "__", "`", "```", "\n", "\n\n", "# ", "- ", "1. ", "> ", "|", "|-|-|", "[", "](", ")", "<", ">", "~~", "\\", "javascript:", "https://", "x", "word", " ", "  ", "\u202e", "\u0000"];
  const known = new Set(["code", "heading", "rule", "quote", "bullets", "numbers", "table", "paragraph", "text", "mono", "strong", "emphasis", "strike", "link"]);
  for (let round = 0; round < 3000; round += 1) {
    const text = Array.from({ length: 1 + random(40) }, () => pieces[random(pieces.length)]).join("");
    const nodes = [...walk(parse(text))];
    for (const node of nodes) {
      assert.ok(known.has(node.type), node.type);
      if (node.href) assert.match(node.href, /^(https?|mailto):/);
    }
    const written = nodes.map((node) => (node.text || "") + (node.href || "")).join("");
    for (const word of ["word", "x"]) {
      const wanted = text.split(/```[^\n]*/).join(" ").split(word).length; // the word behind a fence names a language
      assert.ok(written.split(word).length >= Math.min(wanted, 1), JSON.stringify(text));
    }
  }
});

test("a hostile text takes no more than linear time", () => {
  const hostile = ["*", "_a", "[", "`", "> ", "- ", "**a ", "*a_", "`a``", "![", "(", "[a](", "# ", "- - ", "https://", "\n> ", "~~a", "|a", "|-", "1. ", "\\", "<https://", "*a\n", "# a  "];
  const begin = Date.now();
  for (const piece of hostile) parse(piece.repeat(Math.floor(100_000 / piece.length)));
  parse("# a" + " ".repeat(100_000) + "b");
  assert.ok(Date.now() - begin < 20_000, `${Date.now() - begin} ms`); // quadratic time would be minutes
});

test("a text becomes elements without a property that holds markup", () => {
  const seen = [];
  (function visit(node) {
    if (Array.isArray(node)) return node.forEach(visit);
    if (typeof node === "function" || node === null || typeof node !== "object") return;
    for (const [name, value] of Object.entries(node.props || {})) if (name !== "children") seen.push([name, value]);
    visit(node.props && node.props.children);
  })(Markdown({ text: "# <b>\n[x](https://a.b/ ) <i onclick=x> `<u>`\n\n1. a" }));
  for (const [name] of seen) assert.match(name, /^(class|dir|href|rel|target|title|start|tabindex|aria-label|role)$/);
});

test("characters that are not seen are shown as escapes", () => {
  assert.equal(visibleLine("a\u202eb\u200bc\nd\u0007"), "a\\u202eb\\u200bc\\u000ad\\u0007");
  assert.equal(visible("line\nnext\u0000 \u{1f468}\u200d\u{1f469}"), "line\nnext\\u0000 \u{1f468}\u200d\u{1f469}");
  assert.equal(visibleLine(null), "");
});

test("live figures grow by ticks, and coarser steps get the mean, or the highest quantile", () => {
  const figures = new Figures();
  const series = [{ id: "queue", model: "m", title: "", unit: "", kind: "gauge" }, { id: "ttft_p99", model: "m", title: "", unit: "s", kind: "quantile" }];
  figures.reset({ at: 100, resolutions: [{ step_s: 1, length: 5, at: 100 }, { step_s: 10, length: 3, at: 90 }], series, values: { "queue|m": [[1, 2], [5]], "ttft_p99|m": [[], []] } });
  for (let at = 101; at <= 110; at += 1) figures.add({ at, values: [at, at === 104 ? 9 : null] });
  assert.deepEqual(figures.columns[0][0], [106, 107, 108, 109, 110]);
  assert.deepEqual(figures.columns[1], [[5, 105, 110], [9, null]]);
  assert.equal(figures.latest("queue", "m"), 110);
  assert.equal(figures.latest("ttft_p99", "m"), null);
  const [times, queue, ttft] = figures.table(1, [0, 1]);
  assert.deepEqual([times, queue, ttft], [[90, 100, 110], [5, 105, 110], [null, 9, null]]);
  figures.add({ at: 111, values: [1] }); // of an older set of series
  assert.equal(figures.latest("queue", "m"), 110);
});

test("inputs get a shape that fits the contract, or a reason", () => {
  assert.deepEqual(tensors.shapeFor([-1, 4], 8), [2, 4]);
  assert.deepEqual(tensors.shapeFor([-1, -1], 3), [1, 3]);
  assert.deepEqual(tensors.shapeFor([2, 2], 4), [2, 2]);
  assert.throws(() => tensors.shapeFor([-1, 4], 7), /multiple of 4/);
  assert.throws(() => tensors.shapeFor([2, 2], 3), /needs 4 values/);
  const input = { name: "x", datatype: "FP32", shape: [-1, 2] };
  assert.deepEqual(tensors.fromText(input, "1, 2\n3 4"), { name: "x", datatype: "FP32", shape: [2, 2], data: [1, 2, 3, 4] });
  assert.deepEqual(tensors.fromText(input, "[[1,2],[3,4]]").shape, [2, 2]);
  assert.throws(() => tensors.fromText(input, "1, two"), /"two" is no number/);
  assert.throws(() => tensors.fromText(input, "[[1,2],[3]]"), /different lengths/);
  assert.throws(() => tensors.fromText({ ...input, datatype: "INT64" }, "1.5 2"), /no whole number/);
  assert.deepEqual(tensors.fromText({ name: "b", datatype: "BOOL", shape: [-1] }, "true false 1").data, [true, false, true]);
});

test("pictures and sounds become tensors in the order of the contract", () => {
  const pixels = { width: 2, height: 1, data: new Uint8ClampedArray([255, 0, 0, 255, 0, 255, 0, 255]) };
  assert.deepEqual(tensors.fromPixels({ name: "p", datatype: "UINT8", shape: [-1, 3, 1, 2] }, pixels, 255, false), { name: "p", datatype: "UINT8", shape: [1, 3, 1, 2], data: [255, 0, 0, 255, 0, 0] });
  assert.deepEqual(tensors.fromPixels({ name: "p", datatype: "UINT8", shape: [-1, -1, -1, 3] }, pixels, 255, false), { name: "p", datatype: "UINT8", shape: [1, 1, 2, 3], data: [255, 0, 0, 0, 255, 0] });
  assert.deepEqual(tensors.fromPixels({ name: "p", datatype: "UINT8", shape: [-1, 1, 2] }, pixels, 255, true).data, [179, 105]);
  assert.deepEqual(tensors.fromSamples({ name: "s", datatype: "INT16", shape: [-1, -1] }, new Float32Array([0, 1, -2])), { name: "s", datatype: "INT16", shape: [1, 3], data: [0, 32767, -32767] });
  assert.ok(tensors.maySound({ name: "s", datatype: "FP32", shape: [-1, -1] }));
  assert.ok(!tensors.maySound({ name: "s", datatype: "FP32", shape: [-1, 10] }));
});

test("files travel behind the JSON, each with its length", () => {
  const { body, raw, headers } = tensors.requestOf([{ name: "t", datatype: "BYTES", shape: [1], data: ["a"] }, tensors.fromBytes({ name: "f", datatype: "BYTES", shape: [-1] }, [new Uint8Array([7, 8])])]);
  const length = Number(headers["inference-header-content-length"]);
  assert.deepEqual(JSON.parse(new TextDecoder().decode(raw.slice(0, length))), body);
  assert.deepEqual(body.inputs[1].parameters, { binary_data_size: 6 });
  assert.deepEqual([...raw.slice(length)], [2, 0, 0, 0, 7, 8]);
  assert.equal(tensors.requestOf([{ name: "t", datatype: "BYTES", shape: [1], data: ["a"] }]).raw, undefined);
});

test("events are read whole, wherever the network cuts them", async () => {
  const bytes = new TextEncoder().encode('data: {"a":"ü"}\n\nevent: x\ndata: 1\ndata: 2\n\n: comment\n\ndata: [DONE]\n\n');
  for (let size = 1; size < 20; size += 1) {
    const chunks = [];
    for (let at = 0; at < bytes.length; at += size) chunks.push(bytes.slice(at, at + size));
    const response = new Response(new ReadableStream({ start: (control) => (chunks.forEach((chunk) => control.enqueue(chunk)), control.close()) }));
    const found = [];
    for await (const data of events(response)) found.push(data);
    assert.deepEqual(found, ['{"a":"ü"}', "1\n2", "[DONE]"]);
  }
});

test("messages of every dialect are read, and shell words are quoted", () => {
  assert.equal(messageOf({ error: { message: "m", param: "p" } }, "").message, "m");
  assert.equal(messageOf({ error: "m" }, "").message, "m");
  assert.equal(messageOf(null, "text").message, "text");
  assert.equal(quoted("it's $HOME"), "'it'\\''s $HOME'");
});

test("numbers are short and absent ones are a dash", () => {
  assert.equal(format.quantity(null), "–");
  assert.equal(format.seconds(0.0123), "12.3 ms");
  assert.equal(format.seconds(90), "90 s");
  assert.equal(format.bytes(1536), "1.5 KiB");
  assert.equal(format.quantity(0.5, "ratio"), "50 %");
  assert.equal(format.number(12345), "12.3 k");
});

test("a rollout's evidence is shown as E-values, whose size may be beyond any number", () => {
  assert.equal(rollouts.evidence(0), "1");
  assert.equal(rollouts.evidence(Math.log(100)), "100");
  assert.equal(rollouts.evidence(Math.log(12.345)), "12.3");
  assert.equal(rollouts.evidence(Math.log(4.5e7)), "4.5e+7");
  assert.equal(rollouts.evidence(-1000), "0");
  assert.equal(rollouts.evidence(2302.6), "1e+1000");
  const reading = { against: 1, against_limit: 5, in_favour: 1, in_favour_limit: 3 };
  assert.equal(rollouts.verdict(reading), "undecided");
  assert.equal(rollouts.verdict({ ...reading, in_favour: 3 }), "passed");
  assert.equal(rollouts.verdict({ ...reading, against: 5, in_favour: 3 }), "worse");
  assert.deepEqual(rollouts.copied({ busy: 3, differs: 1, form: 2 }).map((one) => [one.words, one.count]), [
    ["equal", 0], ["different", 1], ["dropped (busy)", 3], ["not compared (form)", 2],
  ]);
  assert.equal(rollouts.step(5, 0), "5 %");
  assert.equal(rollouts.step(0, 100), "0 % and copies of 100 %");
});

test("the state of a version follows from its streams, and a window that alarms decides", () => {
  const window = (size, is_alarm = false) => ({ size, is_alarm });
  assert.equal(drift.deciding([window(10, true), window(40, true), window(160)]).size, 40);
  assert.equal(drift.deciding([window(10), window(40)]).size, 10);
  assert.equal(drift.deciding([]), undefined);
  const streams = [{ readings: [window(10)], is_drifting: false, since: 5 }, { readings: [window(10), window(40, true)], is_drifting: true, since: 9 }, { readings: [], is_drifting: false, since: null }];
  assert.deepEqual(drift.sizesOf(streams), [10, 40]);
  assert.equal(drift.stateOf({ state: "watching", streams }), "drifts");
  assert.equal(drift.sinceOf({ state: "watching", streams }), 9);
  assert.equal(drift.stateOf({ state: "watching", streams: streams.slice(0, 1) }), "ok");
  assert.equal(drift.sinceOf({ state: "watching", streams: streams.slice(0, 1) }), 5);
  assert.equal(drift.stateOf({ state: "watching", streams: streams.slice(2) }), "watching");
  assert.equal(drift.stateOf({ state: "collecting", streams: [] }), "collecting");
  assert.equal(drift.sinceOf({ state: "collecting", streams: [] }), null);
  assert.equal(drift.evidence(0.001), 3);
  assert.equal(drift.evidence(1), 0);
  assert.equal(drift.evidence(0), 308);
});

test("an example has every needed field", () => {
  const schemas = { A: { properties: { model: { type: "string" }, n: { type: "integer", minimum: 2 }, list: { type: "array", items: { $ref: "#/components/schemas/B" } }, other: {} }, required: ["model", "n", "list"] }, B: { properties: { kind: { enum: ["x"] } }, required: ["kind"] } };
  assert.deepEqual(example("/new", { $ref: "#/components/schemas/A" }, schemas, "m"), { model: "m", n: 2, list: [{ kind: "x" }] });
  assert.equal(example("/v1/chat/completions", {}, {}, "m").model, "m");
});
