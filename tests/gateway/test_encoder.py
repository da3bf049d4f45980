"""Tokenizing for many tenants: turns, bounds, cancelled work, and what is refused by its length alone."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2
from services import hashing, validate
from services.errors import WeftError
from services.gateway.answers.registry import Registry
from services.gateway.text.encoder import Encoder
from services.gateway.text.longest_token import most_characters
from services.gateway.text.refusal_pace import BYTES_PER_S, MOST_S, RefusalPace
from services.gateway.text.tokenizer import TextModel
from services.gateway.text.turns import Turns
from tests.gateway.fakes import FakeMesh
from tests.gateway.model import BUNDLE, TOKENIZER

WAIT_S = 30


class Gate:
    """Work that runs until it is let go, and notes what ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.open = threading.Event()

    def work(self, name: str) -> str:
        """Waits for the gate."""
        assert self.open.wait(WAIT_S)
        self.ran.append(name)
        return name


@contextlib.asynccontextmanager
async def busy(most_bytes: int = 100) -> AsyncIterator[tuple[Turns, Gate, "asyncio.Task[str]"]]:
    """One thread, which works for the tenant "first" until the gate opens."""
    turns, gate = Turns(1, most_bytes, "test"), Gate()
    first = asyncio.create_task(turns.run("first", 1, lambda: gate.work("first")))
    await asyncio.sleep(0)
    try:
        yield turns, gate, first
    finally:
        gate.open.set()
        await asyncio.gather(first, return_exceptions=True)
        turns.close()


async def test_tenants_take_turns() -> None:
    """A tenant with much work does not make another one wait for all of it."""
    async with busy() as (turns, gate, _):
        names = ["a1", "a2", "a3", "b1", "b2", "c1"]
        tasks = [asyncio.create_task(turns.run(name[0], 1, lambda name=name: gate.work(name))) for name in names]  # type: ignore[misc]
        await asyncio.sleep(0)
        gate.open.set()
        assert await asyncio.gather(*tasks) == names
        assert gate.ran == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]


async def test_cancelled_work_that_waits_is_dropped() -> None:
    async with busy() as (turns, gate, _):
        tasks = [asyncio.create_task(turns.run("a", 60, lambda name=name: gate.work(name))) for name in ("x",)]  # type: ignore[misc]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        later = asyncio.create_task(turns.run("a", 60, lambda: gate.work("y")))  # Its bytes are free again.
        await asyncio.sleep(0)
        gate.open.set()
        assert await later == "y"
        assert gate.ran == ["first", "y"]


async def test_a_tenants_waiting_bytes_are_bounded() -> None:
    async with busy() as (turns, gate, _):
        waiting = asyncio.create_task(turns.run("a", 60, lambda: gate.work("x")))
        await asyncio.sleep(0)
        with pytest.raises(WeftError, match="too many bytes") as caught:
            await turns.run("a", 60, lambda: gate.work("y"))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s > 0
        other = asyncio.create_task(turns.run("b", 200, lambda: gate.work("z")))  # One text may be larger than that.
        await asyncio.sleep(0)
        gate.open.set()
        assert [await waiting, await other] == ["x", "z"]


async def test_an_exception_of_the_work_is_raised_and_frees_the_thread() -> None:
    turns = Turns(1, 100, "test")

    def fails() -> None:
        raise ValueError("a reason")

    for _ in range(3):
        with pytest.raises(ValueError, match="a reason"):
            await turns.run("a", 1, fails)
    turns.close()


async def test_work_that_waits_fails_when_its_model_is_dropped() -> None:
    async with busy() as (turns, gate, _):
        waiting = asyncio.create_task(turns.run("a", 1, lambda: gate.work("x")))
        await asyncio.sleep(0)
        turns.close()
        with pytest.raises(WeftError, match="tokenizer is not available") as caught:
            await asyncio.wait_for(waiting, WAIT_S)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def bpe(**changes: Any) -> str:
    """A tokenizer's file in the form of a byte-level one."""
    parsed: dict[str, Any] = {
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel"},
        "added_tokens": [{"content": "<longest-token>"}],
        "model": {"type": "BPE", "vocab": {"a": 0, "four": 1}},
    }
    return json.dumps({**parsed, **changes})


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 15),
        ({"normalizer": {"type": "NFC"}}, 60),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]}}, 15),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}}, 15),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "_"}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, None),
        ({"normalizer": {"type": "NFKC"}}, None),
        ({"normalizer": {"type": "Strip"}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"pre_tokenizer": None}, None),
        ({"pre_tokenizer": None, "model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}}}, 15),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, None),
        ({"added_tokens": [{"content": "<x>", "lstrip": True}]}, None),
        ({"model": None}, None),
    ],
)
def test_what_one_token_may_stand_for_is_claimed_only_where_it_is_sure(
    changes: dict[str, Any], most: int | None
) -> None:
    assert most_characters(bpe(**changes)) == most


