// Node's grpc-js with the protos of the repository: whole answers, streams, the receipt, cancels, errors.
import assert from "node:assert/strict";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const root = process.env.WEFT_ROOT;
const definition = loader.loadSync("protos/inference.proto", { includeDirs: [root], keepCase: true, longs: Number });
const { weft } = grpc.loadPackageDefinition(definition);
const client = new weft.v1.Inference(process.env.WEFT_GRPC, grpc.credentials.createInsecure());
const request = {
  model: process.env.WEFT_MODEL,
  prompt: { text: "Once upon a time" },
  sampling: { max_tokens: 16, temperature: 0 },
};

const complete = (fields) =>
  new Promise((resolve, reject) =>
    client.Complete({ ...request, ...fields }, (error, reply) => (error ? reject(error) : resolve(reply))),
  );

async function streamed() {
  const whole = await complete({});
  let text = "";
  let receipt;
  for await (const message of client.Generate(request)) {
    text += message.delta?.text ?? "";
    receipt = message.receipt ?? receipt;
  }
  assert.equal(text, whole.choices[0].text);
  assert.equal(receipt.completion_tokens, 16);
  assert.equal(receipt.workers.length, 1);
}

async function chatted() {
  const chat = { messages: [{ role: "user", content: "Tell me a story." }] };
  const { choices } = await complete({ prompt: { chat } });
  assert(choices[0].text.length > 0);
}

async function cancelled() {
  const call = client.Generate({ ...request, sampling: { max_tokens: 1500, ignore_eos: true } });
  const code = await new Promise((resolve) => {
    call.once("data", () => call.cancel());
    call.on("data", () => {});
    call.on("error", (error) => resolve(error.code));
  });
  assert.equal(code, grpc.status.CANCELLED);
}

async function refused() {
  const error = await complete({ sampling: { temperature: -1 } }).catch((error) => error);
  assert.equal(error.code, grpc.status.INVALID_ARGUMENT);
  assert.match(error.details, /^sampling\.temperature: /);
}

for (const story of [streamed, chatted, cancelled, refused]) {
  await story();
  console.log(story.name);
}
client.close();
