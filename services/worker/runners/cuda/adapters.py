"""Adapters on a GPU: slots in device memory, and which token of a step has which. Knows slots, never jobs.

All slots have memory from the start, for adapters of the largest rank; a smaller rank is padded with zeros. An adapter
is copied from pinned host memory on a stream of its own, beside the steps. What the kernels need to know of a step is
sent in one copy, at an address that graphs have captured: no step waits for the host.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import lora
from kernels.lora import fused
from kernels.lora.tiles import lay_out, most_tiles, most_words, places_of
from services.worker.job import Adapter
from services.worker.models.decoder import Decoder, Projection
from services.worker.models.lora import Delta, Matrices, fit_adapter
from services.worker.runners.cuda.ops import InvariantTritonOps
from services.worker.runners.cuda.upload import STAGING_BUFFERS


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """The host copy of an adapter."""

    stacks: list[tuple[Tensor, Tensor]]
    """The A [parts, R, inputs] and B [outputs, R] of each product, in pinned memory."""
    changes_M: npt.NDArray[np.bool_]
    """Whether it changes a module of this kind in any layer."""


@dataclass(frozen=True, slots=True)
class TiledAdapters:
    """The adapters of a step's T tokens, padding included."""

    stacks: list[lora.AdapterStack]
    order: Tensor
    tiles: Tensor
    chosen: Tensor
    """[kinds of modules, 1 + A]."""
    owners: Tensor
    """[kinds of modules, T]."""
    kinds: list[range]
    """Of each product's modules."""
    fuses: bool
    """Whether a row's bits may depend on the other rows."""

    def linear(
        self, product: int, x: Tensor, weight: object, bias: Tensor | None, residual: Tensor | None, gated: bool
    ) -> Tensor | None:
        """As `StepAdapters.linear`: for few rows and a plain weight."""
        stack = self.stacks[product]
        tile = fused.tile_for(x, stack, gated) if self.fuses and isinstance(weight, Tensor) else None
        if tile is None:
            return None
        assert isinstance(weight, Tensor)
        kinds = self.kinds[product]
        chosen, owners = self.chosen[kinds.start : kinds.stop], self.owners[kinds.start : kinds.stop]
        return fused.linear(
            x, weight, bias, stack, chosen, owners, tile=tile, residual=residual, gated=gated, out=residual
        )

    def add(self, product: int, out: Tensor, x: Tensor) -> None:
        """Add to out [T, outputs] what the adapters add to this product with x [T, inputs]."""
        lora.add_adapters(out, x, self.stacks[product], self.order, self.tiles)


