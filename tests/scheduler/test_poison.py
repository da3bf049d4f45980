"""Requests that kill workers: at most two deaths, and no neighbour is blamed."""

from services.scheduler.core.messages import Assigned, Joined, Rejected
from tests.scheduler.stage import Stage


def die(stage: Stage, worker: str, *jobs: tuple[str, int], after: int = 0, gateway: str = "g1") -> None:
    """A worker dies; the gateways submit the next attempts of its jobs, which are (fingerprint, attempt that died)."""
    stage.worker_leaves(worker)
    for mark, attempt in jobs:
        stage.submit(
            mark, gateway, attempt=attempt + 1, fingerprint=mark.encode(), lost_on=worker, lost_after=after,
            avoid=frozenset({worker}),
        )  # fmt: skip


def where(stage: Stage) -> dict[str, str]:
    """The last answer of each job: its worker, or the reason of its rejection."""
    found = {}
    for answer in stage.answers():
        assert not isinstance(answer, Joined)
        found[answer.job_id] = answer.failure.reason if isinstance(answer, Rejected) else answer.worker_id
    return found


def start(stage: Stage, *marks: str) -> None:
    for mark in marks:
        stage.submit(mark, fingerprint=mark.encode())


def test_a_request_that_kills_two_workers_is_refused_and_stays_refused(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    start(stage, "bad")
    stage.worker("w2", credits=8)
    stage.worker("w3", credits=8)
    die(stage, "w1", ("bad", 1))
    second = where(stage)["bad"]
    assert stage.answers()[-1].probation  # type: ignore[union-attr]
    die(stage, second, ("bad", 2))
    assert where(stage)["bad"] == "POISONED"
    for number in range(3):
        answer = stage.submit(f"again{number}", fingerprint=b"bad")
        assert isinstance(answer, Rejected)
        assert answer.failure.code == 13


def test_neighbours_of_a_poisoned_request_are_not_blamed(stage: Stage) -> None:
    stage.worker("w1", credits=32)
    neighbours = [f"n{number}" for number in range(12)]
    start(stage, "bad", *neighbours)
    stage.worker("w2", credits=32)
    die(stage, "w1", *((mark, 1) for mark in neighbours), after=5)
    die(stage, "w1", ("bad", 1))
    assert set(where(stage).values()) == {"w2"}
    start(stage, "new")
    die(stage, "w2", *((mark, 2) for mark in neighbours), ("new", 1), after=0)
    die(stage, "w2", ("bad", 2))
    stage.worker("w3", credits=32)
    assert where(stage) == {"bad": "POISONED", **dict.fromkeys([*neighbours, "new"], "w3")}


def test_suspects_run_one_at_a_time_until_they_produce_tokens(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    start(stage, "a", "b", "c")
    stage.worker("w2", credits=8)
    die(stage, "w1", ("a", 1), ("b", 1), ("c", 1))
    assert where(stage) == {"a": "w2", "b": "w1", "c": "w1"}
    start(stage, "free")
    assert where(stage)["free"] == "w2", "others run beside a suspect"
    stage.survived("a")
    assert where(stage) == {"a": "w2", "b": "w2", "c": "w1", "free": "w2"}
    stage.report("w2", "b", attempt=2)
    assert where(stage)["c"] == "w2"


def test_a_worker_that_registers_again_keeps_its_suspect_on_probation(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    start(stage, "bad", "b")
    stage.worker("w2", credits=8)
    die(stage, "w1", ("bad", 1), ("b", 1))
    stage.pass_time(2.2, heartbeat=["w2"])
    stage.worker("w2", credits=8, running=["bad"], attempt=2)
    assert where(stage) == {"bad": "w2", "b": "w1"}, "the next suspect still waits"
    stage.worker("w3", credits=8)
    die(stage, "w2", ("bad", 2))
    assert where(stage)["bad"] == "POISONED"


def test_a_suspect_waits_rather_than_to_go_back_to_where_it_failed(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    start(stage, "a", "b")
    stage.worker("w2", credits=8)
    for mark in ("a", "b"):  # Their gateway sees the death of w1 before the scheduler does.
        stage.submit(mark, attempt=2, fingerprint=mark.encode(), lost_on="w1", avoid=frozenset({"w1"}))
    assert [answer.job_id for answer in stage.answers()] == ["a", "b", "a"]
    stage.survived("a")
    assert [answer.job_id for answer in stage.answers()][3:] == ["b"]
    assert where(stage) == {"a": "w2", "b": "w2"}


def test_a_crowd_that_flowed_moves_at_once(stage: Stage) -> None:
    """The death of a worker with many streams delays none of them."""
    stage.worker("w1", credits=64)
    marks = [f"s{number}" for number in range(24)]
    start(stage, *marks)
    stage.worker("w2", credits=64)
    die(stage, "w1", *((mark, 1) for mark in marks), after=20)
    assert set(where(stage).values()) == {"w2"}
    assert not any(answer.probation for answer in stage.answers() if isinstance(answer, Assigned))


def test_a_stream_that_two_kills_hit_is_not_refused(stage: Stage) -> None:
    stage.worker("w1", credits=64)
    marks = [f"s{number}" for number in range(24)]
    start(stage, *marks)
    stage.worker("w2", credits=64)
    die(stage, "w1", *((mark, 1) for mark in marks), after=20)
    stage.worker("w3", credits=64)
    die(stage, "w2", *((mark, 2) for mark in marks), after=20)
    for mark in marks:  # On probation, one after another.
        stage.survived(mark)
    assert set(where(stage).values()) == {"w3"}


def test_a_worker_that_comes_back_was_not_dead(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    start(stage, "a")
    stage.worker("w2", credits=8)
    die(stage, "w1", ("a", 1))
    assert where(stage)["a"] == "w2"
    die(stage, "w2", ("a", 2))
    assert where(stage)["a"] == "POISONED"
    stage.worker("w2", credits=8)
    assert isinstance(stage.submit("b", fingerprint=b"a"), Assigned), "only the link was cut"


def cut(stage: Stage, mark: str, worker: str, attempt: int) -> None:
    """The link from a gateway to a worker breaks; the worker lives, and its link to the scheduler holds."""
    stage.submit(mark, attempt=attempt + 1, fingerprint=mark.encode(), lost_on=worker, avoid=frozenset({worker}))


def test_a_worker_that_goes_on_reporting_was_not_dead(stage: Stage) -> None:
    """Both links of the gateway broke at once, and no worker died."""
    for worker in ("w1", "w2"):
        stage.worker(worker, credits=8)
    start(stage, "a")
    first = where(stage)["a"]
    cut(stage, "a", first, 1)
    cut(stage, "a", where(stage)["a"], 2)
    assert where(stage)["a"] == "POISONED"
    stage.pass_time(0.9, heartbeat=["w1", "w2"])
    assert isinstance(stage.submit("soon", fingerprint=b"a"), Rejected), "the last reports of a dead worker may be late"
    stage.pass_time(0.2, heartbeat=["w1", "w2"])
    assert isinstance(stage.submit("later", fingerprint=b"a"), Assigned)
    assert not stage.suspects()


def test_a_suspect_of_a_link_that_broke_is_not_blamed_for_one_death(stage: Stage) -> None:
    for worker in ("w1", "w2"):
        stage.worker(worker, credits=8)
    start(stage, "a")
    first = where(stage)["a"]
    cut(stage, "a", first, 1)
    second = where(stage)["a"]
    stage.pass_time(1.1, heartbeat=["w1", "w2"])
    die(stage, second, ("a", 2))
    assert where(stage)["a"] == first


def test_a_client_that_leaves_at_the_death_hides_nothing(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    start(stage, "a")
    stage.worker("w2", credits=8)
    die(stage, "w1", ("a", 1))
    stage.worker_leaves("w2")
    stage.pass_time(2.2)
    stage.worker("w3", credits=8)
    assert stage.submit("b", fingerprint=b"a").failure.reason == "POISONED"  # type: ignore[union-attr]


def test_a_success_clears_a_suspect(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    start(stage, "a")
    stage.worker("w2", credits=8)
    die(stage, "w1", ("a", 1))
    stage.report("w2", "a", attempt=2, tokens=4)
    assert not stage.core.state.poison.suspects()


def test_gateways_receive_the_suspects(stage: Stage) -> None:
    stage.worker("w1", credits=8)
    start(stage, "a")
    die(stage, "w1", ("a", 1))
    assert stage.suspects() == (b"a",)
    stage.gateway("g2")
    assert stage.suspects("g2") == (b"a",)
