"""Jobs with an adapter go to workers that have it, rather to those that have it on the device, and wait in vain."""

from services.scheduler.core.messages import Adapter, ModelList
from tests.scheduler.stage import Stage

POEMS, CODE = Adapter("poems", b"p" * 32), Adapter("code", b"c" * 32)
WARM = POEMS._replace(resident=True)


def listed(stage: Stage) -> dict[str, list[str]]:
    """The adapters of each worker, as the gateway received them last."""
    last = [message for message in stage.inbox["g1"] if isinstance(message, ModelList)][-1]
    return {worker.worker_id: [each.name for each in worker.adapters] for worker in last.models[0].workers}


def test_a_job_goes_to_a_worker_that_has_its_adapter() -> None:
    stage = Stage()
    stage.gateway()
    stage.worker("w1", credits=4)
    stage.worker("w2", credits=4, adapters=[POEMS])
    for number in range(3):
        stage.submit(f"poem-{number}", adapter=POEMS.fingerprint)
    stage.submit("plain")
    assert stage.placed() == [("poem-0", "w2"), ("poem-1", "w2"), ("poem-2", "w2"), ("plain", "w1")]


def test_an_adapter_on_the_device_outweighs_some_load() -> None:
    stage = Stage()
    stage.gateway()
    stage.worker("w1", credits=4, adapters=[POEMS])
    stage.worker("w2", credits=4, adapters=[WARM])
    stage.submit("busy", prompt_tokens=320)
    stage.submit("poem", adapter=POEMS.fingerprint)
    assert stage.placed() == [("busy", "w1"), ("poem", "w2")]
    stage.report("w2", adapters=(POEMS,))
    stage.report("w1", adapters=(WARM,))
    stage.submit("later", adapter=POEMS.fingerprint)
    assert stage.placed()[-1] == ("later", "w1")


def test_gateways_receive_the_list_when_it_changes() -> None:
    stage = Stage()
    stage.gateway()
    stage.worker("w1", credits=4)
    assert listed(stage) == {"w1": []}
    stage.report("w1", adapters=(CODE, POEMS))
    assert listed(stage) == {"w1": ["code", "poems"]}
    before = len(stage.inbox["g1"])
    stage.report("w1", adapters=(CODE, WARM))
    assert len(stage.inbox["g1"]) == before, "what is on the device is of no concern to gateways"


def test_a_job_waits_for_its_adapter_and_is_refused_if_no_worker_gets_it() -> None:
    stage = Stage()
    stage.gateway()
    stage.worker("w1", credits=4)
    assert stage.submit("early", adapter=POEMS.fingerprint) is None
    stage.submit("plain")
    stage.report("w1", adapters=(POEMS,))
    assert stage.placed() == [("plain", "w1"), ("early", "w1")]
    assert stage.submit("never", adapter=CODE.fingerprint) is None
    stage.pass_time(2.5, heartbeat=["w1"])
    assert stage.rejected() == {"never": "NO_WORKER"}


def test_a_forecast_counts_workers_with_the_adapter_alone() -> None:
    stage = Stage()
    stage.gateway()
    stage.worker("w1", credits=1, adapters=[POEMS])
    stage.worker("w2", credits=1)
    for worker in ("w1", "w2"):
        stage.report(worker, decode_s=0.1, prefill_rate=1000.0, adapters=(POEMS,) if worker == "w1" else ())
    stage.core.state.models["story"].lengths.mean = 100.0
    stage.submit("first", adapter=POEMS.fingerprint, max_tokens=100)
    stage.submit("second", adapter=POEMS.fingerprint, max_tokens=100, deadline_s=15.0)
    assert stage.placed() == [("first", "w1")]
    assert stage.rejected() == {"second": "DEADLINE_UNMEETABLE"}, "it would begin after 10 s and end after 20"
    stage.submit("plain", max_tokens=100, deadline_s=15.0)
    assert stage.placed()[-1] == ("plain", "w2")
