"""Profiled steps of the engine: phases of the host, kernels, the trace, and one profile at a time."""

import gzip
import json
import re
from pathlib import Path

import pytest

from services.worker.engine.profiling import PHASES, PhaseRecorder, Profiler, family_of
from tests.worker.conftest import EngineMaker
from tests.worker.drive import job, prompt_of, run


def test_a_profile_has_the_time_of_steps_by_phase_and_kernel(engine: EngineMaker) -> None:
    made = engine("llama")
    ordered = made.profiler.order(6)
    assert ordered is not None
    run(made, job(1, prompt_of(40), max_tokens=12))
    profile = ordered.result(0).report()
    assert profile.steps == 6
    assert list(profile.host) == [*PHASES, "elsewhere"]
    assert sum(profile.host.values()) == pytest.approx(profile.seconds)
    assert profile.host["launch"] > profile.host["planning"] > 0, "on a CPU a launch is the whole computation"
    assert not profile.on_gpu
    assert {"linear", "norms"} <= set(profile.families)
    assert sum(profile.families.values()) <= profile.seconds
    events = json.loads(gzip.decompress(profile.trace))["traceEvents"]
    assert {event["name"] for event in events} >= {*PHASES, "aten::linear"}


def test_profiling_does_not_change_answers(engine: EngineMaker) -> None:
    made, alone = engine("llama"), engine("llama")
    assert made.profiler.order(3) is not None
    jobs = [job(key, prompt_of(9 + key), max_tokens=6, temperature=1, seed=key) for key in range(3)]
    observed, plain = run(made, *jobs), run(alone, *jobs)
    assert {key: answer.tokens for key, answer in observed.items()} == {k: a.tokens for k, a in plain.items()}


def test_only_one_profile_runs_at_a_time_and_it_may_be_cancelled() -> None:
    profiler = Profiler(PhaseRecorder)
    first = profiler.order(100)
    assert first is not None
    assert profiler.order(1) is None
    profiler.step_begins()
    first.cancel()
    profiler.step_begins()
    second = profiler.order(1)
    assert second is not None
    profiler.step_begins()
    profiler.enter("planning")
    profiler.step_ends()
    profiler.step_begins()
    assert second.result(0).report().steps == 1


def test_a_profile_that_was_cancelled_before_it_began_is_replaced() -> None:
    """An idle engine takes no step that could end it."""
    profiler = Profiler(PhaseRecorder)
    for steps_between in (0, 2):
        first = profiler.order(3)
        assert first is not None
        first.cancel()
        for _ in range(steps_between):
            profiler.step_begins()
        second = profiler.order(1)
        assert second is not None
        for _ in range(2):
            profiler.step_begins()
        assert second.result(0).report().steps == 1


def test_every_kernel_of_the_project_belongs_to_a_family() -> None:
    files = (Path(__file__).parents[2] / "kernels").rglob("*.py")
    names = [name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)]
    assert len(names) > 15
    assert [name for name in names if family_of(name) == "other"] == []


def test_kernels_belong_to_families() -> None:
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "linear",
        "split_k_kernel": "linear",
        "dense_hopper_kernel": "linear",
        "resident_norm_hopper_kernel": "linear",
        "packed_gemm_kernel": "quantized linear",
        "store_sampled_kernel": "step inputs",
        "prefill_hopper_kernel": "attention",
        "split_kernel": "attention",
        "rms_norm_kernel": "norms",
        "rope_and_store_kernel": "rope and KV",
        "choose_kernel": "sampling",
        "Memcpy DtoH (Device -> Pinned)": "copies",
        "void at::native::elementwise": "other",
    }
    assert {name: family_of(name) for name in names} == names
