"""Random messages of any protobuf type, random JSON, and damaged bytes. Reproducible by a seed."""

import json
import random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_MOST_DEPTH = 5
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_INT64: 63,
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_UINT64: 64,
}
_WORDS = (
    "",
    "a",
    "hello",
    "\x00",
    "é日\U0001f600",
    "../../etc/passwd",
    "<|im_end|>",
    "%s%n",
    "x" * 300,
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 1e-320, float("nan"), float("inf"), float("-inf"), 0.7)


def random_message(draw: random.Random, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message in which each field is absent, ordinary or extreme."""
    message: Message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw.random() < (0.45 if depth else 0.25) or depth > _MOST_DEPTH:
            continue
        try:
            _fill(draw, message, field, depth)
        except (ValueError, TypeError, OverflowError):
            continue
    return message


def _fill(draw: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = getattr(message, field.name)
        keys, values = field.message_type.fields
        for _ in range(draw.choice((1, 3, 40))):
            key = _scalar(draw, keys)
            if values.message_type is None:
                entries[key] = _scalar(draw, values)
            else:
                entries[key].CopyFrom(random_message(draw, values.message_type, depth + 1))
    elif field.is_repeated:
        count = draw.choice((1, 1, 2, 5, 60))
        if field.message_type is not None:
            items = [random_message(draw, field.message_type, depth + 1) for _ in range(min(count, 5))]
            getattr(message, field.name).extend(items)
        else:
            getattr(message, field.name).extend(_scalar(draw, field) for _ in range(count))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(random_message(draw, field.message_type, depth + 1))
    else:
        setattr(message, field.name, _scalar(draw, field))


def _scalar(draw: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _INTEGERS:
        most = (1 << _INTEGERS[kind]) - 1
        least = -most - 1 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64) else 0
        return draw.choice((0, 1, 2, 7, 300, most, least, draw.randint(0, 5000)))
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known = field.enum_type.values if field.enum_type is not None else []
        return draw.choice([*(value.number for value in known), 99, -1])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.choice((b"", b"x", draw.randbytes(32), draw.randbytes(64), draw.randbytes(400)))
    return draw.choice(_WORDS)


def damaged(draw: random.Random, data: bytes) -> bytes:
    """The bytes with a few changes: flipped, cut, doubled, joined, or replaced."""
    changed = bytearray(data or draw.randbytes(8))
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(changed) + 1)
        match draw.randrange(6):
            case 0 if changed:
                changed[min(place, len(changed) - 1)] ^= 1 << draw.randrange(8)
            case 1:
                del changed[place:]
            case 2:
                changed[place:place] = draw.randbytes(draw.choice((1, 4, 200)))
            case 3:
                changed[place:place] = bytes(changed[:place])[:4096]
            case 4:
                changed[place:place] = b"\xff" * 11
            case _:
                changed[place : place + 4] = (b"\x00", b"\x0a\xff\xff\xff\xff\x0f", b"\x80" * 12, b"\x0b" * 120)[
                    draw.randrange(4)
                ]
    return bytes(changed)


_CHAT: dict[str, Any] = {
    "model": "weft-story-2m", "messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "max_tokens": 2,
    "temperature": 0.5, "stream": False, "n": 1, "stop": ["x"], "seed": 1, "logprobs": True, "top_logprobs": 2,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "input": "hello", "user": "u",
    "response_format": {"type": "text"}, "logit_bias": {"5": 1}, "stream_options": {"include_usage": True},
}  # fmt: skip


def random_body(draw: random.Random) -> bytes:
    """The body of an HTTP request: JSON like that of an OpenAI client, with some values replaced, or damaged."""
    body = {name: value for name, value in _CHAT.items() if draw.random() < 0.4}
    for _ in range(draw.choice((0, 1, 1, 2))):
        body[draw.choice(list(_CHAT))] = _value(draw, 0)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    return damaged(draw, data) if draw.random() < 0.3 else data


def _value(draw: random.Random, depth: int) -> Any:
    match draw.randrange(8):
        case 0:
            return draw.choice((None, True, False))
        case 1:
            return draw.choice((0, -1, 1, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), 1e308))
        case 2 | 3:
            return draw.choice((*_WORDS, "\ud800"))
        case 4 | 5 if depth < 4:
            return [_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3, 30)))]
        case _:
            names = ("role", "content", "type", "text", "function", "name", "arguments", *_WORDS)
            return (
                {draw.choice(names): _value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3)))} if depth < 4 else 7
            )
