"""The decoder: embedding, layers, final norm, head; and which tensor of a checkpoint fills which of their weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.operands import Norm
from services.worker.models.config import LearnedPositions, ModelConfig
from services.worker.models.family import Part, PartNames, Split
from services.worker.models.layers import DecoderLayer, Linear, StepTensors, empty_norm, rope_tables
from services.worker.models.ops import Ops
from services.worker.models.registry import family_of


@dataclass(frozen=True, slots=True)
class Projection:
    """A product of the model, and the modules of a checkpoint whose outputs it has one after another."""

    linear: Linear
    modules: tuple[str, ...]
    outputs: tuple[int, ...]
    """Of each module."""
    split: Split
    transposed: bool
    """The checkpoint stores the modules' weights as [inputs, outputs]."""


class Decoder:
    """A decoder of any family. Its weights have no values until they are loaded."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        dtype: torch.dtype,
        max_positions: int,
        device: str = "cpu",
        *,
        meta_linears: bool = False,
    ) -> None:
        """Allocate the weights for sequences of up to `max_positions` tokens.

        meta_linears: the weights of products get no memory here; each is set later, quantized.
        """
        self.config, self.ops, self.family = config, ops, family_of(config.architecture)
        with torch.device(device):
            self._build(dtype)
            for projection in [] if meta_linears else self.projections():
                projection.linear.allocate()
        cos, sin = rope_tables(config.positions, config.head_dim, max_positions, dtype)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def _build(self, dtype: torch.dtype) -> None:
        config, ops, positions = self.config, self.ops, self.config.positions
        empty = ops.empty_weight if config.tied_embeddings else torch.empty
        self.embedding = empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.position_embedding: Tensor | None = None
        """[positions, hidden]; None: positions rotate queries and keys."""
        if isinstance(positions, LearnedPositions):
            self.position_embedding = torch.empty(positions.count, config.hidden_size, dtype=dtype)
        self.layers = [DecoderLayer(ops, config, layer, dtype) for layer in range(config.layers)]
        self.norm = empty_norm(config.norm, config.hidden_size, dtype)
        self.head = Linear(ops, config.hidden_size, 0 if config.tied_embeddings else config.vocab_size, False, dtype)
        if config.tied_embeddings:
            self.head.weight = self.embedding

    # ---- forward ----

    def embed(self, step: StepTensors) -> Tensor:
        """The residual stream before the first layer, [T, hidden]."""
        x = self.embedding[step.token_ids]
        return x if self.position_embedding is None else x.add_(self.position_embedding[step.positions])

    def forward(self, step: StepTensors, pools: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the step's tokens, writing their keys and values to the pools.

        -> the residual stream of the tokens that are sampled from [S, hidden], and the output of the last layer's heads
        [T, heads * head_dim]; a token's row of it is finite if all that the step computed for the token is. The rest of
        the last layer is computed for the sampled tokens only: nothing else reads it, and it is a 32nd of a prompt's
        work in 32 layers.
        """
        x = self.embed(step)
        for layer, pool in zip(self.layers[:-1], pools[:-1], strict=True):
            layer.attention(x, step, pool)
            layer.mlp(x)
        last = self.layers[-1]
        attended = wanted = last.attention.attend(x, step, pools[-1])
        if step.sampled is not None:
            x, wanted = x[step.sampled], attended[step.sampled]
        if len(x):
            last.attention.output.add_matmul(x, wanted)
            last.mlp(x)
        return x, attended

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream [S, hidden] -> logits [S, vocabulary] in the model's dtype."""
        return self.head.norm_matmul(x, self.norm)

    # ---- weights ----

    def projections(self) -> list[Projection]:
        """The products with weights of their own, from the first layer on."""
        found = []
        for index, layer in enumerate(self.layers):
            attention, mlp = layer.attention, layer.mlp
            linears = {Part.QKV: attention.qkv, Part.OUTPUT: attention.output, Part.UP: mlp.up, Part.DOWN: mlp.down}
            for names in self.family.layer:
                if names.part in linears:
                    found.append(_projection(linears[names.part], names, self.config, index))
        if not self.config.tied_embeddings:
            found += [
                _projection(self.head, names, self.config) for names in self.family.outside if names.part is Part.HEAD
            ]
        return found

    def destinations(self) -> dict[str, list[Tensor]]:
        """For each tensor name of a checkpoint, the views of this model's weights that it fills.

        A view has the shape of the tensor. Weights that have no memory yet are left out.
        """
        named = dict(self._outside_destinations())
        for index, layer in enumerate(self.layers):
            named.update(self._layer_destinations(index, layer))
        for projection in self.projections():
            linear, sizes = projection.linear, list(projection.outputs)
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if isinstance(tensor, Tensor) and not tensor.is_meta:
                    views = tensor.split(sizes)  # type: ignore[no-untyped-call]
                    for module, view in zip(projection.modules, views, strict=True):
                        transposed = projection.transposed and kind == "weight"
                        named[f"{module}.{kind}"] = [view.t() if transposed else view]
        return named

    def _outside_destinations(self) -> Iterator[tuple[str, list[Tensor]]]:
        tables = {Part.EMBEDDING: self.embedding, Part.POSITIONS: self.position_embedding}
        for names in self.family.outside:
            (module,) = names.modules
            table = tables.get(names.part)
            if table is not None:
                yield f"{module}.weight", [table]
            elif names.part is Part.FINAL_NORM:
                yield from _norm_destinations(module, self.norm)

    def _layer_destinations(self, index: int, layer: DecoderLayer) -> Iterator[tuple[str, list[Tensor]]]:
        norms = {Part.ATTENTION_NORM: layer.attention.norm, Part.MLP_NORM: layer.mlp.norm}
        qk_norm, heads = layer.attention.qk_norm, self.config.heads
        for names in self.family.layer:
            module = names.modules[0].format(layer=index)
            if names.part in norms:
                yield from _norm_destinations(module, norms[names.part])
            elif qk_norm is not None and names.part in (Part.Q_NORM, Part.K_NORM):
                rows = qk_norm.weight[:heads] if names.part is Part.Q_NORM else qk_norm.weight[heads:]
                yield f"{module}.weight", list(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""
        projections = self.projections()
        products = {f"{module}.weight" for projection in projections for module in projection.modules}
        others = [view.nbytes for name, views in self.destinations().items() for view in views if name not in products]
        return int(sum(projection.linear.weight.nbytes for projection in projections)) + sum(others)


def _norm_destinations(module: str, norm: Norm) -> Iterator[tuple[str, list[Tensor]]]:
    yield f"{module}.weight", [norm.weight]
    if norm.bias is not None:
        yield f"{module}.bias", [norm.bias]


def _projection(linear: Linear, names: PartNames, config: ModelConfig, layer: int = 0) -> Projection:
    modules = tuple(module.format(layer=layer) for module in names.modules)
    outputs = _outputs(names.part, linear, config) if len(modules) > 1 else (linear.outputs,)
    return Projection(linear, modules, outputs, names.split, names.transposed)


def _outputs(part: Part, linear: Linear, config: ModelConfig) -> tuple[int, ...]:
    """Outputs of each module of a part that has several."""
    if part is Part.QKV:
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return q, kv, kv
    assert part is Part.UP, part
    return linear.outputs // 2, linear.outputs // 2
