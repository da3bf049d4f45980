"""MiniLM's shape with random weights beside ONNX Runtime, engine by engine and server by server. `make bench-embed`.

    python -m bench.mesh.embed [queries] [hits] [awake] [--json FILE]

Everything runs on this machine, in rounds that alternate; the best of five counts. Weft has the checkpoint and what
`weft export onnx` writes of it, so that it may let ONNX Runtime compute texts that come alone. Texts are tokens of the
lengths of search queries: a median of 8, a few up to 40. The engines have two threads each and are called in this
process: with one text at a time, and with 32, which ONNX Runtime gets padded to one length. The servers are Weft's
whole mesh with its default threads, and ONNX Runtime with two in one process behind a plain gRPC server
(`servers/onnx_runtime.py`); both get the same calls from 1 and from 32 clients. `hits` sends texts whose vectors a mesh
has, one after another: by calls of gRPC, by messages on one stream of gRPC, and by requests on one connection of HTTP;
and calls of a server that does nothing (`servers/bare.py`), the floor of those of gRPC. `awake` (Linux) measures the
same on cores that do not sleep between two messages: on each a process computes whenever no other does.
`docs/operations.md` describes how an operator gets such cores.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpc import aio
from transformers import BertConfig, BertModel

from bench import table
from bench.mesh.busy_cores import busy
from bench.mesh.processes import Up, up
from bench.mesh.servers.onnx_runtime import Texts, encoder
from bench.table import Figure
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from services.process import keep_pauses_short
from services.worker.build.choose import resolve_engine
from services.worker.build.encoders.assemble import build_encoder
from services.worker.build.export import export as write_export
from services.worker.options import EngineOptions
from services.worker.runners.base import TextTokens
from weft.launch import demo_model

ROUNDS = 5
THREADS = 2
TEXTS, SERVED = 256, 4
"""Texts of a round, and how often the servers get them."""
CLIENTS = 32
HITS = 1024
"""Calls of each kind of hit: of 256, the slowest two or three would decide the p99."""
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 30522,
}


def queries(count: int = TEXTS, seed: int = 7) -> list[list[int]]:
    """Random tokens in texts as long as search queries."""
    chance = random.Random(seed)
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


def export(model: Any, file: Path) -> None:
    """Write the network as ONNX."""

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    ids = torch.ones(3, 8, dtype=torch.int64)
    ids[0, 5:] = 0  # Inputs of one tensor, or a mask without padding, would be left out.
    shapes = {name: {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)} for name in ("ids", "mask")}
    torch.onnx.export(
        Hidden().eval(),
        (ids, ids.clone()),
        str(file),
        input_names=["ids", "mask"],
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
    )


def weft_engine(folder: Path) -> Callable[[Texts], Any]:
    """Token ids of texts -> their vectors, by Weft's engine in this process, which `auto` chooses."""
    options = EngineOptions.model_validate({"threads": THREADS})
    runner: Any = build_encoder(folder, resolve_engine(options, encodes=True), lambda *_: None).engine.runner

    def encode(texts: Texts) -> Any:
        return runner.collect(runner.launch([TextTokens(array("i", text)) for text in texts]))

    return encode


