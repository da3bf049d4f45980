"""Quantized checkpoints are read as their writers define them and served as the dequantized model is."""

import json
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels import quantized_weights
from kernels.quantized_weights import Fp8Weight, Int4Weight, Int8Weight, Nf4Weight, QuantizedWeight
from services.worker.errors import CheckpointError
from services.worker.loader import presets
from services.worker.loader.config import load_config, read_config
from services.worker.loader.formats.compressed_tensors import CompressedTensors, is_named
from services.worker.loader.formats.registry import reader_of
from services.worker.loader.quantized import expected_bytes
from services.worker.loader.tensors import Checkpoint, open_checkpoint
from services.worker.models.config import count_embeddings
from tests.checkpoints import SMALL_DEMO, VOCAB, Shape, make_checkpoint
from tests.quantized import WRITERS, Written, modules_of, write
from tests.served import (
    GOLDEN,
    GOLDENS,
    WIDE,
    assert_served_like,
    engine_of,
    read,
    save,
    tolerance_of,
    twin_of,
    weights_of,
)
from tests.worker.drive import built, decoder_of, job, prompt_of, run

KINDS: Mapping[str, type[QuantizedWeight]] = {
    "int4": Int4Weight,
    "w8a16": Int8Weight,
    "w8a8": Int8Weight,
    "fp8": Fp8Weight,
    "nf4": Nf4Weight,
}
# On CPUs bitsandbytes dequantizes wrongly if a block of 64 starts within a row: all inputs are multiples of 64.
_EVEN = {"intermediate_size": 128}
SHAPES: Mapping[str, Shape] = {
    "llama": Shape("llama", {**_EVEN, "attention_bias": True, "mlp_bias": True}),
    "mistral": Shape("mistral", {**_EVEN, "sliding_window": 24}, shard_bytes=150_000),
    "qwen2": Shape("qwen2", {**_EVEN, "tie_word_embeddings": True}),
    "qwen3": Shape("qwen3", {**_EVEN, "head_dim": 32}),
    "wide": WIDE,
}


FAMILIES = ("awq-mistral", "awq-qwen2", "gptq-mistral", "gptq-qwen2")
ORDERED = ("gptq-act-order", "gptq-asymmetric", "gptq-mistral")
LLM_COMPRESSOR: Mapping[str, str] = {
    "llm-compressor-gptq": "int4",
    "llm-compressor-awq": "int4",
    "llm-compressor-w8a8": "w8a8",
    "llm-compressor-fp8-dynamic": "fp8",
    "llm-compressor-fp8-heads": "fp8",
}


def demo(folder: Path) -> Path:
    """The demo model in float32, for comparisons with dequantized twins."""
    shutil.copytree(SMALL_DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save({name: tensor.float() for name, tensor in read(SMALL_DEMO).items()}, folder)
    return folder


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Written]:
    """written(kind, shape): a quantized checkpoint and its twin."""
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def plain(shape: str) -> Path:
        return demo(folder / shape) if shape == "demo" else make_checkpoint(folder / shape, SHAPES[shape])

    @cache
    def make(kind: str, shape: str) -> Written:
        return write(kind, plain(shape), folder / f"{shape}-quantized")

    return make


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", WRITERS)
def test_weights_equal_those_that_their_writer_dequantizes(
    kind: str, shape: str, written: Callable[[str, str], Written]
) -> None:
    made = written(kind, shape)
    expected = {name: weight for name, weight in read(made.twin).items() if name.endswith("_proj.weight")}
    got = weights_of(made.folder, {name.removesuffix(".weight"): weight.shape for name, weight in expected.items()})
    for name, weight in expected.items():
        mine = got[name.removesuffix(".weight")]
        assert isinstance(mine, KINDS[kind.partition("-")[0]])
        torch.testing.assert_close(mine.dequantize(torch.float32), weight, rtol=1e-6, atol=1e-6)
    head = (
        weights_of(made.folder, {"lm_head": torch.Size((VOCAB, SHAPES[shape].settings.get("hidden_size", 64)))})
        if "lm_head.weight" in read(made.twin)
        else {}
    )
    assert all(isinstance(weight, Tensor) for weight in head.values()), "the head is not quantized"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, "wide") for kind in WRITERS),
        *((kind, "demo") for kind in ("int4", "w8a16", "w8a8", "fp8-channel", "fp8-blocks", "nf4-nested")),
        *(
            (kind, shape)
            for kind in ("int4-asymmetric", "w8a8", "fp8-channel", "nf4-nested")
            for shape in SHAPES
            if shape != "wide"
        ),
    ],
)
def test_answers_are_those_of_the_dequantized_model(
    kind: str, shape: str, written: Callable[[str, str], Written]
) -> None:
    made = written(kind, shape)
    opened = built(made.folder, kv_blocks=256, max_batch_size=16)
    assert_served_like(made.twin, opened.engine, tolerance_of(kind))
    assert opened.parameters == sum(tensor.numel() for tensor in read(made.twin).values())


