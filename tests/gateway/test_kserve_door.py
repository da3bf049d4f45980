"""The Open Inference Protocol over gRPC on a gateway among fakes: answers, streams, errors, keys, limits, cancels."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode, aio

from protos import inference_pb2 as api
from protos import kserve_pb2 as kserve
from protos import mesh_pb2
from protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from services.errors import WeftError, unavailable
from tests.gateway.fakes import FakeMesh, generate, until
from tests.gateway.fakes import ask as ask_weft
from tests.gateway.model import ANSWER, LOREM, ids_of
from tests.gateway.tenant_files import KEY, tenant

TENANTS = (
    tenant("one", KEY, 'models = ["fake"]', "concurrent = 1")
    + tenant("two", "wk-other", 'models = ["another"]', 'methods = ["ListModels", "Generate"]')
    + tenant("three", "wk-third", 'methods = ["Complete"]')
)
FINAL = "triton_final_response"


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh() as running:
        yield running


def stub(mesh: FakeMesh) -> Any:
    """A client of the protocol."""
    return GRPCInferenceServiceStub(mesh.channel)


def ask(text: str = "hello world", outputs: Iterable[str] = (), **parameters: Any) -> kserve.ModelInferRequest:
    """A greedy request with raw contents; parameters are fields by name."""
    request = kserve.ModelInferRequest(model_name="fake", id="7")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(text.encode()).to_bytes(4, "little") + text.encode())
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in ({"temperature": 0.0, "max_tokens": 400} | parameters).items():
        setattr(request.parameters[name], kinds[type(value)], value)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def texts(raw: bytes) -> list[str]:
    """The elements of a raw tensor of BYTES."""
    found = []
    while raw:
        size = int.from_bytes(raw[:4], "little")
        found.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return found


def tensors(response: kserve.ModelInferResponse) -> dict[str, bytes]:
    """The raw tensors of a response by name."""
    return dict(zip([each.name for each in response.outputs], response.raw_output_contents, strict=True))


def text_of(responses: Iterable[kserve.ModelStreamInferResponse]) -> str:
    """The text of a stream."""
    found = [tensors(each.infer_response).get("text_output", b"") for each in responses]
    return "".join(text for raw in found for text in texts(raw))


async def send(*requests: kserve.ModelInferRequest) -> AsyncIterator[kserve.ModelInferRequest]:
    for request in requests:
        yield request


async def stream(mesh: FakeMesh, *requests: kserve.ModelInferRequest) -> list[kserve.ModelStreamInferResponse]:
    """All responses to some requests."""
    return [response async for response in stub(mesh).ModelStreamInfer(send(*requests))]


def finals(responses: Iterable[kserve.ModelStreamInferResponse]) -> list[bool]:
    """The final-response flag of each response."""
    return [each.infer_response.parameters[FINAL].bool_param for each in responses]


# ---- answers ----


async def test_a_whole_answer_as_raw_tensors_with_the_receipt_in_the_trailing_metadata(mesh: FakeMesh) -> None:
    names = ["text_output", "output_ids", "finish_reason", "num_input_tokens", "num_output_tokens", "output_log_probs"]
    call = stub(mesh).ModelInfer(ask(outputs=[*names, "cum_log_probs"]))
    response = await call
    found = tensors(response)
    assert (response.model_name, response.model_version, response.id) == ("fake", "1", "7")
    assert [each.name for each in response.outputs] == [*names, "cum_log_probs"]
    assert texts(found["text_output"]) == [LOREM]
    assert [int.from_bytes(found["output_ids"][i : i + 4], "little") for i in range(0, 4 * len(ANSWER), 4)] == ANSWER
    assert texts(found["finish_reason"]) == ["stop"]
    assert found["num_output_tokens"] == len(ANSWER).to_bytes(4, "little")
    assert found["num_input_tokens"] == (1 + len(ids_of("hello world"))).to_bytes(4, "little")
    assert len(found["output_log_probs"]) == 4 * len(ANSWER)
    trailing = dict(await call.trailing_metadata())
    assert api.Receipt.FromString(trailing["weft-receipt-bin"]).completion_tokens == len(ANSWER)


async def test_typed_contents_are_answered_with_typed_contents(mesh: FakeMesh) -> None:
    request = ask(outputs=["text_output", "output_ids", "logprobs", "cumulative_logprob"], n=2, max_tokens=3)
    request.inputs[0].contents.bytes_contents.append(b"hello world")
    request.ClearField("raw_input_contents")
    response = await stub(mesh).ModelInfer(request)
    assert not response.raw_output_contents
    text, ids, places, total = (each.contents for each in response.outputs)
    assert len(text.bytes_contents) == 2
    assert list(ids.int_contents) == ANSWER[:3] * 2
    assert [list(each.shape) for each in response.outputs] == [[2], [6], [2], [2]]
    assert [place["token_id"] for place in json.loads(places.bytes_contents[0])] == ANSWER[:3]
    assert list(total.fp32_contents) == [-1.5, -1.5]


async def test_an_empty_model_name_means_the_only_model(mesh: FakeMesh) -> None:
    request = ask(max_tokens=2)
    request.model_name = ""
    assert (await stub(mesh).ModelInfer(request)).model_name == "fake"
    responses = await stream(mesh, request)
    assert {each.infer_response.model_name for each in responses} == {"fake"}


async def test_the_prompt_precedes_the_answer_if_asked_for(mesh: FakeMesh) -> None:
    request = ask(exclude_input_in_output=False, n=2)
    assert texts(tensors(await stub(mesh).ModelInfer(request))["text_output"]) == ["hello world" + LOREM] * 2
    request = ask(exclude_input_in_output=False)
    assert text_of(await stream(mesh, request)) == "hello world" + LOREM
    assert text_of(await stream(mesh, ask(exclude_input_in_output=True))) == LOREM


async def test_a_stream_has_a_part_for_each_step_and_marks_the_last(mesh: FakeMesh) -> None:
    mesh.workers[0].step_s = 0.005
    responses = await stream(mesh, ask(return_finish_reason=True))
    assert text_of(responses) == LOREM
    assert len(responses) > 10
    assert finals(responses) == [False] * (len(responses) - 1) + [True]
    assert {each.infer_response.id for each in responses} == {"7"}
    assert [texts(tensors(each.infer_response)["finish_reason"]) for each in responses][-1] == ["stop"]


async def test_the_numbers_of_tokens_of_a_stream_add_up(mesh: FakeMesh) -> None:
    responses = await stream(mesh, ask(stop="the quick brown bear", return_num_output_tokens=True))
    counts = [int.from_bytes(tensors(each.infer_response)["num_output_tokens"], "little") for each in responses]
    assert sum(counts) == len(ANSWER)


async def test_an_empty_final_response_is_sent_if_asked_for(mesh: FakeMesh) -> None:
    responses = await stream(mesh, ask(triton_enable_empty_final_response=True))
    assert text_of(responses) == LOREM
    assert finals(responses) == [False] * (len(responses) - 1) + [True]
    assert not responses[-1].infer_response.outputs
    counted = await stream(mesh, ask(return_num_input_tokens=True))
    assert list(tensors(counted[-1].infer_response)) == ["num_input_tokens"]


async def test_several_continuations_share_a_stream(mesh: FakeMesh) -> None:
    responses = await stream(mesh, ask(n=3, outputs=["text_output", "sequence_index"]))
    by_index: dict[int, str] = {}
    for each in responses:
        found = tensors(each.infer_response)
        index = int.from_bytes(found["sequence_index"], "little")
        by_index[index] = by_index.get(index, "") + texts(found["text_output"])[0]
    assert by_index == dict.fromkeys(range(3), LOREM)
    assert finals(responses) == [False] * (len(responses) - 1) + [True]


async def test_stream_false_is_one_response(mesh: FakeMesh) -> None:
    [response] = await stream(mesh, ask(stream=False))
    assert text_of([response]) == LOREM
    assert finals([response]) == [True]


async def test_requests_of_a_stream_run_at_the_same_time(mesh: FakeMesh) -> None:
    mesh.workers[0].step_s = 0.005
    requests = [ask(f"prompt {place}") for place in range(4)]
    for place, request in enumerate(requests):
        request.id = str(place)
    responses = await stream(mesh, *requests)
    order = [int(each.infer_response.id) for each in responses]
    assert sorted(set(order)) == [0, 1, 2, 3]
    assert order != sorted(order), "the answers overlap"
    for place in range(4):
        assert text_of(each for each in responses if each.infer_response.id == str(place)) == LOREM


# ---- errors ----


async def status_of(call: Any) -> tuple[StatusCode, str]:
    """The status and details of a call that fails."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


