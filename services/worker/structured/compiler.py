"""Forms of answers through llguidance, for the tokenizer of one model. Knows tokens, no jobs and no runner.

A form is compiled in a thread of its own and kept for later answers. A mask takes some microseconds, without the
interpreter's lock.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from services.forms.form import Form
from services.forms.grammar import FormError, check, compile_form, one_line
from services.worker.structured.base import FormRefused, Masks, Matcher

log = logging.getLogger(__name__)

_KEPT = 64
"""Compiled forms; the least recently used goes first."""
_COMPILERS = 2
_MASK_THREADS = 4
_ALONE = 4
"""Most masks of a step that are computed one after another: sharing them among threads takes about as long."""
_UNUSABLE = "this model's tokenizer does not serve structured answers"


class GuidanceMatcher:
    """A `Matcher` of llguidance."""

    __slots__ = ("accepting", "ended", "inner")

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner
        self.accepting = self.ended = False
        self._note()

    def consume(self, token_id: int) -> None:
        """The answer has a further token. Raises FormRefused if the form does not allow it."""
        if not self.inner.consume_token(token_id):
            raise FormRefused(one_line(self.inner.get_error()))
        self._note()

    def _note(self) -> None:
        self.accepting = self.inner.is_accepting()
        self.ended = self.accepting and self.inner.is_stopped()


class GuidanceForms:
    """`Forms` of llguidance."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, end_tokens: Collection[int]) -> None:
        """vocab_size: of the model; it may exceed the tokenizer's. The tokenizer is prepared in a thread, which takes
        about a second for 128,000 tokens."""
        self.words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(_COMPILERS, "forms")
        self._executor = LLExecutor(_MASK_THREADS)
        self._kept: OrderedDict[Form, Future[LLMatcher]] = OrderedDict()
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
        places = [(cast(GuidanceMatcher, matcher).inner, line) for matcher, line in matchers]
        if len(places) > _ALONE:
            self._executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, 4 * self.words, len(masks))
            return
        for matcher, line in places:
            matcher.unsafe_compute_mask_ptr(masks[line].ctypes.data, 4 * self.words)

    def failure(self, matcher: Matcher) -> FormRefused | None:
        """Why the matcher cannot go on."""
        inner = cast(GuidanceMatcher, matcher).inner
        return FormRefused(one_line(inner.get_error())) if inner.is_error() else None

    def close(self) -> None:
        """End the threads once what they do is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _open(self, form: Form, token_ids: Sequence[int]) -> Matcher | FormRefused:
        try:
            matcher = self._compiled(form).deep_copy()
            if token_ids and not matcher.consume_tokens(list(token_ids)):
                return FormRefused("the answer so far does not have this form")
            check(matcher)
            return GuidanceMatcher(matcher)
        except FormError as error:
            return FormRefused(str(error))

    def _compiled(self, form: Form) -> LLMatcher:
        """The matcher at the start of an answer. Of equal forms that arrive together one is compiled. Raises
        FormError."""
        with self._lock:
            found = self._kept.get(form)
            compiles = found is None
            future = self._kept[form] = found if found is not None else Future()
            self._kept.move_to_end(form)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        if compiles:
            try:
                if self._tokenizer.exception() is not None:
                    raise FormError(_UNUSABLE)
                future.set_result(compile_form(form, self._tokenizer.result()))
            except FormError as error:
                future.set_exception(error)
        return future.result()


def _prepare(tokenizer_json: bytes, vocab_size: int, end_tokens: list[int]) -> LLTokenizer:
    """The tokenizer with the model's end tokens. Raises FormError."""
    try:
        return LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=end_tokens or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the library's Rust code is no Exception.
        raise FormError(one_line(str(error))) from None
