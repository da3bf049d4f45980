"""The decoder: embedding, layers, final norm, head; and which tensor of a checkpoint fills which of their weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.operands import Norm
from services.worker.models.config import LearnedPositions, ModelConfig
from services.worker.models.decoder_layer import DecoderLayer
from services.worker.models.family import Part, PartNames, Split
from services.worker.models.hidden_states import HiddenStates
from services.worker.models.layers import Linear, StepTensors, empty_norm
from services.worker.models.lora import AdaptedProduct, AdaptedProducts
from services.worker.models.moe import ExpertLinear, SparseMlp
from services.worker.models.ops import Ops, RopeTables
from services.worker.models.registry import family_of
from services.worker.models.rope import rope_tables
from services.worker.models.rope_settings import Rope


@dataclass(frozen=True, slots=True)
class Projection:
    """A product of the model, and the modules of a checkpoint whose outputs it has one after another."""

    linear: Linear
    modules: tuple[str, ...]
    outputs: tuple[int, ...]
    """The number of outputs of each module."""
    parts: tuple[int, ...]
    """Outputs that ranks split each for itself: of queries, keys and values, or of gate and up."""
    split: Split
    transposed: bool
    """The checkpoint stores the modules' weights as [inputs, outputs]."""

    @property
    def inputs(self) -> int:
        """The number of inputs of each module."""
        return self.linear.inputs


