"""Kernels compiled before or beside a start on the GPU: the engine's process then compiles none of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import DEMO, SMALL_DEMO
from tests.draft_heads import make_heads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STARTS = """
import json, sys
import triton
from services.worker.build.choose import build_engine
from services.worker.loader.checkpoint import locate
from services.worker.options import EngineOptions

compiled, phases = [], []
def listen(src, metadata, metadata_group, times, cache_hit):
    if not cache_hit:
        compiled.append(src.name)
triton.knobs.compilation.listener = listen
settings = json.loads(sys.argv[2])
options = EngineOptions(engine="gpu", max_seq_length=512, **settings)
def note(*progress): phases.append(progress)
build_engine(locate(sys.argv[1]), options, note, compile_ahead=True)
print(json.dumps({"compiled": compiled, "phases": phases}))
"""
SMALL = {"dtype": "bfloat16", "max_batch_size": 8, "step_tokens": 512, "kv_blocks": 512}
CASES: dict[str, dict[str, object]] = {
    "bfloat16": {},
    "fp8": {"quantize": "fp8", "kv_dtype": "fp8"},
    "int4": {"quantize": "int4"},
    "deterministic": {"deterministic": True},
    "ngram, adapters, host memory": {"speculate": "ngram", "adapter_slots": 2, "host_kv_bytes": 1 << 28},
    "a rounded draft": {"speculate": f"draft:{SMALL_DEMO}", "draft_quantize": "int4"},
}


def start(cache: Path, **settings: object) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Starts an engine in a process; returns the kernels that it compiled itself, and its progress."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(DEMO), json.dumps({**SMALL, **settings})],
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    return result["compiled"], [tuple(each) for each in result["phases"]]


@pytest.fixture(params=[*CASES, "draft heads"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The engine's options beside SMALL."""
    if request.param in CASES:
        return CASES[request.param]
    return {"speculate": f"heads:{make_heads(tmp_path_factory.mktemp('trained') / 'heads', DEMO)}"}


def test_a_start_compiles_no_kernel_in_its_own_process(settings: dict[str, object], tmp_path: Path) -> None:
    compiled, phases = start(tmp_path, **settings)
    assert compiled == []
    kernels = [(done, total) for phase, done, total in phases if phase == "kernels"]
    assert kernels[-1][0] == kernels[-1][1] > 10
    compiled, phases = start(tmp_path, **settings)
    assert compiled == []
    assert "kernels" not in {phase for phase, _, _ in phases}, "the cache has every kernel"


def test_weft_warm_compiles_before_the_start(tmp_path: Path) -> None:
    steps = {"WEFT_KV_BLOCKS": "512", "WEFT_STEP_TOKENS": "512", "WEFT_CHUNK_TOKENS": "200"}
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), **steps}
    command = [sys.executable, "-c", "from weft.main import main; main()", "warm", "--model", str(DEMO)]
    command += ["--max-batch-size", "8", "--max-seq-length", "512"]
    lines = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    ]
    assert lines[0][0] == "kernels 0%"
    assert lines[0][-2] == "kernels 100%"
    assert lines[0][-1].startswith("compiled ")
    assert lines[1] == ["all kernels of this model are compiled already"]
    compiled, phases = start(tmp_path)
    assert compiled == []
    assert "kernels" not in {phase for phase, _, _ in phases}
