"""Jobs for encoders as messages of the Run link."""

from array import array

import pytest

from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.worker.service.encode_codec import job_of

CARD = mesh.ModelCard(vocab_size=100, context_length=8, encoder=mesh.EncoderCard(width=4))


def message(*token_ids: int) -> mesh.Job:
    task = mesh.EncodeTask(lengths=[1, len(token_ids) - 1])
    sent = mesh.Job(token_ids=token_ids, prompt_len=len(token_ids), encode=task)
    return mesh.Job.FromString(sent.SerializeToString())


def test_token_ids_become_an_array() -> None:
    made = job_of(message(5, 99, 0), 7, CARD)
    assert made.token_ids == array("i", [5, 99, 0])
    assert (made.key, made.prompt_len, made.encode and made.encode.lengths) == (7, 3, (1, 2))


@pytest.mark.parametrize("token_id", [100, 1 << 31, (1 << 32) - 1])
def test_token_ids_that_the_model_does_not_have_are_refused(token_id: int) -> None:
    with pytest.raises(WeftError) as refusal:
        job_of(message(5, token_id, 0), 7, CARD)
    assert refusal.value.reason == "TOKEN_OUT_OF_RANGE"
