"""Named places at which tests make a process fail. Without WEFT_FAILPOINTS nothing is armed and nothing is checked.

WEFT_FAILPOINTS="engine.step=exit;jobs.start=exit:4242" arms two places. What follows the name is the action, what
follows the colon its argument, whose meaning the place defines. A place calls `hit` with what it does now; it costs one
look at an empty dictionary where nothing is armed. Knows no service.
"""

import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, cast

_ACTIONS = ("exit", "hang", "raise")
Action = Literal["exit", "hang", "raise"]


class FailpointError(Exception):
    """The failure that an armed place with the action `raise` simulates."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """An armed place: `exit` is SIGKILL to the own process, `hang` sleeps for ever, `raise` raises FailpointError."""

    action: Action
    argument: str = ""

    def concerns(self, values: Collection[int]) -> bool:
        """Whether the argument is one of these numbers; without an argument always."""
        return not self.argument or int(self.argument) in values


def parse(text: str) -> dict[str, Failpoint]:
    """The armed places of a WEFT_FAILPOINTS. Raises ValueError."""
    armed = {}
    for entry in filter(None, text.split(";")):
        name, _, rest = entry.partition("=")
        action, _, argument = rest.partition(":")
        if action not in _ACTIONS:
            raise ValueError(f"WEFT_FAILPOINTS: {action!r} is none of {', '.join(_ACTIONS)}")
        armed[name.strip()] = Failpoint(cast(Action, action), argument)
    return armed


ARMED = parse(os.environ.get("WEFT_FAILPOINTS", ""))
"""The places that fail in this process."""


def hit(name: str, values: Collection[int] = ()) -> None:
    """Fails here if this place is armed and concerns `values`, such as the token ids of a job."""
    if not ARMED:
        return
    point = ARMED.get(name)
    if point is None or not point.concerns(values):
        return
    if point.action == "raise":
        raise FailpointError(name)
    if point.action == "exit":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(60)
