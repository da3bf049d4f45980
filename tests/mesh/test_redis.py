"""Redis is killed and restarted under load: no request fails, and hits return."""

import asyncio
from pathlib import Path

import pytest

from tests.mesh.harness import Mesh, ask, generate
from tests.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="function")


async def test_a_killed_redis_fails_nothing(tmp_path: Path, model: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        async with Mesh(tmp_path, model, redis_url=redis.url) as mesh:
            stub = mesh.stub()
            stop = asyncio.Event()
            done: list[bool] = []

            async def client(number: int) -> None:
                turn = 0
                while not stop.is_set():
                    answer = await generate(stub, ask(f"Story {number} of {turn % 3}", max_tokens=6))
                    assert len(answer.ids) == 6
                    done.append(answer.receipt.result_hit)
                    turn += 1

            clients = [asyncio.create_task(client(number)) for number in range(4)]
            await asyncio.sleep(1.5)
            assert any(done), "there are hits before Redis is killed"
            redis.kill()
            await asyncio.sleep(0.3)
            done.clear()
            await asyncio.sleep(1.5)
            assert done, "requests are answered without Redis"
            assert not any(done), "without Redis no request is a hit"
            redis.start()
            await asyncio.sleep(2.0)
            done.clear()
            await asyncio.sleep(1.5)
            assert any(done), "hits return with Redis"
            stop.set()
            await asyncio.gather(*clients)
