"""Checked access to the settings of a config.json. Knows types and ranges, never what a setting means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from services.worker.errors import CheckpointError

_Number = TypeVar("_Number", int, float)
_LARGEST = 1 << 53
_MOST_LAYERS = 1 << 10


@dataclass(frozen=True, slots=True)
class RawConfig:
    """An object of config.json. Every method raises CheckpointError for a value of the wrong kind, by its name."""

    values: Mapping[str, Any]
    file: str = "config.json"
    """Where it is, for messages."""

    @property
    def architecture(self) -> str:
        """The first of `architectures`; "none" if there is none."""
        named = self.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else "none"

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is."""
        return self.values.get(name, default)

    def integer(self, name: str, default: int | None = None, most: int = _LARGEST) -> int:
        """A positive whole number; absent, null or 0: the default."""
        return self._number(name, int, default, most)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; absent, null or 0: the default."""
        return self._number(name, float, default, _LARGEST)

    def layers(self, name: str) -> int:
        """A number of layers."""
        return self._number(name, int, None, _MOST_LAYERS)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; absent or null: the default."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{self.file}: {name} must be true or false")
        return default if value is None else value

    def section(self, name: str) -> "RawConfig":
        """A setting that has settings of its own; empty where it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{self.file}: {name} is not an object")
        return RawConfig(value or {}, self.file)

    def _number(self, name: str, kind: type[_Number], default: _Number | None, most: int) -> _Number:
        if self.get(name) is None and default is None:
            raise CheckpointError(f"{self.file}: {name} is missing")
        value: Any = self.get(name) or default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= most or kind(value) != value:
            whole = "whole " if kind is int else ""
            raise CheckpointError(f"{self.file}: {name} must be a positive {whole}number of at most {most:,}")
        return kind(value)
