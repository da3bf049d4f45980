"""Renders the chat template of a checkpoint in a child process with limits. Knows neither tokenizers nor messages.

The result equals that of transformers' `apply_chat_template`. A template is code of the checkpoint: it is compiled and
run by `template_child.py` alone, in a process without an environment, with bounds on memory and processor time. A
process that does not answer within MAX_SECONDS is killed, and the next rendering starts another one.
"""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from grpc import StatusCode

from services.errors import WeftError
from services.gateway.text.turns import no_tokenizer

MAX_SECONDS = 2.0
"""Longest time of one rendering, and of compiling the template."""
MAX_CHARS = 8 << 20
"""Longest text of a rendering."""
_START_S = 30.0
"""Longest time until a child process has started: long, because the machine may be busy."""
_MOST_ANSWER_BYTES = 4 * MAX_CHARS + (1 << 10)
_CHILD = Path(__file__).with_name("template_child.py")
_PASSED_ON = ("PATH", "TZ", "LD_LIBRARY_PATH")
"""Variables that a child receives: none has a secret."""


class ChatTemplate:
    """The template of one checkpoint. Thread-safe; a second thread waits until the rendering of the first one ends."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._source = source
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._compiled: frozenset[str] | None = None
        self._broken = self._closed = False

    @property
    def reads(self) -> frozenset[str]:
        """The variables that the template reads and does not set itself, but for special tokens."""
        return self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        with self._lock, contextlib.suppress(_ChildError):
            self._running()
        return (self._compiled or frozenset()) - self._special_tokens.keys()

    def warm_up(self) -> None:
        """Starts the process and compiles the template, so that the first rendering does not wait for it."""
        _ = self.reads

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation; variables are values of JSON, "messages" among them. Raises WeftError."""
        with self._lock:
            try:
                child, deadline = self._running()
                if self._compiled is None:
                    raise _refused("the model's chat template does not compile")
                answer = child.ask({**variables, **self._special_tokens}, deadline)
            except _ChildError:
                self._stop()
                if self._closed:
                    raise no_tokenizer() from None
                raise _refused("the model's chat template takes too long or produces too much text") from None
        text = answer.get("text")
        if isinstance(text, str) and len(text) <= MAX_CHARS:
            return text
        if answer.get("error") == "limit":
            raise _refused("the model's chat template takes too long or produces too much text")
        raise _refused("the model's chat template refuses these messages")

    def close(self) -> None:
        """Ends the process, also during a rendering, which then fails."""
        self._broken = self._closed = True
        if self._child is not None:
            self._child.end()
        if self._lock.acquire(blocking=False):
            try:
                self._stop()
            finally:
                self._lock.release()

    def _running(self) -> "tuple[_Child, float]":
        """The process with the compiled template, and until when it may work for this rendering. Raises _ChildError."""
        if self._broken:
            raise _ChildError
        deadline = time.monotonic() + MAX_SECONDS
        if self._child is None:
            self._child = child = _Child()
            weakref.finalize(self, child.kill)
            child.started()
            deadline = time.monotonic() + MAX_SECONDS
            first = self._compiled is None
            try:
                names = child.ask(self._source, deadline).get("reads")
            except _ChildError:
                # It never compiles: no further process is started for it.
                self._broken = first
                self._stop()
                raise
            self._compiled = frozenset(map(str, names)) if isinstance(names, list) else None
        return self._child, deadline

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class _ChildError(Exception):
    """The process has ended, has not answered in time, or has sent no answer."""


class _Child:
    """A process that runs `template_child.py`."""

    def __init__(self) -> None:
        own, its = socket.socketpair()
        with its:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD)],
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                cwd="/",
            )
        own.setblocking(False)
        self._socket = own
        self._killing = threading.Lock()

    def started(self) -> None:
        """Waits until it has started. Raises _ChildError."""
        self._receive(time.monotonic() + _START_S)

    def ask(self, message: Any, deadline: float) -> dict[str, Any]:
        """The answer to a message, until `deadline` on time.monotonic. Raises _ChildError."""
        try:
            data = orjson.dumps(message)
        except TypeError:  # Numbers beyond 64 bits, or text that is no valid Unicode.
            data = json.dumps(message).encode()
        self._send(len(data).to_bytes(4, "big") + data, deadline)
        return self._receive(deadline)

    def end(self) -> None:
        """Ends the process at once; calls that wait for an answer raise _ChildError."""
        self._process.kill()

    def kill(self) -> None:
        """Ends the process at once, and closes the link to it, which no caller may use at this time."""
        with self._killing:
            self._process.kill()
            self._process.wait()
            self._socket.close()

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait(selectors.EVENT_WRITE, deadline)
            except OSError:
                raise _ChildError from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        data = bytearray()
        size = 4
        while len(data) < size:
            try:
                piece = self._socket.recv(min(size - len(data), 1 << 20))
            except BlockingIOError:
                self._wait(selectors.EVENT_READ, deadline)
                continue
            except OSError:
                raise _ChildError from None
            data += piece
            if not piece or (len(data) == 4 and int.from_bytes(data, "big") > _MOST_ANSWER_BYTES):
                raise _ChildError
            if len(data) == 4:
                size = 4 + int.from_bytes(data, "big")
        try:
            answer = orjson.loads(memoryview(data)[4:])
        except orjson.JSONDecodeError:
            answer = {"error": "refused"}
        if not isinstance(answer, dict):
            raise _ChildError
        return answer

    def _wait(self, event: int, deadline: float) -> None:
        """Waits until the socket is ready. Raises _ChildError at the deadline."""
        with selectors.PollSelector() as selector:
            selector.register(self._socket, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise _ChildError


def _refused(message: str) -> WeftError:
    return WeftError(StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE", message, field="prompt.chat")
