"""Settings of the gateway, read from the environment. Knows names and defaults only."""

from typing import Literal

from pydantic import Field

from services.settings import CACHE_ADDRESS, GATEWAY_ADDRESS, HTTP_PORT, SCHEDULER_ADDRESS, CommonSettings

_MOST_ENDED_STREAMS = 1 << 14


class GatewaySettings(CommonSettings):
    """The gateway's settings, beside those of every service."""

    listen: str = Field(GATEWAY_ADDRESS, description="host:port of the public gRPC server; port 0 takes a free port.")
    gateway_http_port: int = Field(
        HTTP_PORT,
        ge=0,
        le=65535,
        description="Port of the public HTTP server (OpenAI's API), on the host of `listen`; 0 disables it.",
    )
    gateway_processes: int = Field(
        0,
        ge=0,
        le=64,
        description="Processes that share the gateway's ports, on Linux; 0: one for every two of up to 8 cores, for "
        "all but four of more, at most 12. SIGHUP replaces them one after the other.",
    )
    gateway_page: bool = Field(True, description="Serve the page (playground and mesh) at / of the HTTP server.")
    scheduler_address: str = Field(SCHEDULER_ADDRESS, description="host:port of the scheduler.")
    cache_address: str = Field(CACHE_ADDRESS, description="host:port of the cache service; empty for none.")
    gateway_cache_budget_s: float = Field(
        0.02, gt=0, description="Seconds after which a look-up of a result, or of vectors, is a miss."
    )
    gateway_vector_bytes: int = Field(
        16 << 20,
        ge=0,
        description="Most bytes of the vectors that a gateway process keeps for a minute after the cache had them.",
    )
    gateway_scheduler_wait_s: float = Field(
        2.0, gt=0, description="Seconds that a request waits for a disconnected scheduler."
    )
    gateway_connect_s: float = Field(
        0.5, gt=0, description="Seconds that connecting to a worker may take before another worker is used."
    )
    gateway_max_attempts: int = Field(5, ge=1, description="Most attempts of one continuation when workers are lost.")
    gateway_stall_s: float = Field(
        60.0, gt=0, description="Seconds after which a call ends whose client does not read."
    )
    gateway_cost_wait_s: float = Field(
        0.25,
        ge=0,
        description="Seconds that a receipt waits for the worker's costs after a stop string ended the answer.",
    )
    gateway_hold_s: float = Field(
        0.05,
        ge=0,
        description="Seconds for which tokens that a step with guesses drew together are held back at most, about, so "
        "that a client receives them at even times; 0: they are sent as they arrive.",
    )
    gateway_most_calls: int = Field(
        4096, ge=1, description="Most requests that run at once in one process; further ones are refused."
    )
    gateway_most_connections: int = Field(
        4096, ge=1, description="Most open connections of one process, of gRPC and of HTTP each; more are closed."
    )
    gateway_connection_streams: int = Field(
        1024, ge=1, description="Most calls at once on one gRPC connection; its client lets further ones wait."
    )
    gateway_connection_idle_s: float = Field(
        300.0, ge=1, description="Seconds after which a gRPC connection without a call is closed."
    )
    gateway_connection_age_s: float = Field(
        1800.0,
        ge=1,
        description="Seconds after which a gRPC connection takes no further calls, so that its client connects again, "
        "perhaps to another gateway.",
    )
    gateway_connection_grace_s: float = Field(
        3600.0, ge=0, description="Seconds that the calls on such a connection may still take."
    )
    gateway_ping_strikes: int = Field(
        10,
        ge=0,
        description="Pings more frequent than two a second that a gRPC connection may send between two answers before "
        "it is closed; 0: any number.",
    )
    tenants_file: str = Field(
        "",
        description="TOML file of tenants and the hashes of their keys; empty: one tenant, and no keys are required.",
    )
    gateway_tls_cert: str = Field(
        "", description="PEM file of the certificate that the public ports (gRPC and HTTP) present; empty: no TLS."
    )
    gateway_tls_key: str = Field("", description="PEM file of the private key of that certificate.")
    gateway_jwt_keys: str = Field(
        "",
        description="File of the public keys (a JWK set, or PEM) that sign JSON Web Tokens, which are accepted beside "
        "API keys; empty: none are. Needs a file of tenants.",
    )
    gateway_jwt_issuer: str = Field("", description="The `iss` that tokens must have.")
    gateway_jwt_audience: str = Field("", description="The `aud` that tokens must have.")
    gateway_jwt_claim: str = Field("sub", min_length=1, description="The claim of a token that names the tenant.")
    gateway_open_reflection: bool = Field(
        False, description="Serve gRPC reflection without a key where keys are required."
    )
    gateway_tokenizer_threads: int = Field(
        2, ge=1, description="Threads that tokenize short texts; one more tokenizes long ones."
    )
    gateway_chat_special_tokens: Literal["escape", "parse"] = Field(
        "escape",
        description="Encode special tokens in chat messages as ordinary text (escape) or as the tokens (parse).",
    )
    gateway_tool_format: Literal["auto", "hermes", "llama3", "mistral"] = Field(
        "auto", description="Format of tool calls in answers; auto: the one that the model's chat template shows."
    )

    def connection_options(self) -> list[tuple[str, int]]:
        """The limits of gRPC connections as channel arguments."""
        return [
            ("grpc.max_allowed_incoming_connections", self.gateway_most_connections),
            ("grpc.max_concurrent_streams", self.gateway_connection_streams),
            # Streams that have ended and are not freed yet: beyond 0, the default, calls would end with UNAVAILABLE
            # where those of a connection are many and short.
            ("grpc.http2.max_deallocating_streams", _MOST_ENDED_STREAMS),
            ("grpc.max_connection_idle_ms", _ms(self.gateway_connection_idle_s)),
            ("grpc.max_connection_age_ms", _ms(self.gateway_connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(self.gateway_connection_grace_s)),
            ("grpc.http2.max_ping_strikes", self.gateway_ping_strikes),
        ]


def _ms(seconds: float) -> int:
    """Milliseconds, as far as gRPC's 32-bit numbers hold them."""
    return min(int(seconds * 1000), (1 << 31) - 1)
