// AI SDK: OpenAI's provider (chat and responses), the compatible one, and Anthropic's.
// node ai_sdk.js ADDRESS FOLDER [CHECK...]: FOLDER is where the packages are installed.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { crc32, deflateSync } from "node:zlib";

const [base, folder, ...wanted] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, Output, stepCountIs, tool, APICallError } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const openai = createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "local",
  baseURL: `${base}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" });
const MODELS = {
  chat: openai.chat("demo"),
  responses: openai.responses("demo"),
  compatible: compatible("demo"),
  anthropic: anthropic("demo"),
};
// Each model takes thinking in its own way.
const THINKING = {
  chat: { openai: { reasoningEffort: "low", forceReasoning: true } },
  responses: { openai: { reasoningEffort: "low", reasoningSummary: "auto", forceReasoning: true, store: false } },
  compatible: { local: { reasoningEffort: "low" } },
  anthropic: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
};
function png() {
  const chunk = (kind, data) => {
    const size = Buffer.alloc(4);
    const sum = Buffer.alloc(4);
    const body = Buffer.concat([Buffer.from(kind, "latin1"), data]);
    size.writeUInt32BE(data.length);
    sum.writeUInt32BE(crc32(body));
    return Buffer.concat([size, body, sum]);
  };
  const head = Buffer.from([0, 0, 0, 64, 0, 0, 0, 64, 8, 2, 0, 0, 0]);
  const row = Buffer.concat([Buffer.alloc(1), Buffer.alloc(64 * 3, 0x80)]);
  const rows = deflateSync(Buffer.concat(Array(64).fill(row)));
  const start = Buffer.from([137, 80, 78, 71, 13, 10, 26, 10]);
  return Buffer.concat([start, chunk("IHDR", head), chunk("IDAT", rows), chunk("IEND", Buffer.alloc(0))]);
}
const PNG = png().toString("base64");
const person = z.object({ name: z.string(), age: z.number().int() });

function tools(asked) {
  return {
    weather: tool({
      description: "Weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        asked.push(city);
        return { sky: "Sunny." };
      },
    }),
  };
}

const checks = {};
for (const [name, model] of Object.entries(MODELS)) {
  const each = { model, maxRetries: 0 };
  const streamed = async (options) => {
    const errors = [];
    const answer = streamText({ ...each, ...options, onError: ({ error }) => errors.push(error) });
    const parts = [];
    for await (const part of answer.fullStream) parts.push(part);
    if (errors.length) throw errors[0];
    return [answer, parts];
  };
  checks[`${name} plain`] = async () => {
    const { text, usage } = await generateText({ ...each, prompt: "Hello" });
    assert.match(text, /sunny/);
    assert.ok(usage.inputTokens > 0);
  };
  checks[`${name} streamed`] = async () => {
    const [answer] = await streamed({ prompt: "Hello" });
    assert.match(await answer.text, /sunny/);
    assert.equal(await answer.finishReason, "stop");
    assert.ok((await answer.usage).outputTokens > 0);
  };
  checks[`${name} tools`] = async () => {
    const asked = [];
    const options = { tools: tools(asked), stopWhen: stepCountIs(4) };
    const first = await generateText({ ...each, ...options, prompt: "Weather in Rome?" });
    assert.match(first.text, /sunny/);
    assert.deepEqual(asked, ["Rome"]);
    const messages = [{ role: "user", content: "Weather in Rome?" }, ...first.response.messages];
    messages.push({ role: "user", content: "And tomorrow?" });
    assert.match((await generateText({ ...each, ...options, messages })).text, /sunny/);
  };
  checks[`${name} tools in a stream, thinking`] = async () => {
    const asked = [];
    const options = { tools: tools(asked), stopWhen: stepCountIs(4), providerOptions: THINKING[name] };
    const [first, parts] = await streamed({ ...options, prompt: "Weather in Rome?" });
    assert.match(await first.text, /sunny/);
    assert.deepEqual(asked, ["Rome"]);
    if (name !== "chat") {
      const thought = parts.filter((part) => part.type === "reasoning-delta").map((part) => part.text);
      assert.match(thought.join(""), /think/);
    }
    const messages = [{ role: "user", content: "Weather in Rome?" }, ...(await first.response).messages];
    messages.push({ role: "user", content: "And tomorrow?" });
    const [second] = await streamed({ ...options, messages });
    assert.match(await second.text, /sunny/);
  };
  checks[`${name} image`] = async () => {
    const content = [
      { type: "text", text: "See" },
      { type: "image", image: `data:image/png;base64,${PNG}` },
    ];
    const { text } = await generateText({ ...each, messages: [{ role: "user", content }] });
    assert.match(text, /1 media/);
  };
  checks[`${name} image in a result`] = async () => {
    const messages = [
      { role: "user", content: "Look" },
      {
        role: "assistant",
        content: [{ type: "tool-call", toolCallId: "c1", toolName: "weather", input: { city: "Rome" } }],
      },
      {
        role: "tool",
        content: [
          {
            type: "tool-result",
            toolCallId: "c1",
            toolName: "weather",
            output: {
              type: "content",
              value: [
                { type: "text", text: "Here" },
                { type: "image-data", data: PNG, mediaType: "image/png" },
              ],
            },
          },
        ],
      },
    ];
    const { text } = await generateText({ ...each, tools: tools([]), messages });
    assert.match(text, /sunny/);
  };
  checks[`${name} structured`] = async () => {
    const { output } = await generateText({ ...each, prompt: "Who?", output: Output.object({ schema: person }) });
    assert.deepEqual(output, { name: "some name", age: 3 });
  };
  checks[`${name} system and effort`] = async () => {
    const { text } = await generateText({
      ...each,
      system: "Be brief.",
      prompt: "Hi",
      providerOptions: THINKING[name],
      temperature: 0.5,
    });
    assert.match(text, /sunny/);
  };
  checks[`${name} overflow`] = async () => {
    const error = await generateText({ ...each, prompt: "word ".repeat(40_000) }).catch((error) => error);
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /maximum context length/);
  };
}
const found = {};
for (const [name, check] of Object.entries(checks)) {
  if (wanted.length && !wanted.some((each) => name.includes(each))) continue;
  try {
    await check();
    found[name] = null;
  } catch (error) {
    const sent = JSON.stringify(error.requestBodyValues ?? null)?.slice(0, 1500);
    found[name] = [error.stack ?? error, sent, error.responseBody ?? ""].join("\n").slice(0, 4000);
  }
}
console.log(`\n${JSON.stringify(found)}`);
