"""Counts of a store since its start. Knows no keys and no values."""

import enum
from collections import Counter
from dataclasses import dataclass, field


class Miss(enum.StrEnum):
    """Why a look-up returned no value."""

    ABSENT = "absent"
    """Redis has no value under the key."""
    CORRUPT = "corrupt"
    """The value in Redis is damaged, or was not made with the secret of this mesh."""
    TIMEOUT = "timeout"
    """Redis did not answer within the look-up's time limit."""
    BREAKER = "breaker"
    """The circuit breaker was open, so Redis was not asked."""
    ERROR = "error"
    """Redis could not be reached, or refused the command."""


@dataclass
class StoreCounters:
    """Every look-up counts as one hit or one miss, every store as one of `stores` or `refused`."""

    hits: int = 0
    misses: Counter[Miss] = field(default_factory=Counter)
    stores: int = 0
    refused: int = 0
    """Values that were not stored: too large, or Redis did not confirm in time."""
    evictions: int = 0
    """Values that were removed to make room for others."""

    def summary(self) -> dict[str, int]:
        """All counts by name, for a log line."""
        misses = {f"miss_{reason}": self.misses[reason] for reason in Miss}
        return {
            "hits": self.hits,
            **misses,
            "stores": self.stores,
            "refused": self.refused,
            "evictions": self.evictions,
        }
