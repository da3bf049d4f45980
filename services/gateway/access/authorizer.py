"""Who may call what: authentication before every call, and each tenant's use of its limits. Knows no requests.

Everything is denied that is not open to all by name. Keys are hashed at once, compared, and neither kept nor logged.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from services.gateway.access.errors import denied, unauthenticated
from services.gateway.access.quotas import Quota
from services.gateway.access.tenants import DEFAULT, Tenant, TenantsFileError, TenantTable, read

log = structlog.get_logger("access")
clock = time.monotonic

RELOAD_S = 0.5
# Health tells nobody anything but whether this process serves, and probes have no keys.
_HEALTH = "/grpc.health.v1.Health/"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/"
_PUBLIC = "/weft.v1.Inference/"
_SCHEME = "bearer "

Metadata = Iterable[tuple[str, str | bytes]]


class Authorizer:
    """The tenants of a file and what they use; without a file one tenant who may do everything."""

    def __init__(self, path: str, open_reflection: bool) -> None:
        """Raises TenantsFileError."""
        self._path = Path(path) if path else None
        self._open = (_HEALTH, _REFLECTION) if open_reflection or not path else (_HEALTH,)
        self._accounts: dict[str, Quota] = {}
        self._seen = self._stamp()
        self._roster: TenantTable | None = read(self._path) if self._path else None

    def check(self, method: str, metadata: Metadata) -> None:
        """Whether a call with this metadata may go to this method, "/package.Service/Method". Raises WeftError."""
        if method.startswith(self._open):
            return
        tenant = self.tenant(metadata)
        public = method.removeprefix(_PUBLIC) if method.startswith(_PUBLIC) else ""
        if public and tenant.may_call(public):
            return
        if method.startswith(_REFLECTION) and tenant.methods is None:
            return
        raise denied("this key is not for this method", "METHOD_DENIED")

    def tenant(self, metadata: Metadata) -> Tenant:
        """The tenant whose key a call carries. Raises WeftError."""
        if self._roster is None:
            return DEFAULT
        keys = [value for name, value in metadata if name == "authorization"]
        if not keys:
            raise unauthenticated("an API key is required, as metadata `authorization: Bearer <key>`", "KEY_REQUIRED")
        # Two credentials could mean two callers: neither is believed.
        value = keys[0] if len(keys) == 1 and isinstance(keys[0], str) else ""
        known = value.lower().startswith(_SCHEME)
        tenant = self._roster.find(value[len(_SCHEME) :].strip()) if known else None
        if tenant is None:
            raise unauthenticated("this API key is not known", "KEY_UNKNOWN")
        return tenant

    def request(self, metadata: Metadata) -> Tenant:
        """Counts a call for its tenant. Raises WeftError if its rate is used up."""
        tenant = self.tenant(metadata)
        self._account(tenant).request(clock())
        return tenant

    def answering(self, metadata: Metadata, tokens: Callable[[], int]) -> "ConcurrencySlot":
        """Counts a call, whose answer is under way in the `with` block; `tokens` is asked at its end.

        Raises WeftError if one of its tenant's limits is reached.
        """
        tenant = self.request(metadata)
        return ConcurrencySlot(tenant, self._account(tenant), tokens)

    async def follow(self) -> None:
        """Reads the file again whenever it has changed, until cancelled. One that cannot be used changes nothing."""
        while self._path is not None:
            await asyncio.sleep(RELOAD_S)
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                self.reload()

    def reload(self) -> None:
        """Takes over the file as it is now. Calls under way go on, also those of tenants that are gone."""
        assert self._path is not None
        try:
            self._roster = read(self._path)
        except TenantsFileError as error:
            log.error("the tenants file cannot be used: the tenants stay as they were", reason=str(error))
            return
        tenants = self._roster.tenants
        self._accounts = {n: a for n, a in self._accounts.items() if n in tenants or a.running}
        for name, account in self._accounts.items():
            if name in tenants:
                account.change(tenants[name].limits, clock())
        log.info("tenants read", tenants=len(tenants))

    def _account(self, tenant: Tenant) -> Quota:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Quota(tenant.limits, clock())
        return account

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes when the file does, also when it is replaced by a link to another, as Kubernetes does."""
        if self._path is None:
            return None
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


class ConcurrencySlot:
    """A `with` block around an answer under way, which holds a place among those of its tenant."""

    __slots__ = ("_account", "_tenant", "_tokens")

    def __init__(self, tenant: Tenant, account: Quota, tokens: Callable[[], int]) -> None:
        self._tenant = tenant
        self._account = account
        self._tokens = tokens

    def __enter__(self) -> Tenant:
        self._account.begin(clock())
        return self._tenant

    def __exit__(self, *_: object) -> None:
        self._account.end(self._tokens(), clock())
