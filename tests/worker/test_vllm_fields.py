"""Every field of a request of VllmEngine is honoured by name, or refused by name; stop strings end an answer."""

import io
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos import vllm_engine_pb2 as vllm
from services import validate
from services.errors import WeftError
from services.worker.loader.stop_watch import StopWatches
from services.worker.service.startup import Startup
from services.worker.service.vllm import messages
from services.worker.service.vllm.servicer import VllmEngineService
from tests.gateway.model import LOREM, TOKENIZER, ids_of

CARD = mesh.ModelCard(name="fox", context_length=512, vocab_size=420, architecture="Fox")
HONOURED: dict[str, tuple[Any, str, Any]] = {
    # field: a value, where it arrives, what arrives
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.25, "top_p", 0.25),
    "top_k": (7, "top_k", 7),
    "min_p": (0.5, "min_p", 0.5),
    "frequency_penalty": (1.5, "frequency_penalty", 1.5),
    "presence_penalty": (-1.5, "presence_penalty", -1.5),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "max_tokens": (9, "max_tokens", 9),
    "min_tokens": (3, "min_tokens", 3),
    "stop_token_ids": ([1, 2], "stop_token_ids", [1, 2]),
    "ignore_eos": (True, "ignore_eos", True),
    "logprobs": (5, "logprobs", 5),
    "seed": (-1, "seed", (1 << 64) - 1),
    "logit_bias": ({5: -100.0}, "logit_bias", {5: -100.0}),
    "json_schema": ("{}", "structured.json_schema", "{}"),
    "regex": ("a+", "structured.regex", "a+"),
    "grammar": ('start: "a"', "structured.grammar", 'start: "a"'),
    "json_object": (True, "structured.json_object", True),
    "choice": (vllm.ChoiceConstraint(choices=["a"]), "structured.choice.texts", ["a"]),
}
ELSEWHERE = {"n", "stop"}
"""Honoured by the number of jobs, and by the messages."""
OF_TEXT = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
"""They say how the caller makes text of the tokens, which are the same whatever they say."""
ALWAYS = {"grammar_from_first_token"}
REFUSED = {"prompt_logprobs": 1, "truncate_prompt_tokens": 5, "structural_tag": "x"}
REFUSED_REQUEST: dict[str, Any] = {
    "kv_transfer_params": b"x",
    "kv_transfer_params_json": "{}",
    "mm_inputs": b"x",
    "media_refs": b"x",
    "extra_mm_inputs": [b"x"],
    "data_parallel_rank": 1,
    "text": "hi",
}


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> vllm.GenerateRequest:
    """A request for tokens 3, 4, 5."""
    if not {"text", "tokenized"} & fields.keys():
        fields["tokenized"] = vllm.TokenizedInput(input_ids=[3, 4, 5])
    return vllm.GenerateRequest(request_id="r", sampling_params=vllm.SamplingParams(**sampling or {}), **fields)


def jobs(asked: vllm.GenerateRequest) -> list[mesh.Job]:
    """The jobs of a request without a deadline."""
    return messages.jobs_of(asked, CARD, 0.0, "")


def refusal(asked: vllm.GenerateRequest) -> WeftError:
    with pytest.raises(WeftError) as caught:
        jobs(asked)
    return caught.value


def reached(message: Any, path: str) -> Any:
    """The value at a path such as "structured.regex"."""
    for name in path.split("."):
        message = getattr(message, name)
    return message


def test_every_field_is_in_one_of_the_lists() -> None:
    listed = [*HONOURED, *ELSEWHERE, *OF_TEXT, *ALWAYS, *REFUSED]
    assert sorted(listed) == sorted(field.name for field in vllm.SamplingParams.DESCRIPTOR.fields)
    of_request = {"request_id", "tokenized", "sampling_params", "stream", *REFUSED_REQUEST}
    assert of_request == {field.name for field in vllm.GenerateRequest.DESCRIPTOR.fields}


@pytest.mark.parametrize("name", HONOURED)
def test_an_honoured_field_arrives(name: str) -> None:
    value, path, expected = HONOURED[name]
    [job] = jobs(request({name: value}))
    found = reached(job.sampling, path)
    plain = dict(found) if isinstance(expected, dict) else list(found) if isinstance(expected, list) else found
    assert plain == expected
    assert reached(jobs(request())[0].sampling, path) != expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_of_the_sampling_is_refused_by_name(name: str) -> None:
    error = refusal(request({name: REFUSED[name]}))
    assert (error.field, error.code.name) == (f"sampling_params.{name}", "INVALID_ARGUMENT")


@pytest.mark.parametrize("name", REFUSED_REQUEST)
def test_a_refused_field_of_the_request_is_refused_by_name(name: str) -> None:
    error = refusal(request(**{name: REFUSED_REQUEST[name]}))
    assert (error.field, error.code.name) == (name, "INVALID_ARGUMENT")


def test_wrong_values_are_refused_by_name() -> None:
    assert refusal(request({"n": 17})).field == "sampling_params.n"
    assert refusal(request({"logprobs": -1})).field == "sampling_params.logprobs"
    assert refusal(request({"logit_bias": {-1: 1.0}})).field == "sampling_params.logit_bias"
    assert refusal(request(tokenized=vllm.TokenizedInput())).field == "tokenized.input_ids"
    unknown = vllm.GenerateRequest.FromString(request().SerializeToString() + b"\xa2\x06\x01x")
    assert refusal(unknown).reason == "UNKNOWN_FIELD"
    [job] = jobs(request({"temperature": -1.0}))
    with pytest.raises(WeftError) as caught:
        validate.check_sampling(job.sampling, CARD)
    assert messages.renamed(caught.value).message.startswith("sampling_params.temperature: ")


