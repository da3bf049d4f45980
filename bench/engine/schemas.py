"""Random JSON schemas, a function of their number, of the keywords that structured answers enforce. Knows no engine."""

import json
import random
from typing import Any

_WORDS = ("name", "age", "size", "tags", "owner", "city", "kind", "notes", "total", "items", "id", "open")
_PATTERNS = ("[a-z]{2,8}", "[A-Z]{3}-[0-9]{2,4}", "(red|green|blue)", "[0-9]{4}-[0-9]{2}-[0-9]{2}", "v[0-9]+")
_FORMATS = ("date", "time", "ipv4", "uuid")


def random_schema(number: int) -> str:
    """Schema `number` as JSON text: an object of up to three levels, all lists and texts of which are short."""
    source = random.Random(number)
    schema = _object(source, 3)
    if source.random() < 0.3:
        schema["$defs"] = {"part": _value(source, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
    return json.dumps(schema)


def _value(source: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _number, _choice, _constant]
    if depth > 0:
        kinds += [_object, _list, _union]
    return source.choice(kinds)(source, depth - 1)


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(_WORDS, source.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(source, depth) for name in names},
        "required": [name for name in names if source.random() < 0.7],
        "additionalProperties": False,
    }


def _list(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(0, 1)
    return {"type": "array", "items": _value(source, depth), "minItems": least, "maxItems": least + 2}


def _union(source: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(source, depth), source.choice(({"type": "null"}, {"type": "boolean"}))]}


def _string(source: random.Random, depth: int) -> dict[str, Any]:
    del depth
    chance = source.random()
    if chance < 0.25:
        return {"type": "string", "pattern": f"^{source.choice(_PATTERNS)}$"}
    if chance < 0.4:
        return {"type": "string", "format": source.choice(_FORMATS)}
    least = source.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + source.randint(0, 12)}


def _number(source: random.Random, depth: int) -> dict[str, Any]:
    del depth
    low = source.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + source.randint(0, 500)}
    return {"type": "integer", **bounds}


def _choice(source: random.Random, depth: int) -> dict[str, Any]:
    del depth
    return {"enum": source.sample([*_WORDS, 1, 2.5, None, True, False], source.randint(1, 5))}


def _constant(source: random.Random, depth: int) -> dict[str, Any]:
    del depth
    return {"const": source.choice([*_WORDS, 7, None])}
