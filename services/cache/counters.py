"""What the cache did since it started, in numbers. Knows no keys and no values."""

import enum
from collections import Counter
from dataclasses import dataclass, field


class Miss(enum.StrEnum):
    """Why a look-up found nothing."""

    ABSENT = "absent"
    """Redis has no such value."""
    CORRUPT = "corrupt"
    """What Redis has is not what was stored."""
    TIMEOUT = "timeout"
    """Redis did not answer within the look-up's budget."""
    BREAKER = "breaker"
    """Redis was not asked: it has been failing."""
    ERROR = "error"
    """Redis could not be reached, or refused."""


@dataclass
class Counters:
    """Counts since the start. Every look-up is one hit or one miss, every store one of stores or refused."""

    hits: int = 0
    misses: Counter[Miss] = field(default_factory=Counter)
    stores: int = 0
    refused: int = 0
    """Stores that did not happen: too large, or any trouble of Redis."""
    evictions: int = 0
    """Values removed to make room for others."""

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
