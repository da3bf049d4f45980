"""Settings that all services share, read from the environment.

A service listens at WEFT_LISTEN and connects to the others at WEFT_SCHEDULER_ADDRESS and WEFT_CACHE_ADDRESS; gateways
receive the addresses of workers from the scheduler. Most settings of gateway, scheduler and cache begin with WEFT_ and
the service's name (WEFT_GATEWAY_...); those of workers have names that users of other servers know (MODEL_NAME, ...),
or begin with WEFT_ alone.

Metrics: each process serves them for Prometheus at WEFT_METRICS_PORT, on the host that it listens at; 0 or unset
disables this. Processes with network addresses of their own (containers, pods) use the same port, by convention 9464;
on one machine `weft serve` assigns consecutive ports: gateway, scheduler, cache, first worker, second worker, ...

Traces: every process reads the standard OTEL_... variables and records spans if they name a collector.
"""

import os
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

GATEWAY_ADDRESS = "127.0.0.1:50051"
HTTP_PORT = 8000
"""The gateway's port for HTTP."""
SCHEDULER_ADDRESS = "127.0.0.1:50052"
CACHE_ADDRESS = "127.0.0.1:50053"
WORKER_ADDRESS = "127.0.0.1:50061"
_REMOVED = {"WEFT_ALLOW_REMOTE": "WEFT_ALLOW_UNPROTECTED"}
"""Settings of older versions, and what has taken their place."""


class CommonSettings(BaseSettings):
    """The shared settings. The settings of each service derive from this class."""

    # No part of a rejected secret may be logged.
    model_config = SettingsConfigDict(
        env_prefix="WEFT_", extra="ignore", populate_by_name=True, hide_input_in_errors=True
    )

    listen: str = Field(
        "", description="host:port to listen at; empty for the service's default, port 0 for a free port."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="json, or console for people; auto is console if stderr is a terminal."
    )
    mesh_id: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]*$",
        description="Id of the mesh, the same for all its processes: those of another mesh are refused. Empty: not "
        "checked. `weft serve` draws one at each start.",
    )
    mesh_secret: SecretStr = Field(
        SecretStr(""),
        description="Secret of the mesh, the same for all its processes, at least 32 characters: connections between "
        "services use TLS with certificates derived from it. Better in a file: see the next one.",
    )
    mesh_secret_file: str = Field(
        "", description="File that holds the secret of the mesh. `weft serve` makes one where nothing is set."
    )
    tls_ca: str = Field("", description="PEM file of the authority that signs the certificates of this mesh alone.")
    tls_cert: str = Field(
        "",
        description="PEM file of this service's certificate, whose DNS name grants its role: gateway.weft.internal, "
        "scheduler.weft.internal, worker.weft.internal, cache.weft.internal, admin.weft.internal. Needs a mesh secret, "
        "too.",
    )
    tls_key: str = Field("", description="PEM file of the private key of that certificate.")
    allow_unprotected: bool = Field(
        False,
        description="DANGER: listen at addresses other than loopback without both TLS and authentication. Anyone "
        "who reaches the port can then read prompts and answers, use the models and forge results.",
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port at which Prometheus reads /metrics, on the host of `listen`; 0 disables it.",
    )
    drain_s: float = Field(
        10.0, ge=0, description="Seconds that running calls may take after SIGTERM; scheduler and cache end at once."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, given: Any) -> Any:
        for old, new in _REMOVED.items():
            if old in os.environ:
                raise PydanticCustomError("removed", "{old} was replaced by {new}", {"old": old, "new": new})
        return given

    @field_validator("listen")
    @classmethod
    def _default_if_empty(cls, listen: str) -> str:
        return listen or str(cls.model_fields["listen"].default)

    def secret(self) -> str:
        """The mesh secret from the environment, or empty."""
        return self.mesh_secret.get_secret_value()