def test_no_text_has_fewer_tokens_than_claimed() -> None:
    most = most_characters(TOKENIZER.to_str())
    if most is not None:
        for text in ("hello world " * 50, " " * 999, "\u00e9\u65e5" * 99, "<s>" * 99, "aaaa" * 99):
            assert len(TOKENIZER.encode(text, add_special_tokens=False).ids) * most >= len(text)


def long_prompts() -> dict[str, api.Prompt]:
    """Prompts of each form that no context of the fake model holds, in messages of less than 1 MiB."""
    text = "hello world " * 80_000
    return {
        "text": api.Prompt(text=text),
        "chat": api.Prompt(chat=api.Chat(messages=[api.ChatMessage(role="user", content=text)])),
        "token_ids": api.Prompt(token_ids=api.TokenIds(ids=[1] * 900_000)),
    }


@pytest.mark.parametrize("form", ["text", "chat", "token_ids"])
async def test_a_prompt_that_cannot_fit_is_refused_before_anything_is_done_with_it(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.text.tokenizer.most_characters", lambda source: 16)
    prompt = long_prompts()[form]
    async with FakeMesh() as mesh:
        await mesh.stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text="hello world")))
        done: list[str] = []
        for place, name in (
            (validate, "check_known"),
            (validate, "check_request"),
            (hashing, "digest"),
            (Registry, "enter"),
            (TextModel, "text_of"),
            (TextModel, "encode"),
            (TextModel, "tokenize"),
        ):
            monkeypatch.setattr(place, name, lambda *_, name=name: done.append(name))
        request = api.GenerateRequest(prompt=prompt, request_id="long", sampling=api.Sampling(max_tokens=2))
        for call in (
            mesh.stub.Complete(request),
            mesh.stub.Tokenize(api.TokenizeRequest(prompt=prompt)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="more than the") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert done == []


def test_the_refusals_of_a_flood_have_a_rate_and_those_of_other_tenants_do_not_wait() -> None:
    pace, size, now = RefusalPace(), 1 << 20, 100.0
    first = [pace.delay_s("a", size, now) for _ in range(8)]
    assert first[:4] == [0.0] * 4
    assert first[4:] == pytest.approx([(number + 1) * size / BYTES_PER_S for number in range(4)])
    assert pace.delay_s("b", size, now) == 0.0
    delays = [pace.delay_s("a", size, now) for _ in range(200)]
    assert max(delays) <= MOST_S
    assert delays[-1] == 0.0, "what would wait too long is refused at once"
    assert pace.delay_s("a", size, now + 2 * MOST_S) == 0.0, "the burst is there again"


async def test_a_refusal_of_a_flood_is_held_back_and_ends_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.text.tokenizer.most_characters", lambda source: 16)
    monkeypatch.setattr(RefusalPace, "delay_s", lambda *_: 3600.0)
    async with FakeMesh() as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.stub.Complete(api.GenerateRequest(prompt=long_prompts()["text"]), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await mesh.stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text="hello world")))


async def test_the_event_loop_runs_while_a_long_text_is_tokenized() -> None:
    """Most methods of the tokenizers library hold the GIL: 1 MiB would stop everything for half a second."""
    model, turned, running = TextModel(mesh_pb2.Bundle.FromString(BUNDLE)), 0, True

    async def turn() -> None:
        nonlocal turned
        while running:
            await asyncio.sleep(0.001)
            turned += 1

    turning = asyncio.create_task(turn())
    with contextlib.closing(Encoder(1)) as encoder:
        await encoder.encode(model, api.Prompt(text="hello world " * 20_000), "a", 1 << 30)
    running = False
    await turning
    assert turned > 10


async def test_a_short_text_is_tokenized_at_once_unless_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model, short = TextModel(mesh_pb2.Bundle.FromString(BUNDLE)), api.Prompt(text="hello world")
    with contextlib.closing(Encoder(1)) as encoder:
        at_once = asyncio.create_task(encoder.encode(model, short, "a", 100))
        await asyncio.sleep(0)
        assert at_once.done(), "a thread had to wake up"
        async with busy() as (turns, gate, _):
            monkeypatch.setattr(encoder, "_short", turns)
            in_turn = asyncio.create_task(encoder.encode(model, short, "a", 100))
            await asyncio.sleep(0)
            assert not in_turn.done(), "it ran before its turn"
            gate.open.set()
            assert await in_turn == at_once.result()
