"""A request of OpenAI's API as it was understood, and readers of its values. Knows no field's meaning."""

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
from grpc import StatusCode

from protos import inference_pb2 as api
from services.errors import WeftError, invalid

Json: TypeAlias = dict[str, Any]
MOST_UINT32 = (1 << 32) - 1
MOST_UINT64 = (1 << 64) - 1
NO_END_USERS = "Weft keeps no record of end users: give each a tenant and a key instead"
_OF_CHAT = {
    "messages": "messages",
    "tools": "tools",
    "tool_mode": "tool_choice",
    "tool_function": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
    "template_variables": "chat_template_kwargs",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
}
"""OpenAI's names, or those of its extensions, for fields of weft.v1's Chat."""


@dataclass(slots=True)
class Asked:
    """A request as it was understood."""

    chat: bool
    request: api.GenerateRequest = field(default_factory=api.GenerateRequest)
    stream: bool = False
    usage: bool = False
    """Send the usage in a last chunk of the stream."""
    token_ids: bool = False
    """Send the ids of the tokens beside their text."""
    variables: Json = field(default_factory=dict)
    """Variables of the chat template."""
    form_field: str = "response_format"
    """The field that sets the form of the answer."""
    limit_field: str = "max_tokens"
    """The field that limits the length of the answer."""
    strict: str = ""
    """The field of a tool that asks for valid arguments."""
    prompts: list[api.Prompt] = field(default_factory=list)
    """All prompts, if there are several; the first one is in `request`, too."""
    prompt_alone: bool = False
    """The answer has the echoed prompt alone."""

    @property
    def requests(self) -> list[api.GenerateRequest]:
        """A request for each prompt. Each has an id of its own."""
        if not self.prompts:
            return [self.request]
        made = []
        for place, prompt in enumerate(self.prompts):
            request = api.GenerateRequest()
            request.CopyFrom(self.request)
            request.prompt.CopyFrom(prompt)
            request.request_id = f"{self.request.request_id}-{place}"
            made.append(request)
        return made

    def param(self, name: str) -> str:
        """OpenAI's name for a field of weft.v1, such as "sampling.max_tokens"."""
        if name.startswith("prompt.chat.") and (field := name.split(".")[2]) in _OF_CHAT:
            return _OF_CHAT[field] + name.removeprefix(f"prompt.chat.{field}")
        if name.startswith("prompt"):
            return "messages" if self.chat else "prompt"
        name = name.removeprefix("sampling.")
        if name.startswith("structured"):
            return self.form_field
        if name == "max_tokens":
            return self.limit_field
        name = "logprobs" if name == "prompt_logprobs" else name
        if name == "include_stop_string":
            return "include_stop_str_in_output"
        return "top_logprobs" if self.chat and name == "logprobs" else name


def unsupported(name: str, reason: str) -> WeftError:
    return invalid(name, reason, "UNSUPPORTED_FIELD")


def unknown(name: str) -> WeftError:
    """The error for a field that the request does not have."""
    return WeftError(StatusCode.INVALID_ARGUMENT, "UNKNOWN_FIELD", f"{name}: there is no such field", field=name)


def wrong(name: str, rule: str) -> WeftError:
    return invalid(name, rule)


def integer(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise wrong(name, f"an integer from {least} to {most}")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, "a number")
    return float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, "true or false")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, "a string")
    return value


def check_count(name: str, value: Sized, most: int) -> None:
    """Refuses a list or an object with too many entries before time is spent on them. Raises WeftError."""
    if len(value) > most:
        raise wrong(name, f"at most {most}")


def ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise wrong(name, "a list of token ids")
    return [integer(name, each, 0, MOST_UINT32) for each in value]


def mapping(name: str, value: Any) -> Json:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong(name, "an object")
    return value


def without_nulls(body: Json) -> Json:
    """A field that is null is one that is not there, as in all requests of this protocol."""
    return {name: value for name, value in body.items() if value is not None}


def check_keys(name: str, given: Json, *known: str) -> None:
    """Refuses other keys of a JSON object than the known ones; null is as good as absent. Raises WeftError."""
    for key, value in given.items():
        if key not in known and value is not None:
            raise unsupported(f"{name}.{key}", "not supported")


def json_text(name: str, value: Any) -> str:
    """A JSON object as text. Raises WeftError for what is none, or is nested too deeply."""
    try:
        return orjson.dumps(mapping(name, value)).decode()
    except orjson.JSONEncodeError:
        raise wrong(name, "nested too deeply") from None