@contextlib.asynccontextmanager
async def child_server(module: str, *arguments: str) -> AsyncIterator[str]:
    """Starts a gRPC server in a child process -> its host:port."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", f"bench.mesh.servers.{module}", *arguments)
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert child.stdout is not None, child
    try:
        yield f"127.0.0.1:{int(await child.stdout.readline())}"
    finally:
        child.kill()
        await child.wait()


async def embed(
    stub: Any, text: Sequence[int], cache: "api.CachePolicy.ValueType" = api.CACHE_POLICY_BYPASS
) -> api.EmbedResponse:
    """One text through the door."""
    reply: api.EmbedResponse = await stub.Embed(request_of(text, cache))
    return reply


def request_of(text: Sequence[int], cache: "api.CachePolicy.ValueType") -> api.EmbedRequest:
    """The request for the vector of one text."""
    inputs = [api.Input(token_ids=api.TokenIds(ids=text))]
    return api.EmbedRequest(inputs=inputs, options=api.EncodeOptions(cache=cache))


async def from_clients(stub: Any, texts: Texts, clients: int) -> None:
    """Each client sends one text after another."""

    async def client(own: Texts) -> None:
        for text in own:
            await embed(stub, text)

    await asyncio.gather(*(client(texts[number::clients]) for number in range(clients)))


def _alone(encode: Callable[[Texts], Any], texts: Texts, batch: int) -> float:
    """Seconds of a text."""
    began = time.perf_counter()
    for start in range(0, len(texts), batch):
        encode(texts[start : start + batch])
    return (time.perf_counter() - began) / len(texts)


async def _served(stub: Any, texts: Texts, clients: int) -> float:
    """Seconds of a text."""
    began = time.perf_counter()
    await from_clients(stub, texts, clients)
    return (time.perf_counter() - began) / len(texts)


async def measure_queries() -> list[Figure]:
    """All figures, in rounds that alternate between Weft and ONNX Runtime."""
    texts, times = queries(), dict[tuple[str, int, str], list[float]]()
    async with contextlib.AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-embed-")))
        folder, file = home / "minilm", home / "model.onnx"
        export(make_model(folder), file)
        write_export(folder, folder / "onnx", "onnx", lambda *_: None)
        engines = {"Weft": weft_engine(folder), "ONNX Runtime": encoder(str(file), THREADS)}
        mesh = await stack.enter_async_context(up({}, model=str(folder)))
        runtime = child_server("onnx_runtime", str(file), str(THREADS))
        addresses = {"Weft": mesh.gateways[0], "ONNX Runtime": await stack.enter_async_context(runtime)}
        served: dict[str, Any] = {
            name: stubs.InferenceStub(await stack.enter_async_context(aio.insecure_channel(address)))
            for name, address in addresses.items()
        }
        for text in texts[:8]:
            vectors = [encode([text])[0] for encode in engines.values()]
            vectors += [(await embed(stub, text)).embeddings[0].values for stub in served.values()]
            for vector in vectors[1:]:
                np.testing.assert_allclose(vector, vectors[0], atol=1e-4)
        keep_pauses_short()  # Long ones of this process would count as the servers'.
        for _ in range(ROUNDS):
            for count in (1, CLIENTS):
                some = texts if count > 1 else texts[: TEXTS // 4]
                for name in engines:
                    times.setdefault(("engine", count, name), []).append(_alone(engines[name], some, count))
                for name in served:  # For a second or two, as one would serve.
                    seconds = await _served(served[name], [*some] * SERVED, count)
                    times.setdefault(("server", count, name), []).append(seconds)
    rows = [(kind, count) for kind in ("engine", "server") for count in (1, CLIENTS)]
    return [figure for kind, count in rows for figure in _figures(times, kind, count)]


async def measure_hits() -> list[Figure]:
    """Calls for vectors that Redis or the gateway has, through each door in turn, one after the other."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="weft-embed-") as home:
        make_model(folder := Path(home) / "minilm")
        async with up({}, model=str(folder)) as mesh:
            keep_pauses_short()  # Long ones of this process would count as the servers'.
            for seed, (door, calls_at) in enumerate(DOORS.items()):
                async with calls_at(mesh) as call:
                    found = await hits_ms(call, queries(HITS, seed))
                for name, calls in found.items():
                    figures += _percentiles(f"{name} over {door}", calls, "<= 2")
        figures += await measure_floor()
    return figures


async def measure_awake() -> list[Figure]:
    """`measure_hits` on cores that do not sleep."""
    with busy(os.sched_getaffinity(0)):
        return await measure_hits()


async def measure_floor() -> list[Figure]:
    """The same calls of a server that answers at once, and of one that calls such a server: as many calls of gRPC as a
    hit in the gateway and one in Redis take, and nothing else."""
    figures: list[Figure] = []
    async with child_server("bare") as near, child_server("bare", near) as behind:
        for name, address in (("one call of gRPC", near), ("two, one behind the other", behind)):
            async with aio.insecure_channel(address) as channel:
                stub, calls = stubs.InferenceStub(channel), list[float]()
                for text in queries(HITS):
                    began = time.perf_counter()
                    await embed(stub, text)
                    calls.append((time.perf_counter() - began) * 1e3)
            figures += _percentiles(f"the floor: {name}", calls)
    return figures


