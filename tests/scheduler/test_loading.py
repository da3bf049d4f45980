"""Starting workers: gateways receive their progress until they serve or are gone."""

from services.scheduler.core.messages import ModelList, WorkerLoading
from tests.scheduler.stage import Stage


def loads(stage: Stage, worker_id: str, done: int) -> None:
    """A starting worker reports its progress."""
    loading = WorkerLoading(worker_id, "story", ("tale",), "weights", done, 4)
    stage.perform(stage.core.on_loading(loading, stage.now))


def received(stage: Stage) -> list[tuple[list[int], int]]:
    """For each received list of models: the progress of each starting worker, and the number of models."""
    lists = [message for message in stage.inbox["g1"] if isinstance(message, ModelList)]
    return [([loading.done for loading in each.loading], len(each.models)) for each in lists]


def test_gateways_receive_the_progress_of_starting_workers(stage: Stage) -> None:
    loads(stage, "w1", 1)
    loads(stage, "w1", 1)  # No change.
    loads(stage, "w2", 0)
    loads(stage, "w1", 3)
    assert received(stage) == [([], 0), ([1], 0), ([1, 0], 0), ([3, 0], 0)]
    stage.gateway("g2")
    assert isinstance(stage.inbox["g2"][1], ModelList)
    assert stage.inbox["g2"][1].loading[0] == WorkerLoading("w1", "story", ("tale",), "weights", 3, 4)


def test_a_worker_that_serves_is_no_longer_loading(stage: Stage) -> None:
    loads(stage, "w1", 4)
    stage.worker("w1")
    loads(stage, "w1", 4)  # Arrives late from the link of the starting worker.
    assert received(stage) == [([], 0), ([4], 0), ([], 1)]
    stage.perform(stage.core.on_loading_ended("w1", stage.now))
    assert received(stage)[-1] == ([], 1)


def test_a_worker_that_gave_up_is_forgotten(stage: Stage) -> None:
    loads(stage, "w1", 2)
    stage.perform(stage.core.on_loading_ended("w1", stage.now))
    stage.perform(stage.core.on_loading_ended("w1", stage.now))
    assert received(stage) == [([], 0), ([2], 0), ([], 0)]
