"""Decoders that embed and rank texts, over the public API: vectors and scores are those of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from tokenizers import Tokenizer
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSequenceClassification

from protos import inference_pb2 as api
from tests.checkpoints import make_checkpoint
from tests.encoders import add_modules
from tests.mesh.harness import Mesh

TEXTS = ["the weft", "what is woven through the warp, thread after thread", "a", "snow"]


def tokens_of(folder: Path, text: str, pair: str | None = None) -> Any:
    """The tokens of a text or a pair, as a batch of one."""
    return torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, pair).ids])


async def test_an_embedder_and_a_reranker(tmp_path: Path) -> None:
    embedder = add_modules(make_checkpoint(tmp_path / "embedder", "qwen3"), {"pooling_mode": "lasttoken"})
    plain = make_checkpoint(tmp_path / "plain", "llama")
    scorer = AutoModelForSequenceClassification.from_pretrained(plain, num_labels=1, dtype=torch.float32).eval()
    scorer.save_pretrained(tmp_path / "reranker")
    (tmp_path / "reranker" / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    async with Mesh(tmp_path, embedder) as mesh:
        other = mesh.new_worker(2, MODEL_NAME=str(tmp_path / "reranker"))
        mesh.workers.append(other)
        other.start()
        await other.ready()
        stub = mesh.stub()
        tasks: dict[str, list[str]] = {}
        while tasks != {"embedder": ["embed"], "reranker": ["rank"]}:
            assert tasks.keys() <= {"embedder", "reranker"}, tasks
            await asyncio.sleep(0.05)  # The gateway has the second model a moment after its worker is ready.
            models = (await stub.ListModels(api.ListModelsRequest())).models
            tasks = {model.name: list(model.tasks) for model in models}
        model = AutoModel.from_pretrained(embedder, dtype=torch.float32).eval()
        with torch.inference_mode():
            vectors = [model(input_ids=tokens_of(embedder, text)).last_hidden_state[0, -1].numpy() for text in TEXTS]
            scores = [
                torch.sigmoid(scorer(input_ids=tokens_of(plain, TEXTS[0], text)).logits)[0, 0].item() for text in TEXTS
            ]
        expected = [vector / np.linalg.norm(vector) for vector in vectors]
        reply = await stub.Embed(
            api.EmbedRequest(
                inputs=[api.Input(text=text) for text in TEXTS], options=api.EncodeOptions(model="embedder")
            )
        )
        np.testing.assert_allclose([each.values for each in reply.embeddings], expected, atol=1e-4)
        async with openai.AsyncOpenAI(base_url=f"{mesh.url()}/v1", api_key="none", max_retries=0) as client:
            found = await client.embeddings.create(model="embedder", input=TEXTS)
        np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-4)
        reranker = api.EncodeOptions(model="reranker")
        ranked = await stub.Rank(api.RankRequest(query=TEXTS[0], documents=TEXTS, options=reranker))
        assert [each.index for each in ranked.results] == sorted(range(len(TEXTS)), key=lambda place: -scores[place])
        np.testing.assert_allclose([each.score for each in ranked.results], sorted(scores, reverse=True), atol=1e-4)
