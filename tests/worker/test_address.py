"""The address that a worker reports to the scheduler."""

import pytest

from services.worker.service.address import NoAddress, advertised

SCHEDULER = "127.0.0.1:50052"


def test_a_configured_address_is_used() -> None:
    assert advertised("worker-3:50061", "0.0.0.0:50061", 50061, SCHEDULER) == "worker-3:50061"


def test_a_worker_on_one_address_reports_it_with_its_port() -> None:
    assert advertised("", "127.0.0.1:0", 40001, "nowhere.invalid:1") == "127.0.0.1:40001"
    assert advertised("", "[::1]:0", 40001, "nowhere.invalid:1") == "[::1]:40001"


@pytest.mark.parametrize("everywhere", ["0.0.0.0:50061", "[::]:50061"])
def test_a_worker_on_all_addresses_reports_the_one_that_reaches_the_scheduler(everywhere: str) -> None:
    assert advertised("", everywhere, 50061, SCHEDULER) == "127.0.0.1:50061"


@pytest.mark.parametrize("scheduler", ["not a host:50052", "127.0.0.1:no-port", ""])
def test_an_unknown_scheduler_makes_the_setting_necessary(scheduler: str) -> None:
    with pytest.raises(NoAddress, match="WEFT_ADVERTISE"):
        advertised("", "0.0.0.0:50061", 50061, scheduler)
