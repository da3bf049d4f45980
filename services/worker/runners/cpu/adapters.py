"""Adapters on the CPU: rows of a step grouped by adapter, one product pair for each group. Knows slots, never jobs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.job import Adapter
from services.worker.models.decoder import Decoder
from services.worker.models.lora import AdapterWeights, Matrices, adapter_bytes, fit_adapter
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.cpu.steps import Ints


@dataclass(frozen=True, slots=True)
class GroupedAdapters:
    """The adapters of a step, and the tokens of each."""

    ops: ReferenceOps
    groups: list[tuple[AdapterWeights, Tensor]]

    def linear(self, *_: object) -> None:
        """Products and what adapters add to them are computed one after the other."""

    def add(self, product: int, out: Tensor, x: Tensor) -> None:
        """Add to out [T, outputs] what the adapters add to this product with x [T, inputs]."""
        multiply = self.ops.multiply
        for weights, tokens in self.groups:
            if not weights[product]:
                continue
            inputs = x[tokens]
            for delta in weights[product]:
                added = multiply(multiply(inputs, delta.a), delta.b)
                out[:, delta.begin : delta.begin + added.shape[1]].index_add_(0, tokens, added)


class CpuAdapters:
    """`AdapterPages` in host memory: a slot refers to the copy that is there already, so loading takes no time."""

    def __init__(self, model: Decoder, ops: ReferenceOps, slots: int) -> None:
        self.slots = slots
        self._ops, self._dtype, self._family = ops, model.embedding.dtype, model.family
        self._products = model.adaptable()
        self._weights: list[AdapterWeights] = [()] * (slots + 1)

    def prepare(self, stored: Matrices) -> tuple[AdapterWeights, int]:
        """The host copy of an adapter, as `fit_adapter` makes it, and its bytes. Raises CheckpointError."""
        weights = fit_adapter(self._products, self._family, stored, self._dtype)
        return weights, adapter_bytes(weights)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Let the slot refer to the adapter."""
        self._weights[slot] = adapter.weights

    def loaded(self, slot: int) -> bool:
        """Always."""
        return True

    def of_tokens(self, slots: Ints) -> GroupedAdapters | None:
        """slots [T]: where the adapter of each token is; 0: it has none. -> None if no token has one."""
        groups = [
            (self._weights[slot], torch.from_numpy(np.flatnonzero(slots == slot)))
            for slot in np.unique(slots).tolist()
            if slot
        ]
        return GroupedAdapters(self._ops, groups) if groups else None
