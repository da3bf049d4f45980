"""Settings of the cache service, read from the environment. Knows names, bounds and defaults, never what uses
them."""

from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from services.cache.redis_client import Timeouts
from services.settings import CACHE_ADDRESS, CommonSettings


class CacheSettings(CommonSettings):
    """WEFT_REDIS_URL (or REDIS_URL), WEFT_CACHE_..., and the settings that all services share."""

    # No part of a rejected URL may be logged: it can contain a password.
    model_config = SettingsConfigDict(hide_input_in_errors=True)

    listen: str = Field(CACHE_ADDRESS, description="host:port to listen at; port 0 takes a free one.")
    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        validation_alias=AliasChoices("WEFT_REDIS_URL", "REDIS_URL"),
        description="Redis URL: redis://, rediss:// (TLS) or unix://, with user, password and database if needed.",
    )
    cache_budget_ms: float = Field(20.0, gt=0, description="Milliseconds after which a look-up is a miss.")
    cache_store_budget_ms: float = Field(
        100.0, gt=0, description="Milliseconds after which storing a result or a vector is abandoned."
    )
    cache_connect_ms: float = Field(50.0, gt=0, description="Milliseconds that opening a connection may take.")
    cache_result_bytes: int = Field(64 << 20, gt=0, description="Most bytes of all results in Redis.")
    cache_value_bytes: int = Field(1 << 20, gt=0, description="Most bytes of one result, or of one vector.")
    cache_ttl_s: float = Field(86_400.0, ge=0.001, description="Seconds for which a value is kept.")
    cache_block_bytes: int = Field(256 << 20, gt=0, description="Most bytes of all KV blocks in Redis.")
    cache_vector_bytes: int = Field(64 << 20, gt=0, description="Most bytes of all vectors of texts in Redis.")
    cache_block_budget_ms: float = Field(
        1000.0, gt=0, description="Milliseconds after which looking up or storing a KV block is abandoned."
    )

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: SecretStr) -> SecretStr:
        try:
            parts = urlsplit(url.get_secret_value())
            sound = parts.scheme in ("redis", "rediss", "unix") and (parts.port is None or parts.port > 0)
        except ValueError:
            sound = False
        if not sound:
            raise ValueError("must be a redis://, rediss:// or unix:// URL")
        return url

    def timeouts(self) -> Timeouts:
        """The time limits for results."""
        return Timeouts(
            look_up_s=self.cache_budget_ms / 1000,
            store_s=self.cache_store_budget_ms / 1000,
            connect_s=self.cache_connect_ms / 1000,
        )

    def block_timeouts(self) -> Timeouts:
        """The time limits for KV blocks. Workers, which fetch them, have shorter limits of their own."""
        block_s = self.cache_block_budget_ms / 1000
        return Timeouts(look_up_s=block_s, store_s=block_s, connect_s=self.cache_connect_ms / 1000)
