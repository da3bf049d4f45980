"""Low-rank adapters of a decoder: what they add to its products (Hu et al. 2021). Knows tensors, no files and no slots.

An adapter adds scale * (x @ A.T) @ B.T to the outputs of some of the model's modules; a product of the model may have
the outputs of several modules. T tokens, r rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.models.family import Family


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to the outputs of one module."""

    begin: int
    """The module's first output in its product."""
    a: Tensor
    """[r, inputs]."""
    b: Tensor
    """[outputs of the module, r], times the adapter's scale."""


Matrices = Mapping[str, tuple[Tensor, Tensor]]
"""A and scaled B of each module of an adapter, by the name of the module in a checkpoint."""
AdapterWeights = Sequence[Sequence[Delta]]
"""For each product that may be adapted, in their order: the modules that are."""


class StepAdapters(Protocol):
    """The adapters of a step's T tokens."""

    def linear(
        self, product: int, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None, gated: bool, /
    ) -> Tensor | None:
        """x @ weight.T + bias with what the adapters add to this product, in one kernel; or None: there is none.
        gated: silu(first half) * second half; residual: added to, in place."""

    def add(self, product: int, out: Tensor, x: Tensor, /) -> None:
        """Add to out [T, outputs] what the adapters add to this product with x [T, inputs]."""


class AdaptedProducts:
    """The products of a decoder that adapters may change."""

    step: StepAdapters | None = None
    """The adapters of the step that is being computed; None: no token of it has one."""


class AdaptedProduct:
    """One of these products."""

    def __init__(self, shared: AdaptedProducts, index: int) -> None:
        self._shared, self._index = shared, index

    @property
    def active(self) -> bool:
        """Whether a token of the step has an adapter."""
        return self._shared.step is not None

    def linear(
        self, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor | None:
        """As `StepAdapters.linear`; None also if no token of the step has an adapter."""
        step = self._shared.step
        return None if step is None else step.linear(self._index, x, weight, bias, residual, gated)

    def add(self, out: Tensor, x: Tensor) -> None:
        """Add to out [T, outputs] what the step's adapters add to the product with x [T, inputs]."""
        if self._shared.step is not None:
            self._shared.step.add(self._index, out, x)


class AdaptedModules(Protocol):
    """A product, and the modules of a checkpoint whose outputs it has one after another."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Their names."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Outputs of each."""

    @property
    def inputs(self) -> int:
        """Inputs of all."""


def fit_adapter(
    products: Sequence[AdaptedModules], family: Family, stored: Matrices, dtype: torch.dtype
) -> AdapterWeights:
    """The weights of an adapter in the order of the model's products. Raises CheckpointError if a module or a shape is
    not the model's."""
    left = {module_of(family, name): name for name in stored}
    weights = []
    for product in products:
        deltas, begin = [], 0
        for module, outputs in zip(product.modules, product.outputs, strict=True):
            name = left.pop(module, None)
            if name is not None:
                a, b = stored[name]
                _check(name, a, b, product.inputs, outputs)
                delta = Delta(begin, a.to(dtype), b.to(dtype))
                if not (delta.a.isfinite().all() and delta.b.isfinite().all()):
                    raise CheckpointError(f"the adapter's {name} has numbers that are not finite in {dtype}")
                deltas.append(delta)
            begin += outputs
        weights.append(deltas)
    if left:
        raise CheckpointError(f"the adapter changes {min(left.values())}, which is no product of this model's layers")
    return weights


def module_of(family: Family, name: str) -> str:
    """The name that the family's tables give a module of a checkpoint."""
    return (family.tensor_name(f"{name}.weight") or name).removesuffix(".weight")


def _check(name: str, a: Tensor, b: Tensor, inputs: int, outputs: int) -> None:
    shapes, rank = (tuple(a.shape), tuple(b.shape)), a.shape[0]
    if shapes != ((rank, inputs), (outputs, rank)):
        raise CheckpointError(
            f"the adapter is of another base: {name} has matrices {list(a.shape)} and {list(b.shape)}, and the model's "
            f"{outputs} outputs of {inputs} inputs"
        )


def adapter_bytes(weights: AdapterWeights) -> int:
    """Bytes of all its matrices."""
    return sum(delta.a.nbytes + delta.b.nbytes for deltas in weights for delta in deltas)