async def test_errors_name_the_callers_field(mesh: FakeMesh) -> None:
    client = stub(mesh)
    code, details = await status_of(client.ModelInfer(ask(temperature=-1.0)))
    assert (code, details.partition(":")[0]) == (StatusCode.INVALID_ARGUMENT, "temperature")
    code, details = await status_of(client.ModelInfer(ask(stream=True)))
    assert (code, details.partition(":")[0]) == (StatusCode.INVALID_ARGUMENT, "stream")
    code, details = await status_of(client.ModelInfer(ask("x " * 600)))
    assert (code, details.partition(":")[0]) == (StatusCode.INVALID_ARGUMENT, "text_input")
    request = ask()
    request.model_name = "nobody"
    code, details = await status_of(client.ModelInfer(request))
    assert code is StatusCode.NOT_FOUND


async def test_a_refused_name_is_one_line_of_limited_length(mesh: FakeMesh) -> None:
    for name in ("x" * 20_000, "two\nlines", "é" * 4000):
        wrong: dict[str, Any] = {name: 1}
        code, details = await status_of(stub(mesh).ModelInfer(ask(**wrong)))
        assert (code, details.endswith(": there is no such field")) == (StatusCode.INVALID_ARGUMENT, True)
        assert len(details) < 200
        assert "\n" not in details
    code, details = await status_of(stub(mesh).ModelInfer(ask(sampling_parameters='{"\\ud800": 1}')))
    assert (code, details) == (StatusCode.INVALID_ARGUMENT, "sampling_parameters.\ufffd: there is no such field")
    code, details = await status_of(stub(mesh).ModelInfer(ask(sampling_parameters='{"stop": "\\ud800"}')))
    assert (code, details) == (StatusCode.INVALID_ARGUMENT, "stop: not valid Unicode")


