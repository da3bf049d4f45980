"""Forms of answers through llguidance, for the tokenizer of one model. Knows tokens, no jobs and no runner.

A form is compiled in a thread of its own and kept for later answers. A mask takes some microseconds, and a millisecond
or two within a string of bounded length, without the interpreter's lock. Copies of a matcher share its lexer, which one
thread at a time uses. So a form is compiled several times, and answers use these in turns.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from services import host
from services.forms.form import Form
from services.forms.grammar import FormError, check, compile_form, one_line
from services.worker.structured.base import FormRefused, Masks, Matcher

log = logging.getLogger(__name__)

_KEPT = 64
"""Compiled forms; the least recently used goes first."""
_COMPILERS = 2
_MASK_THREADS = 16
"""At most; no more than two for each core. The threads take a few masks at a time, the fewer the more threads."""
_MORE_S = 0.05
"""Seconds of computation for further lexers of a form."""
_SLOW_S = 0.2
"""A form whose first compilation takes longer has one lexer. The first takes up to four times as long as the others."""
_ALONE = 4
"""Most masks of a step that are computed one after another: sharing them among threads takes about as long."""
_UNUSABLE = "this model's tokenizer does not serve structured answers"


class GuidanceMatcher:
    """A `Matcher` of llguidance."""

    __slots__ = ("accepting", "ended", "inner", "lexer")

    def __init__(self, inner: LLMatcher, lexer: int) -> None:
        """lexer: which of the form's it uses."""
        self.inner, self.lexer = inner, lexer
        self.accepting = self.ended = False
        self._note()

    def consume(self, token_id: int) -> None:
        """The answer has a further token. Raises FormRefused if the form does not allow it."""
        if not self.inner.consume_token(token_id):
            raise FormRefused(one_line(self.inner.get_error()))
        self._note()

    def likely(self, guesses: Sequence[int]) -> Sequence[int]:
        """What the form prescribes next, or else the first guesses that it allows."""
        if self.ended:
            return ()
        return self.inner.compute_ff_tokens() or guesses[: self.inner.validate_tokens(list(guesses))]

    def fill_along(self, guesses: Sequence[int], masks: Masks) -> list[bool]:
        """Write what may follow now and after each of these guesses. -> where the form is complete.

        A copy goes along the guesses: if it meets a limit behind a wrong one, that is no error of the answer.
        """
        complete, ahead = [self.accepting], self.inner.deep_copy()
        self.inner.unsafe_compute_mask_ptr(masks[0].ctypes.data, masks[0].nbytes)
        for guess, line in zip(guesses, masks[1:], strict=True):
            ahead.consume_token(guess)
            complete.append(ahead.is_accepting())
            if not ahead.is_stopped():
                ahead.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
            if ahead.is_stopped():  # The answer ends before this place, or its own matcher meets the same limit.
                line[:] = -1
        return complete

    def _note(self) -> None:
        self.accepting = self.inner.is_accepting()
        self.ended = self.accepting and self.inner.is_stopped()


class CompiledForm:
    """A form's matchers at the start of an answer, each with a lexer of its own. Used by any thread."""

    def __init__(self, compile_one: Callable[[], LLMatcher], most: int) -> None:
        """compile_one: compiles the form; may raise FormError. most: lexers."""
        self._compile, self._most = compile_one, most
        self._lock = threading.Lock()
        self._matchers: list[LLMatcher] = []
        self._error: str | None = None
        self._fastest_s = math.inf
        self._turns = 0

    def next(self) -> tuple[LLMatcher, int]:
        """The matcher for a further answer, to be copied, and the number of its lexer. The first answers compile it.
        Raises FormError."""
        with self._lock:  # Of equal forms that arrive together one compiles.
            if self._error is not None:
                raise FormError(self._error)
            if len(self._matchers) < self._wanted():
                self._compile_another()
            lexer = self._turns % len(self._matchers)
            self._turns += 1
            return self._matchers[lexer], lexer

    def _wanted(self) -> int:
        """How many lexers the form should have when its next answer begins, by its fastest compilation so far."""
        if not self._matchers:
            return 1
        more = int(_MORE_S / max(self._fastest_s, 1e-6))
        if len(self._matchers) == 1 and self._fastest_s < _SLOW_S:
            more = max(more, 1)
        return min(self._most, 1 + more)

    def _compile_another(self) -> None:
        began = time.perf_counter()
        try:
            self._matchers.append(self._compile())
        except FormError as error:
            if not self._matchers:
                self._error = str(error)
            raise
        self._fastest_s = min(self._fastest_s, time.perf_counter() - began)


