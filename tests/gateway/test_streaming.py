"""Requests that succeed, through the gateway's gRPC API."""

import asyncio
import contextlib
import hashlib
import uuid
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.gateway.access.tenants import DEFAULT
from services.gateway.doors.grpc_gate import RECEIPT_KEY
from services.hashing import block_keys, chain_root
from tests.gateway.fakes import FakeMesh, ask, generate, until
from tests.gateway.model import ANSWER, LOREM, TOKENIZER, ids_of, make_card
from tests.gateway.test_text import FALLBACK, FALLBACK_BUNDLE
from tests.timing import timely


async def test_a_stream_delivers_text_and_tokens_and_last_the_receipt() -> None:
    async with FakeMesh() as mesh:
        answer = await generate(mesh.stub, ask("hello", seed=7))
        assert answer.text() == LOREM
        assert answer.ids() == ANSWER
        assert answer.last().finish_reason == api.FINISH_REASON_STOP
        assert answer.last().stop_token_id == 1
        assert {delta.attempt for delta in answer.deltas} == {1}
        receipt = answer.receipt
        assert receipt == answer.trailing_receipt
        assert receipt.model == "fake"
        assert receipt.seed == 7
        assert receipt.prompt_tokens == len(TOKENIZER.encode("hello").ids)
        assert receipt.completion_tokens == len(ANSWER)
        assert receipt.prefill_tokens == receipt.prompt_tokens - 1
        assert receipt.cached_tokens == 1
        assert receipt.attempts == 1
        assert list(receipt.workers) == ["worker-0"]
        assert receipt.finish_reason == api.FINISH_REASON_STOP
        assert not receipt.result_hit
        assert not receipt.joined


async def test_the_scheduler_receives_lengths_and_hashes_and_the_worker_the_request() -> None:
    async with FakeMesh() as mesh:
        request = ask("hello world and the quick fox", seed=7, top_k=3, priority=5, max_tokens=9, stop=["zzz"])
        answer = await generate(mesh.stub, request, timeout=30)
        prompt = TOKENIZER.encode("hello world and the quick fox").ids
        [submit], [job] = mesh.scheduler.submits, mesh.workers[0].jobs
        assert submit.job_id == job.job_id == f"{DEFAULT.hash}/{answer.receipt.request_id}/0"
        assert (submit.attempt, submit.model, submit.prompt_tokens, submit.max_tokens) == (1, "fake", len(prompt), 9)
        root = chain_root(DEFAULT.salt, mesh.card.fingerprint)
        assert submit.block_keys == b"".join(block_keys(prompt, 4, root))
        # gRPC sends the timeout in three digits, rounded up: 30.001 s as 30.1.
        assert 0 < submit.deadline_s <= 30.1
        assert submit.priority == job.priority == 5
        assert len(submit.identity) == len(submit.body) == 32
        assert list(job.token_ids) == prompt
        assert job.prompt_len == len(prompt)
        assert job.salt == DEFAULT.salt
        assert (job.sampling.top_k, job.sampling.max_tokens, job.sampling.seed) == (3, 9, 7)
        assert not job.sampling.stop
        assert submit.traceparent == job.traceparent
        assert answer.receipt.trace_id in submit.traceparent


async def test_defaults_are_resolved_at_the_gateway() -> None:
    async with FakeMesh() as mesh:
        request = api.GenerateRequest(prompt=api.Prompt(text="hello"))
        first, second = [(await generate(mesh.stub, request)).receipt.seed for _ in range(2)]
        assert first != second
        job = mesh.workers[0].jobs[0]
        assert job.sampling.max_tokens == 256
        assert job.sampling.seed == first
        assert mesh.scheduler.submits[0].identity == b""  # Its draws are random.


async def test_several_continuations_share_one_stream() -> None:
    def script(job: mesh_pb2.Job) -> list[int]:
        return ids_of("one two three "[: 4 * (job.sample_index + 1)])

    async with FakeMesh(script=script) as mesh:
        answer = await generate(mesh.stub, ask(n=3))
        assert [answer.text(i) for i in range(3)] == ["one ", "one two ", "one two thre"]
        assert sorted(job.sample_index for job in mesh.workers[0].jobs) == [0, 1, 2]
        assert len({job.job_id for job in mesh.workers[0].jobs}) == 3
        assert answer.receipt.completion_tokens == sum(len(answer.ids(i)) for i in range(3))
        assert answer.receipt.prefill_tokens == 3 * (answer.receipt.prompt_tokens - 1)


async def test_characters_split_over_tokens_arrive_whole() -> None:
    async with FakeMesh(script=lambda job: ids_of("a 日本語 😀!")) as mesh:
        assert len(ids_of("日")) == 3
        answer = await generate(mesh.stub, ask())
        assert answer.text() == "a 日本語 😀!"
        assert all("\ufffd" not in delta.text for delta in answer.deltas)


