"""Tests of time limits on a machine that runs other work, too."""

import pytest

timely = pytest.mark.flaky(reruns=2, reruns_delay=1.0)
"""Marks a test of a time limit. It is repeated: slow code misses the limit each time, a busy machine only once."""
