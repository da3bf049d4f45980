"""GPT-2 and DistilGPT-2. Knows their settings and tensor names."""

import re
from collections.abc import Mapping

from kernels.operands import Activation, NormKind
from services.worker.errors import CheckpointError
from services.worker.models.config import LearnedPositions, ModelConfig, NormConfig
from services.worker.models.family import Family, Part, PartNames, Split
from services.worker.models.raw_config import RawConfig

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU,
}
_UNSUPPORTED = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention")


def _read_config(raw: RawConfig) -> ModelConfig:
    _refuse_the_unsupported(raw)
    width, heads, layers = raw.integer("n_embd"), raw.integer("n_head"), raw.layers("n_layer")
    if width % (2 * heads):
        raise CheckpointError(f"config.json: n_embd {width} is not {heads} heads of an even number of dimensions")
    positions = raw.integer("n_positions")
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=width,
        intermediate_size=raw.integer("n_inner", 4 * width),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        norm=NormConfig(NormKind.LAYER, raw.number("layer_norm_epsilon", 1e-5), has_bias=True),
        activation=_ACTIVATIONS[str(raw.get("activation_function", "gelu_new"))],
        context_length=positions,
        positions=LearnedPositions(positions),
        tied_embeddings=raw.flag("tie_word_embeddings", default=True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        windows=(None,) * layers,
    )


def _refuse_the_unsupported(raw: RawConfig) -> None:
    activation = str(raw.get("activation_function", "gelu_new"))
    if activation not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"activation_function {activation} is not supported; supported are {supported}")
    for name in _UNSUPPORTED:
        if raw.flag(name):
            raise CheckpointError(f"{name} is not supported")
    if not raw.flag("scale_attn_weights", default=True):
        raise CheckpointError("scale_attn_weights false is not supported")


_BUFFER = re.compile(r"transformer\.h\.[0-9]+\.attn\.(masked_)?bias")


def _tensor_name(stored: str) -> str | None:
    """Some checkpoints leave out the first part of each name; some store the causal masks of attention."""
    name = stored if stored.startswith(("transformer.", "lm_head.")) else f"transformer.{stored}"
    return None if _BUFFER.fullmatch(name) else name


_LAYER = "transformer.h.{layer}."
FAMILY = Family(
    architectures=("GPT2LMHeadModel",),
    read_config=_read_config,
    outside=(
        PartNames(Part.EMBEDDING, Split.COLUMN, ("transformer.wte",)),
        PartNames(Part.POSITIONS, Split.REPLICATED, ("transformer.wpe",)),
        PartNames(Part.FINAL_NORM, Split.REPLICATED, ("transformer.ln_f",)),
        PartNames(Part.HEAD, Split.COLUMN, ("lm_head",)),
    ),
    layer=(
        PartNames(Part.ATTENTION_NORM, Split.REPLICATED, (f"{_LAYER}ln_1",)),
        PartNames(Part.QKV, Split.COLUMN, (f"{_LAYER}attn.c_attn",), transposed=True),
        PartNames(Part.OUTPUT, Split.ROW, (f"{_LAYER}attn.c_proj",), transposed=True),
        PartNames(Part.MLP_NORM, Split.REPLICATED, (f"{_LAYER}ln_2",)),
        PartNames(Part.UP, Split.COLUMN, (f"{_LAYER}mlp.c_fc",), transposed=True),
        PartNames(Part.DOWN, Split.ROW, (f"{_LAYER}mlp.c_proj",), transposed=True),
    ),
    tensor_name=_tensor_name,
)
