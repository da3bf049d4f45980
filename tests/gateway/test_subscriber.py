"""How a client follows a generation: at once, when it can take more, or when the answer has ended."""

import asyncio
from types import SimpleNamespace
from typing import Any

from protos import inference_pb2 as api
from services.gateway.answers.call import Call, Delta, Part
from services.gateway.answers.receipt import Phase, Timeline
from services.gateway.answers.subscriber import Subscriber
from services.gateway.text.journal import Ending, Journal


class Words:
    """A detokenizer whose tokens are words."""

    def feed(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


class Generation:
    """One continuation, whose tokens the test adds."""

    def __init__(self, *, ends_by_text: bool = False) -> None:
        self.journal = Journal([1], Words(), None)  # type: ignore[arg-type]
        self.journal.begin_attempt()
        self.continuations = [SimpleNamespace(journal=self.journal)]
        self.admitted = SimpleNamespace(request=api.GenerateRequest())
        self.text = object()
        self.phase, self.done, self.placed, self.error = Phase.REMOTE, False, True, None
        self.ends_by_text = ends_by_text
        self.advanced = 0
        self.broken = False

    def advance(self) -> None:
        self.advanced += 1
        if self.broken:
            raise RuntimeError("the journal is broken")

    def end(self) -> None:
        self.journal.end(Ending(api.FINISH_REASON_LENGTH))
        self.done = True


class Client:
    """What a door does for one client."""

    def __init__(
        self, generation: Generation, *, direct: bool = True, whole: bool = False, text_alone: bool = False
    ) -> None:
        self.generation = generation
        self.opened = asyncio.Event()
        self.opened.set()
        self.put_parts: list[Part] = []
        self.put_texts: list[str] = []
        self.delivered: list[Part] = []
        call = Call(
            "Generate",
            "test",
            api.GenerateRequest(),
            [],
            self.deliver,
            lambda receipt: None,
            put=self.put if direct else None,
            put_text=self.put_text if text_alone else None,
            whole=whole,
        )
        self.subscriber = Subscriber(Timeline(), 1e9, call)
        self.following = asyncio.create_task(self.subscriber.follow(generation))  # type: ignore[arg-type]

    def put(self, part: Part) -> bool:
        if self.opened.is_set():
            self.put_parts.append(part)
        return self.opened.is_set()

    def put_text(self, text: str) -> bool:
        if self.opened.is_set():
            self.put_texts.append(text)
        return self.opened.is_set()

    async def deliver(self, part: Part) -> None:
        await self.opened.wait()
        self.delivered.append(part)

    def arrive(self, *tokens: int) -> None:
        """Tokens arrive, as the link reports them: within the task that reads the link."""
        self.generation.journal.extend(tokens)
        self.subscriber.notify()

    async def ended(self) -> None:
        self.generation.end()
        self.subscriber.notify()
        await self.following


def texts(parts: list[Any]) -> list[str]:
    return [part.text for part in parts if isinstance(part, Delta)]


async def test_tokens_are_put_within_the_call_that_reports_them() -> None:
    client = Client(Generation())
    await asyncio.sleep(0)
    client.arrive(1)
    assert texts(client.put_parts) == ["1 "], "no other task has run"
    client.arrive(2, 3)
    assert texts(client.put_parts) == ["1 ", "2 3 "]
    await client.ended()
    assert texts(client.put_parts) == ["1 ", "2 3 ", ""]
    assert not client.delivered


async def test_a_client_that_is_behind_gets_its_tokens_together_and_in_order() -> None:
    client = Client(Generation())
    await asyncio.sleep(0)
    client.arrive(1)
    client.opened.clear()
    for token in range(2, 8):
        client.arrive(token)
        await asyncio.sleep(0)
    client.opened.set()
    await client.ended()
    received = [*client.put_parts[:1], *client.delivered, *client.put_parts[1:]]
    assert "".join(texts(received)) == "1 2 3 4 5 6 7 "
    assert len(client.delivered) == 1, "the first of what was left was delivered, the rest was put"
    assert len(received) < 5


async def test_an_error_while_tokens_are_put_is_that_of_the_call() -> None:
    client = Client(Generation())
    await asyncio.sleep(0)
    client.generation.broken = True
    client.arrive(1)  # The link's task goes on.
    error = (await asyncio.gather(client.following, return_exceptions=True))[0]
    assert isinstance(error, RuntimeError)


async def test_a_whole_answer_is_taken_when_it_has_ended() -> None:
    client = Client(Generation(), direct=False, whole=True)
    await asyncio.sleep(0)
    before = client.generation.advanced
    for token in range(1, 6):
        client.arrive(token)
        await asyncio.sleep(0)
    assert client.generation.advanced == before
    assert not client.delivered
    await client.ended()
    assert texts(client.delivered) == ["1 2 3 4 5 "]


async def test_the_text_of_a_whole_answer_is_read_while_it_may_end_the_answer() -> None:
    client = Client(Generation(ends_by_text=True), direct=False, whole=True)
    await asyncio.sleep(0)
    before = client.generation.advanced
    client.arrive(1)
    await asyncio.sleep(0)
    assert client.generation.advanced > before
    await client.ended()


async def test_a_client_that_gets_text_alone_gets_each_text_once() -> None:
    client = Client(Generation(), text_alone=True)
    await asyncio.sleep(0)
    client.arrive(1)
    client.arrive(2, 3)
    assert client.put_texts == ["1 ", "2 3 "], "no other task has run"
    client.opened.clear()
    client.arrive(4)
    client.arrive(5)
    client.opened.set()
    await asyncio.sleep(0)
    assert texts(client.put_parts) == ["4 ", "5 "]
    client.arrive(6)
    await client.ended()
    assert client.put_texts == ["1 ", "2 3 ", "6 "]
    assert texts(client.put_parts) == ["4 ", "5 ", ""]


async def test_a_client_that_gets_text_alone_is_told_of_a_wait_and_of_the_ending() -> None:
    client = Client(Generation(), text_alone=True)
    await asyncio.sleep(0)
    client.arrive(1)
    client.generation.journal.waits += 1
    client.subscriber.notify()
    client.arrive(2)
    await client.ended()
    assert client.put_texts == ["1 ", "2 "]
    told = [(part.waiting, part.finish_reason) for part in client.put_parts if isinstance(part, Delta)]
    assert told == [(True, 0), (False, api.FINISH_REASON_LENGTH)]
