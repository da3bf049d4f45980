"""The processes of a benchmark on several ranks: one that fails ends all, whenever it does."""

import multiprocessing
from collections.abc import Sequence
from typing import Any

import pytest

from bench.kernels import on_ranks as module


class Rank:
    """A process. codes: its exit codes at successive looks, of which the last one stays."""

    def __init__(self, *codes: int | None) -> None:
        self._codes = list(codes)
        self.sentinel, self.killed = self, False

    @property
    def exitcode(self) -> int | None:
        return self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]

    def start(self) -> None:
        """It runs."""

    def kill(self) -> None:
        self.killed = True


def wait(sentinels: Sequence[Rank]) -> None:
    """Asserts that one of these processes has ended."""
    assert any(each._codes[-1] is not None for each in sentinels), "waits for processes that wait for a failed one"


@pytest.mark.parametrize("looks", range(6))
def test_a_rank_that_fails_between_two_looks_ends_all(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, failed, over = Rank(None), Rank(*[None] * looks, 1), Rank(None, 0)
    ranks = iter([stuck, failed, over])

    class Spawn:
        def __init__(self, method: str) -> None:
            assert method == "spawn"

        def Process(self, **_: Any) -> Rank:
            return next(ranks)

    monkeypatch.setattr(multiprocessing, "get_context", Spawn)
    monkeypatch.setattr(module, "wait", wait)
    with pytest.raises(SystemExit, match="1"):
        module.on_ranks(3, lambda *_: None)
    assert stuck.killed
