"""docs/settings.md has every setting of the code: its variables, its default and its meaning."""

import pytest

from services.settings import CommonSettings
from tests.deploy.code import SETTINGS, variables
from tests.docs import settings_page


def test_the_page_equals_what_the_code_generates() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), (
        "run `python -m tests.docs.settings_page`"
    )


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_of_a_service_is_on_the_page(service: str) -> None:
    text = settings_page.PAGE.read_text(encoding="utf-8")
    assert [name for name in variables(service) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("settings", [CommonSettings, *SETTINGS.values()])
def test_every_setting_has_a_description(settings: type[CommonSettings]) -> None:
    assert [name for name, field in settings.model_fields.items() if not field.description] == []


def test_a_row_shows_names_default_bounds_and_meaning() -> None:
    rows = settings_page.page().splitlines()
    row = next(row for row in rows if row.startswith("| `MAX_BATCH_SIZE`"))
    assert row.startswith("| `MAX_BATCH_SIZE`, `WEFT_MAX_BATCH_SIZE` | `64` | integer >= 1 and <= 4096 | ")
    assert any(row.startswith("| `WEFT_LOG_LEVEL` | `info` | `debug`, `info`, ") for row in rows)
