"""A short run of `make fuzz`: damaged frames, 300 cases, and each abuse of a connection once."""

from pathlib import Path

import pytest

from tests.fuzz import abuse, run
from tests.fuzz.__main__ import MODEL
from tests.fuzz.decoders import decode, fuzz_decoders
from tests.fuzz.messages import damaged, random_body
from tests.fuzz.routes import routes_of_a_gateway
from tests.fuzz.run import Fuzzer
from tests.mesh.harness import Mesh
from tests.redis_server import RedisServer


def test_no_damaged_frame_passes() -> None:
    assert fuzz_decoders(20_000, 1) >= 20_000


def test_decoders_refuse_what_they_do_not_understand() -> None:
    import random

    draw = random.Random(1)
    for _ in range(500):
        decode(damaged(draw, draw.choice((random_body(draw), draw.randbytes(60)))))


@pytest.mark.timeout(300)
async def test_nothing_that_is_sent_harms_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call ends with UNKNOWN or INTERNAL, no process ends, and the golden request keeps its answer."""
    monkeypatch.setattr(run, "FLOOD", 300)
    routes = await routes_of_a_gateway()
    with RedisServer(tmp_path / "redis") as redis:
        async with Mesh(tmp_path / "mesh", MODEL, redis_url=redis.url) as mesh:
            fuzzer = Fuzzer(mesh, routes, 1)
            report = await fuzzer.run(300)
            for number in range(len(abuse.GRPC) + len(abuse.HTTP)):
                await fuzzer.abuse(number)
    assert report.bugs == []
    assert report.cases == 300
    assert len(report.abused) == len(abuse.GRPC) + len(abuse.HTTP)
    assert {"INVALID_ARGUMENT", "OK", "HTTP 400"} <= report.codes.keys()
