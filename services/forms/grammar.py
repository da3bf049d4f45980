"""Forms of answers in the notation of llguidance, and the limits within which they are compiled. Knows no requests.

Gateway and worker compile with the same function and the same limits, so that they agree on what can be compiled.
"""

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from services.forms.form import JSON_DEFAULTS, JSON_OVERRIDES, Form

_MOST_MESSAGE = 300


class FormError(Exception):
    """A form cannot be compiled, or cannot be followed any further. The text is for the client and may quote the
    form."""


def compile_form(form: Form, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the start of an answer. Raises FormError. Its first mask is computed, too, and that behind the text
    with which each answer begins, such as a brace: some limits are exceeded only there.

    Neither the time nor the memory of this is bounded in all cases: a check in a process of its own comes first.
    """
    try:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, _source_of(form), log_level=0, limits=limits)
        beyond = matcher.deep_copy()
        for each in (matcher, beyond):
            if not each.is_error():
                each.compute_bitmask()
                beyond.consume_tokens(beyond.compute_ff_tokens())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the library's Rust code is no Exception.
        raise FormError(one_line(str(error)) or "it cannot be compiled") from None
    check(matcher)
    check(beyond)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises FormError if the matcher cannot go on."""
    if matcher.is_error():
        raise FormError(one_line(matcher.get_error()))


def one_line(text: str) -> str:
    """The beginning of a message as one line."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MOST_MESSAGE else f"{line[:_MOST_MESSAGE]}..."


def _source_of(form: Form) -> str:
    """The form as a grammar of llguidance."""
    if form.field in ("json_schema", "json_object"):
        defaults: Any = dict(JSON_DEFAULTS)
        overrides: Any = dict(JSON_OVERRIDES)
        return LLMatcher.grammar_from_json_schema(form.text, defaults=defaults, overrides=overrides)
    if form.field == "regex":
        return LLMatcher.grammar_from_regex(form.text)
    if form.field == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(form.text))
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    return LLMatcher.grammar_from_lark(any_to_lark(form.text))
