"""The settings that all services share."""

import pytest

from services import settings as common
from tests.deploy.code import SETTINGS


@pytest.mark.parametrize("service", SETTINGS)
def test_an_empty_listen_address_is_the_default(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    default = getattr(common, f"{service.upper()}_ADDRESS")
    monkeypatch.delenv("WEFT_LISTEN", raising=False)
    assert SETTINGS[service]().listen == default
    monkeypatch.setenv("WEFT_LISTEN", "")
    assert SETTINGS[service]().listen == default
    monkeypatch.setenv("WEFT_LISTEN", "127.0.0.1:0")
    assert SETTINGS[service]().listen == "127.0.0.1:0"
