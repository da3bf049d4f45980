"""Settings of the cache service: names and defaults; a password is never shown."""

import pytest
from pydantic import ValidationError

from services.cache.redis_client import display_address
from services.cache.settings import CacheSettings
from services.cache.store import Store


def test_the_environment_names_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://one:6379")
    assert CacheSettings().redis_url.get_secret_value() == "redis://one:6379"
    monkeypatch.setenv("WEFT_REDIS_URL", "unix:///run/redis.sock")
    assert CacheSettings().redis_url.get_secret_value() == "unix:///run/redis.sock"


def test_defaults_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CacheSettings()
    assert settings.timeouts().look_up_s == 0.02
    assert settings.cache_result_bytes == 64 << 20
    monkeypatch.setenv("WEFT_CACHE_BUDGET_MS", "7")
    monkeypatch.setenv("WEFT_CACHE_RESULT_BYTES", "1000")
    monkeypatch.setenv("WEFT_CACHE_TTL_S", "60")
    settings = CacheSettings()
    assert (settings.timeouts().look_up_s, settings.cache_result_bytes, settings.cache_ttl_s) == (0.007, 1000, 60)


@pytest.mark.parametrize("url", ["http://:hunter2@host", "redis://:hunter2/x@host", "hunter2", "redis://u:hunter2@h:x"])
def test_a_wrong_url_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WEFT_REDIS_URL", url)
    with pytest.raises(ValidationError) as refused:
        CacheSettings()
    assert "hunter2" not in str(refused.value)


def test_a_password_is_in_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        store = Store("redis://user:hunter2@127.0.0.1:1/0?password=hunter2")
        await store.open()
        await store.close()

    import asyncio

    asyncio.run(story())
    logged = "".join(capfd.readouterr())
    assert "redis is unavailable" in logged
    assert "hunter2" not in logged


def test_a_displayed_address_has_no_secrets() -> None:
    assert display_address("rediss://user:secret@host:7000/3?password=secret") == "rediss://host:7000"
    assert display_address("unix://user:secret@/run/redis.sock?db=2") == "unix:///run/redis.sock"
    assert display_address("redis://") == "redis://localhost:6379"
