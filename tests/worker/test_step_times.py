"""What is learnt from the seconds of an engine's steps."""

import pytest

from services.worker.engine.step_times import StepTimes


def test_one_stalled_step_is_no_pace() -> None:
    times = StepTimes(decode_s=0.002)
    times.observe(0, decodes=True, elapsed_s=0.5)
    assert times.decode_s <= 0.0025


def test_steps_that_stay_slow_become_the_pace() -> None:
    times = StepTimes(decode_s=0.002)
    for _ in range(30):
        times.observe(0, decodes=True, elapsed_s=0.02)
    assert times.decode_s == pytest.approx(0.02, rel=0.05)


def test_the_first_step_is_the_pace_and_faster_ones_follow_it() -> None:
    times = StepTimes()
    times.observe(0, decodes=True, elapsed_s=2.0)
    assert times.decode_s == 2.0
    for _ in range(30):
        times.observe(0, decodes=True, elapsed_s=0.01)
    assert times.decode_s < 0.02