@pytest.mark.parametrize("name", [*GOLDENS, *FAMILIES, *LLM_COMPRESSOR])
def test_golden_weights_equal_those_that_their_writer_dequantizes(name: str) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    got = weights_of(GOLDEN / name, {module: weight.shape for module, weight in expected.items()})
    assert len(expected) == 7
    for module, weight in expected.items():
        mine = got[module]
        assert isinstance(mine, KINDS[LLM_COMPRESSOR.get(name, "int4")])
        if isinstance(mine, Int4Weight):
            assert (mine.order is not None) == (name in ORDERED)
        torch.testing.assert_close(mine.dequantize(torch.float32), weight.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [*GOLDENS, *FAMILIES, *LLM_COMPRESSOR])
def test_answers_of_golden_checkpoints(name: str, tmp_path: Path) -> None:
    rounded = name.endswith("fp8-heads")  # keys and values are quantized too, unlike the twin's
    tolerance = 0.5 if rounded else tolerance_of(LLM_COMPRESSOR.get(name, "int4"))
    twin = twin_of(GOLDEN / name, tmp_path / "twin")
    assert_served_like(twin, engine_of(GOLDEN / name), tolerance, mean=rounded)


def test_scales_of_heads_that_llm_compressor_calibrated() -> None:
    folder = GOLDEN / "llm-compressor-fp8-heads"
    engine, stored = engine_of(folder), read(folder)
    assert all(layer.dtype == torch.float8_e4m3fn for layer in decoder_of(engine).kv.layers)
    for number, layer in enumerate(decoder_of(engine).model.layers):
        scales = [stored[f"model.layers.{number}.self_attn.{kind}_scale"].flatten() for kind in "kv"]
        assert layer.attention.kv_scales is not None
        assert torch.equal(layer.attention.kv_scales, torch.stack(scales))
        assert len(set(scales[0].tolist())) == 2, "each head has its own scale"


def edited(name: str, folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> Path:
    """A golden checkpoint with its tensors and settings changed."""
    shutil.copytree(GOLDEN / name, folder)
    tensors, config = read(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    save(tensors, folder)
    return folder


def test_the_second_format_of_gptq_stores_unshifted_zeros(tmp_path: Path) -> None:
    def second(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
        settings["checkpoint_format"] = "gptq_v2"
        for name in tensors:
            if name.endswith("qzeros"):
                nibbles = torch.stack([(tensors[name] >> 4 * i) & 15 for i in range(8)])
                words = sum(((nibble + 1) & 15).long() << 4 * i for i, nibble in enumerate(nibbles))
                tensors[name] = torch.as_tensor(words).to(torch.int32)

    folder = edited("gptq-asymmetric", tmp_path / "v2", second)
    expected = load_file(GOLDEN / "gptq-asymmetric" / "expected.safetensors")
    for module, weight in weights_of(folder, {each: tensor.shape for each, tensor in expected.items()}).items():
        assert isinstance(weight, Int4Weight)
        torch.testing.assert_close(weight.dequantize(torch.float32), expected[module].float(), rtol=1e-3, atol=1e-4)


def test_a_lone_file_may_have_the_name_that_autogptq_gives_it(tmp_path: Path) -> None:
    folder = edited("gptq", tmp_path / "named", lambda tensors, _: None)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors or model.safetensors.index.json is needed"):
        engine_of(folder)  # the folder also contains the file of expected weights
    (folder / "expected.safetensors").unlink()
    assert built(folder, kv_blocks=8).parameters > 0


def test_biases_of_zeros_are_accepted(tmp_path: Path) -> None:
    folder = edited(
        "gptq", tmp_path / "biased", lambda t, _: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)})
    )
    assert built(folder, kv_blocks=8).parameters > 0


