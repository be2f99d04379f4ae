// Clients from npm, unmodified, against a scripted model. Usage: node clients.mjs URL CLIENT; it fails if a check does.

import assert from "node:assert/strict";
import { z } from "zod";

const [url, client] = process.argv.slice(2);
const api = `${url}/v1`;
const ask = (content) => [{ role: "user", content }];
const City = z.object({ name: z.string(), population: z.number().int() });
const oslo = { name: "Oslo", population: 700000 };
const weatherSchema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

const checks = {
  async openai() {
    const { default: OpenAI } = await import("openai");
    const { zodResponseFormat, zodTextFormat } = await import("openai/helpers/zod");
    const openai = new OpenAI({ baseURL: api, apiKey: "none", maxRetries: 0 });
    const model = "scripted";

    const whole = await openai.chat.completions.create({ model, messages: ask("hello") });
    assert.equal(whole.choices[0].message.content, "Hello to you.");
    const streamed = openai.chat.completions.stream({ model, messages: ask("hello"), stream_options: { include_usage: true } });
    const final = await streamed.finalChatCompletion();
    assert.equal(final.choices[0].message.content, "Hello to you.");
    assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);

    const format = zodResponseFormat(City, "city");
    const parsed = await openai.chat.completions.parse({ model, messages: ask("which city?"), response_format: format });
    assert.deepEqual(parsed.choices[0].message.parsed, oslo);
    const parsing = openai.chat.completions.stream({ model, messages: ask("which city?"), response_format: format });
    assert.deepEqual((await parsing.finalChatCompletion()).choices[0].message.parsed, oslo);

    const tool = {
      type: "function",
      function: { name: "weather", parameters: weatherSchema, parse: JSON.parse, function: ({ city }) => `-3 degrees in ${city}` },
    };
    for (const stream of [false, true]) {
      const runner = openai.chat.completions.runTools({ model, messages: ask("the weather?"), tools: [tool], stream });
      assert.equal(await runner.finalContent(), "It is cold in Oslo.");
      assert.equal((await runner.finalFunctionToolCallResult()), "-3 degrees in Oslo");
    }

    const response = await openai.responses.parse({ model, input: "which city?", text: { format: zodTextFormat(City, "city") } });
    assert.deepEqual(response.output_parsed, oslo);
    const events = [];
    for await (const event of await openai.responses.create({ model, input: "hello", stream: true })) events.push(event.type);
    assert.deepEqual([events.at(0), events.at(-1)], ["response.created", "response.completed"]);
    const said = await openai.responses.stream({ model, input: "hello" }).finalResponse();
    assert.equal(said.output_text, "Hello to you.");

    await assert.rejects(openai.chat.completions.create({ model: "none", messages: ask("hello") }), OpenAI.NotFoundError);
    await assert.rejects(openai.chat.completions.create({ model, messages: ask("hello"), temperature: 3 }), OpenAI.BadRequestError);

    const long = await openai.chat.completions.create({ model, messages: ask("long"), max_tokens: 4000, stream: true });
    for await (const _ of long) break;
    const deadline = Date.now() + 10_000;
    const held = async () => {
      const lines = (await (await fetch(`${url}/metrics`)).text()).split("\n");
      return lines.filter((line) => line.startsWith("inferd_kv_usage_ratio{")).some((line) => Number(line.split(" ")[1]) > 0);
    };
    while (await held()) assert.ok(Date.now() < deadline, "an answer that was left is still computed");
  },

  async ai() {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    const { generateText, generateObject, streamObject, streamText, tool, stepCountIs, Output } = await import("ai");
    const compatible = { name: "inferd", baseURL: api, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true };
    const models = [
      createOpenAICompatible(compatible)("scripted"),
      createAnthropic({ baseURL: api, apiKey: "none" })("scripted"),
      createAnthropic({ baseURL: api, apiKey: "none" })("claude-opus-5-5"),
    ];
    for (const model of models) {
      const generated = await generateText({ model, prompt: "hello", maxRetries: 0 });
      assert.equal(generated.text, "Hello to you.");
      const streamed = streamText({ model, prompt: "hello", maxRetries: 0 });
      let text = "";
      for await (const piece of streamed.textStream) text += piece;
      assert.equal(text, "Hello to you.");
      assert.equal((await streamed.usage).outputTokens, generated.usage.outputTokens);

      const weather = tool({
        description: "The weather in a city.",
        inputSchema: z.object({ city: z.string() }),
        execute: async ({ city }) => `-3 degrees in ${city}`,
      });
      const loop = { model, prompt: "the weather?", tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };
      const called = await generateText(loop);
      assert.equal(called.text, "It is cold in Oslo.");
      assert.equal(called.steps.length, 2);
      assert.equal(await streamText(loop).text, "It is cold in Oslo.");

      assert.deepEqual((await generateObject({ model, schema: City, prompt: "which city?", maxRetries: 0 })).object, oslo);
      const object = streamObject({ model, schema: City, prompt: "which city?", maxRetries: 0 });
      for await (const _ of object.partialObjectStream);
      assert.deepEqual(await object.object, oslo);
      const output = Output.object({ schema: City });
      assert.deepEqual((await generateText({ model, output, prompt: "which city?", maxRetries: 0 })).output, oslo);
    }
  },

  async anthropic() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const { betaZodTool } = await import("@anthropic-ai/sdk/helpers/beta/zod");
    const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
    const fields = { model: "scripted", max_tokens: 500 };
    const whole = await anthropic.messages.create({ ...fields, messages: ask("hello") });
    const message = await anthropic.messages.stream({ ...fields, messages: ask("hello") }).finalMessage();
    for (const { content } of [whole, message]) assert.equal(content[0].text, "Hello to you.");
    assert.equal(message.stop_reason, "end_turn");
    const counted = await anthropic.messages.countTokens({ model: "scripted", messages: ask("hello") });
    assert.equal(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
    const weather = betaZodTool({
      name: "weather",
      description: "The weather in a city.",
      inputSchema: z.object({ city: z.string() }),
      run: ({ city }) => `-3 degrees in ${city}`,
    });
    for (const stream of [false, true]) {
      const runner = anthropic.beta.messages.toolRunner({ ...fields, messages: ask("the weather?"), tools: [weather], stream });
      const last = await runner.runUntilDone();
      assert.equal(last.content[0].text, "It is cold in Oslo.");
    }
  },

  async agents() {
    const { Agent, run, tool, OpenAIChatCompletionsModel, OpenAIResponsesModel, setTracingDisabled } = await import("@openai/agents");
    const { default: OpenAI } = await import("openai");
    setTracingDisabled(true);
    const openai = new OpenAI({ baseURL: api, apiKey: "none", maxRetries: 0 });
    for (const Model of [OpenAIChatCompletionsModel, OpenAIResponsesModel]) {
      const model = new Model(openai, "scripted");
      const weather = tool({
        name: "weather",
        description: "The weather in a city.",
        parameters: z.object({ city: z.string() }),
        execute: async ({ city }) => `-3 degrees in ${city}`,
      });
      const forecaster = new Agent({ name: "Forecaster", model, tools: [weather] });
      assert.equal((await run(forecaster, "the weather?")).finalOutput, "It is cold in Oslo.");
      const streamed = await run(forecaster, "the weather?", { stream: true });
      for await (const _ of streamed);
      assert.equal(streamed.finalOutput, "It is cold in Oslo.");
      const guide = new Agent({ name: "Guide", model, outputType: City });
      assert.deepEqual((await run(guide, "which city?")).finalOutput, oslo);
      const refunds = new Agent({ name: "Refunds", model });
      const triage = Agent.create({ name: "Triage", model, handoffs: [refunds] });
      const handed = await run(triage, "I want a refund");
      assert.deepEqual([handed.lastAgent.name, handed.finalOutput], ["Refunds", "Your refund is on its way."]);
    }
  },
};

await checks[client]();