async def test_an_error_ends_its_request_and_not_its_stream(mesh: FakeMesh) -> None:
    wrong = ask(frequency_penalty=7.0)
    wrong.id = "wrong"
    responses = await stream(mesh, wrong, ask())
    [failed] = [each for each in responses if each.error_message]
    assert failed.infer_response.id == "wrong"
    parameters = failed.infer_response.parameters
    assert failed.error_message.startswith("frequency_penalty: ")
    assert parameters["error_code"].string_param == "INVALID_ARGUMENT"
    assert parameters["error_field"].string_param == "frequency_penalty"
    assert parameters[FINAL].bool_param
    assert text_of(each for each in responses if not each.error_message) == LOREM


async def test_an_error_ends_the_stream_if_the_caller_asks_for_it(mesh: FakeMesh) -> None:
    call = stub(mesh).ModelStreamInfer(send(ask(min_p=3.0)), metadata=(("triton_grpc_error", "true"),))
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith("min_p: ")


async def test_a_failure_after_the_first_token_ends_the_request(mesh: FakeMesh) -> None:
    mesh.workers[0].fail_at = 5, WeftError(StatusCode.INTERNAL, "NUMERIC", "not a number")
    responses = await stream(mesh, ask())
    assert responses[-1].error_message == "not a number"
    assert finals(responses) == [False] * (len(responses) - 1) + [True]


async def test_a_retry_delay_arrives(mesh: FakeMesh) -> None:
    mesh.scheduler.decide = lambda submit: _rejected(submit, unavailable("FULL", "later", 2.5))
    [response] = await stream(mesh, ask())
    assert response.infer_response.parameters["retry_after_s"].double_param == 2.5


def _rejected(submit: mesh_pb2.Submit, error: WeftError) -> mesh_pb2.DispatchResponse:
    failure = error.failure()
    failure.retryable = False
    rejected = mesh_pb2.Rejected(job_id=submit.job_id, attempt=submit.attempt, failure=failure)
    return mesh_pb2.DispatchResponse(rejected=rejected)


async def test_a_timeout_of_a_request_ends_it(mesh: FakeMesh) -> None:
    mesh.workers[0].hold_at = 3
    responses = await stream(mesh, ask(timeout=300_000))
    assert responses[-1].infer_response.parameters["error_reason"].string_param == "DEADLINE_EXCEEDED"
    code, _ = await status_of(stub(mesh).ModelInfer(ask(timeout=300_000)))
    assert code is StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not mesh.workers[0].running)


