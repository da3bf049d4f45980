"""Times the products of an 8B layer with adapters on one GPU: fused, and as a product and two further kernels.

    python -m bench.kernels.adapters [--rows 64] [--adapters 32] [--rank 16] [--tiles]

Weights and adapters are random; what the launches of a cell use in turn exceeds the L2 cache. `mixed`: every third row
has no adapter. --tiles: other shapes of the fused programs, too.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from bench import table
from bench.kernels.timing import DTYPE, ROTATED_BYTES, rand, timed
from kernels import lora
from kernels.linear import dense
from kernels.linear.split_k import Tile
from kernels.lora import AdapterStack, fused
from kernels.lora.tiles import lay_out, most_tiles, places_of
from report.machine import need_gpu

PRODUCTS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
TILES = {
    "qkv": (Tile(64, 128, 1, 4), Tile(64, 128, 4, 3), Tile(64, 64, 2, 4), Tile(32, 128, 1, 4), Tile(32, 128, 2, 4)),
    "o": (Tile(64, 128, 4, 3), Tile(64, 64, 4, 4), Tile(32, 128, 2, 4)),
    "gate_up": (Tile(64, 64, 1, 4), Tile(64, 64, 1, 6), Tile(32, 128, 1, 4), Tile(128, 64, 1, 4, 8)),
    "down": (Tile(64, 128, 4, 3), Tile(64, 128, 8, 3), Tile(64, 64, 4, 4), Tile(64, 256, 2, 3)),
}


@dataclass(frozen=True, slots=True)
class Lists:
    """Which adapter each row has, as `kernels.lora.tiles` lays it out, on the GPU."""

    order: Tensor
    tiles: Tensor
    chosen: Tensor
    owners: Tensor

    @classmethod
    def of(cls, slots_T: NDArray[np.int64], slots: int, parts: int) -> "Lists":
        """Of rows whose adapters, which change all parts of a product, are in these slots; 0: none."""
        tokens, places = len(slots_T), places_of(len(slots_T), slots, parts)
        words = torch.from_numpy(lay_out(slots_T, tokens, np.ones((parts, slots + 1), np.bool_))).cuda()
        tiles = words[places.tiles :][: 3 * most_tiles(tokens, slots)].view(-1, 3)
        chosen = words[places.chosen : places.owners].view(parts, -1)[:, : 1 + min(tokens, slots)]
        return cls(words[:tokens], tiles, chosen, words[places.owners : places.end].view(parts, -1)[:, :tokens])


class Product:
    """One product of several layers, used in turn."""

    def __init__(self, name: str, rows: int, slots: int, rank: int) -> None:
        inputs, outputs = PRODUCTS[name]
        self.gated, adds = name == "gate_up", name in ("o", "down")
        self.x = rand(rows, inputs)
        count = -(-ROTATED_BYTES // (sum(outputs) * inputs * 2))
        self.weights = [rand(sum(outputs), inputs) / inputs**0.5 for _ in range(count)]
        self.residual = rand(rows, sum(outputs)) if adds else None
        with torch.device("cuda"):
            self.stacks = [AdapterStack.empty(slots, rank, inputs, outputs, DTYPE) for _ in range(count)]
        for stack in self.stacks:
            stack.a.normal_(std=inputs**-0.5)
            stack.b.normal_(std=0.01)

    def base(self) -> float:
        """Seconds without adapters, by the kernel that is served."""
        return timed([partial(self._multiply, weight, self.gated) for weight in self.weights])

    def apart(self, lists: Lists) -> float:
        """Seconds of the product and of the two kernels of adapters."""

        def launch(weight: Tensor, stack: AdapterStack) -> None:
            out = self._multiply(weight, False)
            lora.add_adapters(out, self.x, stack, lists.order, lists.tiles)

        return timed([partial(launch, *each) for each in zip(self.weights, self.stacks, strict=True)])

    def fused(self, lists: Lists, tile: Tile | None = None) -> float:
        """Seconds of the product with what adapters add to it."""
        tile = tile or fused.tile_for(self.x, self.stacks[0], self.gated)
        assert tile is not None
        launch: Callable[..., Tensor] = partial(
            fused.linear, self.x, chosen=lists.chosen, owners=lists.owners, tile=tile, residual=self.residual,
            gated=self.gated, out=self.residual, bias=None,
        )  # fmt: skip
        pairs = zip(self.weights, self.stacks, strict=True)
        return timed([partial(launch, weight=weight, stack=stack) for weight, stack in pairs])

    def _multiply(self, weight: Tensor, gated: bool) -> Tensor:
        return dense.linear(self.x, weight, residual=self.residual, gated=gated, out=self.residual)


def measure(rows: int, adapters: int, rank: int, tiles: bool) -> Iterator[str]:
    """Lines of microseconds, of one product after the other."""
    mixed = np.array([1 + row % adapters if row % 3 else 0 for row in range(rows)])
    kinds = {"none": np.zeros(rows, np.int64), "one": np.ones(rows, np.int64), "mixed": mixed}
    yield _line(f"us, {rows} rows", ["base", *(f"fused {kind}" for kind in kinds), "apart one", "apart mixed"])
    for name in PRODUCTS:
        product = Product(name, rows, adapters, rank)
        lists = {kind: Lists.of(slots, adapters, len(PRODUCTS[name][1])) for kind, slots in kinds.items()}
        times = [product.base(), *(product.fused(each) for each in lists.values())]
        times += [product.apart(lists[kind]) for kind in ("one", "mixed")]
        yield _line(name, [f"{seconds * 1e6:.1f}" for seconds in times])
        for tile in TILES[name] if tiles else ():
            numbers = ", ".join(map(str, (tile.n, tile.k, tile.split, tile.stages, tile.warps)))
            found = [product.fused(each, tile) for each in lists.values()]
            yield _line(f"  Tile({numbers})", ["", *(f"{seconds * 1e6:.1f}" for seconds in found)])
        del product
        torch.cuda.empty_cache()


def _line(name: str, cells: list[str]) -> str:
    return f"{name:<28}" + "".join(f"{cell:>14}" for cell in cells)


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description="Times an 8B layer's products with adapters on one GPU.")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tiles", action="store_true", help="other shapes of the fused programs, too")
    asked = parser.parse_args()
    need_gpu()
    out = Console(width=150)
    table.show_machine(out)
    for line in measure(asked.rows, asked.adapters, asked.rank, asked.tiles):
        print(line, flush=True)


if __name__ == "__main__":
    main()