async def test_an_incomplete_character_is_delivered_at_the_end() -> None:
    async with FakeMesh(script=lambda job: ids_of("a 日")[:-1]) as mesh:
        answer = await generate(mesh.stub, ask())
        assert answer.text() == "a \ufffd"


async def test_a_stop_string_across_tokens_ends_the_answer() -> None:
    async with FakeMesh() as mesh:
        answer = await generate(mesh.stub, ask(stop=["brown f", "lazy"]))
        assert answer.text() == "the quick "
        assert answer.last().finish_reason == api.FINISH_REASON_STOP
        assert answer.last().stop_string == "brown f"
        kept = answer.ids()
        assert TOKENIZER.decode(kept).startswith("the quick brown f")
        assert not TOKENIZER.decode(kept[:-1]).startswith("the quick brown f")
        [cancel] = mesh.workers[0].cancelled
        assert cancel.position == len(kept) == answer.receipt.completion_tokens
        assert answer.receipt.prefill_tokens == answer.receipt.prompt_tokens - 1  # as the worker reported
        await until(lambda: not mesh.workers[0].running)


@timely
async def test_a_worker_that_ignores_a_cancel_receives_one_and_its_tokens_are_dropped() -> None:
    async with FakeMesh(gateway_cost_wait_s=0.1) as mesh:
        mesh.workers[0].ignores_cancels = True
        answer = await generate(mesh.stub, ask(stop=["quick"]))
        assert answer.text() == "the "
        assert len(mesh.workers[0].cancelled) == 1
        assert answer.receipt.timings.wall_s < 0.3  # It waits at most gateway_cost_wait_s for the worker's report.
        assert list(answer.receipt.workers) == ["worker-0"]


async def test_a_stop_string_is_found_although_the_client_reads_nothing() -> None:
    tokens = [*[5] * 20_000, *ids_of("lazy"), *[5] * 100_000]

    async with FakeMesh(script=lambda job: tokens, card=make_card(context_length=200_000)) as mesh:
        worker = mesh.workers[0]
        worker.tokens_per_step = 200
        call = mesh.stub.Generate(ask(max_tokens=150_000, logprobs=20, stop=["lazy"]))
        await call.read()
        await until(lambda: bool(worker.cancelled), seconds=20)
        assert worker.cancelled[0].position == 20_000 + len(ids_of("lazy"))
        call.cancel()


async def test_a_possible_stop_string_is_held_back_and_then_delivered() -> None:
    async with FakeMesh() as mesh:
        answer = await generate(mesh.stub, ask(stop=["the worldwide"]))
        assert answer.text() == LOREM


async def test_stop_strings_wait_for_min_tokens() -> None:
    async with FakeMesh() as mesh:
        early = await generate(mesh.stub, ask(stop=["the"]))
        late = await generate(mesh.stub, ask(stop=["the"], min_tokens=4))
        assert early.text() == ""
        assert late.text() == "the quick brown fox jumps over "


async def test_log_probabilities_carry_the_text_of_each_token() -> None:
    async with FakeMesh(script=lambda job: ids_of("the 日")) as mesh:
        answer = await generate(mesh.stub, ask(logprobs=2))
        places = [place for delta in answer.deltas for place in delta.logprobs]
        assert [place.chosen.token_id for place in places] == answer.ids()
        assert [place.chosen.logprob for place in places] == [-0.5] * len(places)
        assert [top.logprob for top in places[0].top] == [-1.0, -2.0]
        assert [top.text for top in places[0].top] == ["<s>", "</s>"]
        assert places[0].chosen.text == "the"
        assert places[-1].chosen.text == "\ufffd"


async def test_tokens_that_are_ready_together_share_a_message() -> None:
    async with FakeMesh() as mesh:
        mesh.workers[0].tokens_per_step = 8
        answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER
        assert len(answer.deltas) <= len(ANSWER) / 8 + 2


async def test_complete_is_the_collected_stream() -> None:
    async with FakeMesh() as mesh:
        request = ask(n=2, logprobs=1, stop=["lazy"])
        stream = await generate(mesh.stub, request)
        call = mesh.stub.Complete(request)
        reply = await call
        trailing: Any = dict(await call.trailing_metadata())
        for index, choice in enumerate(reply.choices):
            assert choice.index == index
            assert choice.text == stream.text(index)
            assert list(choice.token_ids) == stream.ids(index)
            assert len(choice.logprobs) == len(choice.token_ids)
            assert choice.finish_reason == api.FINISH_REASON_STOP
            assert choice.stop_string == "lazy"
        assert len(reply.choices) == 2
        assert api.Receipt.FromString(trailing[RECEIPT_KEY]) == reply.receipt


