"""The same request through every client has the same tokens: greedy and seeded, texts, token ids and conversations."""

from typing import Any

import pytest

from protos import inference_pb2 as api
from tests.mesh.client_doors import DOORS
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")

STORY = "Once upon a time there was a fox who lived in a dark wood near the old mill"
CHAT = api.Chat(
    messages=[api.ChatMessage(role="system", content="You tell stories."), api.ChatMessage(role="user", content=STORY)]
)
PROMPTS = {
    "text": api.Prompt(text=STORY),
    "token ids": api.Prompt(token_ids=api.TokenIds(ids=[5, 9, 200, 31, 77])),
    "chat": api.Prompt(chat=CHAT),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95, "top_k": 40, "frequency_penalty": 0.5},
    "restricted": {
        "temperature": 1.0, "seed": 3, "logit_bias": {77: -100.0, 290: 1.5}, "bad_words": ["fox", "old mill"],
        "stop": ["."], "min_tokens": 4, "repetition_penalty": 1.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_every_door_gives_the_same_tokens(mesh: Mesh, prompt: str, sampling: str) -> None:
    request = api.GenerateRequest(
        model="weft-story-2m",
        prompt=PROMPTS[prompt],
        sampling=api.Sampling(max_tokens=16, **SAMPLINGS[sampling]),
        n=2,
        cache=api.CACHE_POLICY_BYPASS,
    )
    found = {name: await door(mesh, request) for name, door in DOORS.items()}
    expected = found["grpc stream"]
    assert sorted(expected) == [0, 1]
    assert all(expected.values())
    assert found == dict.fromkeys(DOORS, expected)
    if sampling != "greedy":
        assert expected[0] != expected[1]
