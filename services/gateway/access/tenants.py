"""Tenants, and the file that lists them with the hashes of their keys. Knows neither calls nor their costs.

The file is TOML. `weft key` prints a new key and its line for this file; the key itself is stored nowhere.

    [[tenant]]
    name = "acme"
    keys = ["sha256:1f8b...", "sha256:90c2..."]  # several during a key rotation
    models = ["fox"]                             # names or aliases; absent: all
    methods = ["Generate", "ListModels"]         # absent: all
    requests_per_second = 5.0                    # absent: no limit; so for the other limits
    burst = 10                                   # requests at once; absent: one second's worth
    concurrent = 8                               # concurrent answers
    tokens_per_minute = 60000                    # of prompts and answers
    most_priority = 0                            # default 0; a higher priority overtakes other tenants
    operator = true                              # may watch the whole mesh; default false
"""

import hashlib
import hmac
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.hashing import digest
from services.validate import MAX_PRIORITY

MOST_BYTES = 4 << 20
_OF_OPERATORS = {"WatchMesh"}
"""Methods that show more than a tenant's own requests."""
_PREFIX = "sha256:"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant over all processes of a gateway; None for no limit."""

    requests_per_second: float | None = None
    burst: int | None = None
    concurrent: int | None = None
    tokens_per_minute: int | None = None

    @property
    def burst_size(self) -> int:
        """Requests allowed at once; the default is the rate of one second."""
        return self.burst or max(1, math.ceil(self.requests_per_second or 1))


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. Caches are shared only between equal salts, which only the mesh secret can make; fair queueing
    counts by the hash of the name."""

    name: str
    salt: bytes
    hash: str
    limits: Limits = field(default_factory=Limits)
    models: frozenset[str] | None = None
    methods: frozenset[str] | None = None
    most_priority: int = MAX_PRIORITY
    operator: bool = True
    """May watch the whole mesh: all models, workers and traffic."""

    @classmethod
    def named(
        cls,
        name: str,
        limits: Limits | None = None,
        models: Iterable[str] | None = None,
        methods: Iterable[str] | None = None,
        most_priority: int = MAX_PRIORITY,
        operator: bool = True,
    ) -> "Tenant":
        """A tenant; its salt and hash are made of the name alone."""
        return cls(
            name,
            digest(b"weft/salt/1", name.encode()),
            digest(b"weft/tenant/1", name.encode()).hex()[:16],
            limits or Limits(),
            None if models is None else frozenset(models),
            None if methods is None else frozenset(methods),
            most_priority,
            operator,
        )

    def salted(self, secret: bytes) -> "Tenant":
        """The tenant with a salt that only those can make who have the secret; without one, the same tenant."""
        if not secret:
            return self
        return replace(self, salt=hmac.new(secret, b"weft/salt/2\0" + self.name.encode(), hashlib.sha256).digest())

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether the tenant may use a model with these names."""
        return self.models is None or not self.models.isdisjoint(names)

    def may_call(self, method: str) -> bool:
        """Whether the tenant may call a method of the public API."""
        permitted = self.methods is None or method in self.methods
        return permitted and (self.operator or method not in _OF_OPERATORS)


DEFAULT = Tenant.named("default")


class TenantsFileError(Exception):
    """The file is invalid. The message is one line, and quotes nothing of the file but names."""


class TenantTable:
    """All tenants, looked up by key."""

    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        """`tenants` by SHA-256 of their keys."""
        self._buckets: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        for hashed, tenant in tenants.items():
            self._buckets.setdefault(hashed[:2], []).append((hashed, tenant))
        self.tenants = {tenant.name: tenant for tenant in tenants.values()}

    def find(self, key: str) -> Tenant | None:
        """The tenant that a key belongs to.

        Hashes are compared in constant time, but only those in the bucket of the first two bytes. Timing may reveal
        these two bytes of a hash; the key cannot be derived from them.
        """
        hashed = hash_of(key)
        found = None
        for known, tenant in self._buckets.get(hashed[:2], ()):
            if hmac.compare_digest(known, hashed):
                found = tenant
        return found


def hash_of(key: str) -> bytes:
    """SHA-256 of a key. Keys are 256 random bits, so a slow hash would add no protection."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read(path: Path, secret: bytes = b"") -> TenantTable:
    """The tenants of a file, with salts made with `secret`. Raises TenantsFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise TenantsFileError(f"cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise TenantsFileError(f"is larger than {MOST_BYTES >> 20} MiB")
    return parse(data, secret)


def parse(data: bytes, secret: bytes = b"") -> TenantTable:
    """The tenants of a file's bytes, with salts made with `secret`. Raises TenantsFileError."""
    try:
        entries = _File.model_validate(tomllib.loads(data.decode())).tenant
    except UnicodeDecodeError:
        raise TenantsFileError("is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise TenantsFileError(f"is not TOML: {error}") from None
    except RecursionError:
        raise TenantsFileError("is nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        raise TenantsFileError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise TenantsFileError(f"names {next(name for name in names if names.count(name) > 1)} twice")
    owners: dict[bytes, Tenant] = {}
    for entry in entries:
        tenant = entry.tenant().salted(secret)
        for key in entry.keys:
            hashed = bytes.fromhex(key.removeprefix(_PREFIX))
            if hashed in owners:
                raise TenantsFileError(f"{entry.name}: a key is listed twice")
            owners[hashed] = tenant
    return TenantTable(owners)


class _Entry(BaseModel):
    """A tenant's entry in the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    keys: list[Annotated[str, Field(pattern=f"^{_PREFIX}[0-9a-f]{{64}}$")]] = Field(min_length=1)
    models: list[str] | None = None
    methods: (
        list[Literal["Generate", "Complete", "Tokenize", "ListModels", "WatchMesh", "Embed", "Rank", "Classify"]] | None
    ) = None
    requests_per_second: float | None = Field(None, gt=0, allow_inf_nan=False)
    burst: int | None = Field(None, ge=1)
    concurrent: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    most_priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    operator: bool = False

    def tenant(self) -> Tenant:
        """The tenant that the entry describes."""
        limits = Limits(self.requests_per_second, self.burst, self.concurrent, self.tokens_per_minute)
        return Tenant.named(self.name, limits, self.models, self.methods, self.most_priority, self.operator)


class _File(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tenant: list[_Entry] = Field(min_length=1)