def _percentiles(name: str, calls: Sequence[float], goal: str = "") -> list[Figure]:
    p50, p99 = np.percentile(calls, (50, 99))
    return [
        Figure(f"{name}, p50", float(p50), "ms", note=f"{len(calls)} calls"),
        Figure(f"{name}, p99", float(p99), "ms", goal),
    ]


Call = Callable[[Sequence[int]], Awaitable[bool]]
"""Asks for the vector of a text -> whether it was found in a cache."""


async def hits_ms(call: Call, texts: Texts) -> dict[str, list[float]]:
    """Milliseconds of calls whose vectors are in Redis, and of later ones, whose vectors the gateway keeps."""
    found: dict[str, list[float]] = {"computed": [], "a hit in Redis": [], "a hit in the gateway": []}
    for name in found:
        for text in texts:
            began = time.perf_counter()
            is_hit = await call(text)
            found[name].append((time.perf_counter() - began) * 1e3)
            assert is_hit == (name != "computed"), name
        await asyncio.sleep(1.0)  # Stores are written behind the reply.
    del found["computed"]
    return found


@contextlib.asynccontextmanager
async def over_grpc(mesh: Up) -> AsyncIterator[Call]:
    """Calls of `Embed`."""
    async with aio.insecure_channel(mesh.gateways[0]) as channel:
        stub = stubs.InferenceStub(channel)

        async def call(text: Sequence[int]) -> bool:
            return (await embed(stub, text, api.CACHE_POLICY_READ_WRITE)).receipt.result_hit

        yield call


@contextlib.asynccontextmanager
async def over_stream(mesh: Up) -> AsyncIterator[Call]:
    """Messages on one stream of `EmbedStream`."""
    async with aio.insecure_channel(mesh.gateways[0]) as channel:
        stream: Any = stubs.InferenceStub(channel).EmbedStream()

        async def call(text: Sequence[int]) -> bool:
            await stream.write(api.EmbedStreamRequest(request=request_of(text, api.CACHE_POLICY_READ_WRITE)))
            reply = await stream.read()
            assert reply.HasField("response"), reply
            return bool(reply.response.receipt.result_hit)

        yield call
        await stream.done_writing()


class Http:
    """Requests of /v1/embeddings on one connection, with vectors in base64 as OpenAI's clients ask for them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, mesh: Up) -> "AsyncIterator[Http]":
        """Connects to the mesh."""
        host, _, port = mesh.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def __call__(self, text: Sequence[int]) -> bool:
        """As `Call`."""
        body = json.dumps({"model": "minilm", "input": text, "encoding_format": "base64"}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        reply = await self._reader.readexactly(int(fields["content-length"]))
        assert status.split(" ")[1] == "200", reply
        return bool(json.loads(fields["weft-receipt"]).get("result_hit"))


DOORS: Mapping[str, Callable[[Up], contextlib.AbstractAsyncContextManager[Call]]] = {
    "gRPC": over_grpc,
    "gRPC stream": over_stream,
    "HTTP": Http.to,
}


def _figures(times: Mapping[tuple[str, int, str], Sequence[float]], kind: str, count: int) -> list[Figure]:
    ours, theirs = (min(times[kind, count, name]) for name in ("Weft", "ONNX Runtime"))
    what = f"{count} at a time" if kind == "engine" else f"{count} clients"
    return [
        Figure(f"{kind}, {what}: Weft", 1 / ours, "texts/s"),
        Figure(f"{kind}, {what}: ONNX Runtime", 1 / theirs, "texts/s"),
        Figure(f"{kind}, {what}: ratio", theirs / ours, "x", ">= 1"),
    ]


PARTS: dict[str, table.Part] = {
    "queries": ("MiniLM's shape, float32", measure_queries),
    "hits": ("Vectors of MiniLM's shape from the caches", measure_hits),
}
if sys.platform == "linux":
    PARTS["awake"] = ("Vectors of MiniLM's shape from the caches, on cores that do not sleep", measure_awake)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    asyncio.run(table.measure("Measures embeddings on this machine's processor.", PARTS))
