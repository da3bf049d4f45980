"""Reads the tools of a chat request. Knows nothing else of the request."""

from collections.abc import Callable
from typing import Any

from protos import inference_pb2 as api
from services.gateway.doors.openai.values import (
    Asked,
    check_count,
    check_keys,
    flag,
    json_text,
    mapping,
    text,
    unsupported,
    wrong,
)
from services.validate_chat import MAX_TOOLS, calls_required


def tools(asked: Asked, name: str, value: Any) -> None:
    """The functions that the model may call."""
    if not isinstance(value, list):
        raise wrong(name, "a list of tools")
    check_count(name, value, MAX_TOOLS)
    for place, tool in enumerate(value):
        _add_tool(asked, f"{name}[{place}]", tool)


def _add_tool(asked: Asked, at: str, tool: Any) -> None:
    if mapping(at, tool).get("type") != "function":
        raise unsupported(f"{at}.type", "only functions are supported")
    function = mapping(f"{at}.function", tool.get("function"))
    check_keys(at, tool, "type", "function")
    made = asked.request.prompt.chat.tools.add(name=text(f"{at}.function.name", function.get("name")))
    for key, given in function.items():
        if given is None or key == "name":
            continue
        if key == "strict":
            if flag(f"{at}.function.strict", given):
                asked.strict = f"{at}.function.strict"
            continue
        reader = _FUNCTION.get(key)
        if reader is None:
            raise unsupported(f"{at}.function.{key}", "not supported")
        reader(made, f"{at}.function.{key}", given)


def _description(tool: api.Tool, at: str, value: Any) -> None:
    tool.description = text(at, value)


def _parameters(tool: api.Tool, at: str, value: Any) -> None:
    tool.parameters = json_text(at, value)


_FUNCTION: dict[str, Callable[[api.Tool, str, Any], None]] = {"description": _description, "parameters": _parameters}


def check_strict(asked: Asked) -> None:
    """Refuses `strict` where the model chooses whether it calls: those arguments are not checked. Raises WeftError."""
    if asked.strict and not calls_required(asked.request.prompt.chat):
        raise unsupported(asked.strict, "only where `tool_choice` is required or a function")


def tool_choice(asked: Asked, name: str, value: Any) -> None:
    """auto, none, required, or {"type": "function", "function": {"name": NAME}}."""
    chat = asked.request.prompt.chat
    if isinstance(value, str):
        if value not in _MODES:
            raise wrong(name, f"{', '.join(_MODES)} or a function")
        if value != "auto":
            chat.tool_mode = _MODES[value]
        return
    if mapping(name, value).get("type") != "function":
        raise unsupported(f"{name}.type", "only functions are supported")
    function = mapping(f"{name}.function", value.get("function"))
    check_keys(name, value, "type", "function")
    check_keys(f"{name}.function", function, "name")
    chat.tool_function = text(f"{name}.function.name", function.get("name"))


_MODES = {
    "auto": api.TOOL_MODE_UNSPECIFIED, "none": api.TOOL_MODE_NONE, "required": api.TOOL_MODE_REQUIRED,
}  # fmt: skip
