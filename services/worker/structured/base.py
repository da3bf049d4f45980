"""How an engine sees the forms of answers: matchers that follow an answer and say what may come next.

Knows tokens and masks, no library, no jobs and no runner.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.forms.form import Form

Masks = npt.NDArray[np.int32]
"""[M, W]: bit v % 32 of word v // 32 of a line is 1 if token v may be drawn."""


class FormRefused(Exception):
    """An answer cannot have this form, or cannot be continued in it. The text is for the client."""


class Matcher(Protocol):
    """Follows one answer. Used by one thread at a time."""

    @property
    def accepting(self) -> bool:
        """Whether the form is complete, so that the answer may end here."""

    @property
    def ended(self) -> bool:
        """Whether the form is complete and nothing may follow."""

    def consume(self, token_id: int) -> None:
        """The answer has a further token. Raises FormRefused if the form does not allow it."""

    def likely(self, guesses: Sequence[int]) -> Sequence[int]:
        """Tokens that may follow: those of the text that the form prescribes next; without any, the first of these
        guesses, up to one that the form does not allow."""

    def fill_along(self, guesses: Sequence[int], masks: Masks) -> list[bool]:
        """Write what may follow now and after each of these guesses, which the form allows, to the lines of masks.
        -> for each line whether the form is complete there. The matcher stays where it is."""


class Forms(Protocol):
    """Compiles forms, and computes masks of many answers at once."""

    @property
    def words(self) -> int:
        """Words W of a line of a mask."""

    def open(self, form: Form, token_ids: Sequence[int], then: Callable[[Matcher | FormRefused], None]) -> None:
        """Compile a form in another thread and pass its matcher on, after these tokens of the answer. Called from any
        thread; `then` is called from another one."""

    def fill(self, matchers: Collection[tuple[Matcher, int]], masks: Masks) -> None:
        """Write what may follow in the form, to the line of each matcher. End tokens may where the form is complete. A
        matcher that cannot go on raises FormRefused when `failure` is called."""

    def failure(self, matcher: Matcher) -> FormRefused | None:
        """Why the matcher cannot go on; None if it can."""
