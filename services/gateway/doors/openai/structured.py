"""Reads what form a request of OpenAI's API asks of its answer: `response_format`, and vLLM's extensions. Knows nothing
else of the request."""

import re
from typing import Any

from protos import inference_pb2 as api
from services.gateway.doors.openai.values import Asked, check_keys, flag, json_text, mapping, text, unsupported, wrong

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def response_format(asked: Asked, name: str, value: Any) -> None:
    """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name", "schema", ...}}."""
    kind = mapping(name, value).get("type")
    check_keys(name, value, "type", "json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise unsupported(f"{name}.type", "text, json_object or json_schema")
    if value.get("json_schema") is not None and kind != "json_schema":
        raise wrong(f"{name}.json_schema", "only where `type` is json_schema")
    if kind == "json_object":
        _set(asked, name, api.Structured(json_object=True))
    elif kind == "json_schema":
        _set(asked, f"{name}.json_schema.schema", _named_schema(f"{name}.json_schema", value.get("json_schema")))


def _named_schema(at: str, value: Any) -> api.Structured:
    """The schema of a response format. It is enforced whether `strict` or not; its name and description say nothing to
    the model."""
    given = mapping(at, value)
    check_keys(at, given, "name", "description", "schema", "strict")
    if not _NAME.fullmatch(text(f"{at}.name", given.get("name"))):
        raise wrong(f"{at}.name", "1 to 64 characters of A-Z a-z 0-9 _ -")
    if given.get("description") is not None:
        text(f"{at}.description", given["description"])
    if given.get("strict") is not None:
        flag(f"{at}.strict", given["strict"])
    if given.get("schema") is None:
        raise wrong(f"{at}.schema", "required")
    return api.Structured(json_schema=json_text(f"{at}.schema", given["schema"]))


def structured_outputs(asked: Asked, name: str, value: Any) -> None:
    """vLLM's object: json, json_object, regex, choice or grammar."""
    given = {key: each for key, each in mapping(name, value).items() if each is not None and each is not False}
    for key in given.keys() - _READERS.keys():
        raise unsupported(f"{name}.{key}", "not supported")
    if len(given) != 1:
        raise wrong(name, f"one of {', '.join(_READERS)}")
    for key, each in given.items():
        _set(asked, f"{name}.{key}", _READERS[key](f"{name}.{key}", each))


def guided(asked: Asked, name: str, value: Any) -> None:
    """vLLM's older fields: guided_json, guided_regex, guided_choice and guided_grammar."""
    _set(asked, name, _READERS[name.removeprefix("guided_")](name, value))


def _set(asked: Asked, name: str, form: api.Structured) -> None:
    sampling = asked.request.sampling
    if sampling.HasField("structured"):
        raise wrong(name, f"the answer has a form already, by `{asked.form_field}`")
    sampling.structured.CopyFrom(form)
    asked.form_field = name


def _json(at: str, value: Any) -> api.Structured:
    """A schema as an object or as JSON text."""
    return api.Structured(json_schema=value if isinstance(value, str) else json_text(at, value))


def _json_object(at: str, value: Any) -> api.Structured:
    return api.Structured(json_object=flag(at, value))


def _regex(at: str, value: Any) -> api.Structured:
    return api.Structured(regex=text(at, value))


def _choice(at: str, value: Any) -> api.Structured:
    if not isinstance(value, list):
        raise wrong(at, "a list of strings")
    return api.Structured(choice=api.Choices(texts=[text(at, each) for each in value]))


def _grammar(at: str, value: Any) -> api.Structured:
    return api.Structured(grammar=text(at, value))


_READERS = {"json": _json, "json_object": _json_object, "regex": _regex, "choice": _choice, "grammar": _grammar}
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
