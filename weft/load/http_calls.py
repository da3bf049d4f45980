"""Completions over HTTP/1.1 on connections that are kept: one request at a time on each. Knows OpenAI's form of a
completion, and reads of an answer what a load counts."""

import asyncio
import json
from collections import deque

from protos import inference_pb2 as api

_HEAD_END = b"\r\n\r\n"


class HttpError(Exception):
    """A response with another status than 200; the text names the status and OpenAI's code of the error, if it has one:
    a server that has too many connections sends none."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"HTTP {status}/{code}" if code else f"HTTP {status}")
        self.refused = status == 429


class HttpCalls:
    """The connections of one client process to a gateway."""

    def __init__(self, address: str, key: str, least: int) -> None:
        """`address` is host:port; `key` an API key or empty; connections are reused once `least` of them are open."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._address, self._key = address, key
        self._least, self._open = least, 0
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()

    async def complete(self, request: api.GenerateRequest, timeout_s: float) -> api.Receipt:
        """Sends one completion -> its counts of tokens, as a receipt. Raises HttpError and OSError."""
        body = json.dumps(_body(request)).encode()
        head = [f"POST /v1/completions HTTP/1.1\r\nhost: {self._address}\r\nx-request-timeout: {timeout_s}"]
        head += [f"authorization: Bearer {self._key}"] if self._key else []
        data = "\r\n".join([*head, f"content-length: {len(body)}\r\n\r\n"]).encode() + body
        reader, writer = connection = await self._connection()
        try:
            writer.write(data)
            status, answer = await _response(reader)
            if not answer:
                raise HttpError(status, "")
        except BaseException:
            writer.close()
            self._open -= 1
            raise
        self._idle.append(connection)
        if status != 200:
            raise HttpError(status, str(answer["error"]["code"]))
        usage = answer["usage"]
        return api.Receipt(
            prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"], attempts=1
        )

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection that was idle longest, or a new one: a gateway's processes share connections, not requests."""
        if self._idle and self._open >= self._least:
            return self._idle.popleft()
        self._open += 1
        try:
            return await asyncio.open_connection(self._host, self._port)
        except BaseException:
            self._open -= 1
            raise

    def close(self) -> None:
        """Closes the connections."""
        for _, writer in self._idle:
            writer.close()


def _body(request: api.GenerateRequest) -> dict[str, object]:
    sampling, policy = request.sampling, api.CachePolicy.Name(request.cache).removeprefix("CACHE_POLICY_").lower()
    return {
        "model": request.model,
        "prompt": list(request.prompt.token_ids.ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "cache": None if policy == "unspecified" else policy,
    }


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, dict[str, int]]]:
    """Status and body; without a body an empty one."""
    head = await reader.readuntil(_HEAD_END)
    lines = head.lower().split(b"\r\n")
    status = int(lines[0].split(b" ")[1])
    length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
    return status, json.loads(await reader.readexactly(length) or b"{}")
