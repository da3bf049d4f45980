"""The floor of hits: calls of a server that answers at once, and of one that calls it first."""

import pytest
from grpc import aio

from bench.mesh import embed
from protos import inference_pb2_grpc as stubs


async def test_calls_of_one_and_of_two_servers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "HITS", 8)
    figures = await embed.measure_floor()
    names = [f"the floor: {calls}" for calls in ("one call of gRPC", "two, one behind the other")]
    assert [figure.name for figure in figures] == [f"{name}, {part}" for name in names for part in ("p50", "p99")]
    assert all(figure.value > 0 for figure in figures)
    assert [figure.note for figure in figures if figure.note] == ["8 calls"] * 2


async def test_the_second_server_returns_the_answer_of_the_first() -> None:
    async with embed.child_server("bare") as near, embed.child_server("bare", near) as behind:
        answers = []
        for address in (near, behind):
            async with aio.insecure_channel(address) as channel:
                answers.append(await embed.embed(stubs.InferenceStub(channel), [101, 7, 102]))
    assert answers[0] == answers[1]
    assert len(answers[0].embeddings[0].values) == 384
