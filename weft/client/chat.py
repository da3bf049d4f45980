"""Builds conversations of the public API from Python values. Knows their fields, never how a model reads them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from protos import inference_pb2 as api

Message = Mapping[str, Any]
"""`role` and `content`, and as far as they apply `name`, `tool_calls` and `tool_call_id`. A call is {"id", "name",
"arguments"}, or has OpenAI's form {"id", "type": "function", "function": {...}}; arguments are a mapping or JSON."""
Tool = Mapping[str, Any]
"""{"name", "description", "parameters"}, or OpenAI's form {"type": "function", "function": {...}}. The parameters are a
JSON schema as a mapping or as JSON."""


def build_message(turn: Message) -> api.ChatMessage:
    """Raises TypeError or ValueError for what no message can hold."""
    given: dict[str, Any] = {name: value for name, value in turn.items() if value is not None}
    calls = [_call(call) for call in given.pop("tool_calls", ())]
    return api.ChatMessage(tool_calls=calls, **given)


def build_tool(tool: Tool) -> api.Tool:
    """Raises TypeError or ValueError for what no tool can hold."""
    function = dict(_function(tool))
    return api.Tool(parameters=_json(function.pop("parameters", "")), **function)


def _call(call: Mapping[str, Any]) -> api.ToolCall:
    function = dict(_function(call))
    call_id = function.pop("id", call.get("id", ""))
    return api.ToolCall(id=call_id, arguments=_json(function.pop("arguments", "")), **function)


def _function(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" not in value:
        return value
    if value.get("type", "function") != "function" or value.keys() - {"id", "type", "function"}:
        raise ValueError("only tools of type function are supported")
    function: Mapping[str, Any] = value["function"]
    return function


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def add_options(chat: api.Chat, options: Mapping[str, Any]) -> None:
    """Sets the options that concern conversations."""
    tools: Sequence[Tool] = options.get("tools", ())
    chat.tools.extend(map(build_tool, tools))
    if "template_variables" in options:
        chat.template_variables = _json(options["template_variables"])
    if "tool_choice" in options:
        choose_tool(chat, options["tool_choice"])
    for name in ("add_generation_prompt", "continue_final_message", "parallel_tool_calls"):
        if name in options:
            setattr(chat, name, options[name])


def choose_tool(chat: api.Chat, choice: str | Tool) -> None:
    """Sets whether the model calls functions: "auto", "none", "required", or a function, as {"name": NAME} or in
    OpenAI's form. Raises ValueError for other values."""
    if not isinstance(choice, str):
        chat.tool_function = _function(choice)["name"]
    elif choice not in ("auto", "none", "required"):
        raise ValueError(f"{choice!r} is not auto, none or required")
    elif choice != "auto":
        chat.tool_mode = api.ToolMode.Value(f"TOOL_MODE_{choice.upper()}")