async def test_chat_goes_through_the_checkpoints_template() -> None:
    chat = api.Chat(messages=[api.ChatMessage(role="user", content=" hello ")])
    async with FakeMesh() as mesh:
        await generate(mesh.stub, ask(prompt=api.Prompt(chat=chat)))
        prompt = TOKENIZER.decode(list(mesh.workers[0].jobs[0].token_ids), skip_special_tokens=False)
        assert prompt == "<s>user: hello\nassistant:"


async def test_tokenize_gives_the_tokens_of_generate() -> None:
    async with FakeMesh() as mesh:
        reply = await mesh.stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text="the 日")))
        assert list(reply.token_ids) == TOKENIZER.encode("the 日").ids
        assert list(reply.pieces) == ["<s>", "the", " ", "\ufffd", "\ufffd", "\ufffd"]


async def test_models_are_listed_and_have_aliases() -> None:
    async with FakeMesh(2) as mesh:
        [model] = (await mesh.stub.ListModels(api.ListModelsRequest())).models
        assert (model.name, model.workers, model.chat, model.context_length) == ("fake", 2, True, 512)
        answer = await generate(mesh.stub, ask(model="alias"))
        assert answer.receipt.model == "fake"


async def test_a_second_model_makes_the_name_necessary() -> None:
    async with FakeMesh() as mesh:
        await generate(mesh.stub, ask())
        other = mesh.served()[0]
        other.card.name = "other"
        other.card.ClearField("aliases")
        mesh.scheduler.serve_models([*mesh.served(), other])
        await asyncio.sleep(0.05)
        nameless = await generate(mesh.stub, ask())
        assert nameless.error is not None
        assert nameless.error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await generate(mesh.stub, ask(model="other"))).receipt.model == "other"


async def test_the_callers_trace_goes_through() -> None:
    trace = uuid.uuid4().hex
    async with FakeMesh() as mesh:
        metadata = (("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),)
        answer = await generate(mesh.stub, ask(), metadata=metadata)
        assert answer.receipt.trace_id == trace
        assert trace in mesh.workers[0].jobs[0].traceparent
        odd = await generate(mesh.stub, ask(), metadata=(("traceparent", "nonsense"),))
        assert len(odd.receipt.trace_id) == 32
        assert int(odd.receipt.trace_id, 16) != 0


async def test_health_follows_the_models() -> None:
    async with FakeMesh() as mesh:
        stub: Any = health_pb2_grpc.HealthStub(mesh.channel)
        question = health_pb2.HealthCheckRequest(service="weft.v1.Inference")

        async def becomes(status: int) -> None:
            for _ in range(500):
                if (await stub.Check(question)).status == status:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("health did not change")

        await becomes(health_pb2.HealthCheckResponse.SERVING)
        mesh.scheduler.serve_models([])
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        mesh.scheduler.serve_models(mesh.served())
        await becomes(health_pb2.HealthCheckResponse.SERVING)


async def test_a_client_that_stops_reading_is_aborted_and_delays_no_other() -> None:
    many = [5] * 100_000

    def script(job: mesh_pb2.Job) -> list[int]:
        return many if job.sampling.logprobs else ANSWER

    async with FakeMesh(script=script, card=make_card(context_length=200_000), gateway_stall_s=0.4) as mesh:
        worker = mesh.workers[0]
        worker.tokens_per_step = 200
        call = mesh.stub.Generate(ask(max_tokens=100_000, logprobs=20))
        await call.read()  # and no further message
        while not worker.cancelled:
            neighbour = await generate(mesh.stub, ask())
            assert neighbour.ids() == ANSWER
            assert neighbour.receipt.timings.wall_s < 1.0
        with contextlib.suppress(aio.AioRpcError):
            while await call.read() is not aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.ABORTED
        assert api.Receipt.FromString(dict(await call.trailing_metadata())[RECEIPT_KEY]).completion_tokens > 0  # type: ignore[arg-type]


async def test_an_answer_of_a_tokenizer_with_byte_fallback_keeps_its_words_apart_and_survives_broken_bytes() -> None:
    data = FALLBACK_BUNDLE.SerializeToString(deterministic=True)
    broken = FALLBACK.encode(api.Prompt(text="A\u00e9"))[1:-1]  # The last byte is missing.
    answers = {"a": FALLBACK.encode(api.Prompt(text="ab a")), "b": [*broken, 261, 261]}
    assert [FALLBACK.piece(token) for token in answers["b"]] == ["A", "\ufffd", "b", "b"]

    def script(job: mesh_pb2.Job) -> list[int]:
        return answers["a" if job.token_ids[-1] == 262 else "b"]

    digest = hashlib.sha256(data).digest()
    async with FakeMesh(script=script, card=make_card(bundle_digest=digest)) as mesh:
        mesh.workers[0].bundle = data
        whole, torn = [await generate(mesh.stub, ask(prompt)) for prompt in ("ab a", "ab b")]
        assert whole.text() == " ab a"  # It continues the prompt "ab a".
        assert torn.error is None
        assert (torn.text(), torn.ids()) == ("A\ufffdbb", answers["b"])
