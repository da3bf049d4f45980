"""The settings that all services share."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from services import host
from services import settings as common
from services.gateway.processes import default_count
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


@pytest.mark.parametrize("service", SETTINGS)
def test_a_setting_that_was_removed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    monkeypatch.setenv("WEFT_ALLOW_REMOTE", "1")
    with pytest.raises(ValidationError, match="WEFT_ALLOW_REMOTE was replaced by WEFT_ALLOW_UNPROTECTED"):
        SETTINGS[service]()


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (10, 6), (16, 12), (128, 12)])
def test_a_gateway_leaves_cores_to_the_other_services(cores: int, processes: int) -> None:
    assert default_count(cores) == processes


def test_cores_are_those_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert host.available_cores(tmp_path) == min(2, len(os.sched_getaffinity(0)))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host.available_cores(tmp_path) == len(os.sched_getaffinity(0))
