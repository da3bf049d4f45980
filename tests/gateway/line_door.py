"""A second door, for tests: a line protocol over asyncio streams. Knows Calls and their messages, no other protocol.

The client sends one line, `KEY MAX_TOKENS TEXT` (KEY is - for none). The door sends lines: `accepted`, then `text ...`
for each delta, `receipt ...` and `end`, or `error REASON`. A client that disconnects cancels its call.
"""

import asyncio
import json

from protos import inference_pb2 as api
from services.errors import WeftError
from services.gateway.answers.call import Call, Delta, Part
from services.gateway.answers.serve import AnswerService


class LineDoor:
    """Serves one call per connection."""

    def __init__(self, answers: AnswerService) -> None:
        self._answers = answers
        self.receipts: list[api.Receipt] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection. The call ends when the client disconnects."""
        line = (await reader.readline()).decode().rstrip("\n")
        answering = asyncio.create_task(self._answer(line, writer))
        leaving = asyncio.create_task(reader.read())
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)
        writer.close()

    async def _answer(self, line: str, writer: asyncio.StreamWriter) -> None:
        key, max_tokens, text = line.split(" ", 2)

        async def send(*words: str) -> None:
            writer.write((" ".join(words) + "\n").encode())
            await writer.drain()

        async def deliver(part: Part) -> None:
            if isinstance(part, api.Receipt):
                await send("receipt", str(part.completion_tokens))
            elif isinstance(part, Delta):
                await send("text", json.dumps(part.text))

        request = api.GenerateRequest(prompt=api.Prompt(text=text))
        request.sampling.max_tokens = int(max_tokens)
        request.sampling.temperature = 0.0
        call = Call(
            method="Generate",
            protocol="line",
            request=request,
            credentials=[] if key == "-" else [f"Bearer {key}"],
            deliver=deliver,
            finish=self.receipts.append,
            accept=lambda: send("accepted"),
        )
        try:
            await self._answers.serve(call)
        except WeftError as error:
            await send("error", error.reason)
        else:
            await send("end")