@dataclass(frozen=True, slots=True)
class _RopeTable:
    """[positions, 1, head_dim]."""

    cos: Tensor
    sin: Tensor
    windows: list[int | None]
    """The window of each layer that uses the table; None: all tokens."""


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
        self.max_positions = max_positions
        self._adapted = AdaptedProducts()
        self.hidden: HiddenStates | None = None
        """Receives the residual stream before each layer; None: it is not kept."""
        self.between_layers: Callable[[int], None] | None = None
        """Called before each layer with the number of those that are launched."""
        with torch.device(device):
            self._build(dtype)
            for projection in [] if meta_linears else self.projections():
                projection.linear.allocate()
        self._ropes: dict[Rope | LearnedPositions, _RopeTable] = {}
        for window in set(config.windows):
            positions = config.positions if window is None or config.local_rope is None else config.local_rope
            if positions not in self._ropes:
                cos, sin = rope_tables(positions, config.head_dim, max_positions, dtype)
                self._ropes[positions] = _RopeTable(cos.to(device), sin.to(device), [])
            self._ropes[positions].windows.append(window)

    def _build(self, dtype: torch.dtype) -> None:
        config, ops, positions = self.config, self.ops, self.config.positions
        empty = ops.empty_weight if config.tied_embeddings else torch.empty
        embedded, drawn = self.table_rows()
        self.embedding = empty(embedded, config.hidden_size, dtype=dtype)
        self.position_embedding: Tensor | None = None
        """[positions, hidden]; None: positions rotate queries and keys."""
        if isinstance(positions, LearnedPositions):
            self.position_embedding = torch.empty(positions.count, config.hidden_size, dtype=dtype)
        self.layers = [DecoderLayer(ops, config, layer, dtype) for layer in range(config.layers)]
        self.norm = empty_norm(config.norm, config.hidden_size, dtype)
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype, device="cpu"))
        self.head = Linear(ops, config.hidden_size, 0 if config.tied_embeddings else drawn, False, dtype)
        if config.tied_embeddings:
            self.head.weight = self.embedding

    @property
    def draws(self) -> bool:
        """Whether it has logits: a part of a decoder may have none."""
        return True

    def table_rows(self) -> tuple[int, int]:
        """Rows of the embedding and of the head: one for each token of the vocabulary."""
        return self.config.vocab_size, self.config.vocab_size

    # ---- forward ----

    def lookup(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding, [T, hidden]."""
        return self.embedding[token_ids]

    def ropes(self, pick: Callable[[Tensor, Tensor], RopeTables]) -> dict[int | None, RopeTables]:
        """What `pick` makes of the tables of cos and sin, [positions, 1, head_dim], by window."""
        picked = {}
        for table in self._ropes.values():
            picked.update(dict.fromkeys(table.windows, pick(table.cos, table.sin)))
        return picked

    def embed(self, step: StepTensors) -> Tensor:
        """The residual stream before the first layer, [T, hidden]."""
        x = self.lookup(step.token_ids)
        if self.config.embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        return x if self.position_embedding is None else x.add_(self.position_embedding[step.positions])

    def forward(self, step: StepTensors, pools: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the step's tokens, writing their keys and values to the pools.

        -> the residual stream of the tokens that are sampled from [S, hidden], and the output of the last layer's heads
        [T, heads * head_dim]; a token's row of it is finite if all that the step computed for the token is. The rest of
        the last layer is computed for the sampled tokens only: nothing else reads it, and it is a 32nd of a prompt's
        work in 32 layers. Where tokens have adapters all of it is computed: their order is that of all tokens.
        """
        self._adapted.step = step.adapters
        x = self.embed(step)
        for index, (layer, pool) in enumerate(zip(self.layers[:-1], pools[:-1], strict=True)):
            self._enter(index, x, step)
            layer.attention(x, step, pool)
            layer.mlp(x)
        self._enter(len(self.layers) - 1, x, step)
        last = self.layers[-1]
        attended = wanted = last.attention.attend(x, step, pools[-1])
        sampled = step.sampled
        if sampled is not None and (step.adapters is None or not len(sampled)):
            x, wanted, sampled = x[sampled], attended[sampled], None
        if x.shape[0]:
            last.attention.add_output(x, wanted)
            last.mlp(x)
        return x if sampled is None else self.pick(x, sampled), attended

    def pick(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The rows of the residual stream x [T, hidden] of these tokens."""
        return x[tokens]

    def _enter(self, layer: int, x: Tensor, step: StepTensors) -> None:
        if self.between_layers is not None:
            self.between_layers(layer)
        if self.hidden is not None:
            self.hidden.take(layer, x, step.slot_mapping)

    def agreed(self, ids: Tensor) -> Tensor:
        """Token ids that all processes of the model agree on: here there is one."""
        return ids

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream [S, hidden] -> logits [S, vocabulary] in the model's dtype."""
        return self.head_logits(x, self.norm)

    def head_logits(self, x: Tensor, norm: Norm) -> Tensor:
        """The same behind another norm than the model's own."""
        return self.capped(self.head.norm_matmul(x, norm))

    def capped(self, logits: Tensor) -> Tensor:
        """Logits [S, n] with the model's soft cap, in place."""
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def adaptable(self) -> list[Projection]:
        """The products of the layers, without those of experts, in a fixed order. From now on the adapters of a step's
        tokens add to them."""
        found = [
            projection
            for projection in self.projections()
            if projection.linear is not self.head and not isinstance(projection.linear, ExpertLinear)
        ]
        for index, projection in enumerate(found):
            projection.linear.adapters = AdaptedProduct(self._adapted, index)
        return found

    # ---- weights ----

    def projections(self) -> list[Projection]:
        """The products with weights of their own, from the first layer on."""
        found = []
        for index, layer in enumerate(self.layers):
            linears = layer.linears()
            for names in self.family.layer:
                for expert, linear in enumerate(linears.get(names.part, ())):
                    found.append(_projection(linear, names, self.config, index, expert))
        if self.head.outputs:
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
            if table is not None and len(table):
                yield f"{module}.weight", [table]
            elif names.part is Part.FINAL_NORM:
                yield from _norm_destinations(module, self.norm)

    def add_norm_offset(self) -> None:
        """Turn the stored weights of norms into those that rows are multiplied with."""
        offset = self.config.norm.offset
        if not offset:
            return
        norms = [self.norm]
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            found = (attention.norm, attention.after_norm, attention.qk_norm, mlp.norm, mlp.after_norm)
            norms += [norm for norm in found if norm is not None]
        for norm in norms:
            norm.weight.add_(offset)

    def _layer_destinations(self, index: int, layer: DecoderLayer) -> Iterator[tuple[str, list[Tensor]]]:
        norms = {
            Part.ATTENTION_NORM: layer.attention.norm,
            Part.ATTENTION_AFTER_NORM: layer.attention.after_norm,
            Part.MLP_NORM: layer.mlp.norm,
            Part.MLP_AFTER_NORM: layer.mlp.after_norm,
        }
        qk_norm, heads = layer.attention.qk_norm, self.config.heads
        for names in self.family.layer:
            module = names.modules[0].format(layer=index, expert=0)
            norm = norms.get(names.part)
            if norm is not None:
                yield from _norm_destinations(module, norm)
            elif names.part is Part.ROUTER and isinstance(layer.mlp, SparseMlp):
                yield f"{module}.weight", [layer.mlp.router]
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


def _projection(linear: Linear, names: PartNames, config: ModelConfig, layer: int = 0, expert: int = 0) -> Projection:
    modules = tuple(module.format(layer=layer, expert=expert) for module in names.modules)
    parts = _parts(names.part, linear, config)
    outputs = parts if len(modules) > 1 else (linear.outputs,)
    return Projection(linear, modules, outputs, parts, names.split, names.transposed)


def _parts(part: Part, linear: Linear, config: ModelConfig) -> tuple[int, ...]:
    if part is Part.QKV:
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return q, kv, kv
    if part in (Part.UP, Part.EXPERT_UP) and config.activation.is_gated:
        return linear.outputs // 2, linear.outputs // 2
    return (linear.outputs,)
