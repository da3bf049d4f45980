"""Checks the conversation of a request. Knows no chat template."""

import json
import re
from collections.abc import Collection, Iterable

from protos import inference_pb2 as api
from services.errors import WeftError, invalid

MAX_MESSAGES = 1024
MAX_CALLS = 1024
"""Most tool calls of all messages."""
MAX_TOOLS = 128
MAX_VARIABLES_BYTES = 64 << 10
MAX_DEPTH = 100
"""Most levels of lists and objects in a JSON text."""
_OBJECT = f"a JSON object of at most {MAX_DEPTH} levels"
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables of a chat template that fields of the request set."""
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_chat(chat: api.Chat) -> None:
    """Checks all that can be checked without the model. Raises WeftError."""
    if not chat.messages:
        raise _wrong("messages", "empty", "EMPTY_PROMPT")
    if len(chat.messages) > MAX_MESSAGES:
        raise _wrong("messages", f"at most {MAX_MESSAGES}")
    if sum(len(message.tool_calls) for message in chat.messages) > MAX_CALLS:
        raise _wrong("messages.tool_calls", f"at most {MAX_CALLS}")
    for message in chat.messages:
        if not message.role:
            raise _wrong("messages.role", "empty")
        for call in message.tool_calls:
            _check_name("messages.tool_calls.name", call.name)
            if not isinstance(parsed(call.arguments or "{}"), dict):
                raise _wrong("messages.tool_calls.arguments", _OBJECT)
    _check_tools(chat)
    _check_variables(chat.template_variables)
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            raise _wrong("continue_final_message", "not together with add_generation_prompt")
        if not chat.messages[-1].content:
            raise _wrong("continue_final_message", "the last message has no text to continue")


def calls_in(messages: Iterable[object]) -> list[object]:
    """The tool calls of messages in JSON, whatever they contain."""
    objects = [message for message in messages if isinstance(message, dict)]
    listed = (message.get(name) for message in objects for name in ("tool_calls", "toolCalls"))
    return [call for calls in listed if isinstance(calls, list) for call in calls]


def calls_required(chat: api.Chat) -> bool:
    """Whether the answer must consist of tool calls."""
    return chat.tool_mode == api.TOOL_MODE_REQUIRED or chat.HasField("tool_function")


def parsed(text: str) -> object:
    """The value of a JSON text; None if it is no JSON or nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return None if _is_deep(value) else value


def _is_deep(value: object) -> bool:
    """Whether a value has more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for each in level for inner in _within(each)]
        if not level:
            return False
    return True


def _within(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON.


def _check_tools(chat: api.Chat) -> None:
    if len(chat.tools) > MAX_TOOLS:
        raise _wrong("tools", f"at most {MAX_TOOLS}")
    for tool in chat.tools:
        _check_name("tools.name", tool.name)
        if tool.parameters and not isinstance(parsed(tool.parameters), dict):
            raise _wrong("tools.parameters", _OBJECT)
    names = {tool.name for tool in chat.tools}
    if len(names) < len(chat.tools):
        raise _wrong("tools.name", "two tools have one name")
    if chat.HasField("parallel_tool_calls") and not names:
        raise _wrong("parallel_tool_calls", "only with tools")
    if chat.WhichOneof("tool_choice") is not None:
        _check_choice(chat, names)


def _check_choice(chat: api.Chat, names: Collection[str]) -> None:
    if chat.HasField("tool_mode") and chat.tool_mode not in api.ToolMode.values():
        raise _wrong("tool_mode", "must be a tool mode")
    if chat.tool_mode == api.TOOL_MODE_REQUIRED and not names:
        raise _wrong("tool_mode", "required calls: only with tools")
    if chat.HasField("tool_function") and chat.tool_function not in names:
        raise _wrong("tool_function", "not the name of one of the tools")


def _check_name(field: str, name: str) -> None:
    if not _FUNCTION_NAME.fullmatch(name):
        raise _wrong(field, "1 to 64 characters of A-Z a-z 0-9 _ . -")


def _check_variables(text: str) -> None:
    if not text:
        return
    if len(text.encode()) > MAX_VARIABLES_BYTES:
        raise _wrong("template_variables", f"at most {MAX_VARIABLES_BYTES} bytes")
    variables = parsed(text)
    if not isinstance(variables, dict):
        raise _wrong("template_variables", _OBJECT)
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise _wrong(f"template_variables.{name}", "has a field of its own")


def _wrong(field: str, rule: str, reason: str = "INVALID_FIELD") -> WeftError:
    return invalid(f"prompt.chat.{field}", rule, reason)
