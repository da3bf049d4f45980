"""The form of an answer as a plain value, and how JSON is written in it. Knows no requests: engines that have no gRPC
import it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

JSON_DEFAULTS: Mapping[str, Any] = {"whitespace_pattern": r" |\r?\n[ \t]{0,20}"}
"""Options of llguidance that a schema may change (in "x-guidance"). Between the parts of a JSON text: a space, or a
line break and an indentation. Without a bound, a model may write white space until max_tokens."""
JSON_OVERRIDES: Mapping[str, Any] = {"lenient": False}
"""Options that no schema changes: keywords that cannot be enforced are refused, not ignored."""


class Form(NamedTuple):
    """What an answer has to match."""

    field: str
    """The field of weft.v1.Structured that describes it: json_schema, json_object, regex, choice or grammar."""
    text: str
    """The schema, expression or grammar; of a choice, its texts as a JSON list."""
