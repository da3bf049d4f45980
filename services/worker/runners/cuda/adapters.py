"""Adapters on a GPU: slots in device memory, and which token of a step has which. Knows slots, never jobs.

All slots have memory from the start, for adapters of the largest rank; a smaller rank is padded with zeros. An adapter
is copied from pinned host memory on a stream of its own, beside the steps. What the kernels need to know of a step is
sent in one copy, at an address that graphs have captured: no step waits for the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import lora
from kernels.lora import fused
from kernels.lora.tiles import lay_out, most_tiles, places_of
from services.worker.job import Adapter
from services.worker.models.decoder import Decoder, Projection
from services.worker.models.lora import Delta, fit_adapter
from services.worker.runners.cuda.ops import InvariantTritonOps
from services.worker.runners.cuda.upload import STAGING_BUFFERS

HostStack = tuple[Tensor, Tensor]
"""The A [parts, R, inputs] and B [outputs, R] of one product, in pinned memory."""


@dataclass(frozen=True, slots=True)
class TiledAdapters:
    """The adapters of a step's T tokens, padding included."""

    stacks: list[lora.AdapterStack]
    order: Tensor
    tiles: Tensor
    chosen: Tensor
    owners: Tensor
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
        return fused.linear(
            x, weight, bias, stack, self.chosen, self.owners, tile=tile, residual=residual, gated=gated, out=residual
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
        most, on_gpu = places_of(step_tokens, slots).end, self._device.type == "cuda"
        self._words = torch.zeros(most, dtype=torch.int32, device=self._device)
        self._staged = [torch.zeros(most, dtype=torch.int32, pin_memory=on_gpu) for _ in range(STAGING_BUFFERS)]
        self._stream: Any = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied: dict[int, Any] = {}
        """The event after the copy to each slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(stack.a.nbytes + stack.b.nbytes for stack in self.stacks)

    def prepare(self, stored: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[list[HostStack], int]:
        """The host copy of an adapter in the layout of a slot, and its bytes. Raises CheckpointError."""
        weights = fit_adapter(self._products, self._family, stored, self._dtype)
        found = [self._padded(*each) for each in zip(self.stacks, self._products, weights, strict=True)]
        return found, sum(a.nbytes + b.nbytes for a, b in found)

    def _padded(self, stack: lora.AdapterStack, product: Projection, deltas: Sequence[Delta]) -> HostStack:
        pinned = self._device.type == "cuda"
        a = torch.zeros(stack.a.shape[1:], dtype=self._dtype, pin_memory=pinned)
        b = torch.zeros(stack.b.shape[1:], dtype=self._dtype, pin_memory=pinned)
        begins = [end - count for end, count in zip(stack.ends, product.outputs, strict=True)]
        for delta in deltas:
            rank = len(delta.a)
            a[begins.index(delta.begin), :rank] = delta.a
            b[delta.begin : delta.begin + len(delta.b), :rank] = delta.b
        return a, b

    def load(self, slot: int, adapter: Adapter) -> None:
        """Begin to copy an adapter to a slot, once the steps are over that are launched already."""
        copies = [
            (stack.a[slot], host[0], stack.b[slot], host[1])
            for stack, host in zip(self.stacks, adapter.weights, strict=True)
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

    def step(self, tokens: int) -> TiledAdapters:
        """The adapters of a step that is padded to `tokens` tokens, as `send` sent them last; before that of none."""
        words, places = self._words, places_of(tokens, self.slots)
        tiles = words[places.tiles :][: 3 * most_tiles(tokens, self.slots)].view(-1, 3)
        chosen = words[places.chosen :][: 1 + min(tokens, self.slots)]
        return TiledAdapters(self.stacks, words[:tokens], tiles, chosen, words[places.owners : places.end], self._fuses)

    def send(self, slots: npt.NDArray[np.int64], tokens: int, buffer: int) -> TiledAdapters:
        """Send where the adapter of each token is (0: it has none), of a step padded to `tokens` tokens. buffer: which
        staging buffer no step in flight is copied from."""
        words = lay_out(slots, tokens, self.slots)
        self._staged[buffer].numpy()[: len(words)] = words
        self._words[: len(words)].copy_(self._staged[buffer][: len(words)], non_blocking=True)
        return self.step(tokens)
