"""Writes the grammar of an answer that consists of tool calls, in the format of a model. Pure; knows no compiler.

The grammar is in llguidance's variant of Lark. The arguments of each call match the JSON schema of its function.
"""

import json
import re
from collections.abc import Mapping, Sequence

from protos import inference_pb2 as api
from services.errors import WeftError, invalid
from services.forms.form import JSON_DEFAULTS, JSON_OVERRIDES
from services.gateway.text.tool_calls.formats import ToolFormat

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_CALL_ID = "/[A-Za-z0-9]{9}/"
_FIELD = "prompt.chat.tools.parameters"


def grammar_of(form: ToolFormat, tools: Sequence[api.Tool], *, once: bool, special: Mapping[str, int]) -> str:
    """The grammar of one call, or (not `once`) of one or more calls of these functions.

    special: ids of the format's markers that are special tokens: no text matches those. Raises WeftError.
    """
    before, after = _quoted(form.before, special), _quoted(form.after, special)
    further = "" if once else f"({_quoted(form.between, special)} call)*"
    lines = [f"start: {before} call {further} {after}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    head, middle, tail = form.call
    call_id = f"({_quoted(form.id_marker, special)} {_CALL_ID})?" if form.id_marker else ""
    for i, tool in enumerate(tools):
        name, arguments = _quoted(head + tool.name, special), f"arguments_{i}"
        lines.append(f"call_{i}: {name} {call_id} {_quoted(middle, special)} {arguments} {_quoted(tail, special)}")
        lines.append(f"{arguments}: %json {json.dumps(_schema(tool))}")
    return "\n".join(lines)


def _schema(tool: api.Tool) -> dict[str, object]:
    """The JSON schema of a function's arguments, which are an object. Raises WeftError."""
    schema = json.loads(tool.parameters) if tool.parameters else dict(_NO_ARGUMENTS)
    if schema.setdefault("type", "object") != "object":
        raise _wrong("a required call needs a schema of type object")
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise _wrong("x-guidance: an object")
    schema["x-guidance"] = {**JSON_DEFAULTS, **options, **JSON_OVERRIDES}
    return schema


def _quoted(text: str, special: Mapping[str, int]) -> str:
    """A text as a part of a rule: its special tokens by id, the rest as strings."""
    pieces = re.split("|".join(f"({re.escape(marker)})" for marker in special), text) if special else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece)


def _wrong(rule: str) -> WeftError:
    return invalid(_FIELD, rule)
