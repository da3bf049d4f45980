"""The encoding engine on a runner without a model: batches, faults that stay with their text, ends of jobs."""

import math
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from services.worker.engine import encoding
from services.worker.engine.encoding import EncodingEngine
from services.worker.job import EncodeTask, Ended, EndReason, Job, SamplingParams, StepOutput
from services.worker.planner.dynamic_batch import DynamicBatch
from services.worker.runners.base import EncoderRunner, TextTokens
from services.worker.runners.cuda.encoders.encoder_network import EncoderNetwork, EncoderSizes
from services.worker.runners.cuda.encoders.runner import GpuTextRunner

POISON, LATE_POISON, NAN = 666, 667, 13
MOST_TOKENS, MOST_LENGTH = 64, 32


class SumRunner:
    """An `EncoderRunner` whose vectors are the number and the sum of a text's tokens."""

    most_tokens, width = MOST_TOKENS, 2

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.batches: list[int] = []
        """Tokens of each batch that was computed."""
        self.in_flight = self.most_in_flight = 0
        self._counting = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()

    def _count(self, more: int) -> None:
        with self._counting:
            self.in_flight += more
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def launch(self, batch: Sequence[TextTokens], /) -> Sequence[TextTokens]:
        self._count(1)
        if any(POISON in text.token_ids for text in batch):
            self._count(-1)
            raise RuntimeError("poison")
        return batch

    def collect(self, launched: Sequence[TextTokens], /) -> npt.NDArray[np.float32]:
        self.gate.wait(10)
        self._count(-1)
        tokens = sum(len(text.token_ids) for text in launched)
        assert tokens <= MOST_TOKENS
        if any(LATE_POISON in text.token_ids for text in launched):
            raise RuntimeError("poison")
        self.batches.append(tokens)
        sums = [math.nan if NAN in text.token_ids else sum(text.token_ids) for text in launched]
        return np.array([[len(text.token_ids), total] for text, total in zip(launched, sums, strict=True)], np.float32)


class MeetingRunner(SumRunner):
    """Computes a batch only beside another one."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2, timeout=10)

    def launch(self, batch: Sequence[TextTokens], /) -> Sequence[TextTokens]:
        self._both.wait()
        return super().launch(batch)


class FirstTokens(EncoderNetwork):
    """A network on a CPU whose vectors are a text's first token. The first batch fails."""

    def __init__(self) -> None:
        model = SimpleNamespace(
            embedding=torch.zeros(1, 4),
            config=SimpleNamespace(
                layers=1, unique_layers=1, first_position=0, head_dim=32, context_length=MOST_LENGTH
            ),
            projections=lambda: [SimpleNamespace(linear=SimpleNamespace(inputs=1, outputs=1))],
            width=1,
        )
        super().__init__(model)  # type: ignore[arg-type]
        self.fails = True

    def forward(self, words: Tensor, sizes: EncoderSizes, /) -> Tensor:
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("once")
        token_ids, starts = words[sizes.parts[0]], words[sizes.parts[3]]
        return token_ids[starts[:-1]].float()[:, None]


def engine_of(
    runner: EncoderRunner[Any], longest_wait_s: float = 0.0, most_texts: int = 64, lanes: int = 1
) -> EncodingEngine:
    batch = DynamicBatch(MOST_TOKENS, most_texts, longest_wait_s)
    return EncodingEngine(runner, frozenset({"embed"}), MOST_LENGTH, batch, lanes=lanes)


def job(key: int, *texts: list[int], **settings: float) -> Job:
    token_ids = [token for text in texts for token in text]
    task = EncodeTask(tuple(map(len, texts)))
    return Job(key, token_ids, len(token_ids), SamplingParams(1), encode=task, **settings)  # type: ignore[arg-type]


class Ends:
    """An `EngineEvents` that collects the ends of jobs."""

    def __init__(self, engine: EncodingEngine) -> None:
        self.by_key: dict[int, Ended] = {}
        self._engine = engine
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=engine.run, args=(self, self._stop))

    def launched(self, predicted_s: float, /) -> None:
        assert predicted_s >= 0

    def begun(self, output: StepOutput, /) -> None:
        raise AssertionError("texts have no first tokens")

    def stepped(self, output: StepOutput, /) -> None:
        with self._changed:
            self.by_key.update({ended.key: ended for ended in output.ended})
            self._changed.notify_all()

    def __enter__(self) -> "Ends":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._engine.wake()
        self._thread.join(10)

    def wait(self, count: int) -> dict[int, Ended]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.by_key) >= count, 10)
        return self.by_key


def values(ended: Ended) -> list[list[float]]:
    assert ended.vectors is not None, ended
    numbers: list[list[float]] = np.frombuffer(ended.vectors.data, "<f4").reshape(-1, ended.vectors.width).tolist()
    return numbers


depths = pytest.mark.parametrize(("depth", "lanes"), [(1, 1), (2, 1), (1, 2)])


