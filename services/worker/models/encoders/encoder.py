"""The encoder: embeddings, layers that normalize their sums, a pooling or a head. Knows no file, job or device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.operands import Norm, NormKind, Pooling
from services.worker.models.decoder import Projection
from services.worker.models.encoders.config import EncoderConfig, HeadConfig
from services.worker.models.encoders.family import EncoderFamily, EncoderPart
from services.worker.models.encoders.ops import EmbeddingTables, EncoderOps, PackedTexts
from services.worker.models.family import Split
from services.worker.models.layers import Linear


class EncoderLayer:
    """Attention, then the MLP; each adds to its input and normalizes the sum (Vaswani et al. 2017)."""

    def __init__(self, ops: EncoderOps, config: EncoderConfig, dtype: torch.dtype) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.ops, self.heads, self.activation = ops, config.heads, config.activation
        self.qkv = Linear(ops, hidden, 3 * hidden, True, dtype)
        self.output = Linear(ops, hidden, hidden, True, dtype)
        self.attention_norm = _empty_norm(config, hidden, dtype)
        self.up = Linear(ops, hidden, inner, True, dtype)
        self.down = Linear(ops, inner, hidden, True, dtype)
        self.mlp_norm = _empty_norm(config, hidden, dtype)

    def __call__(self, x: Tensor, texts: PackedTexts) -> Tensor:
        """x [T, hidden] -> [T, hidden]; x may be overwritten."""
        ops = self.ops
        attended = ops.attend_packed(ops.matmul(x, self.qkv.weight, self.qkv.bias), texts.plan, self.heads)
        x = ops.matmul_add_norm(attended, self.output.weight, self.output.bias, x, self.attention_norm)
        inner = ops.matmul_activate(x, self.activation, self.up.weight, self.up.bias)
        return ops.matmul_add_norm(inner, self.down.weight, self.down.bias, x, self.mlp_norm)


class ScoreHead:
    """Scores labels by the vector of a text's first token. Never quantized."""

    def __init__(self, config: HeadConfig, hidden: int, dtype: torch.dtype) -> None:
        self.activation = torch.tanh if config.activation == "tanh" else torch.relu
        labels = len(config.labels)
        self.dense, self.dense_bias = torch.empty(hidden, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
        self.labels, self.labels_bias = torch.empty(labels, hidden, dtype=dtype), torch.empty(labels, dtype=dtype)

    def __call__(self, first: Tensor) -> Tensor:
        """[B, hidden] -> scores [B, labels] in float32, before any softmax."""
        inner = self.activation(torch.nn.functional.linear(first, self.dense, self.dense_bias))
        return torch.nn.functional.linear(inner, self.labels, self.labels_bias).float()

    def destinations(self, dense: str, labels: str) -> Iterator[tuple[str, list[Tensor]]]:
        """The weights by the names of these modules."""
        yield f"{dense}.weight", [self.dense]
        yield f"{dense}.bias", [self.dense_bias]
        yield f"{labels}.weight", [self.labels]
        yield f"{labels}.bias", [self.labels_bias]


class Encoder:
    """An encoder of any family. Its weights have no values until they are loaded."""

    def __init__(
        self,
        config: EncoderConfig,
        family: EncoderFamily,
        ops: EncoderOps,
        dtype: torch.dtype,
        pooling: Pooling,
        device: str = "cpu",
        *,
        meta_linears: bool = False,
    ) -> None:
        """pooling: of a model without a head. meta_linears: the weights of products get no memory here; each is set
        later, quantized."""
        self.config, self.family, self.ops, self.pooling, self.device = config, family, ops, pooling, device
        with torch.device(device):
            self._build(dtype)
            for projection in [] if meta_linears else self.projections():
                projection.linear.allocate()

    def _build(self, dtype: torch.dtype) -> None:
        config, width = self.config, self.config.embedding_size or self.config.hidden_size
        self.embedding = torch.empty(config.vocab_size, width, dtype=dtype)
        self.positions = torch.empty(config.positions, width, dtype=dtype)
        self.segments = torch.empty(config.segments, width, dtype=dtype) if config.segments else None
        self.norm = _empty_norm(config, width, dtype)
        self.projection = Linear(self.ops, width, config.hidden_size, True, dtype) if config.embedding_size else None
        self.unique = [EncoderLayer(self.ops, config, dtype) for _ in range(config.unique_layers)]
        self.layers = [self.unique[config.weights_of(layer)] for layer in range(config.layers)]
        self.head = ScoreHead(config.head, config.hidden_size, dtype) if config.head else None

    @property
    def width(self) -> int:
        """Numbers that `forward` returns for each text."""
        return len(self.config.head.labels) if self.config.head else self.config.hidden_size

    def forward(self, texts: PackedTexts) -> Tensor:
        """One vector for each text [B, width] in float32: pooled, or the scores of the head's labels."""
        x = self.hidden(texts)
        return self.ops.pool(x, texts.starts, self.pooling) if self.head is None else self.score(x, texts.starts)

    def hidden(self, texts: PackedTexts) -> Tensor:
        """What the last layer returns, [T, hidden]."""
        x = self.embed(texts)
        for layer in self.layers:
            x = layer(x, texts)
        return x

    def score(self, x: Tensor, starts: Tensor) -> Tensor:
        """The scores of the head's labels [B, labels] in float32 by what the last layer returned. There is a head."""
        assert self.head is not None, "no head"
        return self.head(self.ops.pool(x, starts, Pooling.CLS).to(x.dtype))

    def embed(self, texts: PackedTexts) -> Tensor:
        """What the first layer reads, [T, hidden]."""
        x = self.ops.embed(texts, EmbeddingTables(self.embedding, self.positions, self.segments), self.norm)
        return x if self.projection is None else self.ops.matmul(x, self.projection.weight, self.projection.bias)

    # ---- weights ----

    def projections(self) -> list[Projection]:
        """The products with weights of their own, from the first layer on."""
        found = []
        if self.projection is not None:
            found.append(self._projection(self.projection, EncoderPart.EMBEDDING_PROJECTION))
        for index, layer in enumerate(self.unique):
            linears = {
                EncoderPart.QKV: layer.qkv,
                EncoderPart.OUTPUT: layer.output,
                EncoderPart.UP: layer.up,
                EncoderPart.DOWN: layer.down,
            }
            found += [self._projection(linear, part, index) for part, linear in linears.items()]
        return found

    def _projection(self, linear: Linear, part: EncoderPart, layer: int = 0) -> Projection:
        modules = tuple(module.format(layer=layer) for module in self.family.modules[part])
        outputs = (linear.outputs // len(modules),) * len(modules)
        return Projection(linear, modules, outputs, outputs, Split.REPLICATED, False)

    def destinations(self) -> dict[str, list[Tensor]]:
        """For each tensor name of a checkpoint, the views of this model's weights that it fills. Weights that have no
        memory yet are left out."""
        names = self.family.modules
        tables = {EncoderPart.TOKENS: self.embedding, EncoderPart.POSITIONS: self.positions}
        if self.segments is not None:
            tables[EncoderPart.SEGMENTS] = self.segments
        named = {f"{names[part][0]}.weight": [table] for part, table in tables.items()}
        named.update(_norm_destinations(names[EncoderPart.EMBEDDING_NORM][0], self.norm))
        for index, layer in enumerate(self.unique):
            for part, norm in (
                (EncoderPart.ATTENTION_NORM, layer.attention_norm),
                (EncoderPart.MLP_NORM, layer.mlp_norm),
            ):
                named.update(_norm_destinations(names[part][0].format(layer=index), norm))
        if self.head is not None:
            dense, labels = (names[part][0] for part in (EncoderPart.HEAD_DENSE, EncoderPart.HEAD_LABELS))
            named.update(self.head.destinations(dense, labels))
        for projection in self.projections():
            named.update(_linear_destinations(projection))
        return named

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""
        projections = self.projections()
        products = {f"{module}.weight" for projection in projections for module in projection.modules}
        others = [view.nbytes for name, views in self.destinations().items() for view in views if name not in products]
        return int(sum(projection.linear.weight.nbytes for projection in projections)) + sum(others)


def _empty_norm(config: EncoderConfig, width: int, dtype: torch.dtype) -> Norm:
    return Norm(torch.empty(width, dtype=dtype), config.norm_eps, NormKind.LAYER, torch.empty(width, dtype=dtype))


def _norm_destinations(module: str, norm: Norm) -> Iterator[tuple[str, list[Tensor]]]:
    assert norm.bias is not None
    yield f"{module}.weight", [norm.weight]
    yield f"{module}.bias", [norm.bias]


def _linear_destinations(projection: Projection) -> Iterator[tuple[str, list[Tensor]]]:
    linear = projection.linear
    for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            views = tensor.split(list(projection.outputs))  # type: ignore[no-untyped-call]
            for module, view in zip(projection.modules, views, strict=True):
                yield f"{module}.{kind}", [view]
