"""A plugin of pytest: tests whose whole content passed before are remembered. Knows no kernel.

A test's content is all that its file imports from this project, and the versions of what runs it (`sources.py`). One
remembered test of every eighth file runs in every run nevertheless, files and tests drawn at random: its values are
fresh, and a mistake in the record is found. A run that failed writes no record.
"""

import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.kernels.content_record import ContentRecord, key_of
from tests.kernels.sources import Sources

PASSED = "passed"


class RememberedTests:
    """Deselects tests that passed with the same content. common: files that run every test, part of its content."""

    def __init__(self, record: ContentRecord, root: Path, *common: Path) -> None:
        self.record, self.sources, self.common = record, Sources(root), (Path(__file__), *common)
        self.files: set[Path] = set()
        self.keys: dict[str, str] = {}
        """Name and content of each test, by its id."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests that have no line in the record, and one other of every eighth file."""
        remembered: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in items:
            name = f"{item.path.stem}::{item.nodeid.partition('::')[2]}"
            self.files.add(item.path)
            self.keys[item.nodeid] = key_of(name, self.sources.content(item.path, *self.common))
            if self.keys[item.nodeid] in self.record.known:
                remembered[item.path].append(item)
        for its in random.sample(list(remembered.values()), (len(remembered) + 7) // 8):
            its.remove(random.choice(its))
        deselected = [item for its in remembered.values() for item in its]
        items[:] = (item for item in items if item not in deselected)
        config.hook.pytest_deselected(items=deselected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that passed may be remembered."""
        if report.when == "call" and report.passed:
            self.record.used[self.keys[report.nodeid]] = PASSED

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write a fresh record if all passed. AssertionError: a module of this project is in the content of no test."""
        loaded = {file for module in list(sys.modules) for file in self.sources.files_of(module)}
        unread = loaded - self.sources.closure(*self.files, *self.common)
        assert not unread, f"the content of the tests lacks {sorted(map(str, unread))}"
        if self.record.fresh and exitstatus == pytest.ExitCode.OK:
            self.record.write()
