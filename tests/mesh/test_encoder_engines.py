"""Encoders that other engines compute, over the public API: vectors, and a worker that is killed under load."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModel

from protos import inference_pb2 as api
from tests.encoders import TEXTS, make_encoder, make_tokenizer
from tests.mesh.harness import Mesh, Stub

pytestmark = pytest.mark.xdist_group("exports")

CALLS = 60


@torch.inference_mode()
def expected(folder: Path) -> list[Any]:
    """The mean of the hidden states of each text, by transformers."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), make_tokenizer()
    inputs = [torch.tensor([tokenizer.encode(text).ids]) for text in TEXTS]
    return [model(input_ids=ids).last_hidden_state[0].mean(0).numpy() for ids in inputs]


async def embed(stub: Stub, text: str) -> Any:
    """The vector of a text that no cache has."""
    options = api.EncodeOptions(cache=api.CACHE_POLICY_BYPASS)
    reply = await stub.Embed(api.EmbedRequest(inputs=[api.Input(text=text)], options=options))
    return np.array(reply.embeddings[0].values)


async def checked(stub: Stub, vectors: list[Any]) -> None:
    """Ask for the vectors of all texts, one after the other."""
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(await embed(stub, text), vector, atol=2e-4)


async def test_onnx_runtime_serves_an_encoder_and_a_killed_worker_loses_no_text(
    tmp_path: Path, exported_bert: Path
) -> None:
    vectors = expected(make_encoder(tmp_path / "weights"))
    (exported_bert / "model.safetensors").unlink()
    async with Mesh(tmp_path, exported_bert, workers=2, worker_env={"ENGINE": "onnxruntime"}) as mesh:
        stub = mesh.stub()
        (model,) = (await stub.ListModels(api.ListModelsRequest())).models
        assert (model.engine, model.architecture) == ("onnxruntime", "BertModel")
        done = 0

        async def client() -> None:
            nonlocal done
            while done < CALLS:
                await checked(stub, vectors)
                done += 1

        clients = [asyncio.create_task(client()) for _ in range(8)]
        while done < CALLS // 3:
            await asyncio.sleep(0)
            assert not any(each.done() for each in clients)
        mesh.workers[0].kill()
        await asyncio.gather(*clients)


async def test_auto_serves_an_export_beside_its_weights(tmp_path: Path, exported_bert: Path) -> None:
    vectors = expected(make_encoder(tmp_path / "weights"))
    async with Mesh(tmp_path, exported_bert, workers=1, worker_env={"ENGINE": "auto"}) as mesh:
        (model,) = (await mesh.stub().ListModels(api.ListModelsRequest())).models
        assert model.engine in ("torch", "torch+onnxruntime"), "whichever is faster here"
        await checked(mesh.stub(), vectors)