def test_defaults_are_those_of_vllm_and_the_length_is_wefts() -> None:
    [job] = jobs(request())
    sampling = job.sampling
    assert (sampling.HasField("temperature"), sampling.top_p, sampling.repetition_penalty) == (False, 1.0, 1.0)
    assert sampling.max_tokens == 256
    assert jobs(request())[0].sampling.seed != sampling.seed, "a random seed"
    assert job.tentative


def test_n_continuations_are_n_jobs_with_one_seed() -> None:
    three = jobs(request({"n": 3}))
    assert [(job.stream_id, job.sample_index) for job in three] == [(0, 0), (1, 1), (2, 2)]
    assert len({job.sampling.seed for job in three}) == 1
    assert len({job.job_id for job in three}) == 3


def test_a_whole_answer_and_its_chunks_have_the_same_tokens_and_logprobs() -> None:
    end = mesh.JobEnd(reason=api.FINISH_REASON_STOP, stop_token_id=9, cost=mesh.JobCost(cached_tokens=2))
    found = {}
    for stream in (True, False):
        asked = request({"logprobs": 1, "stop_token_ids": [9]}, stream=stream)
        each, chunks = messages.Continuation(asked, 0, None), []
        for token in (7, 8):
            each.add(token, -0.5, mesh.TopTokens(token_ids=[token], logprobs=[-0.5]))
            chunks.append(each.chunk())
        complete = each.complete(end).complete
        assert (complete.finish_reason, complete.matched_token_id, complete.cached_tokens) == ("stop", 9, 2)
        sent = [chunk.chunk for chunk in chunks if chunk is not None]
        ids = [token for chunk in sent for token in chunk.token_ids] + list(complete.output_ids)
        places = [*(chunk.output_logprobs for chunk in sent), complete.output_logprobs]
        logprobs = [value for place in places for value in place.token_logprobs]
        tops = [list(top.token_ids) for place in places for top in place.top_logprobs]
        found[stream] = (ids, logprobs, tops)
        assert sum(chunk.completion_tokens for chunk in sent) + complete.completion_tokens == 2
    assert found[True] == found[False] == ([7, 8], [-0.5, -0.5], [[7], [8]])


def test_an_end_token_of_the_model_is_no_stop_of_the_request() -> None:
    complete = messages.Continuation(request(), 0, None).complete(
        mesh.JobEnd(reason=api.FINISH_REASON_STOP, stop_token_id=1)
    )
    assert complete.complete.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("stop", ["fox", "over the", "語", "😀", "naïve café", "x j"])
def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(stop: str) -> None:
    watches = StopWatches(TOKENIZER.to_str().encode())
    ids = ids_of(LOREM)
    watch = watches.watch([stop, "never"], 0)
    hits = [watch.feed(token) for token in ids]
    first = next(place for place, hit in enumerate(hits) if hit)
    assert hits[first] == stop
    assert stop in TOKENIZER.decode(ids[: first + 1])
    assert stop not in TOKENIZER.decode(ids[:first])
    late = watches.watch([stop], len(ids) + 1)
    assert not any(late.feed(token) for token in ids), "not before the least number of tokens"


def test_nothing_counts_after_a_stop_string() -> None:
    watch = StopWatches(TOKENIZER.to_str().encode()).watch(["fox"], 0)
    each = messages.Continuation(request(), 0, watch)
    for token in ids_of(LOREM):
        each.add(token, None, None)
    complete = each.complete(mesh.JobEnd(reason=api.FINISH_REASON_CANCELLED)).complete
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "fox")
    assert TOKENIZER.decode(list(complete.output_ids)).endswith("fox")


async def test_an_encoder_is_not_said_to_generate() -> None:
    encoder = mesh.ModelCard(name="fox", encoder=mesh.EncoderCard(tasks=["embed"]))
    assert messages.model_info(CARD).is_generation
    assert not messages.model_info(encoder).is_generation


@pytest.mark.parametrize(
    ("tasks", "text"),
    [(["embed"], "not served here: see Embed of weft.v1.Inference"), (["rank"], "the model does not embed"),
     ([], "the model does not embed")],
)  # fmt: skip
async def test_embeddings_are_refused_with_the_reason(tasks: list[str], text: str) -> None:
    service = VllmEngineService(Startup("worker", "fox"))
    card = mesh.ModelCard(name="fox", encoder=mesh.EncoderCard(tasks=tasks) if tasks else None)
    loaded: Any = SimpleNamespace(card=card)
    service.loaded(loaded)
    with pytest.raises(WeftError) as refused:
        await service.Embed(vllm.EmbedRequest(), None)
    assert refused.value.reason == "EMBEDDINGS_UNSUPPORTED"
    assert text in refused.value.message


def test_the_archive_has_the_tokenizer_and_the_template() -> None:
    bundle = mesh.Bundle(
        tokenizer_json=TOKENIZER.to_str().encode(), chat_template="{{ x }}", special_tokens={"bos_token": "<s>"}
    )
    archive = messages.tokenizer_archive(bundle)
    assert archive == messages.tokenizer_archive(bundle)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert set(files.namelist()) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        assert Tokenizer.from_buffer(files.read("tokenizer.json")).get_vocab_size() == TOKENIZER.get_vocab_size()
        assert b'"bos_token": "<s>"' in files.read("tokenizer_config.json")
