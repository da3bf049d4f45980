"""Sends the requests of a batch and collects their answers. Knows HTTP, no files' formats and no terminals.

A request is repeated while the mesh is full, restarts or cannot be reached. It keeps its id, so it joins its own answer
if that still runs.
"""

import asyncio
import random
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from weft.batch import lines
from weft.batch.lines import Json, Request
from weft.batch.output import Output
from weft.client.channel import CA_FILE, authorities

_LONGEST_WAIT_S = 30.0
_FIRST_WAIT_S = 0.25
_SYNC_S = 1.0
_SERVER_ERRORS = 3
"""Attempts after which an internal error of the mesh is a request's answer."""
_BUSY = (408, 425, 429, 502, 503)
"""The mesh did not take the request: it is repeated."""


class MeshGone(Exception):
    """The mesh cannot be reached, or not for too long. What is done is in the output file."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How a batch is sent."""

    url: str
    api_key: str = ""
    concurrency: int = 64
    """Most requests at a time."""
    priority: int = -100
    """Priority of requests that name none."""
    patience_s: float = 600.0
    """Seconds without any answer after which the batch ends."""


@dataclass(slots=True)
class Totals:
    """What this run has done."""

    lines: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, line: Json) -> None:
        """Counts a line."""
        self.lines += 1
        body = (line["response"] or {}).get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.completion_tokens += usage.get("completion_tokens", 0)


class Batch:
    """A batch that is being sent."""

    def __init__(
        self, spec: Spec, output: Output, on_line: Callable[[int], None], on_wait: Callable[[str], None]
    ) -> None:
        """`on_line` takes the number of lines of the output after each of them; `on_wait` takes the reason why requests
        wait, once whenever the mesh ceases to answer."""
        self.totals = Totals()
        self._spec = spec
        self._output = output
        self._on_line, self._on_wait = on_line, on_wait
        self._answered_at = time.monotonic()
        """When the mesh last answered a request."""
        self._waits = False

    async def run(self, requests: Iterable[Request]) -> None:
        """Sends the requests that the output does not have. Raises MeshGone, CaFileError and OSError."""
        waiting = iter([request for request in requests if request.custom_id not in self._output.done])
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._spec.concurrency)
        headers = {"authorization": f"Bearer {self._spec.api_key}"} if self._spec.api_key else {}
        timeout = httpx.Timeout(10.0, read=None, pool=None)
        pem = authorities(self._spec.url)
        trusted = ssl.create_default_context(cadata=pem.decode()) if pem is not None else True
        async with httpx.AsyncClient(
            base_url=self._spec.url, headers=headers, timeout=timeout, limits=limits, verify=trusted
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    syncing = group.create_task(self._sync())
                    senders = [
                        group.create_task(self._send_all(client, waiting)) for _ in range(self._spec.concurrency)
                    ]
                    await asyncio.gather(*senders)
                    syncing.cancel()
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _send_all(self, client: httpx.AsyncClient, waiting: Iterator[Request]) -> None:
        for request in waiting:
            line = await self._answer(client, request)
            self._output.append(line)
            self.totals.add(line)
            self._on_line(len(self._output.done))

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            await asyncio.to_thread(self._output.sync)

    async def _answer(self, client: httpx.AsyncClient, request: Request) -> Json:
        """The output line of a request."""
        if request.body.get("stream"):
            return lines.refused(request, "invalid_request", "stream: answers of a batch are whole")
        given = {name: value for name, value in request.body.items() if value is not None}
        body = {"priority": self._spec.priority, "request_id": request.request_id} | given
        wait_s, server_errors = _FIRST_WAIT_S, 0
        while True:
            server_s = 0.0
            try:
                response = await client.post(request.url, json=body)
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    fault = "for another name" if "mismatch" in str(error) else f"not trusted: see {CA_FILE}"
                    raise MeshGone(f"the certificate of {self._spec.url} is {fault}") from None
                self._unanswered("cannot be reached")
            else:
                status = response.status_code
                server_errors += status >= 500 and status not in _BUSY
                if status not in _BUSY and (status < 500 or server_errors >= _SERVER_ERRORS):
                    self._answered()
                    return lines.answered(request, status, _body(response))
                if status == 503:
                    self._unanswered("serves no request at the moment")
                else:
                    self._answered()  # Full, but there.
                server_s = _seconds(response.headers.get("retry-after-ms"), 1000) or _seconds(
                    response.headers.get("retry-after"), 1
                )
            # The waits grow: with many waiting requests the mesh could not answer each as soon as it promises.
            await asyncio.sleep(max(server_s, wait_s) * random.uniform(0.75, 1.25))
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    def _answered(self) -> None:
        self._answered_at, self._waits = time.monotonic(), False

    def _unanswered(self, reason: str) -> None:
        """Raises MeshGone if the mesh has not answered for too long."""
        if not self._waits:
            self._waits = True
            self._on_wait(reason)
        if time.monotonic() - self._answered_at > self._spec.patience_s:
            raise MeshGone(f"no answer from {self._spec.url} for {self._spec.patience_s:g} s")


def _seconds(text: str | None, per_second: int) -> float:
    try:
        return max(0.0, min(_LONGEST_WAIT_S, float(text or 0) / per_second))
    except ValueError:
        return 0.0


def _body(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
