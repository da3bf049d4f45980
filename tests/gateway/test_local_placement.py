"""Workers that the scheduler lists no more: for how long they are remembered, and what becomes of their links."""

import types

import pytest

from protos import mesh_pb2 as mesh
from services.gateway import main
from services.gateway.links import local_placement
from services.gateway.links.local_placement import REMEMBER_S, LocalPlacement
from services.gateway.links.worker_links import WorkerLinks
from tests.gateway.fakes import FakeMesh, ask, generate, until
from tests.gateway.model import ANSWER

SUBMIT = mesh.Submit(job_id="job", attempt=1, model="m")


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the placement."""
    clock = Clock()
    monkeypatch.setattr(local_placement, "time", clock)
    return clock


class Links(WorkerLinks):
    """Working links to all workers."""

    def find(self, address: str) -> types.SimpleNamespace:  # type: ignore[override]
        """A link without jobs."""
        return types.SimpleNamespace(connected=True, usable=True, jobs=0)


def listed(*addresses: str) -> mesh.ModelList:
    """One model at these workers."""
    workers = [mesh.ServedWorker(worker_id=each, address=each, credits=4) for each in addresses]
    card = mesh.ModelCard(name="m")
    return mesh.ModelList(models=[mesh.ServedModel(card=card, addresses=addresses, workers=workers)])


def test_a_worker_is_remembered_after_its_last_list_however_old_that_is(clock: Clock) -> None:
    placement = LocalPlacement(Links("a gateway"))
    placement.update(listed("w1"))
    clock.now = 1000.0
    placement.update(listed())
    clock.now += REMEMBER_S
    placed = placement.place(SUBMIT, connected=True)
    assert placed is not None
    assert (placed.address, placement.addresses) == ("w1", {"w1"})
    clock.now += 1.0
    assert placement.place(SUBMIT) is None
    assert placement.addresses == set()


def test_workers_that_leave_together_are_forgotten_without_another_list(clock: Clock) -> None:
    placement = LocalPlacement(Links("a gateway"))
    placement.update(listed("w1", "w2", "w3"))
    for clock.now, rest in ((5.0, ["w2", "w3"]), (9.0, ["w3"])):
        placement.update(listed(*rest))
    clock.now = 5.1 + REMEMBER_S
    assert placement.addresses == {"w2", "w3"}
    clock.now = 9.1 + REMEMBER_S
    assert placement.addresses == {"w3"}
    clock.now = 10_000.0
    assert placement.addresses == {"w3"}, "a listed worker is not forgotten"


async def test_a_job_reaches_a_worker_off_the_list_until_its_link_closes(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_KEEP_S", 0.05)
    async with FakeMesh() as fakes:
        [worker] = fakes.workers
        address = fakes.address(worker.worker_id)
        known = mesh.ServedWorker(worker_id=worker.worker_id, address=address, credits=4)
        fakes.scheduler.serve_models([mesh.ServedModel(card=fakes.card, addresses=[address], workers=[known])])
        assert (await generate(fakes.stub, ask())).ids() == ANSWER
        clock.now = 1000.0
        fakes.scheduler.workers = []
        fakes.scheduler.serve_models([])
        assert (await generate(fakes.stub, ask("more"))).ids() == ANSWER
        assert len(worker.links) == 1
        clock.now += REMEMBER_S + 1.0
        await until(lambda: not worker.links)
        refused = await generate(fakes.stub, ask("once more"))
        assert refused.error is not None
        assert refused.error.details() == "no worker is left"
