"""Another runtime as a child process of `bench.mesh.beside_runtimes`, which runs this file by the runtime's own Python.

    python runtime_child.py genai|ik MODEL THREADS

Each line of the input is a number of tokens; the answer is a line with the tokens per second after the first one.
"""

import sys
import time
from collections.abc import Callable


def genai(path: str, threads: int) -> Callable[[int], float]:
    """openvino-genai's LLMPipeline."""
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def rate(tokens: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        return 1000.0 / float(pipeline.generate(["ab cd ef gh"], config).perf_metrics.get_tpot().mean)

    return rate


def ik(path: str, threads: int) -> Callable[[int], float]:
    """ik-llama-cpp-python."""
    import ik_llama_cpp

    model = ik_llama_cpp.IkLlama(path, n_ctx=512, n_threads=threads, verbose=False, n_seq_max=1)

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        list(model.generate(list(range(5, 21)), max_tokens=tokens, temperature=0.0))
        return time.perf_counter() - began

    def rate(tokens: int) -> float:
        alone = seconds(1)
        return (tokens - 1) / (seconds(tokens) - alone)

    return rate


def main() -> None:
    """The program."""
    kind, path, threads = sys.argv[1:]
    rate = {"genai": genai, "ik": ik}[kind](path, int(threads))
    rate(2)
    print("ready", flush=True)
    for line in sys.stdin:
        print(f"rate {rate(int(line))}", flush=True)


if __name__ == "__main__":
    main()
