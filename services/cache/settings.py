"""Settings of the cache service, read from the environment. Knows names, bounds and defaults, never what they steer."""

from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from services.cache.store import Budgets
from services.settings import CACHE_ADDRESS, CommonSettings


class CacheSettings(CommonSettings):
    """What the cache service reads: WEFT_REDIS_URL (or REDIS_URL), and WEFT_CACHE_... for the rest."""

    # Nothing of a rejected URL may reach a log: it can hold a password.
    model_config = SettingsConfigDict(hide_input_in_errors=True)

    listen: str = Field(CACHE_ADDRESS, description="host:port to listen at; port 0 takes a free one.")
    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        validation_alias=AliasChoices("WEFT_REDIS_URL", "REDIS_URL"),
        description="Redis: redis://, rediss:// (TLS) or unix://, with user, password and database if need be.",
    )
    cache_budget_ms: float = Field(20.0, gt=0, description="Milliseconds after which a look-up is a miss.")
    cache_store_budget_ms: float = Field(100.0, gt=0, description="Milliseconds after which a store is given up.")
    cache_connect_ms: float = Field(50.0, gt=0, description="Milliseconds that opening a connection may take.")
    cache_result_bytes: int = Field(64 << 20, gt=0, description="Most bytes of results in Redis, all together.")
    cache_value_bytes: int = Field(1 << 20, gt=0, description="Most bytes of one result.")
    cache_ttl_s: float = Field(86_400.0, ge=0.001, description="Seconds for which a value is kept.")
    cache_block_bytes: int = Field(256 << 20, gt=0, description="Most bytes of KV blocks in Redis, all together.")
    cache_block_budget_ms: float = Field(
        1000.0, gt=0, description="Milliseconds after which the look-up or store of a KV block is given up."
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
            raise ValueError("not a redis://, rediss:// or unix:// URL")
        return url

    def budgets(self) -> Budgets:
        """The times of results, in seconds."""
        return Budgets(
            look_up_s=self.cache_budget_ms / 1000,
            store_s=self.cache_store_budget_ms / 1000,
            connect_s=self.cache_connect_ms / 1000,
        )

    def block_budgets(self) -> Budgets:
        """The times of KV blocks, in seconds. Who fetches them has a budget of its own, which is shorter."""
        block_s = self.cache_block_budget_ms / 1000
        return Budgets(look_up_s=block_s, store_s=block_s, connect_s=self.cache_connect_ms / 1000)