def wait_until_computing(engine: EncodingEngine) -> None:
    while engine.stats().predicted_step_s == 0.0:
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2])
def test_two_hundred_texts_are_batched_without_padding(depth: int) -> None:
    runner = SumRunner(depth)
    engine, lengths = engine_of(runner), [1 + index * 7 % MOST_LENGTH for index in range(200)]
    for key, length in enumerate(lengths):
        engine.submit(job(key, [2] * length))
    with Ends(engine) as ends:
        ended = ends.wait(200)
    assert [values(ended[key]) for key in range(200)] == [[[length, 2 * length]] for length in lengths]
    assert sum(runner.batches) == sum(lengths)  # Not one row more than there are tokens.
    assert len(runner.batches) <= 1.2 * sum(lengths) / MOST_TOKENS
    assert engine.stats().steps == len(runner.batches)
    assert runner.most_in_flight == depth  # Full batches wait for one another on the device.


@depths
def test_a_poisoned_text_fails_alone(depth: int, lanes: int) -> None:
    runner = SumRunner(depth)
    engine = engine_of(runner, lanes=lanes)
    for key in range(8):
        engine.submit(job(key, [key, key], [POISON if key == 3 else 1], [5]))
    engine.submit(job(8, [NAN]))
    engine.submit(job(9, [LATE_POISON]))
    with Ends(engine) as ends:
        ended = ends.wait(10)
    failed = {key: end for key, end in ended.items() if end.reason is EndReason.ERROR}
    assert {key: (end.failed_text, end.error and end.error.reason) for key, end in failed.items()} == {
        3: (1, "INTERNAL"),
        8: (0, "NUMERIC"),
        9: (0, "INTERNAL"),
    }
    assert all(values(ended[key]) == [[2, 2 * key], [1, 1], [1, 5]] for key in range(8) if key != 3)


def test_a_batch_in_flight_keeps_its_vectors_while_parts_of_a_failed_one_are_computed() -> None:
    engine = engine_of(GpuTextRunner(FirstTokens(), MOST_TOKENS, 4), most_texts=4)
    for key in (1, 2, 3):
        engine.submit(job(key, *([10 * key + text] * 4 for text in range(4))))
    with Ends(engine) as ends:
        ended = ends.wait(3)
    assert {key: values(ended[key]) for key in (1, 2, 3)} == {
        key: [[10 * key + text] for text in range(4)] for key in (1, 2, 3)
    }


def test_far_deadlines_of_ended_jobs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_FEW_DEADLINES", 4)
    engine = engine_of(SumRunner())
    with Ends(engine) as ends:
        for key in range(1, 41):
            engine.submit(job(key, [1], deadline=time.monotonic() + 1e6))
            assert ends.wait(key)[key].reason is EndReason.STOP
        assert len(engine._deadlines) <= 4 + 2


@depths
def test_jobs_end_by_cancel_deadline_and_bad_texts(depth: int, lanes: int) -> None:
    runner = SumRunner(depth)
    engine = engine_of(runner, lanes=lanes)
    runner.gate.clear()
    with Ends(engine) as ends:
        engine.submit(job(1, [1]))
        wait_until_computing(engine)
        engine.submit(job(2, [1]))
        engine.submit(job(3, [1], deadline=time.monotonic() - 1))
        engine.submit(job(4, [1] * (MOST_LENGTH + 1)))
        engine.submit(Job(5, [1], 1, SamplingParams(4)))
        engine.cancel(2)
        runner.gate.set()
        ended = ends.wait(5)
    assert [ended[key].reason.value for key in range(1, 6)] == ["stop", "cancelled", "deadline", "error", "error"]
    assert runner.batches == [1]  # What has ended is not computed.


@depths
def test_a_batch_waits_for_texts_that_come_and_no_longer(depth: int, lanes: int) -> None:
    runner = SumRunner(depth)
    engine = engine_of(runner, longest_wait_s=30.0, lanes=lanes)
    with Ends(engine) as ends:
        engine.submit(job(0, [1]))
        ends.wait(1)  # Nothing else is expected: it did not wait for half a minute.
        for key in range(1, 30):
            engine.submit(job(key, [1] * 3))
        ends.wait(30)
    assert len(runner.batches) < 15


def test_full_batches_are_computed_side_by_side_in_lanes() -> None:
    runner = MeetingRunner()
    engine = engine_of(runner, lanes=2)
    for key in range(8):
        engine.submit(job(key, [key] * MOST_LENGTH))
    with Ends(engine) as ends:
        ended = ends.wait(8)
    assert [values(ended[key]) for key in range(8)] == [[[MOST_LENGTH, key * MOST_LENGTH]] for key in range(8)]
    assert runner.batches == [MOST_TOKENS] * 4


def test_few_texts_wait_for_the_batch_in_flight_and_half_as_many_begin_beside_it() -> None:
    runner = SumRunner()
    engine = engine_of(runner, lanes=2)
    runner.gate.clear()
    with Ends(engine) as ends:
        engine.submit(job(1, [1] * 20))
        wait_until_computing(engine)
        for key in range(2, 12):
            engine.submit(job(key, [1]))
        while runner.most_in_flight < 2:
            time.sleep(0.001)
        runner.gate.set()
        ends.wait(11)
    assert sorted(runner.batches) == [10, 20]
