"""Kernels are compiled while weights are loaded: conditions, progress, and failures, which do not fail a start."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import compile_cache
from services.worker.build import kernel_cache
from services.worker.build.kernel_cache import Compilation, Marker, compiling
from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions
from tests.checkpoints import DEMO, Shape, make_checkpoint
from tests.draft_heads import make_heads
from tests.served import WIDE_EXPERTS
from tests.tiny_config import tiny_config

CONFIG = tiny_config(layers=4, head_dim=64, windows=(None, 64, None, 64), eos_token_ids=(1,))
OPTIONS = EngineOptions(engine="gpu", dtype="float32")
ORDER = {"folder": "/model", "options": {}}


def changed(**options: Any) -> EngineOptions:
    """OPTIONS with these changes."""
    return OPTIONS.model_copy(update=options)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Triton cache."""
    monkeypatch.setattr(compile_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def program(*lines: str) -> list[str]:
    """The command of a process that reads its input and then runs these lines."""
    return [sys.executable, "-c", "\n".join(("import json, os, sys, time", "order = sys.stdin.readline()", *lines))]


def run(command: list[str], silence_s: float = 60.0) -> tuple[bool, list[tuple[str, int, int]]]:
    """Whether the process compiled everything, and the progress that it reported."""
    seen: list[tuple[str, int, int]] = []
    with Compilation(command, ORDER, silence_s) as compilation:
        good = compilation.wait(lambda *progress: seen.append(progress))
    return good, seen


def test_compiling_is_reported_as_a_phase() -> None:
    good, seen = run(
        program(
            "assert json.loads(order)['folder'] == '/model'",
            "for done in range(4):",
            "    print(json.dumps({'done': done, 'total': 3}), flush=True)",
            "    time.sleep(0.15)",
        )
    )
    assert good
    assert {phase for phase, _, _ in seen} == {"kernels"}
    assert seen[-1] == ("kernels", 3, 3)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert any(0 < done < 3 for _, done, _ in seen)


@pytest.mark.parametrize(
    "command",
    [
        program("sys.exit(3)"),
        program("print(json.dumps({'error': 'out of memory'}))"),
        program("os.kill(os.getpid(), 9)"),
        program("print('[1]'); print('{'); print('no report'); sys.exit(1)"),
        [sys.executable, "-c", "pass", "and reads no order"],
    ],
)
def test_a_failed_compilation_does_not_fail_the_start(command: list[str]) -> None:
    good, seen = run(command)
    assert good == (command[-1] == "and reads no order")
    assert all(phase == "kernels" for phase, _, _ in seen)


def test_a_process_that_reports_nothing_is_given_up() -> None:
    began = time.monotonic()
    good, _ = run(program("time.sleep(600)"), silence_s=0.5)
    assert not good
    assert time.monotonic() - began < 30


def test_compiling_stops_when_loading_has_failed(tmp_path: Path) -> None:
    """The process and its children end with the context."""
    lines = ["os.fork()", "open(sys.argv[1] + str(os.getpid()), 'w').close()", "time.sleep(600)"]
    compilation = Compilation([*program(*lines), f"{tmp_path}/pid-"], ORDER)
    with contextlib.suppress(CheckpointError), compilation:
        while len(list(tmp_path.glob("pid-*"))) < 2:
            time.sleep(0.05)
        raise CheckpointError("a tensor is missing")
    deadline = time.monotonic() + 30
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_kernels_are_compiled_only_if_needed_and_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "command", lambda: program("print(json.dumps({'done': 1, 'total': 1}))"))
    monkeypatch.setattr(kernel_cache, "processes", lambda: 8)
    marker, much = Marker(CONFIG, None, OPTIONS), 1 << 40

    def started(options: EngineOptions = OPTIONS, spare: int = much) -> bool:
        with compiling(tmp_path, CONFIG, options, marker, spare) as compilation:
            return compilation is not None

    assert started()
    assert not started(changed(engine="torch"))
    assert not started(spare=1 << 30), "the weights leave no room for another process"
    monkeypatch.setattr(kernel_cache, "processes", lambda: 1)
    assert not started()
    monkeypatch.setattr(kernel_cache, "processes", lambda: 8)
    marker.set()
    assert not started(), "the cache has every kernel"
    monkeypatch.setattr(kernel_cache, "command", lambda: ["/no/such/python"])
    marker = Marker(CONFIG, None, changed(dtype="bfloat16"))
    assert not started()


def test_a_marker_belongs_to_a_shape_and_a_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Marker(CONFIG, None, OPTIONS).set()
    same = (
        (replace(CONFIG, layers=8, windows=(None, 64) * 4, eos_token_ids=(2,)), None, OPTIONS),
        (CONFIG, None, changed(kv_blocks=7, prefix_cache=False)),
    )
    others = (
        (replace(CONFIG, hidden_size=96), None, OPTIONS),
        (replace(CONFIG, windows=(None,) * 4), None, OPTIONS),
        (CONFIG, {"quant_method": "awq"}, OPTIONS),
        (CONFIG, None, changed(quantize="fp8")),
        (CONFIG, None, changed(max_batch_size=65)),
    )
    assert [Marker(*each).is_set() for each in same] == [True, True]
    assert [Marker(*each).is_set() for each in others] == [False] * 5
    monkeypatch.setattr(kernel_cache, "_device", lambda: "another GPU")
    assert not Marker(CONFIG, None, OPTIONS).is_set()


def test_an_unwritable_cache_is_no_error(cache: Path) -> None:
    cache.write_text("no folder")
    marker = Marker(CONFIG, None, OPTIONS)
    marker.set()
    assert not marker.is_set()


