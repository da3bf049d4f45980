"""The shapes of the demo models and how each is trained. Numbers only: no tensors, no files."""

from dataclasses import dataclass

VOCAB = 6144
CONTEXT = 2048


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model with tied embeddings; heads are `head_dim` wide."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64


@dataclass(frozen=True)
class Recipe:
    """One training run: warm up, hold the learning rate, let it fall to zero."""

    name: str
    shape: Shape
    epochs: float
    window: int = CONTEXT  # tokens
    batch: int = 48  # windows a step
    learning_rate: float = 3e-3
    matrix_weight_decay: float = 0.3  # strong: the corpus is read many times over
    dropout: float = 0.0
    warmup_steps: int = 100
    decay_share: float = 0.6  # of all steps, at the end
    evaluations: int = 12
    distill: bool = False  # learn from the story model's distribution instead of the next token


STORY = Recipe(
    "weft-story-11m", Shape(hidden=384, layers=6, heads=6, kv_heads=2, intermediate=896), epochs=30, dropout=0.1
)
DRAFT = Recipe(
    "weft-story-2m",
    Shape(hidden=192, layers=2, heads=3, kv_heads=1, intermediate=512),
    epochs=16,
    matrix_weight_decay=0.05,
    distill=True,
)

# A run of seconds on a CPU, which only shows that the program works.
TINY_VOCAB = 384
TINY_STORY = Recipe(
    "weft-story-tiny",
    Shape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, head_dim=32),
    epochs=3,
    window=64,
    batch=8,
    warmup_steps=2,
    evaluations=2,
    dropout=0.1,
)
TINY_DRAFT = Recipe(
    "weft-story-tiny-draft",
    Shape(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64, head_dim=32),
    epochs=3,
    window=64,
    batch=8,
    warmup_steps=2,
    evaluations=1,
    distill=True,
)
