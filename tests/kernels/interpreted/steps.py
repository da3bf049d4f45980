"""Whole steps of the GPU's runner: plain, in parts, with adapters, with guesses."""

from typing import Any

import pytest

from tests.kernels.steps import (
    check_draft_guesses,
    check_guesses,
    check_guesses_under_masks,
    check_heads_guesses,
    check_measured_scales,
    check_parallel_guesses,
    check_parts_of_a_step,
    check_steps,
    check_steps_with_adapters,
)
from tests.tiny_config import gpt2_settings


@pytest.mark.parametrize("model", [{}, gpt2_settings(128)], ids=["llama", "gpt2"])
def test_whole_steps_of_the_runner(model: dict[str, Any]) -> None:
    check_steps(**model)


def test_parts_of_a_step_with_masks() -> None:
    check_parts_of_a_step()


def test_steps_with_adapters() -> None:
    check_steps_with_adapters()


def test_steps_with_guesses() -> None:
    check_guesses()


def test_guesses_under_masks() -> None:
    check_guesses_under_masks()


def test_guesses_of_a_draft_model() -> None:
    check_draft_guesses()


def test_guesses_of_a_parallel_draft_model() -> None:
    check_parallel_guesses()


def test_guesses_of_draft_heads() -> None:
    check_heads_guesses()


def test_scales_that_the_runner_measures() -> None:
    check_measured_scales()
