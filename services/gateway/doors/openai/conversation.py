"""Reads the messages of a chat request and the variables of its template. Knows nothing else of the request."""

from typing import Any

from protos import inference_pb2 as api
from services.gateway.doors.openai.values import (
    Asked,
    Json,
    check_count,
    check_keys,
    flag,
    json_text,
    mapping,
    text,
    unsupported,
    wrong,
)
from services.validate_chat import MAX_CALLS, MAX_MESSAGES, calls_in

_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id"}


def messages(asked: Asked, name: str, value: Any) -> None:
    """The conversation."""
    if not isinstance(value, list):
        raise wrong(name, "a list of messages")
    check_count(name, value, MAX_MESSAGES)
    check_count(f"{name}.tool_calls", calls_in(value), MAX_CALLS)
    chat = asked.request.prompt.chat
    chat.SetInParent()
    for place, message in enumerate(value):
        _add_message(chat, f"{name}[{place}]", mapping(f"{name}[{place}]", message))


def _add_message(chat: api.Chat, at: str, message: Json) -> None:
    for key, given in message.items():
        if key not in _MESSAGE and given is not None and given != []:
            raise unsupported(f"{at}.{key}", "not supported")
    calls = message.get("tool_calls") or []
    if message.get("content") is None and not calls:
        raise wrong(f"{at}.content", "required")
    made = chat.messages.add(role=text(f"{at}.role", message.get("role")))
    if message.get("content") is not None:
        made.content = _content(f"{at}.content", message["content"])
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            setattr(made, key, text(f"{at}.{key}", message[key]))
    if not isinstance(calls, list):
        raise wrong(f"{at}.tool_calls", "a list of calls")
    for place, call in enumerate(calls):
        _add_call(made, f"{at}.tool_calls[{place}]", mapping(f"{at}.tool_calls[{place}]", call))


def _add_call(message: api.ChatMessage, at: str, call: Json) -> None:
    if call.get("type") not in (None, "function"):
        raise unsupported(f"{at}.type", "only functions are supported")
    function = mapping(f"{at}.function", call.get("function"))
    check_keys(at, call, "id", "type", "function", "index")
    check_keys(f"{at}.function", function, "name", "arguments")
    message.tool_calls.add(
        id="" if call.get("id") is None else text(f"{at}.id", call["id"]),
        name=text(f"{at}.function.name", function.get("name")),
        arguments=text(f"{at}.function.arguments", function.get("arguments")),
    )


def _content(name: str, value: Any) -> str:
    """The text of a message: a string, or parts of text, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(name, "a string or a list of parts")
    texts = []
    for place, part in enumerate(value):
        at = f"{name}[{place}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise unsupported(f"{at}.type", "only parts of text are supported")
        check_keys(at, part, "type", "text")
        texts.append(text(f"{at}.text", part.get("text")))
    return "\n".join(texts)


def template_variables(asked: Asked, name: str, value: Any) -> None:
    """Variables of the chat template."""
    asked.variables.update(mapping(name, value))


def thinking(asked: Asked, name: str, value: Any) -> None:
    """The variable of this name, which reasoning models read."""
    asked.variables[name] = flag(name, value)


def chat_flag(asked: Asked, name: str, value: Any) -> None:
    """A flag of weft.v1's Chat."""
    setattr(asked.request.prompt.chat, name, flag(name, value))


def finish(asked: Asked) -> None:
    """Sets what several fields make together."""
    if asked.variables:
        asked.request.prompt.chat.template_variables = json_text("chat_template_kwargs", asked.variables)
