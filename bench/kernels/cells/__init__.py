"""What is measured of the kernels: a row for each cell. Here what a row is; the files beside this measure them."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's layer."""

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
    """One measured cell."""

    name: str
    microseconds: float
    bytes: float
    flop: float
    against: dict[str, float] = field(default_factory=dict)
    """Microseconds of others that do the same job."""
    note: str = ""
    rate: str = "matmul"
    """The ceiling of its FLOP: matmul or fp8."""

    def share(self, ceilings: dict[str, float]) -> float:
        """Floor over time."""
        return max(self.bytes / ceilings["read"], self.flop / ceilings[self.rate]) * 1e6 / self.microseconds
