"""Trace files in their published formats, and errors for other files."""

import gzip
import json
from pathlib import Path

import pytest

from weft.load.traces import Arrival, TraceError, read

MOONCAKE = {"timestamp": 2500, "input_length": 700, "output_length": 20, "hash_ids": [0, 9]}
AZURE = {"timestamp": 52.5, "input_length": 3180, "output_length": 8}


def trace(folder: Path, *lines: object, name: str = "trace.jsonl") -> Path:
    path = folder / name
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_both_formats_are_read_and_time_starts_at_the_first_request(tmp_path: Path, name: str) -> None:
    later = {**AZURE, "timestamp": 4500}
    assert read(trace(tmp_path, MOONCAKE, later, name=name)) == [
        Arrival(0.0, 700, 20, (0, 9)),
        Arrival(2.0, 3180, 8),
    ]
    assert len(read(trace(tmp_path, *[AZURE] * 9, name=name), limit=4)) == 4


def test_lengths_are_clipped_to_the_context() -> None:
    assert Arrival(1.0, 3000, 100).clipped(2048) == Arrival(1.0, 1948, 100)
    assert Arrival(1.0, 3000, 5000).clipped(2048) == Arrival(1.0, 1024, 1024)
    assert Arrival(1.0, 30, 50).clipped(2048) == Arrival(1.0, 30, 50)


@pytest.mark.parametrize(
    "lines",
    [[], ["text"], [{"timestamp": 1}], [{**MOONCAKE, "input_length": "x"}], [{**MOONCAKE, "hash_ids": [1]}]],
)
def test_a_malformed_trace_is_reported_in_one_line(tmp_path: Path, lines: list[object]) -> None:
    with pytest.raises(TraceError) as caught:
        read(trace(tmp_path, *lines))
    assert "\n" not in str(caught.value)


def test_a_malformed_gzip_file_is_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(b"\x00\xff")
    with pytest.raises(TraceError, match=r"trace\.gz cannot be read"):
        read(path)
