"""Settings of the gateway, read from the environment. Knows names and defaults only."""

from typing import Literal

from pydantic import Field

from services.settings import CACHE_ADDRESS, GATEWAY_ADDRESS, HTTP_PORT, SCHEDULER_ADDRESS, CommonSettings


class GatewaySettings(CommonSettings):
    """The gateway's settings, beside those of every service."""

    listen: str = Field(GATEWAY_ADDRESS, description="host:port of the public gRPC server; port 0 takes a free port.")
    gateway_http_port: int = Field(
        HTTP_PORT,
        ge=0,
        le=65535,
        description="Port of the public HTTP server (OpenAI's API), on the host of `listen`; 0 disables it.",
    )
    scheduler_address: str = Field(SCHEDULER_ADDRESS, description="host:port of the scheduler.")
    cache_address: str = Field(CACHE_ADDRESS, description="host:port of the cache service; empty for none.")
    gateway_cache_budget_s: float = Field(
        0.02, gt=0, description="Seconds after which a look-up in the result cache is a miss."
    )
    gateway_scheduler_wait_s: float = Field(
        2.0, gt=0, description="Seconds that a request waits for a disconnected scheduler."
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
    tenants_file: str = Field(
        "",
        description="TOML file of tenants and the hashes of their keys; empty: one tenant, and no keys are required.",
    )
    gateway_open_reflection: bool = Field(
        False, description="Serve gRPC reflection without a key where keys are required."
    )
    gateway_tokenizer_threads: int = Field(
        2, ge=1, description="Threads that tokenize prompts and render chat templates."
    )
    gateway_chat_special_tokens: Literal["escape", "parse"] = Field(
        "escape",
        description="Encode special tokens in chat messages as ordinary text (escape) or as the tokens (parse).",
    )
