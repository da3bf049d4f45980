"""Checks that the forms of answers can be compiled, in processes with hard limits. Knows processes, no requests.

The processes are started when forms arrive, and end with the process that started them: their input ends.
"""

import asyncio
import json
import sys
from collections import OrderedDict

from services.errors import WeftError, invalid, unavailable
from services.forms.form import Form
from services.forms.request import FIELD

_PROCESSES = 2
_VERDICTS = 1024
"""Forms whose result is kept; the least recently used goes first."""
_MOST_WAIT_S = 30.0
"""For the queue and for a machine that is too busy to give a process the time that it may use."""
_TOO_LARGE = "it takes more than 2 s of computation or 1 GiB of memory to compile"


class FormChecks:
    """Compiles each form once, before the first request with it is admitted."""

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-m", "services.forms.check_child")) -> None:
        self._command = command
        self._verdicts: OrderedDict[Form, str] = OrderedDict()
        self._idle: list[asyncio.subprocess.Process] = []
        self._places = asyncio.Semaphore(_PROCESSES)

    async def check(self, form: Form, field: str | None = None) -> None:
        """Raises WeftError if the form cannot be compiled. `field` of the request asks for it; None: its own field."""
        reason = self._verdicts.get(form)
        if reason is None:
            try:
                async with asyncio.timeout(_MOST_WAIT_S), self._places:
                    reason = await self._compile(form)
            except TimeoutError:
                raise _busy() from None
            self._verdicts[form] = reason
            if len(self._verdicts) > _VERDICTS:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(form)
        if reason:
            raise invalid(field or f"{FIELD}.{form.field}", reason, "INVALID_GRAMMAR")

    async def close(self) -> None:
        """Ends the processes."""
        for process in self._idle:
            await _end(process)
        self._idle.clear()

    async def _compile(self, form: Form) -> str:
        """Why the form cannot be compiled; empty if it can. Raises WeftError if no process answers."""
        line = json.dumps(form).encode() + b"\n"
        while True:
            used = bool(self._idle)
            process = self._idle.pop() if used else await self._start()
            try:
                reply = await _ask(process, line)
                reason = str(json.loads(reply)) if reply else ""
            except BaseException:  # It may still compile, or send an answer for which no caller waits any more.
                await _end(process)
                raise
            if reply:
                self._idle.append(process)
                return reason
            status = await process.wait()
            if status < 0:  # It was ended by a signal: one of the limits, or of the memory of the machine.
                return _TOO_LARGE
            if not used:
                raise _busy()
            # It had ended before, because it had used much memory: another one gets the form.

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
        except OSError:
            raise _busy() from None


async def _ask(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    """The reply to a line; empty if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass
    return await process.stdout.readline()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a process whatever it does, and waits for its end."""
    if process.returncode is None:
        process.kill()
    await process.wait()


def _busy() -> WeftError:
    return unavailable("STRUCTURED_CHECK", "no process could check the form of the answer")
