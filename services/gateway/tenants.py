"""Who asks. Today everybody is the one default tenant; API keys will name others here and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.hashing import digest


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant: caches are shared only between equal salts, fairness counts by the hash of the name."""

    name: str
    salt: bytes
    hash: str

    @classmethod
    def named(cls, name: str) -> "Tenant":
        """The tenant of this name."""
        return cls(name, digest(b"weft/salt/1", name.encode()), digest(b"weft/tenant/1", name.encode()).hex()[:16])


DEFAULT = Tenant.named("default")


def authenticate(metadata: Sequence[tuple[str, str | bytes]]) -> Tenant:
    """The tenant whose credential a call carries."""
    del metadata  # Without a file of keys there is one tenant.
    return DEFAULT
