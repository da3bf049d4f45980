"""Figures of other servers, each file with its source, date and machine. Measures nothing."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    """One version of another server on one machine."""

    name: str
    version: str
    source: str
    """Who measured, and through which interface."""
    date: date
    machine: str
    method: str
    rows: Mapping[str, Mapping[str, float]]
    """Row name -> figure name with its unit (`tok_per_s`, `ttft_p50_ms`, ...) -> value. A missing one is absent."""

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


@cache
def load(name: str) -> Peer:
    """The peer of `bench/peers/NAME.toml`."""
    return Peer(**tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text()))