@pytest.mark.parametrize("names", [("kv_scale",), ("k_proj.output_scale", "v_proj.output_scale")])
def test_autofp8_checkpoints_with_scales_of_the_cache(
    names: tuple[str, ...], written: Callable[[str, str], Written], tmp_path: Path
) -> None:
    """AutoFP8 writes `kv_cache_scheme` as a string and scales as scalars; early versions have one for both."""
    made = written("fp8-static", "llama")
    folder = Path(shutil.copytree(made.folder, tmp_path / "autofp8"))
    tensors = {name: t.reshape(()) if name.endswith("_scale") else t for name, t in read(folder).items()}
    layers = range(load_config(folder).layers)
    tensors |= {f"model.layers.{n}.self_attn.{name}": torch.tensor(0.5) for n in layers for name in names}
    save(tensors, folder)
    settings = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**settings, "kv_cache_scheme": "static"}
    (folder / "config.json").write_text(json.dumps(config))
    engine = engine_of(folder)
    assert all(layer.dtype == torch.float8_e4m3fn for layer in decoder_of(engine).kv.layers)
    scales = [layer.attention.kv_scales for layer in decoder_of(engine).model.layers]
    assert [scale.tolist() for scale in scales if scale is not None] == [[[0.5, 0.5], [0.5, 0.5]]] * len(layers)
    expected = {name.removesuffix(".weight"): t for name, t in read(made.twin).items() if name.endswith("_proj.weight")}
    for name, weight in weights_of(folder, {name: t.shape for name, t in expected.items()}).items():
        torch.testing.assert_close(
            quantized_weights.dequantize(weight, torch.float32), expected[name], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(
    "pattern",
    [
        r".*",
        r".*self_attn\.(q|k|v)_proj",
        r"model\.layers\.\d+\.mlp\..*",
        r"model\.layers\.(?:[0-9]|1[0-9])\.",
        r"^(?!.*(gate|up)).*_proj$",
        r"(?i).*DOWN_proj\Z",
        r".*layers\.[0-9]{1,2}\.mlp\.(?P<kind>gate|up)_proj",
        r"model\.layers\.(?!0\.)\d+?\b.*",
        r".*\.[^.]*(?<=k)_proj",
        r"layers",
    ],
)
def test_patterns_match_as_in_the_library(pattern: str) -> None:
    modules = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
    names = ["lm_head", *(f"model.layers.{layer}.{module}" for layer in (0, 1, 10, 31) for module in modules)]
    target = f"re:{pattern}"
    meant = [name for name in names if match_name(name, target)]
    assert [name for name in names if is_named(name, target)] == meant
    assert bool(meant) is (pattern != "layers"), "a pattern is matched from the start of a name"


@pytest.mark.parametrize("first", ["Linear", "re:.*down_proj"])
def test_a_group_that_names_a_module_precedes_a_general_one(
    first: str, written: Callable[[str, str], Written], tmp_path: Path
) -> None:
    """If two groups of compressed-tensors match a module, in any order, the same applies as in the library."""
    fours, eights = written("int4", "llama"), written("w8a16-packed", "llama")
    folder = Path(shutil.copytree(fours.folder, tmp_path / "mixed"))
    down = {name: tensor for name, tensor in read(eights.folder).items() if ".down_proj." in name}
    save({name: t for name, t in read(folder).items() if ".down_proj." not in name} | down, folder)
    configs = [json.loads((made.folder / "config.json").read_text()) for made in (fours, eights)]
    four, eight = (config["quantization_config"]["config_groups"]["group_0"] for config in configs)
    groups = {"a": four, "b": {**eight, "targets": ["re:.*down_proj"]}}
    groups = dict(sorted(groups.items(), reverse=first != "Linear"))
    configs[0]["quantization_config"]["config_groups"] = groups
    (folder / "config.json").write_text(json.dumps(configs[0]))

    model = AutoModelForCausalLM.from_pretrained(fours.twin, dtype=torch.float32)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]), show_progress=False)
    modules = {name: module for name, module in model.named_modules() if name.endswith("_proj")}
    got = weights_of(folder, {name: module.weight.shape for name, module in modules.items()})
    for name, module in modules.items():
        bits = module.quantization_scheme.weights.num_bits
        assert bits == (8 if name.endswith("down_proj") else 4)
        assert isinstance(got[name], Int8Weight if bits == 8 else Int4Weight)