async def test_a_client_that_cancels_frees_its_jobs(mesh: FakeMesh) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 5
    never_ends: asyncio.Queue[kserve.ModelInferRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[kserve.ModelInferRequest]:
        while True:
            yield await never_ends.get()

    call = stub(mesh).ModelStreamInfer(requests())
    for text in ("one", "two"):
        never_ends.put_nowait(ask(text))
    await until(lambda: worker.sent == 10)
    assert len(worker.running) == 2
    call.cancel()
    await until(lambda: not worker.running)


async def test_a_stream_that_ends_its_requests_gets_all_answers(mesh: FakeMesh) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 5
    reading = asyncio.create_task(stream(mesh, ask()))
    await until(lambda: worker.sent == 5)
    worker.hold_at = None
    assert text_of(await asyncio.wait_for(reading, 10)) == LOREM


async def test_a_gateway_that_stops_answers_what_is_under_way() -> None:
    async with asyncio.timeout(30), FakeMesh(drain_s=60) as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 5
        streams: list[Any] = [stub(mesh).ModelStreamInfer() for _ in range(2)]
        await streams[0].write(ask(stream=False))
        await until(lambda: worker.sent == 5)
        stopping = asyncio.create_task(mesh.stop_gateway())
        assert (await status_of(streams[1].read()))[0] is StatusCode.UNAVAILABLE
        worker.hold_at = None
        assert text_of([await streams[0].read()]) == LOREM
        assert (await status_of(streams[0].read()))[0] is StatusCode.UNAVAILABLE
        await stopping


async def test_a_malformed_message_is_invalid(mesh: FakeMesh) -> None:
    unary: Any = mesh.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    call = unary(b"\xff\xff\xff")
    code, _ = await status_of(call)
    assert code is StatusCode.INVALID_ARGUMENT
    streaming: Any = mesh.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in streaming(iter([b"\xff\xff\xff"])):
            pass
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT


# ---- the server and its models ----


async def until_ready(client: Any) -> None:
    """Waits until the gateway has its list of models."""
    for _ in range(500):
        if (await client.ServerReady(kserve.ServerReadyRequest())).ready:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the gateway is not ready")


async def test_the_server_describes_itself_and_its_models(mesh: FakeMesh) -> None:
    client = stub(mesh)
    assert (await client.ServerLive(kserve.ServerLiveRequest())).live
    await until_ready(client)
    assert (await client.ServerMetadata(kserve.ServerMetadataRequest())).name == "weft"
    for name, version, ready in (("fake", "", True), ("alias", "1", True), ("fake", "2", False), ("nobody", "", False)):
        reply = await client.ModelReady(kserve.ModelReadyRequest(name=name, version=version))
        assert reply.ready == ready
    metadata = await client.ModelMetadata(kserve.ModelMetadataRequest(name="alias"))
    assert (metadata.name, metadata.platform, list(metadata.versions)) == ("fake", "FakeForCausalLM", ["1"])
    config = (await client.ModelConfig(kserve.ModelConfigRequest(name="fake"))).config
    assert config.parameters["context_length"].string_value == "512"
    code, _ = await status_of(client.ModelConfig(kserve.ModelConfigRequest(name="nobody")))
    assert code is StatusCode.NOT_FOUND
    code, _ = await status_of(client.RepositoryModelLoad(kserve.RepositoryModelLoadRequest(model_name="x")))
    assert code is StatusCode.UNIMPLEMENTED


async def test_the_repository_lists_models_that_are_loaded_or_loading(mesh: FakeMesh) -> None:
    loading = mesh_pb2.WorkerLoading(worker_id="w", model="new", phase="weights", done=1, total=4)
    models = mesh_pb2.ModelList(models=mesh.served(), loading=[loading])

    async def index(ready: bool) -> list[tuple[str, str, str]]:
        reply = await stub(mesh).RepositoryIndex(kserve.RepositoryIndexRequest(ready=ready))
        return [(each.name, each.state, each.reason) for each in reply.models]

    for _ in range(200):
        mesh.scheduler.send(mesh_pb2.DispatchResponse(models=models))  # The gateway may have to connect first.
        if len(await index(False)) == 2:
            break
        await asyncio.sleep(0.01)
    assert await index(False) == [("fake", "READY", ""), ("new", "LOADING", "weights 25%")]
    assert await index(True) == [("fake", "READY", "")]


async def test_a_gateway_without_models_is_live_and_not_ready() -> None:
    async with FakeMesh() as mesh:
        for _ in range(200):
            mesh.scheduler.serve_models([])
            if not (await stub(mesh).ServerReady(kserve.ServerReadyRequest())).ready:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("still ready")
        assert (await stub(mesh).ServerLive(kserve.ServerLiveRequest())).live


# ---- keys and limits ----


async def test_keys_methods_models_and_limits_hold(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    async with FakeMesh(tenants_file=str(path)) as mesh:
        client = stub(mesh)

        def key(value: str) -> Any:
            return (("authorization", f"Bearer {value}"),)

        assert (await client.ServerLive(kserve.ServerLiveRequest())).live, "probes have no keys"
        await until_ready(client)
        code, _ = await status_of(client.ModelInfer(ask()))
        assert code is StatusCode.UNAUTHENTICATED
        code, _ = await status_of(client.ServerMetadata(kserve.ServerMetadataRequest(), metadata=key("wk-wrong")))
        assert code is StatusCode.UNAUTHENTICATED
        code, _ = await status_of(client.ModelInfer(ask(), metadata=key("wk-other")))
        assert code is StatusCode.PERMISSION_DENIED, "this key may not call Complete"
        code, _ = await status_of(client.ServerMetadata(kserve.ServerMetadataRequest(), metadata=key("wk-third")))
        assert code is StatusCode.PERMISSION_DENIED, "this key may not call ListModels"
        code, _ = await status_of(client.RepositoryModelLoad(kserve.RepositoryModelLoadRequest(), metadata=key(KEY)))
        assert code is StatusCode.UNIMPLEMENTED
        ready = await client.ModelReady(kserve.ModelReadyRequest(name="fake"), metadata=key("wk-other"))
        assert not ready.ready, "the names of other models are not revealed"
        denied = [each async for each in client.ModelStreamInfer(send(ask()), metadata=key("wk-other"))]
        assert denied[0].infer_response.parameters["error_reason"].string_param == "MODEL_DENIED"
        assert (await client.ModelInfer(ask(max_tokens=2), metadata=key(KEY))).model_name == "fake"
        mesh.workers[0].hold_at = 1
        first, second = ask("one", max_tokens=3), ask("two", max_tokens=3)
        first.id, second.id = "first", "second"
        call = client.ModelStreamInfer(send(first, second), metadata=key(KEY))
        responses = []
        async for each in call:
            responses.append(each)
            if each.error_message:
                mesh.workers[0].hold_at = None
        reasons = [each.infer_response.parameters["error_reason"].string_param for each in responses]
        assert reasons.count("TOO_MANY_CONCURRENT") == 1
        urgent, _ = await status_of(client.ModelInfer(ask(priority=1), metadata=key(KEY)))
        assert urgent is StatusCode.PERMISSION_DENIED


async def test_a_gateway_without_room_refuses_a_request_of_a_stream() -> None:
    async with asyncio.timeout(30), FakeMesh(gateway_most_calls=1) as mesh:
        worker, streaming = mesh.workers[0], stub(mesh).ModelStreamInfer()
        worker.hold_at = 5
        await streaming.write(ask(stream=False))
        await until(lambda: worker.sent == 5)
        refused = ask("another")
        refused.id = "refused"
        await streaming.write(refused)
        response = await streaming.read()
        parameters = response.infer_response.parameters
        assert (response.infer_response.id, finals([response])) == ("refused", [True])
        assert parameters["error_code"].string_param == "RESOURCE_EXHAUSTED"
        assert parameters["error_reason"].string_param == "GATEWAY_OVERLOADED"
        assert parameters["retry_after_s"].double_param == 1
        worker.hold_at = None
        assert text_of([await streaming.read()]) == LOREM
        await streaming.write(ask(stream=False))
        assert text_of([await streaming.read()]) == LOREM
        await streaming.done_writing()
        assert await streaming.read() is aio.EOF
    assert len(worker.jobs) == 2


async def test_a_gateway_without_room_ends_the_stream_of_a_caller_who_asks_for_it() -> None:
    async with asyncio.timeout(30), FakeMesh(gateway_most_calls=1) as mesh:
        worker = mesh.workers[0]
        streaming = stub(mesh).ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
        worker.hold_at = 5
        for text in ("one", "two"):
            await streaming.write(ask(text, stream=False))
        code, _ = await status_of(streaming.read())
        assert code is StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: not worker.running)


async def test_a_caller_that_does_not_read_its_errors_ends_its_stream() -> None:
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with (
        asyncio.timeout(60),
        FakeMesh(gateway_stall_s=1) as mesh,
        aio.insecure_channel(f"127.0.0.1:{mesh.server.port}", options=narrow) as channel,
    ):
        worker, streaming = mesh.workers[0], GRPCInferenceServiceStub(channel).ModelStreamInfer()
        worker.hold_at = 5
        await streaming.write(ask(stream=False))
        await until(lambda: worker.sent == 5)
        for _ in range(20):  # An error repeats the id of its request.
            await streaming.write(kserve.ModelInferRequest(id="x" * 25_000))
        await until(lambda: not worker.running, 30)  # The gateway has given the stream up.
        with contextlib.suppress(aio.AioRpcError):
            while await streaming.read() is not aio.EOF:
                pass
        assert await streaming.code() is StatusCode.ABORTED


async def test_the_same_tokens_as_over_weft_v1(mesh: FakeMesh) -> None:
    expected = await generate(mesh.stub, ask_weft("hello world"))
    assert text_of(await stream(mesh, ask())) == expected.text()
