// openai-node and the Vercel AI SDK, unmodified, against a running inferd.
//
//   npm install && node clients.mjs http://127.0.0.1:8000 demo
//
// Prints one line per check and fails if one does not hold.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is inferd?" }];
const greedy = { model, messages, temperature: 0, max_tokens: 40 };
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const ok = (what) => console.log("  ok  ", what);

console.log("openai-node");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const whole = await client.chat.completions.create(greedy);
const text = whole.choices[0].message.content;
assert.ok(text);
ok(`create: ${JSON.stringify(text)}`);

let streamed = "";
let usage;
const options = { include_usage: true };
for await (const chunk of await client.chat.completions.create({ ...greedy, stream: true, stream_options: options })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
ok("its stream is the same text, and brings usage");

const final = await client.chat.completions.stream(greedy).finalChatCompletion();
assert.equal(final.choices[0].message.content, text);
ok("stream().finalChatCompletion() puts it together");

const called = await client.chat.completions.create({ ...greedy, tools });
assert.ok(["stop", "tool_calls", "length"].includes(called.choices[0].finish_reason));
ok("tools are accepted");

await assert.rejects(client.chat.completions.create({ ...greedy, model: "none" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...greedy, temperature: 3 }), OpenAI.BadRequestError);
ok("an unknown model is a NotFoundError, a bad value a BadRequestError");

const long = { ...greedy, max_tokens: 1500, ignore_eos: true, stream: true };
const cut = await client.chat.completions.create(long);
for await (const _ of cut) break;
const deadline = Date.now() + 1000;
const used = async () => {
  const lines = (await (await fetch(`${url}/metrics`)).text()).split("\n");
  return lines.filter((line) => line.startsWith("vllm:kv_cache_usage_perc{")).map((line) => Number(line.split(" ")[1]));
};
while ((await used()).some((ratio) => ratio > 0)) assert.ok(Date.now() < deadline, "blocks are still held after 1 s");
ok("leaving the loop cancels, and the KV cache is free within 1 s");

console.log("Vercel AI SDK");
const provider = createOpenAICompatible({ name: "inferd", baseURL: `${url}/v1`, includeUsage: true });
const settings = { model: provider(model), prompt: messages[0].content, temperature: 0, maxOutputTokens: 40 };
const generated = await generateText(settings);
assert.equal(generated.text, text);
assert.equal(generated.usage.outputTokens, whole.usage.completion_tokens);
ok("generateText, with usage");
const stream = streamText(settings);
let pieces = "";
for await (const piece of stream.textStream) pieces += piece;
assert.equal(pieces, text);
assert.equal((await stream.usage).outputTokens, whole.usage.completion_tokens);
ok("streamText is the same text, and brings usage");
