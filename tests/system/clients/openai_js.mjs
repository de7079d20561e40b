// The official OpenAI client for JavaScript against a server: every API that Penstock has of OpenAI's.
// OPENAI_BASE_URL and PENSTOCK_MODEL say which. Prints the name of each part that passed; any failure ends the program with 1.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const model = process.env.PENSTOCK_MODEL;
const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Repeat: dog cat" }];
const schema = { type: "object", properties: { a: { enum: [7] } }, required: ["a"], additionalProperties: false };
const tool = { type: "function", function: { name: "pick", description: "Picks.", parameters: schema, strict: true } };

const parts = {
  async models() {
    const list = await client.models.list();
    assert.equal(list.data[0].id, model);
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0, logprobs: true, top_logprobs: 2 });
    assert.equal(answer.choices[0].message.content, "dog cat");
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },
  async streaming() {
    const stream = await client.chat.completions.create(
      { model, messages, temperature: 0, stream: true, stream_options: { include_usage: true } });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, "dog cat");
    assert.ok(usage.completion_tokens > 0);
    const helper = client.chat.completions.stream({ model, messages, temperature: 0 });
    assert.equal(await helper.finalContent(), "dog cat");
  },
  async abort() {
    const stream = await client.chat.completions.create(
      { model, messages: [{ role: "user", content: "Count on." }], stream: true, max_tokens: 500, min_tokens: 500 });
    for await (const chunk of stream) { stream.controller.abort(); assert.ok(chunk); break; }
  },
  async tools() {
    const asked = { model, messages, temperature: 0, tools: [tool], tool_choice: "required" };
    const [call] = (await client.chat.completions.create(asked)).choices[0].message.tool_calls;
    assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["pick", { a: 7 }]);
    const runner = client.chat.completions.stream(asked);
    const [streamed] = (await runner.finalMessage()).tool_calls;
    assert.deepEqual(JSON.parse(streamed.function.arguments), { a: 7 });
    const told = await client.chat.completions.create({ model, temperature: 0, tools: [tool], messages: [
      ...messages, { role: "assistant", content: null, tool_calls: [call] },
      { role: "tool", tool_call_id: call.id, content: "done" }] });
    assert.equal(typeof told.choices[0].message.content, "string");
  },
  async parse() {
    const format = { type: "json_schema", json_schema: { name: "picked", strict: true, schema } };
    const answer = await client.chat.completions.parse({ model, messages, response_format: format });
    assert.deepEqual(answer.choices[0].message.parsed, { a: 7 });
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: ["dog", "cat"], max_tokens: 3, n: 2, temperature: 1, seed: 1 });
    assert.equal(answer.choices.length, 4);
    let count = 0;
    for await (const chunk of await client.completions.create({ model, prompt: "dog", max_tokens: 3, stream: true }))
      count += chunk.choices.length;
    assert.ok(count > 0);
  },
  async embeddings() {
    // This client asks for base64 and decodes it, unless it is told otherwise.
    const [decoded, numbers] = await Promise.all([undefined, "float"].map((encoding_format) =>
      client.embeddings.create({ model, input: ["a dog", "a cat"], encoding_format })));
    decoded.data[1].embedding.forEach((x, i) => assert.ok(Math.abs(x - numbers.data[1].embedding[i]) < 1e-6));
  },
  async responses() {
    const first = await client.responses.create({ model, input: "Repeat: dog cat", temperature: 0 });
    assert.equal(first.output_text, "dog cat");
    const kinds = [];
    let text = "";
    const stream = await client.responses.create({ model, input: "Repeat: sun", previous_response_id: first.id, stream: true });
    for await (const event of stream) {
      kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
      if (event.type === "response.completed") assert.equal(event.response.output[0].content[0].text, text);
    }
    assert.deepEqual([kinds[0], kinds[1], kinds.at(-1)], ["response.created", "response.in_progress", "response.completed"]);
    const final = await client.responses.stream({ model, input: "Repeat: red", temperature: 0 }).finalResponse();
    assert.equal(final.output_text, "red");
    const parsed = await client.responses.parse({ model, input: "Pick.", text: { format: { type: "json_schema", name: "p", strict: true, schema } } });
    assert.deepEqual(parsed.output_parsed, { a: 7 });
    assert.equal((await client.responses.retrieve(first.id)).id, first.id);
    assert.equal((await client.responses.inputItems.list(first.id)).data[0].role, "user");
    let later = await client.responses.create({ model, input: "Repeat: dog", background: true });
    while (["queued", "in_progress"].includes(later.status)) later = await client.responses.retrieve(later.id);
    assert.equal(later.status, "completed");
    await client.responses.delete(first.id);
    await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
    const talk = await client.conversations.create({});
    await client.responses.create({ model, input: "Repeat: dog", conversation: talk.id });
    assert.equal((await client.conversations.items.list(talk.id)).data.length, 2);
  },
  async files_and_batches() {
    const line = (id) => JSON.stringify({ custom_id: id, method: "POST", url: "/v1/chat/completions", body: { model, messages, temperature: 0 } });
    const file = await client.files.create({ purpose: "batch", file: await toFile(Buffer.from(`${line("a")}\n${line("b")}\n`), "in.jsonl") });
    let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
    for (let tries = 0; !["completed", "failed", "expired"].includes(batch.status); tries++) {
      assert.ok(tries < 300, batch.status);
      await new Promise((done) => setTimeout(done, 100));
      batch = await client.batches.retrieve(batch.id);
    }
    const lines = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map((one) => JSON.parse(one));
    assert.deepEqual(lines.map((one) => one.custom_id).sort(), ["a", "b"]);
    assert.equal(lines[0].response.body.choices[0].message.content, "dog cat");
    assert.ok((await client.batches.list()).data.some((one) => one.id === batch.id));
    assert.equal((await client.files.retrieve(file.id)).filename, "in.jsonl");
    assert.ok((await client.files.delete(file.id)).deleted);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }),
      (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature" && error.type === "invalid_request_error");
  },
};

for (const [name, part] of Object.entries(parts)) {
  await part();
  console.log(`passed ${name}`);
}
