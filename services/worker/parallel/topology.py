"""The grid of ranks that compute one model: stages of layers, each shared by tensor ranks. Knows numbers, no model.

Ranks are numbered stage after stage. Rank 0 is the worker's own process.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its grid."""

    stage: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Grid:
    """`tensor` ranks share each layer; `pipeline` stages have the layers one after another."""

    tensor: int = 1
    pipeline: int = 1
    spreads_experts: bool = False
    """Each tensor rank has some whole experts; otherwise it has some neurons of every expert."""

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    def place(self, rank: int) -> Place:
        """The place of a rank."""
        assert 0 <= rank < self.ranks, f"rank {rank} of {self}"
        return Place(*divmod(rank, self.tensor))

    def rank(self, place: Place) -> int:
        """The rank at a place."""
        return place.stage * self.tensor + place.tensor

    def is_last(self, rank: int) -> bool:
        """Whether the rank is of the stage that samples."""
        return self.place(rank).stage == self.pipeline - 1

    @property
    def drawing_rank(self) -> int:
        """The rank whose tokens are reported: the first of the last stage."""
        return self.rank(Place(self.pipeline - 1, 0))

    def __str__(self) -> str:
        return f"tensor {self.tensor} x pipeline {self.pipeline}" + (", whole experts" if self.spreads_experts else "")