class GuidanceForms:
    """`Forms` of llguidance."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, end_tokens: Collection[int]) -> None:
        """vocab_size: of the model; it may exceed the tokenizer's. The tokenizer is prepared in a thread, which takes
        about a second for 128,000 tokens."""
        self.words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(_COMPILERS, "forms")
        self._mask_threads = min(_MASK_THREADS, 2 * host.available_cores())
        self._executor = LLExecutor(self._mask_threads)
        self._kept: OrderedDict[Form, CompiledForm] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer = self._threads.submit(_prepare, tokenizer_json, vocab_size, sorted(end_tokens))

    def wait(self) -> None:
        """Wait until the tokenizer is prepared: part of that holds the interpreter's lock."""
        if self._tokenizer.exception() is not None:
            log.warning("structured answers are not served: %s", self._tokenizer.exception())

    def open(self, form: Form, token_ids: Sequence[int], then: Callable[[Matcher | FormRefused], None]) -> None:
        """Compile a form, or find it, and pass on its matcher after these tokens."""

        def opened() -> None:
            then(self._open(form, token_ids))

        self._threads.submit(opened)

    def fill(self, matchers: Collection[tuple[Matcher, int]], masks: Masks) -> None:
        """Write the masks of these lines."""
        assert masks.shape[1] == self.words, masks.shape
        assert masks.flags.c_contiguous
        places = [(cast(GuidanceMatcher, matcher), line) for matcher, line in matchers]
        if len(places) > _ALONE:
            # A thread takes neighbours: those of one lexer would wait for each other in different threads.
            places.sort(key=lambda place: place[0].lexer)
            inner = [(matcher.inner, line) for matcher, line in places]
            self._executor.unsafe_compute_mask_ptr(inner, masks.ctypes.data, 4 * self.words, len(masks))
            return
        for matcher, line in places:
            matcher.inner.unsafe_compute_mask_ptr(masks[line].ctypes.data, 4 * self.words)

    def failure(self, matcher: Matcher) -> FormRefused | None:
        """Why the matcher cannot go on."""
        inner = cast(GuidanceMatcher, matcher).inner
        return FormRefused(one_line(inner.get_error())) if inner.is_error() else None

    def close(self) -> None:
        """End the threads once what they do is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _open(self, form: Form, token_ids: Sequence[int]) -> Matcher | FormRefused:
        try:
            compiled, lexer = self._compiled(form).next()
            matcher = compiled.deep_copy()
            if token_ids and not matcher.consume_tokens(list(token_ids)):
                return FormRefused("the answer so far does not have this form")
            check(matcher)
            return GuidanceMatcher(matcher, lexer)
        except FormError as error:
            return FormRefused(str(error))

    def _compiled(self, form: Form) -> CompiledForm:
        """The form, which its first answer compiles."""

        def compile_one() -> LLMatcher:
            if self._tokenizer.exception() is not None:
                raise FormError(_UNUSABLE)
            return compile_form(form, self._tokenizer.result())

        with self._lock:
            kept = self._kept.setdefault(form, CompiledForm(compile_one, self._mask_threads))
            self._kept.move_to_end(form)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return kept


def _prepare(tokenizer_json: bytes, vocab_size: int, end_tokens: list[int]) -> LLTokenizer:
    """The tokenizer with the model's end tokens. Raises FormError."""
    try:
        return LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=end_tokens or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the library's Rust code is no Exception.
        raise FormError(one_line(str(error))) from None
