"""Hostile chat templates cost at most 2.5 s and 256 MiB in a process of their own, and nobody else waits for them."""

import asyncio
import hashlib
import os
import resource
import time
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.errors import WeftError
from services.gateway.text import chat_template
from services.gateway.text.chat_template import MAX_SECONDS, ChatTemplate
from services.gateway.text.template_child import MEMORY_BYTES
from tests.gateway.fakes import FakeMesh, ask
from tests.gateway.model import BUNDLE
from tests.security.templates import HOSTILE, SHORT

VARIABLES = {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": True, "tools": None}
MOST_S = 2.5
MOST_BYTES = 256 << 20
NAMES = list(HOSTILE) if os.environ.get("WEFT_TEST_ALL") else SHORT
SECRETS = ("WEFT_", "root:", "subclasses", "module 'os'", "uid=")


def test_there_are_enough_templates() -> None:
    assert len(HOSTILE) >= 74
    assert set(SHORT) <= HOSTILE.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_template_is_refused_or_harmless_in_time(name: str) -> None:
    """The first rendering compiles the template; the second one finds it compiled, or its process killed."""
    template = ChatTemplate(HOSTILE[name], {})
    reasons: list[tuple[grpc.StatusCode, str]] = []
    others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # Of the processes of other tests.
    for _ in range(2):
        began = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            text = template.render(VARIABLES)
            assert not any(secret in text for secret in SECRETS), text[:200]
        except WeftError as error:
            reasons.append((error.code, error.reason))
        spent = _processor_s() - before.ru_utime - before.ru_stime
        # On a busy machine the clock runs on while nothing works: the process's own time counts, too.
        assert time.monotonic() - began <= MOST_S or spent <= MAX_SECONDS
    template.close()
    assert set(reasons) <= {(grpc.StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE")}
    # Until it runs another program, a child counts as large as this process.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # The largest of all processes that have ended so far.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 <= max(MOST_BYTES, others, own)
    assert MEMORY_BYTES <= MOST_BYTES


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_template_process_has_no_environment_and_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_MESH_SECRET", "canary-of-the-mesh-secret")
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(VARIABLES) == "hello"
    assert template._child is not None
    process = template._child._process.pid
    environment = Path(f"/proc/{process}/environ").read_text()
    assert "canary" not in environment
    assert "WEFT_" not in environment
    assert set(os.listdir(f"/proc/{process}/fd")) == {"0", "1", "2"}
    template.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.fixture
def half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renderings that hang are killed sooner: until then they take a processor."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", MAX_SECONDS / 2)


def test_a_killed_process_is_replaced_at_the_next_rendering(half_the_time: None) -> None:
    template = ChatTemplate("{% if messages[0].content == 'loop' %}" + HOSTILE["nested loops"] + "{% endif %}ok", {})
    assert template.render(VARIABLES) == "ok"
    with pytest.raises(WeftError, match="takes too long"):
        template.render({"messages": [{"role": "user", "content": "loop"}]})
    assert template.render(VARIABLES) == "ok"
    template.close()


def test_a_rendering_of_a_dropped_template_may_be_sent_again() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.warm_up()
    template.close()
    with pytest.raises(WeftError, match="tokenizer is not available") as caught:
        template.render(VARIABLES)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def bundle_with(template: str) -> bytes:
    """The bundle of the tests' model with another chat template."""
    bundle = mesh_pb2.Bundle.FromString(BUNDLE)
    bundle.chat_template = template
    return bundle.SerializeToString()


async def test_health_and_other_clients_go_on_while_a_template_hangs(half_the_time: None) -> None:
    """Sixteen clients chat with a model whose template never ends; texts of the same model are answered meanwhile."""
    bundle = bundle_with(HOSTILE["nested loops"])
    chat: Message = api.Prompt(chat=api.Chat(messages=[api.ChatMessage(role="user", content="hello")]))
    async with FakeMesh(bundle=bundle) as mesh:
        assert mesh.card.bundle_digest == hashlib.sha256(bundle).digest()
        hanging = [asyncio.ensure_future(_code(mesh, ask(prompt=chat, max_tokens=2))) for _ in range(16)]
        await asyncio.sleep(0)
        answered = 0
        while not any(each.done() for each in hanging):
            assert await _code(mesh, ask("hello world", max_tokens=2)) is grpc.StatusCode.OK
            answered += 1
        assert answered >= 5
        assert {each.result() for each in hanging if each.done()} == {grpc.StatusCode.INVALID_ARGUMENT}
        for each in hanging:
            each.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def _code(mesh: FakeMesh, request: api.GenerateRequest) -> grpc.StatusCode:
    call = mesh.stub.Generate(request)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return await call.code()
