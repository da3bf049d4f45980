"""Reads recorded traffic as lists of arrivals: Mooncake and Azure traces in JSON lines, gzip or plain."""

import gzip
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

HASH_BLOCK = 512
"""Prompt tokens of one hash id of Mooncake."""


class TraceError(Exception):
    """A trace cannot be read; the message is one line with the place and the reason."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    """Seconds after the first request."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Equal ids mean equal blocks of 512 tokens; empty if the trace has none."""

    def clipped(self, context: int) -> "Arrival":
        """The arrival shortened to a model's context, of which the answer gets at most half."""
        output = max(1, min(self.output_tokens, context // 2))
        return Arrival(self.at_s, max(1, min(self.input_tokens, context - output)), output, self.hash_ids)


def read(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests of a trace whose timestamps are milliseconds. Raises TraceError."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            arrivals = [_arrival(line, number) for number, line in enumerate(islice(lines, limit), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path.name} cannot be read: {type(error).__name__}") from None
    if not arrivals:
        raise TraceError(f"{path.name} holds no requests")
    first = arrivals[0].at_s
    return [Arrival(max(0.0, a.at_s - first), a.input_tokens, a.output_tokens, a.hash_ids) for a in arrivals]


def _arrival(line: str, number: int) -> Arrival:
    try:
        record: dict[str, Any] = json.loads(line)
        ids = tuple(int(i) for i in record.get("hash_ids") or ())
        arrival = Arrival(
            float(record["timestamp"]) / 1e3, int(record["input_length"]), int(record["output_length"]), ids
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TraceError(f"line {number} has no timestamp, input_length and output_length") from None
    if ids and len(ids) * HASH_BLOCK < arrival.input_tokens:
        raise TraceError(f"line {number}: {len(ids)} hash ids cannot cover {arrival.input_tokens} tokens")
    return arrival
