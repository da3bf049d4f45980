"""Authentication and authorization of calls, and each tenant's use of its limits. Knows no protocols and no requests.

Everything that is not explicitly permitted is denied. Keys are hashed at once; they are neither kept nor logged.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from services.errors import WeftError
from services.gateway.access.bearer_tokens import BearerTokens
from services.gateway.access.errors import denied, unauthenticated
from services.gateway.access.quotas import Quota
from services.gateway.access.tenants import DEFAULT, Tenant, TenantsFileError, TenantTable, read
from services.gateway.access.usage import SharedUsage, UsageTable

log = structlog.get_logger("access")
clock = time.monotonic

RELOAD_S = 0.5
_SCHEME = "bearer "

Credentials = Sequence[str]
"""The values of a call's `authorization` header (or metadata). A call with several of them is not authenticated."""


Refusal = Callable[[Credentials], WeftError | None]
"""Returns why a call with these credentials that arrives now is refused before it is read; None if it is read."""


class Authorizer:
    """The tenants of a file and their use of their limits; without a file one tenant without limits."""

    def __init__(
        self,
        path: str,
        shared: UsageTable | None = None,
        member: int = 0,
        secret: bytes = b"",
        tokens: BearerTokens | None = None,
    ) -> None:
        """`path` of the tenants file, or empty. With a `shared` table limits hold over all members of the gateway;
        `member` is the number of this one. `secret` for the tenants' salts. Besides API keys, `tokens` that name a
        tenant of the file are accepted. Raises TenantsFileError."""
        self._secret = secret
        self._bearer_tokens = tokens
        self._default = DEFAULT.salted(secret)
        self._path = Path(path) if path else None
        self._quotas: dict[str, Quota] = {}
        self._shared, self._member = shared, member
        self._seen = self._stamp()
        self._tenants: TenantTable | None = read(self._path, secret) if self._path else None

    @property
    def requires_keys(self) -> bool:
        """There is a tenants file: calls need an API key."""
        return self._tenants is not None

    def tenant(self, credentials: Credentials) -> Tenant:
        """The tenant that owns the API key of a call. Raises WeftError."""
        if self._tenants is None:
            return self._default
        if not credentials:
            raise unauthenticated("an API key is required, as `authorization: Bearer <key>`", "KEY_REQUIRED")
        # Several credentials could belong to several callers: none is accepted.
        value = credentials[0] if len(credentials) == 1 else ""
        has_key = value.lower().startswith(_SCHEME)
        tenant = self._owner(self._tenants, value[len(_SCHEME) :].strip()) if has_key else None
        if tenant is None:
            raise unauthenticated("the API key is not valid", "KEY_UNKNOWN")
        return tenant

    def _owner(self, tenants: TenantTable, credential: str) -> Tenant | None:
        """The tenant that has this API key, or that this token names."""
        if self._bearer_tokens is None or not self._bearer_tokens.looks_like_one(credential):
            return tenants.find(credential)
        name = self._bearer_tokens.tenant(credential)
        return tenants.tenants.get(name) if name is not None else None

    def permit(self, method: str, credentials: Credentials) -> Tenant:
        """The tenant of a call of this method of the public API, such as "Generate". Raises WeftError."""
        tenant = self.tenant(credentials)
        if not tenant.may_call(method):
            raise method_denied()
        return tenant

    def count(self, tenant: Tenant) -> None:
        """Counts a request against the tenant's rate. Raises WeftError if the rate is exceeded."""
        self._quota(tenant).request(clock())

    def slot(self, tenant: Tenant, tokens: Callable[[], int]) -> "ConcurrencySlot":
        """A `with` block for one answer of a tenant; `tokens` gives the tokens to charge at its end."""
        return ConcurrencySlot(self._quota(tenant), tokens)

    async def follow(self) -> None:
        """Reads the file again after each change, until cancelled. An invalid file changes nothing."""
        while self._path is not None:
            await asyncio.sleep(RELOAD_S)
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                self.reload()

    def reload(self) -> None:
        """Applies the file as it is now. Running calls continue, also those of removed tenants."""
        assert self._path is not None
        try:
            self._tenants = read(self._path, self._secret)
        except TenantsFileError as error:
            log.error("invalid tenants file: the previous tenants stay in effect", reason=str(error))
            return
        tenants = self._tenants.tenants
        self._quotas = {name: quota for name, quota in self._quotas.items() if name in tenants or quota.running}
        for name, quota in self._quotas.items():
            if name in tenants:
                quota.change(tenants[name].limits, clock())
        log.info("tenants read", tenants=len(tenants))

    def _quota(self, tenant: Tenant) -> Quota:
        quota = self._quotas.get(tenant.name)
        if quota is None:
            quota = self._quotas[tenant.name] = Quota(tenant.limits, clock(), self._usage(tenant))
        return quota

    def _usage(self, tenant: Tenant) -> SharedUsage | None:
        """Where the tenant's usage is counted beside other processes; None to count it here alone. A tenant without
        limits may get some later, which then hold for the answers that run."""
        if self._shared is None:
            return None
        usage = self._shared.usage(tenant.hash, self._member)
        if usage is None:
            log.warning("too many tenants to share their limits: some are counted by each process on its own")
        return usage

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes when the file changes, also when a symbolic link is replaced, as Kubernetes does."""
        if self._path is None:
            return None
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


class ConcurrencySlot:
    """A `with` block around an answer, which counts as one concurrent answer of its tenant."""

    __slots__ = ("_quota", "_tokens")

    def __init__(self, quota: Quota, tokens: Callable[[], int]) -> None:
        self._quota = quota
        self._tokens = tokens

    def __enter__(self) -> None:
        """Raises WeftError if one of the tenant's limits is reached."""
        self._quota.begin(clock())

    def __exit__(self, *_: object) -> None:
        self._quota.end(self._tokens(), clock())


def method_denied() -> WeftError:
    """The key does not permit this method."""
    return denied("this key does not permit this method", "METHOD_DENIED")
