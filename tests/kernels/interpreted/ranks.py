"""Exchanges of ranks."""

from collections.abc import Callable

import pytest

from tests.kernels.peers import (
    Room,
    check_counts_that_wrap,
    check_norms,
    check_parts,
    check_rows,
    check_stages,
    check_sums,
    on_ranks,
)


@pytest.mark.parametrize(
    "check", [check_sums, check_norms, check_parts, check_rows, check_stages, check_counts_that_wrap]
)
def test_exchanges_of_ranks(check: Callable[[Room], None]) -> None:
    on_ranks(check)
