"""Asserts that a worker serves a quantized checkpoint as transformers serves its unquantized twin, on any device."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels import quantized_weights
from services.worker.engine.generation import GenerationEngine
from services.worker.loader.config import load_config, read_config
from services.worker.loader.formats.module_tensors import ModuleTensors
from services.worker.loader.formats.module_tensors import Tensors as Source
from services.worker.loader.formats.registry import reader_of
from services.worker.loader.tensors import open_checkpoint
from services.worker.models.decoder import Decoder
from services.worker.runners.cpu.ops import ReferenceOps
from tests.checkpoints import VOCAB, Shape
from tests.worker.drive import job, open_engine, prompt_of, run

GOLDEN = Path(__file__).parent / "golden"
GOLDENS = ("awq", "gptq", "gptq-act-order", "gptq-asymmetric")
# Some widths are multiples of the block size 128, some are not.
WIDE = Shape("llama", {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "initializer_range": 0.1})
# Neither its experts nor their neurons divide by two ranks, and of the neurons there are too few for four.
UNEVEN_EXPERTS = Shape("qwen3-moe", {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 3})
# A group of 128 inputs is all of an expert's neurons: tensor ranks that share these would divide it.
WIDE_EXPERTS = Shape(
    "qwen3-moe",
    {
        "hidden_size": 128,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "initializer_range": 0.1,
    },
)
# Of log-probabilities, at logits up to 40: INT4 on CPUs multiplies in bfloat16, W8A8 rounds its inputs.
TOLERANCES = {"int4": 0.4, "w8a8": 0.6}
EXACT = 2e-3


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    paths = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def save(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes tensors as the only weights file of a checkpoint."""
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})


def tolerance_of(kind: str) -> float:
    """The largest accepted difference of log-probabilities from the twin's on a CPU."""
    return next((most for name, most in TOLERANCES.items() if kind.startswith(name)), EXACT)


def weights_of(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, quantized_weights.Weight]:
    """The weights that the worker's reader makes of a quantized checkpoint."""
    reader, checkpoint = reader_of(read_config(folder).quantization, None), open_checkpoint(folder)
    assert reader is not None
    with checkpoint.opened() as fetch:
        source = Source(checkpoint.headers, fetch)
        return {name: reader.read(ModuleTensors(source, name), *shape) for name, shape in shapes.items()}


def engine_of(folder: Path, **options: Any) -> GenerationEngine:
    settings = {"kv_blocks": 256, "max_batch_size": 16, **options}
    return open_engine(folder, **settings)


def assert_served_like(
    twin: Path, engine: GenerationEngine, tolerance: float, tokens: int = 16, *, mean: bool = False
) -> None:
    """Each greedy token is, within the tolerance, the twin's best and has its log-probability there; with `mean`, the
    mean of the differences is compared."""
    model: Any = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    prompts = [prompt_of(length, vocab=min(model.config.vocab_size, VOCAB)) for length in (1, 9, 33)]
    answers = run(engine, *(job(i, p, max_tokens=tokens, logprobs=0, ignore_eos=True) for i, p in enumerate(prompts)))
    longest = max(map(len, prompts))
    padded = [prompt + answers[i].tokens + [0] * (longest - len(prompt)) for i, prompt in enumerate(prompts)]
    with torch.inference_mode():
        all_logits = model(torch.tensor(padded)).logits
    for index, prompt in enumerate(prompts):
        answer, begin = answers[index], len(prompt) - 1
        logits = all_logits[index, begin : begin + tokens]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert len(answer.tokens) == tokens
        away = (torch.tensor(answer.logprobs) - expected).abs()
        short = logits.log_softmax(-1).amax(-1) - expected
        assert float(away.mean() if mean else away.max()) <= tolerance
        assert float(short.mean() if mean else short.max()) <= 2 * tolerance


def twin_of(source: Path, folder: Path) -> Path:
    """Writes the dequantized weights that the worker reads; other tests compare these with the writer's own."""
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    projections = Decoder(load_config(source), ReferenceOps(), torch.float32, 1, meta_linears=True).projections()
    shapes = {
        module: torch.Size((outputs, each.linear.inputs))
        for each in projections
        for module, outputs in zip(each.modules, each.outputs, strict=True)
    }
    plain = {
        f"{module}.weight": quantized_weights.dequantize(w, torch.float32)
        for module, w in weights_of(source, shapes).items()
    }
    for name, tensor in read(source).items():
        module, _, kind = name.rpartition(".")
        if (kind == "bias" and bool(tensor.any())) or (
            module not in shapes and not module.startswith(tuple(f"{each}." for each in shapes))
        ):
            plain[name] = tensor.float()
    save(plain, folder)
    return folder
