"""The demo model on this machine's CPU through the gateway's gRPC interface, against transformers. `make bench-cpu`.

    python -m bench.mesh.cpu [model] [weights] [--json FILE]

Everything runs here: gateway, scheduler, cache, Redis, worker, client and, in turns with them, transformers in this
process, whose threads sleep meanwhile. Of each kind the best of three rounds counts.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from grpc import aio
from transformers import AutoModelForCausalLM

from bench import table
from bench.engine import cpu_weights
from bench.mesh.processes import up
from bench.table import Figure
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from weft.launch import demo_model

ROUNDS = 3
THREADS = 2
TOKENS = 256
STREAMS = 16
STREAM_TOKENS = 128
_PROMPT = 32


def reference() -> Callable[[list[int]], float]:
    """Seconds that `transformers.generate` takes for each token after the first: float32, greedy, with KV cache."""
    torch.set_num_threads(THREADS)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model.model_folder(), dtype=torch.float32)
    model.eval()

    def seconds(prompt: list[int], tokens: int) -> float:
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        assert answer.shape[1] == len(prompt) + tokens, "it must not end early"
        return time.perf_counter() - began

    return lambda prompt: (seconds(prompt, TOKENS) - seconds(prompt, 1)) / (TOKENS - 1)


async def answer(stub: Any, prompt: list[int], tokens: int) -> float:
    """Stream one answer -> seconds per token after the first."""
    sampling = api.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    form = api.Prompt(token_ids=api.TokenIds(ids=prompt))
    request = api.GenerateRequest(prompt=form, sampling=sampling, cache=api.CACHE_POLICY_BYPASS)
    first, last, count = 0.0, 0.0, 0
    async for response in stub.Generate(request):
        if response.delta.token_ids:
            last = time.perf_counter()
            first = first or last
            count += len(response.delta.token_ids)
    assert count == tokens, f"{count} tokens came"
    return (last - first) / (tokens - 1)


async def together(stub: Any, prompts: list[list[int]]) -> float:
    """Tokens per second of concurrent answers."""
    began = time.perf_counter()
    await asyncio.gather(*(answer(stub, prompt, STREAM_TOKENS) for prompt in prompts))
    return len(prompts) * STREAM_TOKENS / (time.perf_counter() - began)


async def in_turn(stub: Any, prompts: list[list[int]]) -> float:
    """Tokens per second of the same answers one after another."""
    began = time.perf_counter()
    for prompt in prompts:
        await answer(stub, prompt, STREAM_TOKENS)
    return len(prompts) * STREAM_TOKENS / (time.perf_counter() - began)


def prompts(count: int) -> list[list[int]]:
    """Random prompts without shared prefixes."""
    chance = random.Random(11)
    return [chance.choices(range(1, 6000), k=_PROMPT) for _ in range(count)]


async def through_the_door() -> list[Figure]:
    """All figures, in rounds that alternate between Weft and transformers."""
    theirs = reference()
    token_s: dict[str, list[float]] = {"ours": [], "theirs": []}
    rates: dict[str, list[float]] = {"together": [], "in turn": []}
    async with up({"OMP_NUM_THREADS": str(THREADS)}) as mesh, aio.insecure_channel(mesh.gateways[0]) as channel:
        stub: Any = stubs.InferenceStub(channel)
        await answer(stub, prompts(1)[0], 16)
        for _ in range(ROUNDS):
            token_s["ours"].append(await answer(stub, prompts(1)[0], TOKENS))
            token_s["theirs"].append(theirs(prompts(1)[0]))
        for _ in range(ROUNDS):
            rates["in turn"].append(await in_turn(stub, prompts(STREAMS)))
            rates["together"].append(await together(stub, prompts(STREAMS)))
    ours, reference_s = min(token_s["ours"]), min(token_s["theirs"])
    alone, batched = max(rates["in turn"]), max(rates["together"])
    return [
        Figure("transformers.generate, batch 1, 2 threads", 1 / reference_s, "tokens/s", note="decode only"),
        Figure("Weft through its gRPC interface, batch 1", 1 / ours, "tokens/s", note="decode only"),
        Figure("ratio", reference_s / ours, "x", ">= 1"),
        Figure(f"{STREAMS} answers one after another", alone, "tokens/s", note=f"{STREAM_TOKENS} tokens each"),
        Figure(f"{STREAMS} concurrent answers", batched, "tokens/s"),
        Figure("ratio", batched / alone, "x", ">= 4"),
    ]


async def weights() -> list[Figure]:
    """Quantized weights, without a mesh."""
    return cpu_weights.measure()


PARTS: dict[str, table.Part] = {
    "model": ("The demo model, float32", through_the_door),
    "weights": ("Quantized weights", weights),
}


if __name__ == "__main__":
    asyncio.run(table.measure("Measures decode on this machine's processor.", PARTS))
