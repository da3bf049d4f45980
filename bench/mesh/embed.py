"""MiniLM's shape with random weights, through the gateway's gRPC interface, beside ONNX Runtime. `make bench-embed`.

    python -m bench.mesh.embed [queries] [--json FILE]

Everything runs here, on two threads, in rounds that alternate; the best of three counts. Texts have the lengths of
search queries: a median of 8 tokens, a few up to 40. ONNX Runtime is called in this process with texts that are tokens
already: one at a time, and in padded batches of 32. Weft gets the same tokens over gRPC, from 1 and from 32 clients.
"""

import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpc import aio
from transformers import BertConfig, BertModel

from bench import table
from bench.mesh.processes import Up, processor_s, up
from bench.table import Figure
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from weft.launch import demo_model

ROUNDS = 3
THREADS = 2
TEXTS = 256
CLIENTS = 32
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 30522,
}
Texts = Sequence[Sequence[int]]


def queries(count: int = TEXTS) -> list[list[int]]:
    """Random tokens in texts as long as search queries."""
    chance = random.Random(7)
    lengths = [min(40, max(3, round(chance.lognormvariate(2.1, 0.4)))) for _ in range(count)]
    return [[101, *chance.choices(range(1000, 30000), k=length - 2), 102] for length in lengths]


def make_model(folder: Path) -> Any:
    """Write a checkpoint of MiniLM's shape, with the demo model's tokenizer; the requests carry token ids."""
    torch.manual_seed(0)
    make: Any = BertModel
    model = make(BertConfig(**_SHAPE), add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    shutil.copyfile(demo_model.model_folder() / "tokenizer.json", folder / "tokenizer.json")
    return model


def onnx_session(model: Any, folder: Path) -> Callable[[Texts], Any]:
    """Token ids of texts -> their mean vectors, by ONNX Runtime; the texts are padded to one length."""
    import onnxruntime

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    ids = torch.ones(3, 8, dtype=torch.int64)
    ids[0, 5:] = 0  # Inputs of one tensor, or a mask without padding, would be left out.
    shapes = {name: {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)} for name in ("ids", "mask")}
    file = folder / "model.onnx"
    torch.onnx.export(
        Hidden().eval(),
        (ids, ids.clone()),
        str(file),
        input_names=["ids", "mask"],
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # Its threads sleep while Weft runs.
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def encode(texts: Texts) -> Any:
        longest = max(map(len, texts))
        ids = np.zeros((len(texts), longest), np.int64)
        mask = np.zeros_like(ids)
        for place, text in enumerate(texts):
            ids[place, : len(text)], mask[place, : len(text)] = text, 1
        (hidden,) = session.run(None, {"ids": ids, "mask": mask})
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)

    return encode


async def embed(stub: Any, text: Sequence[int]) -> Sequence[float]:
    """One text through the door."""
    inputs = [api.Input(token_ids=api.TokenIds(ids=text))]
    request = api.EmbedRequest(inputs=inputs, options=api.EncodeOptions(cache=api.CACHE_POLICY_BYPASS))
    reply = await stub.Embed(request)
    values: Sequence[float] = reply.embeddings[0].values
    return values


async def from_clients(stub: Any, texts: Texts, clients: int) -> None:
    """Each client sends one text after another."""

    async def client(own: Texts) -> None:
        for text in own:
            await embed(stub, text)

    await asyncio.gather(*(client(texts[number::clients]) for number in range(clients)))


async def _timed(mesh: Up, stub: Any, texts: Texts, clients: int) -> tuple[float, float]:
    """Seconds of the clock, and of the worker's processor."""
    began, used = time.perf_counter(), processor_s(mesh.pid("worker-1"))
    await from_clients(stub, texts, clients)
    return time.perf_counter() - began, processor_s(mesh.pid("worker-1")) - used


def _theirs(encode: Callable[[Texts], Any], texts: Texts, batch: int) -> tuple[float, float]:
    began, used = time.perf_counter(), time.process_time()
    for start in range(0, len(texts), batch):
        encode(texts[start : start + batch])
    return time.perf_counter() - began, time.process_time() - used


async def measure_queries() -> list[Figure]:
    """All figures, in rounds that alternate between Weft and ONNX Runtime."""
    texts = queries()
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="weft-embed-") as home:
        folder = Path(home) / "minilm"
        encode = onnx_session(make_model(folder), Path(home))
        settings = {"WEFT_THREADS": str(THREADS)}
        async with up(settings, model=str(folder)) as mesh, aio.insecure_channel(mesh.gateways[0]) as channel:
            stub: Any = stubs.InferenceStub(channel)
            for text in texts[:8]:
                np.testing.assert_allclose(await embed(stub, text), encode([text])[0], atol=1e-4)
            for _ in range(ROUNDS):
                for clients in (1, CLIENTS):
                    some = texts if clients > 1 else texts[: TEXTS // 4]
                    ours, theirs = await _timed(mesh, stub, some, clients), _theirs(encode, some, clients)
                    for name, (wall_s, used_s) in (("ours", ours), ("theirs", theirs)):
                        times.setdefault((name, clients), []).append((wall_s / len(some), used_s / len(some)))
    return [figure for clients in (1, CLIENTS) for figure in _figures(times, clients)]


def _figures(times: dict[tuple[str, int], list[tuple[float, float]]], clients: int) -> list[Figure]:
    best = {name: [min(column) for column in zip(*times[name, clients], strict=True)] for name in ("ours", "theirs")}
    batch = "one at a time" if clients == 1 else f"padded batches of {clients}"
    return [
        Figure(f"ONNX Runtime, {batch}", 1 / best["theirs"][0], "texts/s", note="no server"),
        Figure(f"Weft through its gRPC interface, {clients} clients", 1 / best["ours"][0], "texts/s"),
        Figure("ratio", best["theirs"][0] / best["ours"][0], "x", ">= 1"),
        Figure("ONNX Runtime, processor", best["theirs"][1] * 1e3, "ms/text"),
        Figure("Weft's worker, processor", best["ours"][1] * 1e3, "ms/text"),
    ]


PARTS: dict[str, table.Part] = {"queries": ("MiniLM's shape, float32", measure_queries)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    asyncio.run(table.measure("Measures embeddings on this machine's processor.", PARTS))
