"""Where a worker says that it is."""

import pytest

from services.worker.service.address import NoAddress, advertised

SCHEDULER = "127.0.0.1:50052"


def test_what_it_is_told_wins() -> None:
    assert advertised("worker-3:50061", "0.0.0.0:50061", 50061, SCHEDULER) == "worker-3:50061"


def test_a_single_address_is_its_own_name_with_the_port_it_got() -> None:
    assert advertised("", "127.0.0.1:0", 40001, "nowhere.invalid:1") == "127.0.0.1:40001"
    assert advertised("", "[::1]:0", 40001, "nowhere.invalid:1") == "[::1]:40001"


@pytest.mark.parametrize("everywhere", ["0.0.0.0:50061", "[::]:50061"])
def test_who_listens_everywhere_is_where_the_scheduler_sees_it(everywhere: str) -> None:
    assert advertised("", everywhere, 50061, SCHEDULER) == "127.0.0.1:50061"


@pytest.mark.parametrize("scheduler", ["not a host:50052", "127.0.0.1:no-port", ""])
def test_a_scheduler_that_is_not_found_asks_for_the_setting(scheduler: str) -> None:
    with pytest.raises(NoAddress, match="WEFT_ADVERTISE"):
        advertised("", "0.0.0.0:50061", 50061, scheduler)
