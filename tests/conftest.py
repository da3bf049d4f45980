"""Distributes tests over processes, the longest files first. Prints each failure that a repetition did not confirm.

Keeps tests apart from a mesh of the person who runs them, and from one another.
"""

import fcntl
import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.security import identity
from tests.exports import exported_bert, exported_gpt2, plain_gpt2

__all__ = ["exported_bert", "exported_gpt2", "plain_gpt2"]

LONGEST = (
    "tests/kernels/test_kernels.py",
    "tests/compress",
    "tests/mesh",
    "tests/page",
    "tests/faults",
    "tests/security",
    "tests/worker/test_formats.py",
    "tests/worker/test_oracle.py",
    "tests/worker",
    "tests/cache",
    "tests/weft",
)
"""Files and folders by their duration, the longest first; all others follow. Tests that compute come first, beside
tests that wait for other processes."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while modules are imported, and never visits again what the imports made.

    A third of the processor time of the collection of tests was that of the garbage collector.
    """
    gc.disable()
    try:
        with _first_alone():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts each file into its own group (`--dist loadgroup`), unless a test names a group, and sorts by LONGEST."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=_place)


@pytest.fixture(autouse=True, scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty home folder: commands in a test's process do not use the secret of a mesh in .weft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def kept_identity() -> Iterator[None]:
    """Restores the identity of the test's process, which commands replace."""
    before = identity.current()
    yield
    identity.assume(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives a repetition a time limit, too: pytest-timeout sets one for the first run alone."""
    if getattr(item, "execution_count", 1) > 1:
        import pytest_timeout  # A machine for GPU tests may lack it, and repeats nothing.

        hooks = item.config.pluginmanager.hook
        hooks.pytest_timeout_cancel_timer(item=item)
        hooks.pytest_timeout_set_timer(item=item, settings=pytest_timeout._get_item_settings(item))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints whole why a test failed before it was repeated: such a failure is a fault to find, too."""
    unconfirmed = terminalreporter.getreports("rerun")
    if unconfirmed:
        terminalreporter.section(f"{len(unconfirmed)} failures before a repetition")
    for report in unconfirmed:
        terminalreporter.section(report.nodeid, sep="_")
        terminalreporter.line(report.longreprtext)


@contextmanager
def _first_alone() -> Iterator[None]:
    """The first of several processes collects alone and leaves its bytecode: the others need a third of the time."""
    with Path(__file__).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _place(item: pytest.Item) -> int:
    return next((place for place, prefix in enumerate(LONGEST) if item.nodeid.startswith(prefix)), len(LONGEST))
