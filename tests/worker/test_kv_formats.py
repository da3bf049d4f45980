"""Keys and values stored in 8 bits: accuracy of answers, memory, scales of the checkpoint, deterministic mode."""

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from tests.worker.conftest import EngineMaker
from tests.worker.drive import Answer, decoder_of, job, open_engine, prompt_of, run

PROMPTS = [prompt_of(length) for length in (5, 33, 90)]
TOKENS = 24
# Equal choices of 72, and mean difference of log-probabilities: 3 bits of mantissa are few for such small models.
NEARNESS = {"int8": (66, 0.06), "fp8": (45, 0.3)}


@pytest.mark.parametrize("shape", ["llama", "mistral-window", "qwen3", "demo"])
def test_answers_stay_near_those_of_full_precision(shape: str, engine: EngineMaker) -> None:
    """Each token is generated after the tokens of the exact engine (teacher forcing)."""
    exact = run(engine(shape), *[job(key, prompt, max_tokens=TOKENS, logprobs=0) for key, prompt in enumerate(PROMPTS)])
    agreed: dict[str, int] = {}
    for kind, (fewest, most) in NEARNESS.items():
        wanted = [
            job(100 * key + at, prompt, emitted=exact[key].tokens[:at], max_tokens=at + 1, logprobs=20)
            for key, prompt in enumerate(PROMPTS)
            for at in range(TOKENS)
        ]
        got = run(engine(shape, kv_dtype=kind), *wanted)
        pairs = [(exact[key], at, got[100 * key + at]) for key in range(len(PROMPTS)) for at in range(TOKENS)]
        agreed[kind] = sum(answer.tokens[0] == its.tokens[at] for its, at, answer in pairs)
        mean = statistics.mean(_difference(its, at, answer) for its, at, answer in pairs)
        assert agreed[kind] >= fewest
        assert 0 < mean < most  # a difference of zero would mean that no value was rounded
    assert agreed["int8"] >= agreed["fp8"]


def _difference(its: Answer, at: int, answer: Answer) -> float:
    """Difference of log-probability of the exact engine's token; 0 if it is not among the most likely ones."""
    own, tops = its.logprobs[at], answer.tops[0]
    assert own is not None
    assert tops is not None
    return abs(dict(tops).get(its.tokens[at], own) - own)


@pytest.mark.parametrize(("kind", "gain"), [("fp8", 2.0), ("int8", 32 / 17)])
def test_the_same_bytes_hold_more_tokens(engine: EngineMaker, kind: str, gain: float) -> None:
    full = engine("demo", kv_blocks=None, kv_bytes=64 << 20, dtype="bfloat16")
    small = engine("demo", kv_blocks=None, kv_bytes=64 << 20, dtype="bfloat16", kv_dtype=kind)
    assert small.memory.kv_tokens / full.memory.kv_tokens == pytest.approx(gain, rel=0.01)
    assert small.memory.kv <= 64 << 20
    assert small.block_bytes == pytest.approx(full.block_bytes / gain)
    assert small.block_layout != full.block_layout
    assert sum(layer.numel() * layer.element_size() for layer in decoder_of(small).kv.layers) == small.memory.kv


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_blocks_move_out_and_back(engine: EngineMaker, kind: str) -> None:
    one = engine(kv_dtype=kind)
    run(one, job(1, prompt_of(64), max_tokens=2))
    contents = decoder_of(one).kv.read([1, 2, 3])
    assert {len(page) for page in contents} == {one.block_bytes}
    decoder_of(one).kv.scrub([1, 2])
    assert decoder_of(one).kv.read([1]) == [bytes(one.block_bytes)]
    decoder_of(one).kv.write([1, 2], contents[:2])
    assert decoder_of(one).kv.read([1, 2, 3]) == contents


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_deterministic_mode_holds_with_8_bit_keys_and_values(engine: EngineMaker, kind: str) -> None:
    wanted = [
        job(key, prompt_of(20 + 31 * key), max_tokens=20, temperature=0.9, seed=key, logprobs=0) for key in range(4)
    ]
    made = engine(deterministic=True, kv_dtype=kind)
    alone = {one.key: run(made, one)[one.key] for one in wanted}
    crowd = [job(50 + key, prompt_of(7 + 3 * key, seed=2), max_tokens=12) for key in range(20)]
    chunked = engine(deterministic=True, kv_dtype=kind, max_batch_size=4, step_tokens=11, prefix_cache=False)
    for answers in (run(made, *crowd, *wanted), run(chunked, *wanted)):
        for key, answer in alone.items():
            assert (answers[key].tokens, answers[key].logprobs) == (answer.tokens, answer.logprobs)


# ---- scales of the checkpoint ----


