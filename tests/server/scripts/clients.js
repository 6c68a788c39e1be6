// What JavaScript's clients get from a server, as one JSON object: node clients.js ADDRESS SCRIPTED PICTURE
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import OpenAI from "openai";

const [address, scripted, picture] = process.argv.slice(2);
const sampling = { temperature: 0, max_tokens: 12 };
const hello = [{ role: "user", content: "Hello" }];
const weather = {
  type: "object",
  properties: { days: { type: "integer" } },
  required: ["days"],
  additionalProperties: false,
};
const shape = {
  type: "object",
  properties: { color: { enum: ["red", "blue"] } },
  required: ["color"],
  additionalProperties: false,
};

async function ofOpenAI() {
  const own = { apiKey: "none", maxRetries: 0 };
  const client = new OpenAI({ baseURL: `${address}/v1`, ...own });
  const caller = new OpenAI({ baseURL: `${scripted}/v1`, ...own });
  const chat = (more) => client.chat.completions.create({ model: "default", messages: hello, ...sampling, ...more });
  const whole = await chat({});
  let streamed = "";
  let usage = null;
  for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  const tools = [{ type: "function", function: { name: "weather", parameters: weather } }];
  const called = await caller.chat.completions.create({ model: "default", messages: hello, tools });
  const result = { role: "tool", tool_call_id: called.choices[0].message.tool_calls[0].id, content: "Rain" };
  const after = await chat({ messages: [...hello, called.choices[0].message, result], tools, max_tokens: 60 });
  const running = caller.chat.completions.stream({ model: "default", messages: hello, tools });
  const parts = [
    { type: "image_url", image_url: { url: picture } },
    { type: "text", text: "Which shape is it?" },
  ];
  const seen = await chat({ messages: [{ role: "user", content: parts }] });
  const held = { type: "json_schema", json_schema: { name: "shape", strict: true, schema: shape } };
  const thought = await chat({ reasoning_effort: "low", max_tokens: 200 });
  const errors = [];
  for (const wrong of [{ model: "another" }, { temperature: -1 }]) {
    errors.push(await chat(wrong).catch((error) => ({ status: error.status, param: error.param, code: error.code })));
  }
  const response = await client.responses.create({ model: "default", input: "Hello", temperature: 0 });
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  return {
    whole: whole.choices[0].message.content,
    streamed,
    usage,
    call: called.choices[0].message.tool_calls[0].function,
    finish: called.choices[0].finish_reason,
    streamedCall: (await running.finalChatCompletion()).choices[0].message.tool_calls[0].function,
    after: after.choices[0].finish_reason,
    seen: seen.choices[0].message.content,
    held: (await chat({ response_format: held, max_tokens: 200 })).choices[0].message.content,
    thought: thought.choices[0].message.reasoning_content,
    errors,
    response: response.output_text,
    names,
  };
}

async function ofAiSdk() {
  const made = (baseURL) => createOpenAICompatible({ name: "qwen35mm", baseURL, supportsStructuredOutputs: true });
  const model = made(`${address}/v1`)("default");
  const caller = made(`${scripted}/v1`)("default");
  const own = { model, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
  const whole = await generateText({ ...own, prompt: "Hello" });
  let streamed = "";
  for await (const text of streamText({ ...own, prompt: "Hello" }).textStream) streamed += text;
  const tools = { weather: tool({ inputSchema: jsonSchema(weather) }) };
  const called = await generateText({ ...own, model: caller, prompt: "Hello", tools });
  const image = Buffer.from(picture.split(",")[1], "base64");
  const content = [
    { type: "image", image },
    { type: "text", text: "Which shape is it?" },
  ];
  const seen = await generateText({ ...own, messages: [{ role: "user", content }] });
  const long = { maxOutputTokens: 200 };
  const held = await generateText({
    ...own,
    ...long,
    prompt: "Hello",
    output: Output.object({ schema: jsonSchema(shape) }),
  });
  const thinking = { providerOptions: { qwen35mm: { reasoningEffort: "low" } }, ...long };
  const thought = await generateText({ ...own, ...thinking, prompt: "Hello" });
  const refused = await generateText({ ...own, temperature: -1, prompt: "Hello" }).catch((error) => error.statusCode);
  return {
    whole: whole.text,
    usage: whole.usage.outputTokens,
    streamed,
    call: called.toolCalls.map((call) => ({ name: call.toolName, input: call.input })),
    seen: seen.text,
    held: held.output,
    thought: thought.reasoningText,
    refused,
  };
}

console.log(JSON.stringify({ openai: await ofOpenAI(), ai: await ofAiSdk() }));
