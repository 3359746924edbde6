// Drives every route through the official npm client against the fake engine: `node client.mjs BASE_URL`.
// Prints one JSON line of what it saw; exits 1 on any failed assertion.
import assert from "node:assert/strict";
import OpenAI from "openai";

const api = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: process.argv[3], maxRetries: 0, timeout: 20000 });
const hi = [{ role: "user", content: "hi" }];
const reversed = [..."<user>hi\n<assistant>"].reverse().join("");
const seen = {};

const models = await api.models.list();
assert.deepEqual(models.data.map((model) => model.id), ["fake"]);
assert.equal((await api.models.retrieve("fake")).id, "fake");

const whole = await api.completions.create({ model: "fake", prompt: "hello wörld", max_tokens: 50 });
assert.equal(whole.choices[0].text, "dlröw olleh");

let text = "";
let usage = null;
const stream = await api.completions.create({
  model: "fake", prompt: "hello wörld", max_tokens: 50, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.text ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, "dlröw olleh");
assert.equal(usage.completion_tokens, 13);

const chat = await api.chat.completions.create({
  model: "fake", messages: hi, logprobs: true, top_logprobs: 2, max_completion_tokens: 3,
});
assert.equal(chat.choices[0].message.content, reversed.slice(0, 3));
assert.equal(chat.choices[0].logprobs.content.length, 3);
assert.equal(chat.choices[0].finish_reason, "length");

const runner = api.chat.completions.stream({ model: "fake", messages: hi });
assert.equal(await runner.finalContent(), reversed);

// The prompt "call" makes the fake model answer with a tool call; a schema makes it answer with JSON.
const tools = [{ type: "function", function: { name: "get_time", parameters: { type: "object", properties: {} } } }];
const called = await api.chat.completions
  .stream({ model: "fake", messages: [{ role: "user", content: "call" }], tools })
  .finalChatCompletion();
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.equal(called.choices[0].message.tool_calls[0].function.name, "get_time");
assert.deepEqual(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments), { city: "Rome" });

const schema = { name: "answer", schema: { type: "object", properties: { a: { type: "integer" } } }, strict: true };
const made = await api.chat.completions.create({
  model: "fake", messages: [{ role: "user", content: "json" }],
  response_format: { type: "json_schema", json_schema: schema },
});
assert.deepEqual(JSON.parse(made.choices[0].message.content), { a: 1 });

await assert.rejects(api.completions.create({ model: "fake", prompt: "x", temperature: -1 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});
await assert.rejects(api.completions.create({ model: "none", prompt: "x" }), OpenAI.NotFoundError);
const stranger = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "wrong", maxRetries: 0 });
await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);

// The routes that the client has no methods for.
const routes = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[3], maxRetries: 0, timeout: 20000 });
assert.deepEqual((await routes.post("/tokenize", { body: { prompt: "hi" } })).tokens, [256, 104, 105]);
assert.deepEqual(await routes.post("/detokenize", { body: { tokens: [104, 105] } }), { prompt: "hi" });
const generated = await routes.post("/generate", {
  body: { token_ids: [97, 98], sampling_params: { max_tokens: 2, logprobs: 1 } } });
assert.deepEqual(generated.choices[0].token_ids, [98, 97]);
assert.equal(generated.choices[0].logprobs.length, 2);
assert.deepEqual(await routes.get("/health"), { status: "ok" });
assert.deepEqual(await routes.get("/ready"), { status: "ready" });
assert.ok((await routes.get("/version")).version);
assert.match(await routes.get("/metrics"), /vllm:spec_decode_num_drafts_total/);

const reasons = [];
const doomed = await api.completions.create(
  { model: "fake", prompt: "doomed", max_tokens: 3900, stream: true, ignore_eos: true });
for await (const chunk of doomed) {
  if (reasons.length === 0) {
    assert.deepEqual((await routes.post("/abort", { body: { request_id: chunk.id } })).aborted, [chunk.id]);
  }
  reasons.push(chunk.choices[0].finish_reason);
}
assert.equal(reasons.at(-1), "abort");

const control = new AbortController();
const endless = await api.completions.create(
  { model: "fake", prompt: "endless", max_tokens: 3900, stream: true, ignore_eos: true }, { signal: control.signal });
let pieces = 0;
for await (const chunk of endless) {
  pieces += chunk.choices.length;
  if (pieces === 3) control.abort();
}
seen.pieces = pieces;
console.log(JSON.stringify(seen));