class GpuAdapters:
    """`AdapterPages` on a GPU. It also runs on a CPU, for tests of all that is not the device."""

    def __init__(self, model: Decoder, slots: int, rank: int, step_tokens: int) -> None:
        """rank: the largest rank of an adapter; step_tokens: most tokens of a step."""
        self.slots, self._rank, self._dtype, self._family = slots, rank, model.embedding.dtype, model.family
        self._products = model.adaptable()
        self._device = model.embedding.device
        with self._device:
            self.stacks = [
                lora.AdapterStack.empty(slots, rank, product.inputs, product.outputs, self._dtype)
                for product in self._products
            ]
        self._fuses = not isinstance(model.ops, InvariantTritonOps)
        self._kinds = kinds_of_modules(self._products)
        self._changes_MS = np.zeros((max(kinds.stop for kinds in self._kinds), slots + 1), np.bool_)
        """Whether the adapter in a slot changes a kind of module."""
        most, on_gpu = most_words(step_tokens, *self._sizes), self._device.type == "cuda"
        self._words = torch.zeros(most, dtype=torch.int32, device=self._device)
        self._staged = [torch.zeros(most, dtype=torch.int32, pin_memory=on_gpu) for _ in range(STAGING_BUFFERS)]
        self._stream: Any = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied: dict[int, Any] = {}
        """The event after the copy to each slot."""

    @property
    def _sizes(self) -> tuple[int, int]:
        """Slots, and kinds of modules."""
        return self.slots, len(self._changes_MS)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(stack.a.nbytes + stack.b.nbytes for stack in self.stacks)

    def prepare(self, stored: Matrices) -> tuple[HostAdapter, int]:
        """The host copy of an adapter in the layout of a slot, and its bytes. Raises CheckpointError."""
        if self._stream is not None:  # A new thread has the first device as its current one.
            torch.cuda.set_device(self._device)
        weights = fit_adapter(self._products, self._family, stored, self._dtype)
        found = [self._padded(*each) for each in zip(self.stacks, self._products, weights, strict=True)]
        changes_M = np.zeros(len(self._changes_MS), np.bool_)
        for product, kinds, deltas in zip(self._products, self._kinds, weights, strict=True):
            begins = _begins(product)
            changes_M[[kinds[begins.index(delta.begin)] for delta in deltas]] = True
        return HostAdapter(found, changes_M), sum(a.nbytes + b.nbytes for a, b in found)

    def _padded(self, stack: lora.AdapterStack, product: Projection, deltas: Sequence[Delta]) -> tuple[Tensor, Tensor]:
        pinned = self._device.type == "cuda"
        a = torch.zeros(stack.a.shape[1:], dtype=self._dtype, pin_memory=pinned)
        b = torch.zeros(stack.b.shape[1:], dtype=self._dtype, pin_memory=pinned)
        begins = _begins(product)
        for delta in deltas:
            rank = len(delta.a)
            a[begins.index(delta.begin), :rank] = delta.a
            b[delta.begin : delta.begin + len(delta.b), :rank] = delta.b
        return a, b

    def load(self, slot: int, adapter: Adapter) -> None:
        """Begin to copy an adapter to a slot, once the steps are over that are launched already."""
        held: HostAdapter = adapter.weights
        self._changes_MS[:, slot] = held.changes_M
        copies = [
            (stack.a[slot], host[0], stack.b[slot], host[1])
            for stack, host in zip(self.stacks, held.stacks, strict=True)
        ]
        if self._stream is None:
            for a, host_a, b, host_b in copies:
                a.copy_(host_a)
                b.copy_(host_b)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for a, host_a, b, host_b in copies:
                a.copy_(host_a, non_blocking=True)
                b.copy_(host_b, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._copied[slot] = event

    def loaded(self, slot: int) -> bool:
        """Whether the copy to this slot is complete."""
        return self._stream is None or bool(self._copied[slot].query())

    def await_copy(self, slot: int) -> None:
        """Let steps that are launched from now on wait for the copy to this slot. On a rank it may not be complete when
        rank 0's is."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[slot])

    def step(self, tokens: int) -> TiledAdapters:
        """The adapters of a step that is padded to `tokens` tokens, as `send` sent them last; before that of none."""
        words, places = self._words, places_of(tokens, *self._sizes)
        tiles = words[places.tiles :][: 3 * most_tiles(tokens, self.slots)].view(-1, 3)
        kinds = len(self._changes_MS)
        chosen = words[places.chosen : places.owners].view(kinds, -1)[:, : 1 + min(tokens, self.slots)]
        owners = words[places.owners : places.end].view(kinds, (places.end - places.owners) // kinds)[:, :tokens]
        return TiledAdapters(self.stacks, words[:tokens], tiles, chosen, owners, self._kinds, self._fuses)

    def send(self, slots: npt.NDArray[np.int64], tokens: int, buffer: int) -> TiledAdapters:
        """Send where the adapter of each token is (0: it has none), of a step padded to `tokens` tokens. buffer: which
        staging buffer no step in flight is copied from."""
        words = lay_out(slots, tokens, self._changes_MS)
        self._staged[buffer].numpy()[: len(words)] = words
        self._words[: len(words)].copy_(self._staged[buffer][: len(words)], non_blocking=True)
        return self.step(tokens)


def kinds_of_modules(products: Sequence[Projection]) -> list[range]:
    """For each product the kinds of its modules, numbered over all products. Modules of one kind have names that
    differ by the number of their layer alone."""
    found: dict[tuple[str, ...], range] = {}
    kinds, end = [], 0
    for product in products:
        names = tuple(re.sub(r"\.\d+\.", ".", module) for module in product.modules)
        if names not in found:
            found[names], end = range(end, end + len(names)), end + len(names)
        kinds.append(found[names])
    return kinds


def _begins(product: Projection) -> list[int]:
    """The first output of each of its modules."""
    return [sum(product.outputs[:place]) for place in range(len(product.outputs))]
