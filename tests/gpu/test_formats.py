"""Quantized checkpoints on the GPU: in float32 the numbers of the dequantized model, in bfloat16 those of the kernels.

Checkpoints of compressed-tensors and bitsandbytes need these libraries, or QUANTIZED=folder that was filled elsewhere
by `python -m tests.quantized folder`.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from kernels.moe import grouped_fp8
from kernels.quantized_weights import QUANTIZERS
from tests.checkpoints import Shape, make_checkpoint
from tests.served import EXACT, GOLDEN, GOLDENS, WIDE, WIDE_EXPERTS, assert_served_like, engine_of, read, save, twin_of

KINDS = (
    *("int4", "int4-asymmetric", "int4-channel", "w8a16", "w8a16-packed", "w8a8", "fp8-tensor", "fp8-channel"),
    *("w8a16-groups", "w8a16-groups-int8", "fp8-static", "fp8-compressed-blocks", "fp8-blocks", "nf4", "nf4-nested"),
)
# Mean difference of log-probabilities where logits reach 40. FP8 products round their inputs to 3 bits of mantissa.
ROUNDED = {"fp8": 0.8, "w8a8": 0.5}
BFLOAT16 = 0.3
GPT2 = Shape("gpt2", {"n_embd": 192, "n_inner": 320, "n_layer": 2, "initializer_range": 0.1})
GPT2_LINEARS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a kind to a checkpoint quantized so."""
    made = tmp_path_factory.mktemp("quantized")

    def get(kind: str) -> Path:
        if kind in GOLDENS:
            return GOLDEN / kind
        if folder := os.environ.get("QUANTIZED"):
            return Path(folder) / kind
        writers = pytest.importorskip("tests.quantized", reason="needs compressed-tensors")
        pytest.importorskip("bitsandbytes")
        if not (made / "plain").exists():
            make_checkpoint(made / "plain", WIDE)
        return Path(writers.write(kind, made / "plain", made).folder)

    return get


@pytest.mark.parametrize("kind", [*KINDS, *GOLDENS])
def test_a_checkpoint_is_served_as_its_dequantized_twin(
    kind: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = written(kind)
    twin = twin_of(folder, tmp_path / "twin")
    assert_served_like(twin, engine_of(folder, engine="gpu", dtype="float32"), EXACT)
    mean = next((most for name, most in ROUNDED.items() if kind.startswith(name)), BFLOAT16)
    assert_served_like(twin, engine_of(folder, engine="gpu", dtype="bfloat16"), mean, mean=True)


def rounded_twin(plain: Path, kind: str, folder: Path) -> Path:
    """Writes a checkpoint whose layers' weights are those of a plain one, rounded and dequantized."""
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = read(plain)
    for name, weight in tensors.items():
        if name.endswith(GPT2_LINEARS):  # stored as [inputs, outputs]
            tensors[name] = QUANTIZERS[kind](weight.t().contiguous()).dequantize(torch.float32).t()
        elif name.endswith("_proj.weight"):
            tensors[name] = QUANTIZERS[kind](weight).dequantize(torch.float32)
    save(tensors, folder)
    return folder


@pytest.mark.parametrize("shape", [WIDE, GPT2, WIDE_EXPERTS], ids=["llama", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_plain_weights_are_rounded_on_the_device(kind: str, shape: Shape, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", shape)
    twin = rounded_twin(plain, kind, tmp_path / "twin")
    assert_served_like(twin, engine_of(plain, engine="gpu", dtype="float32", quantize=kind), EXACT)


def test_experts_of_many_rows_are_served_as_their_dequantized_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8 tensor cores")
    plain = make_checkpoint(tmp_path / "plain", WIDE_EXPERTS)
    twin = rounded_twin(plain, "fp8", tmp_path / "twin")
    monkeypatch.setattr(grouped_fp8, "MIN_ROWS", 1)
    with mock.patch.object(grouped_fp8, "multiply", wraps=grouped_fp8.multiply) as products:
        engine = engine_of(plain, engine="gpu", dtype="bfloat16", quantize="fp8")
        assert_served_like(twin, engine, BFLOAT16, mean=True)
    assert products.called
