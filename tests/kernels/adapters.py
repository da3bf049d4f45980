"""Checks of the kernels of adapters against their definition, on any device."""

import random

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import lora
from kernels.linear.split_k import Tile, workspace
from kernels.lora import fused
from kernels.lora.tiles import FEW, lay_out, most_tiles, places_of
from tests.kernels.cases import DEVICE, close, poison, rand

SLOTS = 5


def check_adapters(
    tokens: int, inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype, padding: int = 3
) -> None:
    """Tokens of five adapters and of none in any order, in a step that is padded; rows of x and out have a stride. Rows
    without an adapter, and what lies between rows, stay as they are; slot 0 holds NaN."""
    owners = np.array([random.randint(0, SLOTS) for _ in range(tokens)])
    stack = _stack(inputs, outputs, rank, dtype)
    x, out, want = _strided(tokens + padding, inputs, dtype), _strided(tokens + padding, sum(outputs), dtype), None
    x[tokens:] = poison(padding, inputs, dtype=dtype)
    out[tokens:] = poison(padding, sum(outputs), dtype=dtype)
    want = out.clone()
    lora.reference(want[:tokens], x, stack, torch.from_numpy(owners))
    order, tiles, _, _ = _lists(owners, tokens + padding)
    before = out.clone()
    lora.add_adapters(out, x, stack, order, tiles)
    close(out[:tokens], want[:tokens])
    bare = [token for token in range(tokens) if not owners[token]]
    assert torch.equal(out[bare], before[bare])
    assert out[tokens:].isnan().all()


def check_adapters_are_invariant(tokens: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype) -> None:
    """A row has the same bits beside other rows of its adapter, beside others, and alone."""
    stack, x = _stack(inputs, outputs, 16, dtype), rand(tokens, inputs, dtype=dtype)

    def computed(rows: list[int], owners: list[int]) -> torch.Tensor:
        out = torch.zeros(len(rows), sum(outputs), dtype=dtype, device=DEVICE)
        order, tiles, _, _ = _lists(np.array(owners), len(rows))
        lora.add_adapters(out, x[rows].contiguous(), stack, order, tiles)
        return out

    last = tokens - 1
    alone = computed([last], [2])
    assert torch.equal(computed(list(range(tokens)), [2] * tokens)[last:], alone)
    assert torch.equal(computed(list(range(tokens)), [*(row % 5 for row in range(last)), 2])[last:], alone)


def check_adapted_product(
    rows: int, inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype, *, tile: Tile,
    gated: bool = False, owned: float = 0.7, changed: float = 0.8, padding: int = 1,
) -> None:  # fmt: skip
    """A product and what adapters add to it, in one kernel, twice: it leaves its counters as it found them. Slots that
    no row has hold NaN, and so do parts that an adapter does not change, and padding; a row without an adapter has the
    bits of a batch without adapters. changed: the share of adapters that change a part."""
    assert rows + padding <= FEW
    chosen_slots = [slot for slot in range(1, SLOTS + 1) if random.random() < 0.8] or [2]
    owners = np.array([random.choice(chosen_slots) if random.random() < owned else 0 for _ in range(rows)])
    stack = _stack(inputs, outputs, rank, dtype)
    changes = np.array([[random.random() < changed for _ in range(SLOTS + 1)] for _ in outputs])
    _fill(stack, ~changes, 0.0)
    weight, x = rand(sum(outputs), inputs, dtype=dtype) / inputs**0.5, _strided(rows + padding, inputs, dtype)
    x[rows:] = poison(padding, inputs, dtype=dtype)
    bias = None if gated else rand(sum(outputs), dtype=dtype)
    residual = None if gated else rand(rows + padding, sum(outputs), dtype=dtype)
    want = x[:rows].double() @ weight.double().T
    lora.reference(want, x, stack, torch.from_numpy(owners))
    _fill(stack, ~changes | ~np.isin(range(SLOTS + 1), owners), float("nan"))
    if gated:
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    elif bias is not None and residual is not None:
        want += bias.double() + residual[:rows].double()

    def computed(slots: NDArray[np.int64]) -> torch.Tensor:
        _, _, chosen, places = _lists(slots, rows + padding, changes)
        return fused.linear(x, weight, bias, stack, chosen, places, tile=tile, residual=residual, gated=gated)

    for _ in range(2):
        out = computed(owners)
        close(out[:rows], want)
    bare, base = np.flatnonzero(owners == 0), computed(np.zeros(rows, np.int64))
    assert torch.equal(out[bare], base[bare])
    assert not workspace(x.device, 0).arrived.any()


def _lists(
    owners: NDArray[np.int64], tokens: int, changes: NDArray[np.bool_] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lists of `kernels.lora.tiles` on the device, of a step that is padded to `tokens`. changes: which adapter
    changes which part; None: one part, and all change it."""
    changes = np.ones((1, SLOTS + 1), np.bool_) if changes is None else changes
    places = places_of(tokens, SLOTS, len(changes))
    words = torch.from_numpy(lay_out(owners, tokens, changes)).to(DEVICE)
    tiles = words[places.tiles :][: 3 * most_tiles(tokens, SLOTS)].view(-1, 3)
    chosen = words[places.chosen : places.owners].view(len(changes), -1)[:, : 1 + min(tokens, SLOTS)]
    owned = words[places.owners : places.end].view(len(changes), (places.end - places.owners) // len(changes))
    return words[:tokens], tiles, chosen, owned[:, :tokens]


def _fill(stack: lora.AdapterStack, which: NDArray[np.bool_], value: float) -> None:
    """which [parts, slots]: what to fill."""
    for part, slot in np.argwhere(which).tolist():
        stack.a[slot, part], stack.b[slot, ([0, *stack.ends])[part] : stack.ends[part]] = value, value


def _stack(inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype) -> lora.AdapterStack:
    with torch.device(DEVICE):
        stack = lora.AdapterStack.empty(SLOTS, rank, inputs, outputs, dtype)
    stack.a[1:, :, :rank] = rand(SLOTS, len(outputs), rank, inputs, dtype=dtype) / inputs**0.5
    stack.b[1:, :, :rank] = rand(SLOTS, sum(outputs), rank, dtype=dtype)
    stack.a[0], stack.b[0] = float("nan"), float("nan")
    return stack


def _strided(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return rand(rows, columns + 8, dtype=dtype)[:, :columns]