def with_scales(folder: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    """A copy of a one-file checkpoint with additional scale tensors."""
    shutil.copytree(folder, target)
    save_file(load_file(target / "model.safetensors") | scales, target / "model.safetensors", {"format": "pt"})
    return target


def open_fp8(folder: Path) -> GenerationEngine:
    return open_engine(folder, kv_blocks=64, kv_dtype="fp8")


def test_scales_of_the_checkpoint_are_used(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Scales that lose nearly all precision change the answer; powers of two hardly change it."""
    folder, layer = checkpoint("llama"), "model.layers.0.self_attn"
    named = {f"{layer}.k_scale": torch.tensor([0.5, 2.0]), f"{layer}.v_scale": torch.tensor(0.25)}
    fine = open_fp8(with_scales(folder, tmp_path / "fine", named))
    scales = decoder_of(fine).model.layers[0].attention.kv_scales
    assert scales is not None
    assert scales.tolist() == [[0.5, 2.0], [0.25, 0.25]]
    assert decoder_of(fine).model.layers[1].attention.kv_scales is None
    coarse = {f"{layer}.{kind}_proj.{kind}_scale": torch.tensor([4000.0]) for kind in "kv"}
    wanted = job(1, prompt_of(40), max_tokens=12, logprobs=0)
    plain, same, other = (
        run(engine, wanted)[1]
        for engine in (open_fp8(folder), fine, open_fp8(with_scales(folder, tmp_path / "coarse", coarse)))
    )
    assert same.tokens == plain.tokens
    assert other.logprobs != plain.logprobs


@pytest.mark.parametrize(("strategy", "queries"), [("tensor", False), ("attn_head", False), ("attn_head", True)])
def test_a_checkpoint_calibrated_for_fp8_is_served_in_fp8(
    checkpoint: Callable[[str], Path], tmp_path: Path, strategy: str, queries: bool
) -> None:
    """The checkpoint selects fp8 without an option. Its scales of queries are not used."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    stored = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, dynamic=False)
    attention = {"attention": QuantizationScheme(targets=["LlamaAttention"], input_activations=stored)}
    how = {"config_groups": attention} if queries else {"config_groups": {}, "kv_cache_scheme": stored}
    scheme = QuantizationConfig(**how, format="dense")
    apply_quantization_config(model, scheme, show_progress=False)
    scales = {name: torch.rand_like(t) + 0.1 for name, t in model.state_dict().items() if name.endswith("_scale")}
    folder = with_scales(checkpoint("llama"), tmp_path / "calibrated", scales)
    config = json.loads((folder / "config.json").read_text())
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    settings = compressor.quantization_config.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    engine = open_engine(folder, kv_blocks=64)
    assert all(layer.dtype == torch.float8_e4m3fn for layer in decoder_of(engine).kv.layers)
    for number, layer in enumerate(decoder_of(engine).model.layers):
        assert layer.attention.kv_scales is not None
        for kind, mine in zip("kv", layer.attention.kv_scales, strict=True):
            its = scales[f"model.layers.{number}.self_attn.{kind}_scale"].flatten()
            assert torch.equal(mine, its.expand(2))
    assert len(run(engine, job(1, prompt_of(40), max_tokens=8))[1].tokens) == 8


@pytest.mark.parametrize(
    ("scale", "complaint"),
    [(torch.ones(5), "has 5 scales for 2 key/value heads"), (torch.tensor(0.0), "not positive numbers")],
)
def test_invalid_scales_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, scale: torch.Tensor, complaint: str
) -> None:
    folder = with_scales(checkpoint("llama"), tmp_path / "bad", {"model.layers.1.self_attn.v_scale": scale})
    with pytest.raises(CheckpointError, match=complaint):
        open_fp8(folder)


# ---- scales that are measured ----


def louder(folder: Path, target: Path, times: float) -> Path:
    """A copy with the first layer's values `times` larger and its output weights `times` smaller."""
    tensors, layer = load_file(folder / "model.safetensors"), "model.layers.0.self_attn"
    tensors[f"{layer}.v_proj.weight"] *= times
    tensors[f"{layer}.o_proj.weight"] /= times
    shutil.copytree(folder, target)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def open_measured(folder: Path, **options: Any) -> GenerationEngine:
    return open_engine(folder, kv_blocks=64, kv_scales="dynamic", **options)


@pytest.mark.parametrize("times", [2.0**16, 2.0**-16])
def test_measured_scales_hold_numbers_beyond_those_of_fp8(
    checkpoint: Callable[[str], Path], tmp_path: Path, times: float
) -> None:
    """Measured scales keep the precision of values that are too large or too small for fp8."""
    plain, loud = checkpoint("llama"), louder(checkpoint("llama"), tmp_path / "loud", times)
    wanted = job(1, prompt_of(40), max_tokens=12, logprobs=0)
    good, same, lost = (
        run(engine, wanted)[1]
        for engine in (open_measured(plain, kv_dtype="fp8"), open_measured(loud, kv_dtype="fp8"), open_fp8(loud))
    )
    assert same.tokens == good.tokens
    assert same.logprobs == pytest.approx(good.logprobs, abs=1e-4)
    assert lost.logprobs != pytest.approx(good.logprobs, abs=1e-2)


def test_measured_scales_are_powers_of_two_with_room(checkpoint: Callable[[str], Path]) -> None:
    engine, again = (open_measured(checkpoint("qwen3"), kv_dtype="fp8") for _ in range(2))
    for layer, other in zip(decoder_of(engine).model.layers, decoder_of(again).model.layers, strict=True):
        scales, others = layer.attention.kv_scales, other.attention.kv_scales
        assert scales is not None
        assert others is not None
        assert scales.shape == (2, layer.attention.kv_heads)
        assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
        assert torch.equal(scales, others)
    run(engine, job(1, prompt_of(60), max_tokens=2))
    largest = max(float(layer.float().abs().max()) for layer in decoder_of(engine).kv.layers)
    assert 0 < largest < 448
    assert engine.block_layout == again.block_layout != open_fp8(checkpoint("qwen3")).block_layout


def test_a_checkpoints_scales_are_not_measured(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    named = {"model.layers.0.self_attn.k_scale": torch.tensor([0.5, 2.0])}
    engine = open_measured(with_scales(checkpoint("llama"), tmp_path / "named", named), kv_dtype="fp8")
    scales = [layer.attention.kv_scales for layer in decoder_of(engine).model.layers]
    assert scales[0] is not None
    assert scales[0].tolist() == [[0.5, 2.0], [1.0, 1.0]]
    assert scales[1] is None


def test_only_fp8_has_scales_to_measure(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match="KV_SCALES=dynamic is for keys and values in fp8"):
        open_measured(checkpoint("llama"), kv_dtype="int8")
