"""Numerics: every option changes them, or is known to change no bit; fingerprint and block layout follow from them."""

from typing import Any

import pytest

from services.worker.numerics import Numerics
from services.worker.options import EngineOptions

# An option whose value may change a token's bits, and another value of it.
CHANGES_BITS: dict[str, Any] = {
    "engine": "gpu",
    "deterministic": False,
    "dtype": "float16",
    "quantize": "int8",
    "quantize_head": "int8",
    "exact_inputs": True,
    "kv_dtype": "int8",
    "kv_scales": "dynamic",
    "fetch_dtype": "fp8",
    "threads": 3,
    "tensor_parallel": 2,
    "expert_parallel": True,
}
CHANGES_NO_BIT = {
    "max_batch_size",  # sizes of batches, chunks and blocks: in deterministic mode they change no bit
    "max_seq_length",
    "block_size",
    "step_tokens",
    "max_wait_ms",
    "chunk_tokens",
    "kv_bytes",
    "kv_blocks",
    "prefix_cache",  # where keys and values are stored, not their values
    "host_kv_bytes",
    "speculate",  # a guess is kept if it is what would be drawn
    "speculate_depth",
    "draft_quantize",
    "adapter_slots",  # an adapter has a fingerprint of its own
    "adapter_rank",
    "paced_acceptance",
    "pipeline_parallel",  # which process computes a layer
    "paced_step_ms",  # the time of tokens, not their values
    "paced_prefill_rate",
}
STRICT = EngineOptions(deterministic=True)


def test_every_option_is_listed_as_changing_bits_or_not() -> None:
    assert set(EngineOptions.model_fields) == CHANGES_BITS.keys() | CHANGES_NO_BIT
    assert not CHANGES_BITS.keys() & CHANGES_NO_BIT


@pytest.mark.parametrize("option", CHANGES_BITS)
def test_options_that_change_bits_change_the_numerics(option: str) -> None:
    changed = STRICT.model_copy(update={option: CHANGES_BITS[option]})
    assert changed.numerics != STRICT.numerics
    assert layout(changed) != layout(STRICT) or option in ("kv_dtype", "kv_scales", "fetch_dtype")


@pytest.mark.parametrize("option", sorted(CHANGES_NO_BIT))
def test_options_that_change_no_bit_leave_the_numerics_as_they_are(option: str) -> None:
    value = False if option == "prefix_cache" else 7
    assert STRICT.model_copy(update={option: value}).numerics == STRICT.numerics


def layout(options: EngineOptions) -> str:
    return options.numerics.block_layout(16, 2, 4, 64)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ["float32", "False"]),
        ({"engine": "gpu"}, ["bfloat16", "False"]),
        ({"engine": "torch", "deterministic": True, "threads": 2}, ["float32", "True"]),
        ({"engine": "gpu", "deterministic": True}, ["bfloat16", "True", "gpu"]),
        ({"engine": "paced"}, ["float32", "False", "paced"]),
        ({"tensor_parallel": 2}, ["float32", "False"]),
        ({"tensor_parallel": 2, "deterministic": True}, ["float32", "True", "tensor2"]),
        ({"tensor_parallel": 2, "expert_parallel": True}, ["float32", "False"]),
        (
            {"tensor_parallel": 2, "expert_parallel": True, "deterministic": True},
            ["float32", "True", "tensor2+experts"],
        ),
        ({"pipeline_parallel": 2, "deterministic": True}, ["float32", "True"]),
        (
            {"dtype": "float16", "quantize": "int4", "kv_dtype": "fp8", "kv_scales": "dynamic"},
            ["float16", "False", "int4", "fp8", "dynamic"],
        ),
        ({"fetch_dtype": "fp8"}, ["float32", "False", "fetched in fp8"]),
    ],
)
def test_fingerprints_depend_on_the_numerics(options: dict[str, Any], parts: list[str]) -> None:
    assert EngineOptions(**options).numerics.fingerprint_parts() == parts


@pytest.mark.parametrize(
    ("options", "stored", "digest", "expected"),
    [
        ({}, "float32", "", "float32/16/2x4x64/0of1"),
        ({"deterministic": True}, "float32", "", "float32/16/2x4x64/0of1/1"),
        ({"deterministic": True, "threads": 3}, "float32", "", "float32/16/2x4x64/0of1/3"),
        ({"threads": 3}, "float32", "", "float32/16/2x4x64/0of1"),
        ({"engine": "gpu", "deterministic": True}, "bfloat16", "", "bfloat16/16/2x4x64/0of1/gpu"),
        ({"engine": "gpu"}, "float8_e4m3fn", "ab12", "bfloat16+float8_e4m3fn/16/2x4x64/0of1/ab12"),
        ({"quantize": "int8"}, "int8", "", "float32+int8/16/2x4x64/0of1/int8"),
        ({"tensor_parallel": 2}, "float32", "", "float32/16/2x4x64/tensor2"),
        ({"tensor_parallel": 2, "expert_parallel": True}, "float32", "", "float32/16/2x4x64/tensor2+experts"),
    ],
)
def test_layouts_of_blocks_depend_on_the_numerics(
    options: dict[str, Any], stored: str, digest: str, expected: str
) -> None:
    assert EngineOptions(**options).numerics.loaded(stored, digest).block_layout(16, 2, 4, 64) == expected


def test_shards_have_other_blocks() -> None:
    plain = Numerics("float32", "cpu", 0, deterministic=False)
    second = Numerics("float32", "cpu", 0, deterministic=False, shard="1of2")
    assert second.block_layout(16, 2, 4, 64) != plain.block_layout(16, 2, 4, 64)
    assert second.fingerprint_parts() == plain.fingerprint_parts(), "all shards of a model have one fingerprint"
