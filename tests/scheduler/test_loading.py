"""Workers that are being started: gateways hear how far they are, until they serve or are gone."""

from services.scheduler.messages import Loading, Models
from tests.scheduler.stage import Stage


def loads(stage: Stage, worker_id: str, done: int) -> None:
    """A worker says how far it is."""
    loading = Loading(worker_id, "story", ("tale",), "weights", done, 4)
    stage.perform(stage.pool.on_loading(loading, stage.now))


def told(stage: Stage) -> list[tuple[list[int], int]]:
    """How far each loading worker was, and how many models there were, in each list of models."""
    lists = [message for message in stage.inbox["g1"] if isinstance(message, Models)]
    return [([loading.done for loading in each.loading], len(each.models)) for each in lists]


def test_gateways_hear_how_far_workers_are(stage: Stage) -> None:
    loads(stage, "w1", 1)
    loads(stage, "w1", 1)  # No news.
    loads(stage, "w2", 0)
    loads(stage, "w1", 3)
    assert told(stage) == [([], 0), ([1], 0), ([1, 0], 0), ([3, 0], 0)]
    stage.gateway("g2")
    assert isinstance(stage.inbox["g2"][1], Models)
    assert stage.inbox["g2"][1].loading[0] == Loading("w1", "story", ("tale",), "weights", 3, 4)


def test_a_worker_that_serves_loads_no_more(stage: Stage) -> None:
    loads(stage, "w1", 4)
    stage.worker("w1")
    loads(stage, "w1", 4)  # What its other link still said.
    assert told(stage) == [([], 0), ([4], 0), ([], 1)]
    stage.perform(stage.pool.on_loading_ended("w1", stage.now))
    assert told(stage)[-1] == ([], 1)


def test_a_worker_that_gave_up_is_forgotten(stage: Stage) -> None:
    loads(stage, "w1", 2)
    stage.perform(stage.pool.on_loading_ended("w1", stage.now))
    stage.perform(stage.pool.on_loading_ended("w1", stage.now))
    assert told(stage) == [([], 0), ([2], 0), ([], 0)]
