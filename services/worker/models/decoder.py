"""The decoder: embedding, layers, final norm, head; and which tensor of a checkpoint goes where in it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.layers import DecoderLayer, Linear, StepTensors, rope_tables
from services.worker.models.ops import Ops


@dataclass(frozen=True, slots=True)
class Projection:
    """A product of the model, and the modules of a checkpoint whose outputs it has one after another."""

    linear: Linear
    modules: tuple[str, ...]
    outputs: tuple[int, ...]


class Decoder:
    """A Llama-shaped decoder. The weights are memory of no value until they are loaded."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        dtype: torch.dtype,
        max_positions: int,
        device: str = "cpu",
        *,
        hollow: bool = False,
    ) -> None:
        """A hollow model has no memory for the weights of its products: each takes one that is quantized."""
        self.config, self.ops = config, ops
        with torch.device(device):
            self._build(dtype)
            for projection in [] if hollow else self.projections():
                projection.linear.make_room()
        cos, sin = rope_tables(config.rope, config.head_dim, max_positions, dtype)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def _build(self, dtype: torch.dtype) -> None:
        config, ops = self.config, self.ops
        empty = ops.empty_weight if config.tied_embeddings else torch.empty
        self.embedding = empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = [DecoderLayer(ops, config, layer, dtype) for layer in range(config.layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype)
        self.head = Linear(ops, config.hidden_size, 0 if config.tied_embeddings else config.vocab_size, False, dtype)
        if config.tied_embeddings:
            self.head.weight = self.embedding

    def forward(self, step: StepTensors, pools: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the step's tokens, writing their keys and values to the pools.

        -> the residual stream of the tokens that are sampled from [S, hidden], and what the last layer's heads saw
        [T, heads * head_dim], whose line is finite if all that the step computed of its token is. What would follow in
        that layer is read by nobody but the former, and is left out: a 32nd of a prompt's work in 32 layers.
        """
        x = self.embedding[step.token_ids]
        for layer, pool in zip(self.layers[:-1], pools[:-1], strict=True):
            layer.attention(x, step, pool)
            layer.mlp(x)
        last = self.layers[-1]
        seen = wanted = last.attention.attend(x, step, pools[-1])
        if step.sampled is not None:
            x, wanted = x[step.sampled], seen[step.sampled]
        if len(x):
            last.attention.output.add_to(x, wanted)
            last.mlp(x)
        return x, seen

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream [S, hidden] -> logits [S, vocabulary] in the model's dtype."""
        return self.head.of_normed(x, self.norm, self.config.norm_eps)

    def projections(self) -> list[Projection]:
        """The products with weights of their own, from the first layer on."""
        found = [
            each for index, layer in enumerate(self.layers) for each in _layer_projections(index, layer, self.config)
        ]
        if not self.config.tied_embeddings:
            found.append(Projection(self.head, ("lm_head",), (self.config.vocab_size,)))
        return found

    def destinations(self) -> dict[str, list[Tensor]]:
        """For each tensor name of a Hugging Face checkpoint, the views of this model's weights that it fills.

        Weights that have no memory yet are left out.
        """
        places = {"model.embed_tokens.weight": [self.embedding], "model.norm.weight": [self.norm]}
        for index, layer in enumerate(self.layers):
            for name, views in _norm_destinations(layer, self.config).items():
                places[f"model.layers.{index}.{name}"] = views
        for projection in self.projections():
            linear, sizes = projection.linear, list(projection.outputs)
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if isinstance(tensor, Tensor) and not tensor.is_meta:
                    for module, rows in zip(projection.modules, tensor.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                        places[f"{module}.{kind}"] = [rows]
        return places

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, as they lie in memory."""
        projections = self.projections()
        products = {f"{module}.weight" for projection in projections for module in projection.modules}
        others = [view.nbytes for name, views in self.destinations().items() for view in views if name not in products]
        return int(sum(projection.linear.weight.nbytes for projection in projections)) + sum(others)


def _norm_destinations(layer: DecoderLayer, config: ModelConfig) -> dict[str, list[Tensor]]:
    attention = layer.attention
    places = {"input_layernorm.weight": [attention.norm], "post_attention_layernorm.weight": [layer.mlp.norm]}
    if attention.qk_norm is not None:
        places["self_attn.q_norm.weight"] = list(attention.qk_norm[: config.heads])
        places["self_attn.k_norm.weight"] = list(attention.qk_norm[config.heads :])
    return places


def _layer_projections(index: int, layer: DecoderLayer, config: ModelConfig) -> list[Projection]:
    attention, mlp = layer.attention, layer.mlp
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts: list[tuple[str, Linear, tuple[int, ...]]] = [
        ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", attention.qkv, (q, kv, kv)),
        ("self_attn.o_proj", attention.output, (config.hidden_size,)),
        ("mlp.gate_proj mlp.up_proj", mlp.gate_up, (config.intermediate_size,) * 2),
        ("mlp.down_proj", mlp.down, (config.hidden_size,)),
    ]
    prefix = f"model.layers.{index}."
    return [
        Projection(linear, tuple(prefix + name for name in names.split()), outputs) for names, linear, outputs in parts
    ]
