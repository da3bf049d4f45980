// OpenAI's client for Node: models, completions, chats, streams, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.WEFT_MODEL;
const client = new OpenAI({ baseURL: `${process.env.WEFT_HTTP}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story about a fox." }];

async function models() {
  const names = [];
  for await (const each of await client.models.list()) names.push(each.id);
  assert(names.includes(model));
}

async function completions() {
  const fields = { model, prompt: "Once upon a time", max_tokens: 16, temperature: 0 };
  const whole = await client.completions.create(fields);
  let text = "";
  let usage;
  const chunks = await client.completions.create({ ...fields, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of chunks) {
    text += chunk.choices.map((choice) => choice.text).join("");
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].text);
  assert.equal(usage.completion_tokens, 16);
}

async function chats() {
  const fields = { model, messages, max_completion_tokens: 16, temperature: 0 };
  const whole = await client.chat.completions.create({ ...fields, logprobs: true, top_logprobs: 2 });
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...fields, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(whole.choices[0].logprobs.content.length, whole.usage.completion_tokens);
  const collected = await client.chat.completions.stream(fields).finalChatCompletion();
  assert.equal(collected.choices[0].message.content, text);
}

async function errors() {
  await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
  const wrong = client.chat.completions.create({ model, messages, temperature: -1 });
  await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
}

for (const story of [models, completions, chats, errors]) {
  await story();
  console.log(story.name);
}
