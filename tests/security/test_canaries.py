"""Secrets and texts appear in no log, metric, trace or Redis key, even at the level debug."""

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest
import redis as redis_client
from grpc import aio

from protos import inference_pb2 as api
from protos.inference_pb2_grpc import InferenceStub
from tests.mesh.harness import Mesh, ask, generate
from tests.redis_server import RedisServer
from tests.security.conftest import KEY, SECRET, Files
from tests.security.test_public_ports import https
from tests.telemetry.scraping import scrape

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = "canaryprompt"
CHAT = "canarychat"
STOP = "canarystop"
WRONG_KEY = "weft-canary-of-a-wrong-key"
BEARER = (("authorization", f"Bearer {KEY}"),)
CANARIES = (PROMPT, CHAT, STOP, WRONG_KEY, KEY, SECRET, "PRIVATE KEY")


async def test_no_sink_has_a_secret_or_a_text(mesh: Mesh, files: Files, redis: RedisServer) -> None:
    """Sends canaries in every form, well and badly, then reads every sink."""
    assert all(process.env["WEFT_LOG_LEVEL"] == "debug" for process in mesh.processes)
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    async with aio.secure_channel(mesh.gateways[0].address, credentials) as channel:
        stub = InferenceStub(channel)
        answer = await generate(stub, ask(PROMPT, max_tokens=3, stop=[STOP]), metadata=BEARER)
        assert answer.ids
        await stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text=PROMPT)), metadata=BEARER)
        chat = api.Prompt(chat=api.Chat(messages=[api.ChatMessage(role="user", content=CHAT)]))
        await generate(stub, api.GenerateRequest(prompt=chat, sampling=api.Sampling(max_tokens=2)), metadata=BEARER)
        bad = [
            ask(PROMPT, max_tokens=10_000_000),
            ask(PROMPT, model=CHAT),
            ask(f"{PROMPT} " * 60_000),
        ]
        for request in bad:
            with pytest.raises(aio.AioRpcError) as caught:
                await generate(stub, request, metadata=BEARER)
            assert PROMPT not in str(caught.value.details())
        with pytest.raises(aio.AioRpcError):
            await generate(stub, ask(PROMPT), metadata=(("authorization", f"Bearer {WRONG_KEY}"),))
    async with https(mesh, files) as http:
        await _over_http(http)
    await asyncio.sleep(0)
    for process in mesh.processes:
        _assert_clean(process.name, process.log.read_text(errors="replace"))
        _assert_clean(f"metrics of {process.name}", (await scrape(process)).text)
        command = await asyncio.to_thread(Path(f"/proc/{process.pid}/cmdline").read_text)
        _assert_clean(f"command line of {process.name}", command)
    store = redis_client.Redis.from_url(redis.url)
    names = b" ".join(bytes(name) for name in store.keys("*"))  # type: ignore
    store.close()
    assert names
    _assert_clean("names in Redis", names.decode(errors="replace"))


async def _over_http(http: httpx.AsyncClient) -> None:
    for key in (KEY, WRONG_KEY):
        headers = {"authorization": f"Bearer {key}"}
        for body in (
            {"model": "weft-story-2m", "prompt": PROMPT, "max_tokens": 2},
            {"model": CHAT, "prompt": PROMPT},
            {"model": "weft-story-2m", "messages": [{"role": "user", "content": CHAT}]},
            {"model": "weft-story-2m", "prompt": PROMPT, PROMPT: CHAT},
        ):
            for path in ("/v1/completions", "/v1/chat/completions", f"/v1/{PROMPT}"):
                await http.post(path, json=body, headers=headers)
        await http.post("/v1/completions", content=f'{{"prompt": "{PROMPT}'.encode(), headers=headers)


def _assert_clean(sink: str, text: str) -> None:
    assert text, sink
    for canary in CANARIES:
        place = text.find(canary)
        assert place < 0, f"{sink} has {canary}: {text[max(0, place - 200) : place + 100]}"
