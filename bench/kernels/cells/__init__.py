"""Rows of the kernel benchmark: defines a row; the other files of this folder measure them."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one model's layers."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    vocab: int = 128256


SHAPES = (Shape("8B", 4096, 32, 8, 128, 14336), Shape("1B", 2048, 32, 8, 64, 8192))


@dataclass(slots=True)
class Row:
    """One measured kernel and shape."""

    name: str
    microseconds: float
    bytes: float
    flop: float
    against: dict[str, float] = field(default_factory=dict)
    """Microseconds of other implementations of the same operation."""
    note: str = ""
    rate: str = "matmul"
    """The ceiling that applies to its FLOP: matmul or fp8."""

    def share(self, ceilings: dict[str, float]) -> float:
        """Floor divided by measured time."""
        return max(self.bytes / ceilings["read"], self.flop / ceilings[self.rate]) * 1e6 / self.microseconds