def test_the_w8a16_preset_is_int8_in_groups() -> None:
    """llm-compressor uses the presets of compressed-tensors, so this is the preset of both."""
    preset = preset_name_to_scheme("W8A16", ["Linear"]).model_dump(mode="json")
    read_as = CompressedTensors.of({"format": "pack-quantized", "config_groups": {"group_0": preset}})
    assert read_as.is_grouped_int8("model.layers.0.mlp.up_proj")
    assert [scheme.group_size for scheme in read_as.schemes] == [128]


def test_act_order_of_compressed_tensors(written: Callable[[str, str], Written], tmp_path: Path) -> None:
    """The library no longer writes act-order, but older checkpoints have it: g_idx is the group of each column."""
    made = written("int4-asymmetric", "llama")
    folder = tmp_path / "ordered"
    shutil.copytree(made.folder, folder)
    tensors, name = read(folder), "model.layers.0.mlp.down_proj"
    shape = read(made.twin)[f"{name}.weight"].shape
    plain = weights_of(folder, {name: shape})[name]
    assert isinstance(plain, Int4Weight)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(0))
    moved = plain.unpack()[:, order].int().view(shape[0], -1, 8)
    words = sum(moved[:, :, i].long() << 4 * i for i in range(8))
    tensors[f"{name}.weight_packed"] = torch.as_tensor(words).to(torch.int32)
    tensors[f"{name}.weight_g_idx"] = (order // 32).int()
    save(tensors, folder)
    read_back = weights_of(folder, {name: shape})[name]
    assert isinstance(read_back, Int4Weight)
    assert read_back.order is not None
    torch.testing.assert_close(read_back.dequantize(torch.float32), plain.dequantize(torch.float32)[:, order])


# ---- quantizing while weights are loaded ----


@pytest.mark.parametrize("kind", quantized_weights.QUANTIZERS)
@pytest.mark.parametrize("shape", ["llama", "mistral", "qwen2", "qwen3"])
def test_plain_weights_are_quantized_while_they_are_loaded(kind: str, shape: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", SHAPES[shape])
    twin = Path(shutil.copytree(plain, tmp_path / "twin", ignore=shutil.ignore_patterns("*.safetensors*")))
    tensors = read(plain)
    for name in modules_of(tensors):
        rounded = quantized_weights.QUANTIZERS[kind](tensors[f"{name}.weight"])
        tensors[f"{name}.weight"] = rounded.dequantize(torch.float32)
    save(tensors, twin)
    assert_served_like(twin, engine_of(plain, quantize=kind), tolerance_of(kind))


@pytest.mark.parametrize(("shape", "head"), [("llama", "lm_head"), ("qwen2", "model.embed_tokens")])
@pytest.mark.parametrize("kind", [None, "int4"])
def test_the_head_is_rounded_and_the_embedding_is_not(kind: str | None, shape: str, head: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", SHAPES[shape])
    engine = engine_of(plain, quantize=kind, quantize_head="int8")
    model, same = decoder_of(engine).model, decoder_of(engine_of(plain, quantize=kind)).model
    weight = read(plain)[f"{head}.weight"]
    x = torch.randn(5, weight.shape[1])
    wanted = (x * (x.square().mean(-1, keepdim=True) + model.norm.eps).rsqrt() * model.norm.weight) @ weight.t()
    error = (model.logits(x) - wanted).abs().mean() / wanted.abs().mean()
    assert 1e-4 < float(error) < 0.02
    assert torch.equal(model.embedding, same.embedding)
    assert len(run(engine, job(0, prompt_of(9, vocab=VOCAB), max_tokens=8))[0].tokens) == 8


@pytest.mark.parametrize("engine", ["gpu", "onnxruntime"])
def test_a_rounded_head_is_refused_where_there_is_none(engine: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", SHAPES["llama"])
    with pytest.raises(CheckpointError, match=r"(?i)quantize_head"):
        engine_of(plain, engine=engine, quantize_head="int8")


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "nf4"])
def test_answers_do_not_depend_on_the_batch(kind: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", SHAPES["wide"])
    engine = engine_of(plain, quantize=kind, deterministic=True)
    prompts = [prompt_of(length, vocab=VOCAB) for length in (1, 7, 16, 33, 50)]
    jobs = [job(i, p, max_tokens=16, logprobs=0, bypass_cache=True) for i, p in enumerate(prompts)]
    together = run(engine, *jobs)
    for one in jobs:
        alone = run(engine, one)[one.key]
        assert (alone.tokens, alone.logprobs) == (together[one.key].tokens, together[one.key].logprobs)


def test_the_quantized_demo_model_takes_fewer_bytes(checkpoint: Callable[[str], Path]) -> None:
    plain = engine_of(checkpoint("demo"))
    sizes = {kind: engine_of(checkpoint("demo"), quantize=kind).memory.weights for kind in ("int8", "int4")}
    embedding = 4 * count_embeddings(load_config(checkpoint("demo")))
    assert sizes["int8"] - embedding < 0.27 * (plain.memory.weights - embedding)
    assert sizes["int4"] - embedding < 0.15 * (plain.memory.weights - embedding)


def test_a_plain_model_is_never_whole_in_memory(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: set[int] = set()
    most = 0
    opened = Checkpoint.opened

    @contextmanager
    def watched(self: Checkpoint) -> Iterator[Callable[[str], Tensor]]:
        with opened(self) as fetch:

            def read_one(name: str) -> Tensor:
                nonlocal most
                tensor = fetch(name)
                if name.endswith("_proj.weight"):
                    alive.add(id(tensor))
                    weakref.finalize(tensor, alive.discard, id(tensor))
                    most = max(most, len(alive))
                return tensor

            yield read_one

    monkeypatch.setattr(Checkpoint, "opened", watched)
    engine_of(checkpoint("demo"), quantize="int4")
    assert 1 <= most <= 3, "no more than one fused projection is in memory"


@pytest.mark.parametrize("kind", WRITERS)
def test_the_size_of_weights_is_estimated_before_loading(kind: str, written: Callable[[str, str], Written]) -> None:
    """The estimate includes formats that a CPU stores dequantized, in four or eight times the bytes of the file."""
    folder = written(kind, "wide").folder
    reader = reader_of(read_config(folder).quantization, None)
    assert reader is not None
    estimated = expected_bytes(load_config(folder), open_checkpoint(folder), reader, torch.float32, "cpu")
    assert estimated == pytest.approx(engine_of(folder).memory.weights, rel=0.1)


def test_random_models_are_quantized_too() -> None:
    made = built(presets.folder_of("random:tiny"), kv_blocks=256, max_batch_size=16, quantize="int4")
    engine = made.engine
    assert run(engine, job(0, [5, 6, 7], max_tokens=8, ignore_eos=True))[0].tokens
    assert engine.memory.weights < 4 * made.parameters


def test_quantized_and_plain_models_share_no_blocks(checkpoint: Callable[[str], Path]) -> None:
    layouts = {engine_of(checkpoint("llama"), quantize=kind).block_layout for kind in (None, "int8", "int4")}
    assert len(layouts) == 3
