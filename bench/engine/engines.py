"""All engines beside each other on a CPU: seconds of a start, and tokens at batch 1 and 16, of the demo model.

    python -m bench.engine.engines [--engines torch onnxruntime ...] [--model FOLDER] [--exports .weft/exports]

Greedy answers must be equal. Rates are per second of wall-clock and, for a busy machine, per second of processor time.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from services.worker.build.choose import build_engine
from services.worker.build.export import export
from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from services.worker.job import Job, SamplingParams
from services.worker.loader.exports import NAMES
from services.worker.options import EngineOptions

ENGINES = ("torch", "onnxruntime", "openvino", "exported")
STREAMS = (1, 16)
PROMPT_TOKENS, ANSWER_TOKENS = 64, 128
FORMS = {"onnxruntime": "onnx", "openvino": "onnx", "exported": "torch"}
"""What each engine reads; the others read the checkpoint."""


def folder_of(engine: str, model: Path, exports: Path) -> Path:
    """What an engine serves; an export is written once."""
    if engine not in NAMES:
        return model
    out = exports / f"{model.name}-{FORMS[engine]}"
    if not out.exists():
        export(model, out, FORMS[engine], lambda *_: None)
    return out


def answer(engine: GenerationEngine, streams: int) -> tuple[list[list[int]], float, float]:
    """-> the answers, and the seconds of wall-clock and of processor time from the last first token to the end."""
    answers: list[list[int]] = [[] for _ in range(streams)]
    for key in range(streams):
        prompt = random.Random(key).choices(range(100, 2000), k=PROMPT_TOKENS)
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        engine.submit(Job(key, prompt, len(prompt), params, bypass_cache=True))
    began = used = 0.0
    while engine.has_work():
        for token in engine.step().tokens:
            answers[token.key].append(token.token_id)
        if not began and all(answers):
            began, used, first = time.perf_counter(), time.process_time(), sum(map(len, answers))
    share = sum(map(len, answers)) / (sum(map(len, answers)) - first)
    return answers, (time.perf_counter() - began) * share, (time.process_time() - used) * share


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/weft-story-11m"))
    parser.add_argument("--exports", type=Path, default=Path(".weft/exports"))
    parser.add_argument("--threads", type=int, help="of each engine; absent: its own choice")
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    asked = parser.parse_args()
    expected: dict[int, list[list[int]]] = {}
    print("| engine | start | batch 1, tokens/s (per processor s) | 16 streams | equal tokens |\n|---|---|---|---|---|")
    for name in asked.engines:
        folder = folder_of(name, asked.model, asked.exports)
        began = time.perf_counter()
        options = EngineOptions(engine=name, max_batch_size=max(STREAMS), max_seq_length=512, threads=asked.threads)
        try:
            engine = build_engine(folder, options, lambda *_: None).engine
        except CheckpointError as refusal:
            print(f"| {name} | {refusal} | | | |", flush=True)
            continue
        cells, equal = [f"{time.perf_counter() - began:.1f} s"], True
        for streams in STREAMS:
            answers, took, used = answer(engine, streams)
            equal &= expected.setdefault(streams, answers) == answers
            tokens = streams * ANSWER_TOKENS
            cells.append(f"{tokens / took:,.0f} ({tokens / used:,.0f})")
        print(f"| {name} | {' | '.join(cells)} | {'yes' if equal else 'no'} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
