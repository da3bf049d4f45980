"""`python -m tests.docs.settings_page` writes docs/settings.md from the settings classes of the services.

Knows how a pydantic field is printed, not what a setting does.
"""

import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AliasChoices, SecretStr
from pydantic.fields import FieldInfo

from services.settings import CommonSettings
from tests.deploy.code import SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
_HEAD = """\
# Settings

Every service reads its settings from environment variables. This page is generated from the settings classes
(`services/settings.py` and `services/*/settings.py`) by `python -m tests.docs.settings_page`; a test fails when page
and code differ. Where a setting has several names, the first that is set is used.

`weft serve` passes its environment on to all services that it starts; its flags (`weft serve --help`) set the most
common variables of the workers. Other variables:

- `WEFT_ADDRESS`, the gateway's host:port: every command that calls a mesh, but for `weft batch` and `weft adapters`.
- `WEFT_URL`, the URL of its HTTP port: `weft batch`.
- `WEFT_API_KEY`: every command that sends requests, `weft top` and `weft doctor`.
- `WEFT_CA_FILE`, the PEM file of the authorities that a gateway's certificate is checked against, unless they are those
  of the system: every command that takes `https://host:port` as the address, and the Python client.
- `WEFT_SCHEDULER_ADDRESS`: `weft adapters`, `weft bench --profile` and `weft doctor`.
- `WEFT_HOME`, where `weft serve` and `make demo` keep data, logs and the secret of the mesh, which `weft adapters` and
  `weft bench --profile` read there: `.weft` in the current folder unless it is set.
- `OTEL_...`, the standard variables for traces: every process; see [operations.md](operations.md#traces).
"""
_KINDS = {
    bool: "true, false",
    int: "integer",
    float: "number",
    str: "text",
    SecretStr: "text",
    list[str]: "JSON list",
}
_TABLE = "| variable | default | values | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD, "\n## All services\n\n", _TABLE]
    parts += _rows(CommonSettings, CommonSettings.model_fields)
    for service, settings in SETTINGS.items():
        parts += [f"\n## {service.capitalize()}\n\n", _TABLE]
        parts += _rows(settings, _own_fields(settings))
    return "".join(parts)


def _own_fields(settings: type[CommonSettings]) -> list[str]:
    """The fields that a service adds to the common settings, or for which it has another default."""
    common = CommonSettings.model_fields
    return [
        name
        for name, field in settings.model_fields.items()
        if name not in common or field.default != common[name].default
    ]


def _rows(settings: type[CommonSettings], fields: Iterable[str]) -> Iterator[str]:
    prefix = str(settings.model_config.get("env_prefix", ""))
    for name in fields:
        field = settings.model_fields[name]
        variables = ", ".join(f"`{variable}`" for variable in _variables(prefix, name, field))
        meaning = (field.description or "").replace("|", "\\|")
        yield f"| {variables} | {_default(field)} | {_values(field)} | {meaning} |\n"


def _variables(prefix: str, name: str, field: FieldInfo) -> list[str]:
    """The environment variables of a field in the order of their precedence, without duplicates."""
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias or f"{prefix}{name}"]
    return list(dict.fromkeys(str(choice).upper() for choice in choices))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != "" else "empty"


def _values(field: FieldInfo) -> str:
    """The allowed values of a field: names, or a type with its bounds."""
    kind: Any = field.annotation
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in typing.get_args(kind))
    bounds = " and ".join(filter(None, map(_bound, field.metadata)))
    return f"{_KINDS[kind]} {bounds}".strip()


def _bound(metadata: object) -> str:
    match metadata:
        case Ge(ge=least):
            return f">= {least}"
        case Gt(gt=least):
            return f"> {least}"
        case Le(le=most):
            return f"<= {most}"
        case Lt(lt=most):
            return f"< {most}"
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
