"""`weft doctor` checks a Redis by each kind of URL."""

from pathlib import Path

from tests.redis_server import RedisServer
from weft.cli import doctor


def test_every_kind_of_redis_url_is_checked(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        for url in (redis.url, f"unix://{redis.embedded.socket}?db=1"):
            assert doctor._redis(url).verdict is doctor.Verdict.OK, url
        assert doctor._redis(redis.url.replace("redis://", "rediss://")).verdict is doctor.Verdict.BAD  # without TLS
    assert doctor._redis(f"unix://{redis.embedded.socket}").verdict is doctor.Verdict.BAD
    assert doctor._redis("redis://here:many").verdict is doctor.Verdict.BAD
