"""ONNX Runtime behind a plain gRPC server, as a child process of `bench.mesh.embed`: what a user would write in a day.

    python -m bench.mesh.servers.onnx_runtime FILE THREADS

It answers `Embed` of weft.v1 with the mean vectors of token ids. Texts that wait while others are computed are computed
together afterwards, padded to one length. The first line of the output is its port.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.mesh.servers.serve import serve
from protos import inference_pb2 as api

_MOST_TEXTS = 32
"""Texts of a batch."""

Texts = Sequence[Sequence[int]]


def encoder(file: str, threads: int) -> Callable[[Texts], Any]:
    """Token ids of texts -> their mean vectors, by ONNX Runtime; the texts are padded to one length."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # Its threads sleep while others run.
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def encode(texts: Texts) -> Any:
        longest = max(map(len, texts))
        ids = np.zeros((len(texts), longest), np.int64)
        mask = np.zeros_like(ids)
        for place, text in enumerate(texts):
            ids[place, : len(text)], mask[place, : len(text)] = text, 1
        (hidden,) = session.run(None, {"ids": ids, "mask": mask})
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)

    return encode


class Servicer:
    """Serves `Embed` alone."""

    def __init__(self, encode: Callable[[Texts], Any]) -> None:
        self._encode = encode
        self._waiting: asyncio.Queue[tuple[Sequence[int], asyncio.Future[Any]]] = asyncio.Queue()

    async def embed(self, request: api.EmbedRequest, _: Any) -> api.EmbedResponse:
        """The vector of one text."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((request.inputs[0].token_ids.ids, future))
        return api.EmbedResponse(embeddings=[api.Embedding(values=(await future).tolist())])

    async def compute(self) -> None:
        """Compute what waits, batch after batch."""
        with ThreadPoolExecutor(1) as pool:
            while True:
                batch = [await self._waiting.get()]
                while len(batch) < _MOST_TEXTS and not self._waiting.empty():
                    batch.append(self._waiting.get_nowait())
                texts = [text for text, _ in batch]
                vectors = await asyncio.get_running_loop().run_in_executor(pool, self._encode, texts)
                for (_, future), vector in zip(batch, vectors, strict=True):
                    future.set_result(vector)


async def main(file: str, threads: int) -> None:
    """Serves until the input ends."""
    servicer = Servicer(encoder(file, threads))
    computing = asyncio.create_task(servicer.compute())
    await serve(servicer.embed)
    computing.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
