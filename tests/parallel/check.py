"""Every grid against one process: families, formats, whole experts, lost ranks.

`python -m tests.parallel.check` prints a line for each shape and exits with 1 if an answer differs. It takes about
twelve minutes of two cores.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from services.worker.errors import CheckpointError
from tests import quantized
from tests.checkpoints import SHAPES, make_checkpoint
from tests.parallel import scenes
from tests.parallel.losses import left_behind, signal_rank, streams_survive
from tests.parallel.threads import grid_engine
from tests.served import UNEVEN_EXPERTS, WIDE, WIDE_EXPERTS
from tests.worker.drive import run

GRIDS = ((2, 1), (4, 1), (1, 2), (1, 3), (2, 2))
FORMAT_GRIDS = ((2, 1), (4, 1), (1, 2), (2, 2))
EXPERT_GRIDS = ((2, 1), (4, 1), (2, 2))
MIXTURES = {
    "mixtral": SHAPES["mixtral"],
    "qwen3-moe": SHAPES["qwen3-moe"],
    "uneven": UNEVEN_EXPERTS,
}
ROUNDED = ("round-int8", "round-int4", "round-fp8", "round-nf4")
TOLERANCE = 1e-3
"""Of log-probabilities in formats: the wide model's logits are up to 40, and a CPU rounds inputs of INT8 to 16 bits."""
COARSE = 0.15
"""Of INT4's first log-probabilities, all that is compared: a CPU multiplies INT4 in bfloat16, and ranks round parts of
a sum where one process rounds the sum."""


def families(shapes: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each tiny checkpoint on each grid, in all scenes."""
    for shape in shapes:
        with _folder() as folder:
            make_checkpoint(folder, shape)
            expected = scenes.one_process(folder)
            for tensor, pipeline in GRIDS:
                yield f"{shape} {tensor} x {pipeline}", scenes.compare(folder, tensor, pipeline, expected)


def formats(kinds: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """A wide tiny model in each format. A grid that would divide a group or a block refuses it."""
    with _folder() as folder:
        plain = make_checkpoint(folder / "plain", WIDE)
        for kind in kinds:
            options: dict[str, Any] = {"quantize": kind.removeprefix("round-")} if kind in ROUNDED else {}
            served = plain if options else quantized.write(kind, plain, folder / "written").folder
            yield from _format(kind, served, options)


def experts(only: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Whole experts spread over ranks: each family that has some, in all scenes; and each format, which no grid
    refuses."""
    for shape in only or MIXTURES:
        if shape in MIXTURES:
            with _folder() as folder:
                make_checkpoint(folder, MIXTURES[shape])
                expected = scenes.one_process(folder)
                for tensor, pipeline in EXPERT_GRIDS:
                    wrong = scenes.compare(folder, tensor, pipeline, expected, expert_parallel=True)
                    yield f"{shape} {tensor} x {pipeline}, whole experts", wrong
    with _folder() as folder:
        plain = make_checkpoint(folder / "plain", WIDE_EXPERTS)
        for kind in only or [*ROUNDED, *quantized.EXPERT_WRITERS]:
            if kind not in MIXTURES:
                options: dict[str, Any] = {"quantize": kind.removeprefix("round-")} if kind in ROUNDED else {}
                served = plain if options else quantized.write(kind, plain, folder / "written").folder
                yield from _format(kind, served, options, EXPERT_GRIDS, spread=True)


def _format(
    kind: str,
    folder: Path,
    options: dict[str, Any],
    grids: Sequence[tuple[int, int]] = FORMAT_GRIDS,
    *,
    spread: bool = False,
) -> Iterator[tuple[str, list[str]]]:
    """spread: whole experts over the tensor ranks."""
    coarse = "int4" in kind
    jobs = scenes.greedy() if coarse else scenes.jobs()
    whole = scenes.one_process(folder, **options)
    expected = {one.key: whole[one.key] for one in jobs}
    for tensor, pipeline in grids:
        title = f"{kind} {tensor} x {pipeline}{', whole experts' if spread else ''}"
        try:
            with grid_engine(folder, tensor, pipeline, expert_parallel=spread, **options) as engine:
                answers = run(engine, *jobs)
            wrong = scenes.differences(expected, answers, COARSE if coarse else TOLERANCE, tokens=not coarse)
            yield title, wrong
        except CheckpointError as error:
            allowed = tensor > 1 and not spread
            yield f"{title}: refused ({error})", [] if allowed else ["stages and whole experts refuse no format"]


def losses() -> Iterator[tuple[str, list[str]]]:
    """Each rank of a grid killed in turn, and one that hangs, with streams in flight and a second worker."""
    two = {"WEFT_TENSOR_PARALLEL": "2"}
    yield f"{two} rank 1 hangs", _lose([two, two], 1, signal.SIGSTOP)
    for env in (two, {**two, "WEFT_PIPELINE_PARALLEL": "2"}):
        for number in range(2 ** len(env)):
            # Stages change no bit: a worker without them continues the answers.
            yield f"{env} kill -9 rank {number}", _lose([env, two], number, signal.SIGKILL)


def _lose(workers: Sequence[Mapping[str, str]], number: int, how: signal.Signals) -> list[str]:
    with _folder() as folder:
        try:
            asyncio.run(streams_survive(folder, workers, signal_rank(number, how), ends=how is signal.SIGKILL))
        except AssertionError as error:
            return [str(error)]
    return [f"left behind: {each}" for each in left_behind()]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> int:
    """Run the parts that are asked for -> the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["families", "formats", "experts", "losses"])
    parser.add_argument("--only", nargs="*", help="shapes or formats")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "families": lambda: families(asked.only or list(SHAPES)),
        "formats": lambda: formats(asked.only or [*ROUNDED, *quantized.WRITERS]),
        "experts": lambda: experts(asked.only or []),
        "losses": losses,
    }
    failed = 0
    for part in asked.parts:
        for title, wrong in parts[part]():
            failed += bool(wrong)
            print(f"{'WRONG' if wrong else 'equal'}  {title}", *wrong, sep="\n       ", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
