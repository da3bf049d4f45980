"""From a conversation of the public API to the variables of its chat template. Pure; knows neither Jinja nor tokens.

The variables are those of transformers' `apply_chat_template`: arguments of calls and parameters of tools are objects,
and a message that is continued ends with a mark, behind which the rendered text is cut off.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from protos import inference_pb2 as api
from services.errors import invalid

Variables: TypeAlias = dict[str, Any]
"""Values of JSON by name."""


class Conversation:
    """A valid conversation, ready to be rendered."""

    def __init__(self, chat: api.Chat) -> None:
        self._mark = f"continued{secrets.token_hex(8).translate(_LETTERS)} " if chat.continue_final_message else ""
        messages = [_message(each) for each in chat.messages]
        if self._mark:
            messages[-1]["content"] += self._mark
        begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not self._mark
        self.further: Variables = json.loads(chat.template_variables) if chat.template_variables else {}
        """The variables that the client has named."""
        self.variables: Variables = {
            "messages": messages,
            "tools": [_tool(each) for each in tools_of(chat)] or None,
            "documents": None,
            "add_generation_prompt": begins,
            **self.further,
        }

    def cut(self, text: str, variables: Mapping[str, Any]) -> str:
        """The rendered text, up to the end of the message that is continued. Raises WeftError.

        variables: those that were rendered, whose messages may have been escaped.
        """
        if not self._mark:
            return text
        message = variables["messages"][-1]["content"].removesuffix(self._mark)
        end = text.rfind(self._mark.rstrip())
        if end < 0 or message.strip() not in text[:end]:
            rule = "the model's chat template changes the last message, so that it cannot be continued"
            raise invalid("prompt.chat.continue_final_message", rule)
        # A template that trims messages has trimmed the mark.
        return text[:end] if text.startswith(self._mark, end) else text[:end].rstrip()


def tools_of(chat: api.Chat) -> Sequence[api.Tool]:
    """The tools that the model may call."""
    return () if chat.tool_mode == api.TOOL_MODE_NONE else chat.tools


def callable_tools(chat: api.Chat) -> Sequence[api.Tool]:
    """The tools that calls in the answer may name: all that the model sees, or the one that it must call."""
    tools = tools_of(chat)
    return [each for each in tools if each.name == chat.tool_function] if chat.HasField("tool_function") else tools


def calls_once(chat: api.Chat) -> bool:
    """Whether an answer ends after its first tool call."""
    once = chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls
    return bool(tools_of(chat)) and (once or chat.HasField("tool_function"))


_LETTERS = str.maketrans("0123456789", "ghijklmnop")


def _message(message: api.ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        made["name"] = message.name
    if message.tool_calls:
        made["tool_calls"] = [_call(each) for each in message.tool_calls]
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    return made


def _call(call: api.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments or "{}")}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _tool(tool: api.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = json.loads(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
