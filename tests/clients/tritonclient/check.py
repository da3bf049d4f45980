"""tritonclient: health, metadata, whole answers, decoupled streams, parameters, errors, several at a time; HTTP."""

import asyncio
import json
import os
import queue
from collections.abc import Callable

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

MODEL = os.environ["WEFT_MODEL"]
PROMPT = "Once upon a time"
client = triton.InferenceServerClient(os.environ["WEFT_GRPC"])


def tensor(name: str, values: list[object], kind: type = np.object_, datatype: str = "BYTES") -> triton.InferInput:
    """An input of one dimension."""
    each = triton.InferInput(name, [len(values)], datatype)
    each.set_data_from_numpy(np.array(values, dtype=kind))
    return each


def asked() -> list[triton.InferInput]:
    """A prompt and the sampling, as Triton's backend for vLLM takes them."""
    sampling = json.dumps({"temperature": 0, "max_tokens": 16})
    return [tensor("text_input", [PROMPT.encode()]), tensor("sampling_parameters", [sampling.encode()])]


def text_of(result: triton.InferResult) -> str:
    """The text of an answer or of a part of it."""
    found = result.as_numpy("text_output")
    return "" if found is None else b"".join(found).decode()


def stream(**options: object) -> list[triton.InferResult]:
    """All responses to one request on a stream."""
    results: queue.Queue = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put(error or result))
    client.async_stream_infer(MODEL, **options)
    client.stop_stream()
    return list(results.queue)


def described() -> None:
    """Health, readiness, metadata, configuration, and the index of the repository."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata().name == "weft"
    assert "text_input" in [each.name for each in client.get_model_metadata(MODEL).inputs]
    config = client.get_model_config(MODEL, as_json=True)["config"]
    assert config["model_transaction_policy"]["decoupled"]
    assert [each.state for each in client.get_model_repository_index().models] == ["READY"]


def whole() -> None:
    """A whole answer with the tensors that the caller names."""
    names = ["text_output", "output_ids", "finish_reason", "num_input_tokens", "output_log_probs"]
    result = client.infer(MODEL, asked(), outputs=[triton.InferRequestedOutput(name) for name in names])
    assert result.as_numpy("output_ids").shape == (16,)
    assert result.as_numpy("finish_reason").tolist() == [b"length"]
    assert result.as_numpy("num_input_tokens")[0] > 0
    assert (result.as_numpy("output_log_probs") <= 0).all()
    assert text_of(result) == text_of(client.infer(MODEL, asked()))


def streamed() -> None:
    """The parts of a stream are the whole answer; the last one is marked, or empty if the caller asks for that."""
    expected = text_of(client.infer(MODEL, asked()))
    parts = stream(inputs=asked())
    assert len(parts) > 4
    assert "".join(map(text_of, parts)) == expected
    flags = [each.get_response().parameters["triton_final_response"].bool_param for each in parts]
    assert flags == [False] * (len(parts) - 1) + [True]
    parts = stream(inputs=asked(), enable_empty_final_response=True)
    assert parts[-1].get_response().parameters["triton_final_response"].bool_param
    assert not parts[-1].get_response().outputs
    [only] = stream(inputs=[*asked(), tensor("stream", [False], np.bool_, "BOOL")])
    assert text_of(only) == expected


def tensorrt_llm() -> None:
    """The inputs of TensorRT-LLM's ensemble."""
    inputs = [
        tensor("text_input", [PROMPT.encode()]),
        tensor("max_tokens", [16], np.int32, "INT32"),
        tensor("temperature", [0.0], np.float32, "FP32"),
        tensor("bad_words", [b""]),
        tensor("stop_words", [b""]),
        tensor("random_seed", [7], np.uint64, "UINT64"),
        tensor("beam_width", [1], np.int32, "INT32"),
        tensor("pad_id", [0], np.int32, "INT32"),
    ]
    assert text_of(client.infer(MODEL, inputs)) == text_of(client.infer(MODEL, asked()))


def parameters() -> None:
    """Fields as parameters; equal seeds give equal draws."""
    fields = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 12}
    prompt = [tensor("text_input", [PROMPT.encode()])]
    first, second = (client.infer(MODEL, prompt, parameters=fields, priority=101, timeout=60_000_000) for _ in "ab")
    assert text_of(first) == text_of(second)
    other = client.infer(MODEL, prompt, parameters=fields | {"seed": 6})
    assert text_of(other) != text_of(first)


def refused(work: Callable[[], object], status: str, field: str) -> None:
    """The client raises its own exception, which names the field."""
    error = None
    try:
        work()
    except InferenceServerException as raised:
        error = raised
    assert error is not None, "the request was accepted"
    assert status in str(error.status()), error
    assert error.message().startswith(field), error


def errors() -> None:
    """Errors name the field; an error on a stream leaves the stream open."""
    prompt = [tensor("text_input", [PROMPT.encode()])]
    refused(lambda: client.infer(MODEL, prompt, parameters={"temperature": -1.0}), "INVALID_ARGUMENT", "temperature")
    refused(lambda: client.infer(MODEL, prompt, parameters={"beams": 2}), "INVALID_ARGUMENT", "beams")
    refused(lambda: client.infer("nobody", prompt), "NOT_FOUND", "no model")
    results: queue.Queue = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put(error or result))
    client.async_stream_infer(MODEL, prompt, parameters={"top_p": 7.0})
    client.async_stream_infer(MODEL, asked())
    client.stop_stream()
    found = list(results.queue)
    [error] = [each for each in found if isinstance(each, InferenceServerException)]
    assert error.message().startswith("top_p"), error
    assert text_of(client.infer(MODEL, asked())) == "".join(text_of(each) for each in found if each is not error)


def asynchronous() -> None:
    """The asyncio client, eight requests on one stream."""

    async def run() -> None:
        async with triton_aio.InferenceServerClient(os.environ["WEFT_GRPC"]) as each:
            expected = text_of(await each.infer(MODEL, asked()))

            async def requests():
                for place in range(8):
                    yield {"model_name": MODEL, "inputs": asked(), "request_id": str(place)}

            texts: dict[str, str] = {}
            async for result, error in each.stream_infer(requests()):
                assert error is None, error
                place = result.get_response().id
                texts[place] = texts.get(place, "") + text_of(result)
            assert texts == {str(place): expected for place in range(8)}

    asyncio.run(run())


def http() -> None:
    """The same over HTTP, with tensors as bytes behind the JSON and as JSON."""
    other = triton_http.InferenceServerClient(os.environ["WEFT_HTTP"].removeprefix("http://"))
    assert other.is_server_live()
    assert other.is_server_ready()
    assert other.is_model_ready(MODEL)
    assert other.get_model_metadata(MODEL)["name"] == MODEL
    expected = text_of(client.infer(MODEL, asked()))
    for is_binary in (True, False):
        prompt = triton_http.InferInput("text_input", [1], "BYTES")
        prompt.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_), binary_data=is_binary)
        outputs = [triton_http.InferRequestedOutput("text_output", binary_data=is_binary)]
        fields = {"temperature": 0, "max_tokens": 16}
        result = other.infer(MODEL, [prompt], outputs=outputs, parameters=fields)
        [text] = result.as_numpy("text_output")
        assert (text if isinstance(text, str) else text.decode()) == expected
    error = None
    try:
        other.infer(MODEL, [prompt], parameters={"temperature": -1})
    except InferenceServerException as raised:
        error = raised
    assert error is not None, "the request was accepted"
    assert error.message().startswith("temperature"), error


for story in (described, whole, streamed, tensorrt_llm, parameters, errors, asynchronous, http):
    story()
    print(story.__name__)
