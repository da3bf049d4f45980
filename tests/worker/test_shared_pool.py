"""The memory of a GPU's pool for other processes: what is described, mapped and unmapped, with a stand-in driver.

The calls of the driver get the arguments that they would; addresses are this process's own.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import kv_pages
from kernels.peers import memory as peer_memory
from kernels.peers.memory import PeerMemoryError
from services.worker.kvcache.shared_memory import CannotShare
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.sharing.pool import SharedGpuPool
from tests.tiny_config import tiny_config

CONFIG = tiny_config(layers=3, head_dim=64)
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
CONTEXT = 77


class Driver:
    """Answers as libcuda does. Each allocation begins 256 bytes before its tensor."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.contexts: list[int] = []
        self.failing: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        called = getattr(type(self), f"_{name}")

        def call(*arguments: Any) -> int:
            if name in self.failing:
                return self.failing[name]
            assert self.contexts or name in ("cuPointerGetAttribute", "cuCtxPushCurrent_v2"), "no current context"
            called(self, *(getattr(each, "value", each) for each in arguments))
            return 0

        return call

    def cuGetErrorString(self, code: int, name: Any) -> int:
        name._obj.value = f"error {code}".encode()
        return 0

    def _cuPointerGetAttribute(self, data: Any, attribute: int, address: int) -> None:
        assert attribute == 1
        data._obj.value = CONTEXT

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        assert context == CONTEXT
        self.contexts.append(CONTEXT)

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        context._obj.value = self.contexts.pop()

    def _cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        base._obj.value, size._obj.value = address - 256, 1 << 20

    def _cuIpcGetMemHandle(self, handle: Any, base: int) -> None:
        handle._obj.reserved[:] = base.to_bytes(peer_memory.HANDLE_BYTES, "little")

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> None:
        assert flags == 1
        address._obj.value = int.from_bytes(bytes(handle.reserved), "little")
        self.open.append(address._obj.value)

    def _cuIpcCloseMemHandle(self, address: int) -> None:
        self.open.remove(address)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(peer_memory, "_driver", lambda: made)
    return made


def pool_of(blocks: int = 5) -> GpuPool:
    """A pool of random bytes."""
    pool = GpuPool(CONFIG, 16, torch.bfloat16, torch.device("cpu"))
    pool.allocate(blocks)
    for layer in pool.layers:
        kv_pages.bytes_of(layer).random_(0, 255)
    return pool


def test_a_pool_is_mapped_where_its_layers_are(library: Driver) -> None:
    lender, own = pool_of(), pool_of()
    mapped = SharedGpuPool(own).map(SharedGpuPool(lender).describe())
    assert mapped._addresses is not None
    assert mapped._addresses.tolist() == [layer.data_ptr() for layer in lender.layers]
    assert len(library.open) == 3
    mapped.close()
    mapped.close()
    assert not library.open
    assert not library.contexts
    with pytest.raises(CannotShare, match="not mapped"):
        mapped.copy([1])


@pytest.mark.parametrize("places", [[6], [-1], [1, 1 << 40]])
def test_blocks_beyond_the_other_pool_are_refused(library: Driver, places: list[int]) -> None:
    mapped = SharedGpuPool(pool_of(8)).map(SharedGpuPool(pool_of(5)).describe())
    with pytest.raises(CannotShare, match="does not have"):
        mapped.copy(places)


def damaged(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda described: {**described, **changes}


@pytest.mark.parametrize(
    "damage",
    [
        damaged(kind="another"), damaged(page=[16, 2, 2, 32]), damaged(layers=[[0, 0]]), damaged(handles=["xyz"]),
        damaged(handles=["00"] * 3), damaged(layers=[[0, 0], [1, 0], [3, 0]]), damaged(blocks=None), lambda _: {},
    ],
)  # fmt: skip
def test_descriptions_of_other_memory_are_refused(
    library: Driver, damage: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    described = json.loads(SharedGpuPool(pool_of()).describe())
    with pytest.raises(CannotShare):
        SharedGpuPool(pool_of()).map(json.dumps(damage(described)).encode())
    with pytest.raises(CannotShare):
        SharedGpuPool(pool_of()).map(b"\xff no description")
    assert not library.open


def test_what_was_mapped_is_unmapped_when_the_rest_cannot_be(library: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    described = SharedGpuPool(pool_of()).describe()
    opened = library._cuIpcOpenMemHandle_v2

    def limited(self: Driver, *arguments: Any) -> None:
        if len(self.open) == 2:
            self.failing["cuIpcOpenMemHandle_v2"] = OUT_OF_MEMORY
            raise PeerMemoryError("cuIpcOpenMemHandle_v2: no memory (2)")
        opened(*arguments)

    monkeypatch.setattr(Driver, "_cuIpcOpenMemHandle_v2", limited)
    with pytest.raises(CannotShare, match=r"no memory \(2\): the other worker's GPU is not visible"):
        SharedGpuPool(pool_of()).map(described)
    assert not library.open


def test_errors_of_the_driver_have_its_names(library: Driver) -> None:
    library.failing["cuIpcGetMemHandle"] = INVALID_VALUE
    with pytest.raises(CannotShare, match=r"cuIpcGetMemHandle: error 1 \(1\) \(.*expandable_segments\)"):
        SharedGpuPool(pool_of()).describe()
    assert not library.contexts


def test_a_machine_without_a_driver_cannot_share() -> None:
    if torch.cuda.is_available():
        pytest.skip("it has one")
    with pytest.raises(CannotShare, match="libcuda"):
        SharedGpuPool(pool_of()).describe()
