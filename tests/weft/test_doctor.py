"""`weft doctor` checks a Redis by each kind of URL, and whether GPUs reach one another."""

from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from weft.cli import doctor


def test_every_kind_of_redis_url_is_checked(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        for url in (redis.url, f"unix://{redis.embedded.socket}?db=1"):
            assert doctor._redis(url).verdict is doctor.Verdict.OK, url
        assert doctor._redis(redis.url.replace("redis://", "rediss://")).verdict is doctor.Verdict.BAD  # without TLS
    assert doctor._redis(f"unix://{redis.embedded.socket}").verdict is doctor.Verdict.BAD
    for url in ("redis://here:many", "http://127.0.0.1:6379", "here"):
        assert doctor._redis(url) == doctor.Finding(
            "redis", doctor.Verdict.BAD, "--redis-url is no redis://, rediss:// or unix:// URL"
        )


TWO = """ \tGPU0\tGPU1\t
 GPU0\tX\tOK\t
 GPU1\t{state}\tX\t

Legend:
  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""
ONE = " \tGPU0\t\n GPU0\tX\t\n"


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        (TWO.format(state="OK"), [(doctor.Verdict.OK, "all GPUs")]),
        (TWO.format(state="CNS"), [(doctor.Verdict.NOTE, "(CNS)")]),
        (ONE, []),
        ("", []),
    ],
)
def test_gpus_that_do_not_reach_one_another_are_reported(
    printed: str, found: list[tuple[doctor.Verdict, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "printed").write_text(printed)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ntest "$*" = "topo -p2p r" && exec /bin/cat {tmp_path}/printed\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = list(doctor._peers())
    assert [finding.verdict for finding in findings] == [verdict for verdict, _ in found]
    assert all(text in finding.detail for finding, (_, text) in zip(findings, found, strict=True))
