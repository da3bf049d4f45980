"""Values that callers give, as fields of messages: numbers, strings, lists, JSON. Knows no names of fields."""

import json
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.errors import invalid
from services.validate import MAX_BIASES

_MOST_ENTRIES = MAX_BIASES
"""Of a list or map: no field takes more."""


def _kind(target: FieldDescriptor) -> int:
    return int(target.cpp_type)


_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_INTEGERS = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)


def _scalar(name: str, target: FieldDescriptor, value: Any) -> Any:
    """The value for a field that is neither a message nor an enum. Numbers may be text: older clients write them so."""
    kind = _kind(target)
    if kind in _FLOATS:
        return _float(name, value)
    if kind in _INTEGERS:
        return integer(name, value)
    wanted = bool if kind == FieldDescriptor.CPPTYPE_BOOL else str
    if not isinstance(value, wanted):
        raise invalid(name, "true or false" if wanted is bool else "a string")
    return value


def _float(name: str, value: Any) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise invalid(name, "a number")


def integer(name: str, value: Any) -> int:
    """An integer, or the text of one. Raises WeftError."""
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and value.isascii() and len(value) <= 20:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, "an integer")
    return value


def flag(name: str, value: Any) -> bool:
    """true or false. Raises WeftError."""
    if not isinstance(value, bool):
        raise invalid(name, "true or false")
    return value


def one(name: str, value: Any) -> Any:
    """The only element of a list, as tensors have it; another value as it is. Raises WeftError."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise invalid(name, "one element")
    return value[0]


def assign(message: Message, target: FieldDescriptor, name: str, value: Any) -> None:
    """Sets a field of a message to the value that the caller gave as `name`. Raises WeftError."""
    try:
        if target.message_type is not None:
            _assign_json(message, target, name, value)
        elif target.is_repeated:
            each = value if isinstance(value, list) else [value]
            getattr(message, target.name).extend([_scalar(name, target, element) for element in each])
        elif target.enum_type is not None:
            setattr(message, target.name, _enum(name, target, one(name, value)))
        else:
            setattr(message, target.name, _scalar(name, target, one(name, value)))
    except UnicodeError:
        raise invalid(name, "not valid Unicode") from None
    except (ValueError, TypeError, OverflowError):
        raise invalid(name, "out of range") from None


def check_count(name: str, value: Any, most: int) -> None:
    """Refuses a list or an object with too many entries before time is spent on them. Raises WeftError."""
    if isinstance(value, list | dict) and len(value) > most:
        raise invalid(name, f"at most {most}")


def _assign_json(message: Message, target: FieldDescriptor, name: str, value: Any) -> None:
    """A map or a message: as JSON, or as the text of it."""
    if not (target.is_repeated and isinstance(value, list) and any(not isinstance(each, str) for each in value)):
        value = one(name, value)  # The text of JSON.
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        check_count(name, parsed, _MOST_ENTRIES)
        json_format.ParseDict({target.name: parsed}, message)
    except (ValueError, RecursionError, json_format.ParseError):
        raise invalid(name, f"not the JSON of weft.v1's {target.full_name.removeprefix('weft.v1.')}") from None


def _enum(name: str, target: FieldDescriptor, value: Any) -> int:
    """A value of an enum by the end of its name in lower case, such as "bypass"."""
    assert target.enum_type is not None
    values = target.enum_type.values
    prefix = values[0].name.removesuffix("UNSPECIFIED")
    names = {each.name.removeprefix(prefix).lower(): each.number for each in values if each.number}
    if not isinstance(value, str) or value not in names:
        raise invalid(name, f"one of {', '.join(names)}")
    return names[value]
