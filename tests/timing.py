"""Promises in seconds, on a machine that has other work too."""

import pytest

timely = pytest.mark.flaky(reruns=2, reruns_delay=1.0)
"""Marks a test of a bound on time: what is slow misses it three times, what had to wait for a processor only once."""
