"""Models with adapters at the gateway: names, fingerprints, workers, and those that no worker has any more."""

from protos import mesh_pb2 as mesh
from services import hashing
from services.gateway.links.adapters import served_with_adapters

BASE = b"b" * 32


def listed(*workers: dict[str, bytes]) -> mesh.ModelList:
    """One model, with the adapters of each worker by name."""
    card = mesh.ModelCard(name="base", aliases=["b"], fingerprint=BASE, block_size=16)
    served = [
        mesh.ServedWorker(
            worker_id=f"w{number}",
            address=f"w{number}:1",
            adapters=[mesh.AdapterState(name=name, fingerprint=each) for name, each in adapters.items()],
        )
        for number, adapters in enumerate(workers)
    ]
    return mesh.ModelList(models=[mesh.ServedModel(card=card, workers=served)])


def test_an_adapter_has_names_a_fingerprint_and_workers_of_its_own() -> None:
    found = served_with_adapters(listed({"poems": b"p"}, {}, {"poems": b"p", "code": b"c"}), {})
    assert found.keys() == {"base:poems", "b:poems", "base:code", "b:code"}
    poems = found["b:poems"]
    assert (poems.card.name, poems.model, poems.addresses) == ("base:poems", "base", ("w0:1", "w2:1"))
    assert poems.card.fingerprint == hashing.adapted(BASE, b"p") != found["base:code"].card.fingerprint
    assert found["base:code"].only_address == "w2:1"


def test_of_two_adapters_of_one_name_that_of_most_workers_is_served() -> None:
    found = served_with_adapters(listed({"poems": b"old"}, {"poems": b"new"}, {"poems": b"new"}), {})
    assert (found["base:poems"].adapter, found["base:poems"].addresses) == (b"new", ("w1:1", "w2:1"))


def test_an_adapter_is_unavailable_without_workers_and_unknown_when_it_is_dropped() -> None:
    before = served_with_adapters(listed({"poems": b"p"}), {})
    gone = served_with_adapters(listed(), before)
    assert gone.keys() == before.keys()
    assert gone["base:poems"].addresses == ()
    assert served_with_adapters(listed({}), gone) == {}
