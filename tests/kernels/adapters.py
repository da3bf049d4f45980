"""Checks of the kernels of adapters against their definition, on any device."""

import random

import numpy as np
import torch

from kernels import lora
from kernels.lora.tiles import lay_out, most_tiles, tiles_at
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
    words = torch.from_numpy(lay_out(owners, tokens + padding, SLOTS)).to(DEVICE)
    order, tiles = words[: tokens + padding], words[tiles_at(tokens + padding) :].view(-1, 3)
    assert len(tiles) == most_tiles(tokens + padding, SLOTS)
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
        words = torch.from_numpy(lay_out(np.array(owners), len(rows), SLOTS)).to(DEVICE)
        lora.add_adapters(
            out, x[rows].contiguous(), stack, words[: len(rows)], words[tiles_at(len(rows)) :].view(-1, 3)
        )
        return out

    last = tokens - 1
    alone = computed([last], [2])
    assert torch.equal(computed(list(range(tokens)), [2] * tokens)[last:], alone)
    assert torch.equal(computed(list(range(tokens)), [*(row % 5 for row in range(last)), 2])[last:], alone)


def _stack(inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype) -> lora.AdapterStack:
    with torch.device(DEVICE):
        stack = lora.AdapterStack.empty(SLOTS, rank, inputs, outputs, dtype)
    stack.a[1:, :, :rank] = rand(SLOTS, len(outputs), rank, inputs, dtype=dtype) / inputs**0.5
    stack.b[1:, :, :rank] = rand(SLOTS, sum(outputs), rank, dtype=dtype)
    stack.a[0], stack.b[0] = float("nan"), float("nan")
    return stack


def _strided(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return rand(rows, columns + 8, dtype=dtype)[:, :columns]
