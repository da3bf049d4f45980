"""Folds factors from the norm or linear that makes a channel into the linears that read it; outputs do not change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compress.base.linears import READERS
from compress.base.network import Moments, head_dim, linear


@dataclass(frozen=True, slots=True)
class FoldPair:
    """A maker (a norm or a linear) and the linears that read its output channels."""

    maker: str
    readers: tuple[str, ...]
    heads: int
    """Key/value heads whose channels several query heads read; 1 elsewhere."""
    sharing: int
    """Query heads per key/value head."""

    def spread(self, factor_C: Tensor) -> Tensor:
        """A factor for each channel of the maker -> for each input of the readers [K]."""
        return factor_C.view(self.heads, 1, -1).expand(-1, self.sharing, -1).flatten()

    def gather(self, inputs_K: Tensor) -> Tensor:
        """The largest value over the readers' inputs that come from one channel of the maker [C]."""
        return inputs_K.view(self.heads, self.sharing, -1).amax(1).flatten()

    def move(self, layer: nn.Module, factor_C: Tensor) -> Tensor:
        """Divide the maker's channels by the factor and multiply the readers' inputs -> the inputs' factors [K].

        A norm's weight is stored in bf16, so the factor is adjusted to one that is exact in bf16.
        """
        maker = layer.get_submodule(self.maker)
        with torch.no_grad():
            if isinstance(maker, nn.Linear):
                maker.weight.div_(factor_C[:, None])
                if maker.bias is not None:
                    maker.bias.div_(factor_C)
            else:
                weight = maker.get_parameter("weight")
                lighter = (weight / factor_C).bfloat16().float()
                factor_C = torch.where(lighter == 0, 1, weight / torch.where(lighter == 0, 1, lighter))
                weight.copy_(torch.where(lighter == 0, weight, lighter))
            factor_K = self.spread(factor_C)
            for name in self.readers:
                linear(layer, name).weight.mul_(factor_K)
        return factor_K


def fold_pairs(layer: nn.Module) -> Iterator[FoldPair]:
    """All fold pairs of a layer, in the order of computation."""
    values, queries = linear(layer, "self_attn.v_proj"), linear(layer, "self_attn.o_proj")
    heads, sharing = values.out_features // head_dim(layer), queries.in_features // values.out_features
    for maker, readers in READERS.items():
        attends = maker == "self_attn.v_proj"
        yield FoldPair(maker, readers, heads if attends else 1, sharing if attends else 1)


def scaled(moments: Moments, factor_K: Tensor) -> Moments:
    """The moments of inputs divided by the factor."""
    return replace(
        moments,
        gram=moments.gram / torch.outer(factor_K, factor_K),
        mean=moments.mean / factor_K,
        largest=moments.largest / factor_K,
    )