# Of a grid, the kernels of each of two ranks are recorded as if it were the first.
LAUNCHES = """
import json, sys
import torch, triton
from pathlib import Path
from tests.kernels import reported_gpu

reported_gpu.use()
from kernels import compile_cache
from services.worker.build import compile_kernels
from services.worker.loader import presets
from services.worker.options import EngineOptions
from services.worker.parallel.gpu_collectives import UnconnectedCollectives
from services.worker.parallel.shards import shard_of

experts, demo, heads = map(Path, sys.argv[1:])
small = {"max_batch_size": 4, "step_tokens": 256, "max_seq_length": 256, "dtype": "bfloat16"}

def launched(folder, **options):
    with compile_cache.recording() as found:
        compile_kernels.launch_all(folder, EngineOptions(**small, **options))
    return sorted([each.kernel.fn.__name__, repr(each.arguments[0])] for each in found)

tiny = presets.folder_of("random:tiny")
report = {"plain": launched(tiny), "int4": launched(tiny, quantize="int4")}
report["heads"] = launched(demo, speculate=f"heads:{heads}")
few_layers = compile_kernels.layer_kinds
compile_kernels.layer_kinds = lambda config: tuple(range(config.layers))
report["plain, all layers"] = launched(tiny)
compile_kernels.layer_kinds = few_layers
report["draft"] = launched(tiny, speculate="draft:random:tiny", draft_quantize="int4")
torch.cuda.current_device = lambda: 0
compile_kernels.UnconnectedCollectives = lambda grid, words, _: UnconnectedCollectives(grid, words, torch.device("cpu"))
for rank in range(2):
    compile_kernels.shard_of = lambda sizes, grid, _: shard_of(sizes, grid, rank)
    report[f"rank {rank}"] = launched(experts, tensor_parallel=2, expert_parallel=True)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """Name and signature of each kernel that a start launches. On a CPU no kernel can be launched, so the kernels for
    any GPU are recorded only."""
    experts = make_checkpoint(tmp_path_factory.mktemp("experts"), WIDE_EXPERTS)
    heads = make_heads(tmp_path_factory.mktemp("heads") / "heads", DEMO)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES, str(experts), str(DEMO), str(heads)],
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("weights", ["plain", "int4"])
def test_all_kernels_of_a_start_are_found_without_launching_one(
    weights: str, launches: dict[str, list[list[str]]]
) -> None:
    found = {name for name, _ in launches[weights]}
    assert {"rms_norm_kernel", "shrink_kernel", "expand_kernel", "copy_blocks_kernel"} <= found, found
    assert ("packed_gemm_kernel" in found) == (weights == "int4")
    assert len(found) > 10


def test_kernels_are_those_of_all_layers_where_few_are_recorded(launches: dict[str, list[list[str]]]) -> None:
    assert launches["plain"] == launches["plain, all layers"]


def test_the_kernels_of_draft_heads_are_found(launches: dict[str, list[list[str]]]) -> None:
    found = {name for name, _ in launches["heads"]}
    assert {"keep_kernel", "before_kernel", "advance_kernel", "accept_kernel"} <= found, found


def test_the_kernels_of_a_rounded_draft_are_found(launches: dict[str, list[list[str]]]) -> None:
    found = {name for name, _ in launches["draft"]} - {name for name, _ in launches["plain"]}
    assert {"packed_gemm_kernel", "advance_kernel"} <= found, found


DRAFT_STEPS = """
import json, sys
from pathlib import Path
from tests.kernels import reported_gpu

reported_gpu.use()
from kernels import attention, compile_cache
from services.worker.build import compile_kernels
from services.worker.options import EngineOptions

attention.is_hopper = lambda device: True
folder = Path(sys.argv[1])
options = {"max_batch_size": 64, "step_tokens": 512, "max_seq_length": 512, "dtype": "bfloat16"}
with compile_cache.recording() as found:
    compile_kernels.launch_all(folder, EngineOptions(**options, speculate=f"draft:{folder}", draft_quantize="int4"))
scheduled = [each for each in found if each.kernel.fn.__name__ == "schedule_kernel"]
print(json.dumps(sorted({each.arguments[3][each.kernel.arg_names.index("BLOCK_V"),] for each in scheduled})))
"""


def test_no_step_of_a_draft_has_long_rows_without_tokens(tmp_path: Path) -> None:
    """On a Hopper, where Triton cannot compile a kernel for 0 pieces of rows."""
    shape = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 8}
    folder = make_checkpoint(tmp_path, Shape("llama", {**shape, "num_hidden_layers": 1}))
    done = subprocess.run(
        [sys.executable, "-c", DRAFT_STEPS, str(folder)],
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0] == 1


def test_ranks_with_whole_experts_run_the_kernels_that_are_compiled_for_the_first(
    launches: dict[str, list[list[str]]],
) -> None:
    """Which experts a rank has changes none of them."""
    names = {name for name, _ in launches["rank 0"]}
    assert {"route_few_kernel", "grouped_kernel", "add_weighted_kernel"} <= names
    assert launches["rank 0"] == launches["rank 1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it compiles")
def test_weft_warm_without_a_gpu_ends_with_one_line() -> None:
    command = [sys.executable, "-c", "from weft.main import main; main()", "warm", "--model", "random:tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (os.EX_CONFIG, "")
    assert done.stderr == "weft: ENGINE=gpu needs a GPU that torch can use\n"


def test_the_process_that_compiles_reports_its_failure(tmp_path: Path) -> None:
    """The process receives a folder without a model."""
    compilation = kernel_cache.start(tmp_path, OPTIONS)
    with compilation:
        assert not compilation.wait(lambda phase, done, total: None)
    assert compilation.error.endswith("config.json is missing") or "CUDA" in compilation.error
