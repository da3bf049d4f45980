"""Each worker of a machine with several GPUs computes on its own ones and sees the others."""

import os
from pathlib import Path

import pytest

from weft.launch import devices, plan
from weft.launch.devices import VISIBLE

SMI = """#!/bin/sh
test "$1" = --list-gpus && printf 'GPU 0: one (UUID: GPU-1)\\n  MIG 1g (UUID: MIG-1)\\nGPU 1: another (UUID: GPU-2)\\n'
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program nvidia-smi that lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(VISIBLE, raising=False)
    return program


def test_gpus_are_those_that_the_environment_names_or_the_driver_lists(smi: Path) -> None:
    assert devices.gpus({VISIBLE: "3,GPU-9"}) == ["3", "GPU-9"]
    assert devices.gpus({VISIBLE: ""}) == []
    assert devices.gpus({}) == ["0", "1"]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert devices.gpus({}) == []


def test_own_gpus_come_first() -> None:
    names = ["0", "1", "2", "3"]
    assert [devices.visible_to(worker, 1, names)[VISIBLE] for worker in range(5)] == [
        "0,1,2,3", "1,2,3,0", "2,3,0,1", "3,0,1,2", "0,1,2,3",
    ]  # fmt: skip
    assert [devices.visible_to(worker, 2, names)[VISIBLE] for worker in range(2)] == ["0,1,2,3", "2,3,0,1"]
    assert devices.visible_to(1, 1, ["0"]) == {}


@pytest.mark.parametrize(("ranks", "expected"), [("1", ["0,1", "1,0", "0,1"]), ("2", ["0,1", "0,1", "0,1"])])
async def test_workers_of_a_mesh_take_gpus_in_turn(smi: Path, tmp_path: Path, ranks: str, expected: list[str]) -> None:
    settings = {"WEFT_TENSOR_PARALLEL": ranks}
    spec = plan.MeshSpec(models=["a"], home=tmp_path / "home", workers=3, free_ports=True, settings=settings)
    async with plan.planned(spec) as planned:
        workers = [each.environment for each in planned.specs if each.name.startswith("worker-")]
        assert [worker.get(VISIBLE) for worker in workers] == expected


async def test_a_single_worker_is_left_alone(smi: Path, tmp_path: Path) -> None:
    spec = plan.MeshSpec(models=["a"], home=tmp_path / "home", free_ports=True)
    async with plan.planned(spec) as planned:
        assert all(VISIBLE not in each.environment for each in planned.specs)
