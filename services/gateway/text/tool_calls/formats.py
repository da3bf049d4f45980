"""The formats in which models write tool calls, and which one a chat template teaches. Pure; knows no parser.

Sources: the templates of Hermes 2 Pro and Qwen 2.5, of Llama 3.1 and 3.2, and of Mistral's instruct models (the newer
ones write the name and [ARGS] instead of a list).
"""

from dataclasses import dataclass, replace
from typing import Literal

FormatName = Literal["auto", "hermes", "llama3", "mistral", "mistral-args"]
"""A name of FORMATS, or "auto": look at the chat template."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    opens: str
    """The text before a call."""
    call: tuple[str, str, str]
    """How a required call is written: the texts before the name, between name and arguments, and behind these."""
    before: str = ""
    """The text before all required calls."""
    between: str = ""
    """The text between two required calls."""
    after: str = ""
    """The text behind all required calls."""
    closes: str = ""
    """The text behind a call; may be missing."""
    separators: str = ""
    """Characters between calls."""
    at_start: bool = False
    """An answer that begins with an object is a call, without the text before it."""
    list_or_name: bool = False
    """The text before a call is followed by a list of calls, or by a name and its arguments."""
    markers: tuple[str, ...] = ()
    """Texts that are special tokens in some tokenizers: their text is kept."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits: the template refuses others."""
    id_marker: str = ""
    """Between name and arguments the model may write this text and an id."""


_MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    call=('{"name": "', '", "arguments": ', "}"),
    before="[TOOL_CALLS][",
    between=", ",
    after="]",
    separators=",]",
    list_or_name=True,
    markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    short_ids=True,
)
_FORMATS = (
    ToolFormat(
        "hermes",
        "<tool_call>",
        call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        between="\n",
        closes="</tool_call>",
        markers=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        "llama3",
        "<|python_tag|>",
        call=('{"name": "', '", "parameters": ', "}"),
        between="; ",
        separators=";",
        at_start=True,
        markers=("<|python_tag|>",),
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        name="mistral-args",
        call=("[TOOL_CALLS]", "[ARGS]", ""),
        before="",
        between="",
        after="",
        id_marker="[CALL_ID]",
    ),
)
FORMATS = {form.name: form for form in _FORMATS}


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template shows to the model; None if it is none of them."""
    if "<tool_call>" in template and "arguments" in template and not any(x in template for x in _OTHERS):
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral-args" if "[ARGS]" in template else "mistral"]
    if "<|start_header_id|>" in template and "parameters" in template and "tools" in template:
        return FORMATS["llama3"]
    return None


_OTHERS = ("<function=", "<arg_key>")
"""Templates that write other things than JSON between the tags of Hermes."""
