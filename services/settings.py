"""Settings that every service shares: read from the environment, each under one documented name.

A service listens at WEFT_LISTEN and finds the others at WEFT_SCHEDULER_ADDRESS and WEFT_CACHE_ADDRESS (workers are
found through the scheduler). A service's own settings begin with WEFT_ and its name: WEFT_GATEWAY_..., WEFT_WORKER_...

Metrics: each process answers Prometheus at WEFT_METRICS_PORT of the host that it listens at; unset or 0, nowhere. Where
each process has a network address of its own (containers, pods) all have the same port, by convention 9464. On one
machine `weft serve` counts up from it: gateway, scheduler, cache, first worker, second worker, ...

Traces: the standard OTEL_... variables, read by every process; none is recorded unless they name a collector.
"""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

GATEWAY_ADDRESS = "127.0.0.1:50051"
SCHEDULER_ADDRESS = "127.0.0.1:50052"
CACHE_ADDRESS = "127.0.0.1:50053"
WORKER_ADDRESS = "127.0.0.1:50061"


class CommonSettings(BaseSettings):
    """What every service reads. A service's own settings derive from this class."""

    model_config = SettingsConfigDict(env_prefix="WEFT_", extra="ignore", populate_by_name=True)

    listen: str = Field("", description="host:port to listen at; empty takes the service's default, port 0 a free one.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="json for machines, console for people; auto asks whether stderr is a terminal."
    )
    allow_remote: bool = Field(
        False,
        description="Listen beyond loopback, on a network that is trusted: callers are not authenticated.",
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port at which Prometheus reads /metrics, on the host of `listen`; 0: none."
    )
    drain_s: float = Field(10.0, ge=0, description="Seconds that calls under way are given at a stop.")

    @field_validator("listen")
    @classmethod
    def _default_if_empty(cls, listen: str) -> str:
        return listen or str(cls.model_fields["listen"].default)
