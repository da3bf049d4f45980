// buf curl, which learns the API by gRPC's server reflection: unary calls, streams, errors, and KServe's protocol.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";

const model = process.env.WEFT_MODEL;
const sampling = { max_tokens: 8, temperature: 0 };

function curl(method, body) {
  const url = `http://${process.env.WEFT_GRPC}/${method}`;
  const options = ["curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", JSON.stringify(body), url];
  const { status, stdout, stderr } = spawnSync("node_modules/.bin/buf", options, { encoding: "utf8" });
  return { status, messages: stdout.trim().replaceAll("}\n{", "}\0{").split("\0").filter(Boolean).map((each) => JSON.parse(each)), stderr };
}

function listed() {
  const { status, messages, stderr } = curl("weft.v1.Inference/ListModels", {});
  assert.equal(status, 0, stderr);
  assert(messages[0].models.some((each) => each.name === model));
}

function answered() {
  const request = { model, prompt: { text: "Once upon a time" }, sampling };
  const [whole] = curl("weft.v1.Inference/Complete", request).messages;
  assert.equal(whole.choices[0].tokenIds.length, 8);
  const { messages } = curl("weft.v1.Inference/Generate", request);
  assert(messages.length > 3);
  assert.equal(messages.map((each) => each.delta?.text ?? "").join(""), whole.choices[0].text);
  assert.equal(messages.at(-1).receipt.completionTokens, 8);
}

function kserve() {
  const text = Buffer.from("Once upon a time").toString("base64");
  const inputs = [{ name: "text_input", datatype: "BYTES", shape: [1], contents: { bytesContents: [text] } }];
  const parameters = { max_tokens: { int64Param: 8 }, temperature: { doubleParam: 0 } };
  const request = { modelName: model, inputs, parameters };
  const [whole] = curl("inference.GRPCInferenceService/ModelInfer", request).messages;
  const decoded = (each) => Buffer.from(each.outputs[0].contents.bytesContents[0], "base64").toString();
  const { messages } = curl("inference.GRPCInferenceService/ModelStreamInfer", request);
  assert.equal(messages.map((each) => decoded(each.inferResponse)).join(""), decoded(whole));
}

function refused() {
  const request = { model, prompt: { text: "x" }, sampling: { temperature: -1 } };
  const { status, stderr } = curl("weft.v1.Inference/Complete", request);
  assert.notEqual(status, 0);
  assert.match(stderr, /invalid_argument/);
  assert.match(stderr, /sampling\.temperature/);
}

for (const story of [listed, answered, kserve, refused]) {
  story();
  console.log(story.name);
}
