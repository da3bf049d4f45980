"""A validated request with its tenant and model, and the seed of its draws. Knows no tokens."""

import os
from dataclasses import dataclass
from functools import cached_property

from protos import inference_pb2 as api
from services import hashing
from services.gateway.access.tenants import Tenant
from services.gateway.links.adapters import Served
from services.gateway.links.result_cache import deterministic
from services.gateway.links.unmeetable import Place


@dataclass(frozen=True)
class AdmittedRequest:
    """A validated request."""

    request: api.GenerateRequest
    request_id: str
    tenant: Tenant
    served: Served
    traceparent: str

    @cached_property
    def body(self) -> bytes:
        """SHA-256 of the request as the client sent it."""
        return hashing.digest(b"weft/body/1", self.request.SerializeToString(deterministic=True))

    @property
    def place(self) -> Place:
        """Its tenant and model."""
        return self.tenant.hash, self.served.card.name

    @property
    def n(self) -> int:
        """Number of continuations."""
        return max(1, self.request.n)

    @property
    def bypass_cache(self) -> bool:
        """The request neither reads nor fills any cache."""
        return self.request.cache == api.CACHE_POLICY_BYPASS

    @property
    def repeatable(self) -> bool:
        """It always has the same answer, which may be in the result cache, or another request's."""
        sampling = self.request.sampling  # Scores of the prompt are not part of a result.
        return deterministic(sampling) and not self.bypass_cache and not sampling.HasField("prompt_logprobs")

    def seed(self) -> int:
        """The request's own seed, one derived from its id (equal for retries at any gateway), or a random one."""
        request = self.request
        if request.sampling.HasField("seed"):
            return request.sampling.seed
        if request.request_id:
            name = hashing.digest(b"weft/seed/1", self.tenant.salt, request.request_id.encode(), self.body)
            return int.from_bytes(name[:8], "little")
        return int.from_bytes(os.urandom(8), "little")
