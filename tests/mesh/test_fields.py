"""Each field of a request has its documented effect over gRPC; each test fails if the field is ignored."""

import asyncio
import math
import uuid
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from protos import inference_pb2 as api
from tests.mesh.harness import Answer, Stub, ask, cached, generate

pytestmark = pytest.mark.asyncio(loop_scope="session")

STORY = "Once upon a time there was a little girl who lived in a small house near the wood. One day she"
SETTLE_S = 0.1  # The gateway stores results in the background.
STOP, LENGTH = api.FINISH_REASON_STOP, api.FINISH_REASON_LENGTH


async def greedy(stub: Stub, max_tokens: int = 24, **sampling: Any) -> Answer:
    return await generate(stub, ask(STORY, max_tokens=max_tokens, **sampling))


async def test_max_tokens_bounds_the_answer(stub: Stub) -> None:
    short, longer = await greedy(stub, 5), await greedy(stub, 9)
    assert len(short.ids) == 5
    assert len(longer.ids) == 9
    assert longer.ids[:5] == short.ids
    assert short.finish == {0: LENGTH}


async def test_stop_tokens_end_the_answer_and_are_not_part_of_it(stub: Stub) -> None:
    free = await greedy(stub)
    stop = free.ids[4]
    stopped = await greedy(stub, stop_token_ids=[stop])
    assert stopped.ids == free.ids[: free.ids.index(stop)]
    assert stopped.finish == {0: STOP}
    assert stopped.stop == {0: stop}


async def test_min_tokens_holds_the_end_back(stub: Stub) -> None:
    free = await greedy(stub)
    stop = free.ids[2]
    held = await greedy(stub, stop_token_ids=[stop], min_tokens=12)
    assert len(held.ids) >= 12
    assert stop not in held.ids[:12]


async def test_min_tokens_holds_stop_strings_back(stub: Stub) -> None:
    free = await greedy(stub)
    early = free.text[3:8]
    assert len((await greedy(stub, stop=[early])).ids) < 12
    assert len((await greedy(stub, stop=[early], min_tokens=12)).ids) >= 12


async def test_temperature_spreads_the_draws(stub: Stub) -> None:
    best = await greedy(stub)
    cold = await greedy(stub, temperature=0.001, seed=3)
    hot = await greedy(stub, temperature=2.0, seed=3)
    assert cold.ids == best.ids
    assert hot.ids != best.ids


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda field: next(iter(field)))
async def test_narrow_sampling_is_greedy(stub: Stub, narrow: dict[str, Any]) -> None:
    best = await greedy(stub)
    wide = await greedy(stub, temperature=1.5, seed=11)
    assert wide.ids != best.ids
    assert (await greedy(stub, temperature=1.5, seed=11, **narrow)).ids == best.ids


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
async def test_the_smallest_divisor_leaves_the_best_token(stub: Stub, field: str) -> None:
    """Dividing the logits by a value as small as this would overflow to infinity."""
    small, smallest = [await greedy(stub, 24, seed=3, ignore_eos=True, **{field: value}) for value in (1e-6, 1e-40)]
    assert smallest.ids == small.ids


async def test_a_top_k_beyond_the_vocabulary_keeps_all_tokens(stub: Stub) -> None:
    free = await greedy(stub, temperature=1.5, seed=11)
    assert (await greedy(stub, temperature=1.5, seed=11, top_k=2**32 - 1)).ids == free.ids


async def test_top_k_keeps_k_tokens(stub: Stub) -> None:
    """At top_k = 3 and a high temperature each token is one of the three most likely, and not always the first."""
    answer = await greedy(stub, 32, temperature=50.0, top_k=3, seed=5, logprobs=3)
    call = stub.Generate(ask(STORY, max_tokens=32, temperature=50.0, top_k=3, seed=5, logprobs=3))
    entries = [entry async for response in call for entry in response.delta.logprobs]
    ranks = [[top.token_id for top in entry.top].index(entry.chosen.token_id) for entry in entries]
    assert len(answer.ids) == len(ranks) == 32
    assert set(ranks) == {0, 1, 2}


async def test_a_seed_repeats_its_draws(stub: Stub) -> None:
    bypass = api.CACHE_POLICY_BYPASS

    async def draw(seed: int | None) -> tuple[list[int], int]:
        request = ask(STORY, max_tokens=24, temperature=1.0)
        request.cache = bypass
        if seed is not None:
            request.sampling.seed = seed
        answer = await generate(stub, request)
        return answer.ids, answer.receipt.seed

    first, seed = await draw(None)
    assert (await draw(seed))[0] == first
    assert (await draw(7)) == (await draw(7))
    assert (await draw(7))[0] != (await draw(8))[0]


async def test_a_stop_string_ends_the_text_before_it(stub: Stub) -> None:
    free = await greedy(stub, 40)
    stop = free.text[20:26]
    stopped = await greedy(stub, 40, stop=[stop, "never generated"])
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish == {0: STOP}
    assert stopped.stop == {0: stop}


async def test_a_stop_string_can_be_kept(stub: Stub) -> None:
    free = await greedy(stub, 40)
    stop = free.text[20:26]
    stopped = await greedy(stub, 40, stop=[stop], include_stop_string=True)
    assert stopped.text == free.text[: free.text.index(stop)] + stop
    assert stopped.stop == {0: stop}
    assert stopped.ids == (await greedy(stub, 40, stop=[stop])).ids


async def test_bad_words_are_banned_as_sequences_of_tokens(stub: Stub) -> None:
    async def ids_of(text: str) -> list[int]:
        return list((await stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text=text)))).token_ids)

    free = await greedy(stub, 40)
    first, second = free.text.split()[4:6]
    for word in (first, f"{first} {second}"):
        tokens = (await ids_of(f"{STORY} {word}"))[len(await ids_of(STORY)) :]
        places = [at for at in range(40) if free.ids[at : at + len(tokens)] == tokens]
        assert places, "the word is in the free answer"
        kept = places[0] + len(tokens) - 1
        by_word = await greedy(stub, 40, bad_words=[word])
        by_tokens = await greedy(stub, 40, bad_token_sequences=[api.TokenIds(ids=tokens)])
        for answer in (by_word, by_tokens):
            assert answer.ids[:kept] == free.ids[:kept]
            assert all(answer.ids[at : at + len(tokens)] != tokens for at in range(40))
        assert word not in by_word.text


async def test_logit_bias_moves_a_token(stub: Stub) -> None:
    free = await greedy(stub)
    banned = free.ids[0]
    assert banned not in (await greedy(stub, logit_bias={banned: -100.0})).ids
    assert set((await greedy(stub, logit_bias={77: 100.0}, ignore_eos=True)).ids) == {77}


async def test_repetition_penalty_avoids_tokens_of_prompt_and_answer(stub: Stub) -> None:
    free = await greedy(stub, 48, ignore_eos=True)
    assert len(set(free.ids)) < 48, "the greedy answer repeats itself, as it must for this test"
    fresh = await greedy(stub, 48, ignore_eos=True, repetition_penalty=10.0)
    prompt = set((await stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text=STORY)))).token_ids)
    assert len(set(fresh.ids)) == 48
    assert not prompt & set(fresh.ids)


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
async def test_answer_penalties_change_the_token_they_must(stub: Stub, field: str) -> None:
    """The log-probabilities without a penalty show where the penalty first changes the answer, and to which token."""
    sampling: dict[str, Any] = {"ignore_eos": True, "logprobs": 20}
    call = stub.Generate(ask(STORY, max_tokens=160, **sampling))
    entries = [entry async for response in call for entry in response.delta.logprobs]
    ids = [entry.chosen.token_id for entry in entries]
    for place, entry in enumerate(entries):
        seen = Counter(ids[:place] if field == "frequency_penalty" else set(ids[:place]))
        best = max(entry.top, key=lambda top, seen=seen: top.logprob - 2.0 * seen[top.token_id])  # type: ignore[misc]
        if best.token_id != ids[place]:
            break
    else:
        pytest.fail("the greedy answer repeats no token")
    penalized = await greedy(stub, place + 1, ignore_eos=True, **{field: 2.0})
    assert penalized.ids == [*ids[:place], best.token_id]


async def test_logprobs_are_those_asked_for(stub: Stub) -> None:
    for asked in (None, 0, 5):
        sampling: dict[str, Any] = {} if asked is None else {"logprobs": asked}
        call = stub.Generate(ask(STORY, max_tokens=8, **sampling))
        entries = [entry async for response in call for entry in response.delta.logprobs]
        assert len(entries) == (0 if asked is None else 8)
        for entry in entries:
            assert entry.chosen.logprob <= 0
            assert len(entry.top) == asked
            if asked:
                assert entry.top[0].token_id == entry.chosen.token_id
                assert math.isclose(entry.top[0].logprob, entry.chosen.logprob, abs_tol=1e-6)
                assert all(a.logprob >= b.logprob for a, b in pairwise(entry.top))
                assert entry.chosen.text


@pytest.mark.parametrize("asked", [0, 3])
async def test_prompt_logprobs_are_those_of_the_answer_before(stub: Stub, asked: int) -> None:
    """The log-probabilities of an answer's tokens are the same when they are the end of a prompt."""
    answer = await greedy(stub, 12, logprobs=asked, ignore_eos=True)
    ids = list((await stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text=STORY)))).token_ids)
    request = ask([*ids, *answer.ids], max_tokens=2, prompt_logprobs=asked)
    request.n, request.echo = 2, True
    for _ in range(2):
        parts = [response async for response in stub.Generate(request)]
        kinds = [response.WhichOneof("event") for response in parts]
        assert kinds.index("prompt") == 0
        assert "prompt" not in kinds[kinds.index("delta") :]
        whole = await stub.Complete(request)
        assert list(whole.prompt.token_ids) == [*ids, *answer.ids]
        assert whole.prompt.text.endswith(answer.text)
        first, *places = whole.prompt.logprobs
        assert math.isnan(first.chosen.logprob)
        assert [place.chosen.token_id for place in places] == [*ids, *answer.ids][1:]
        own = [place.chosen.logprob for place in places[-12:]]
        assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(own, answer.logprobs[0], strict=True))
        assert all(len(place.top) == asked for place in places)
        assert whole.receipt.cached_tokens < 2 * len(ids), "the first continuation computes the whole prompt"
    assert not (await stub.Complete(ask(STORY, max_tokens=1))).HasField("prompt")


async def test_echo_sends_the_prompt_as_it_was(stub: Stub) -> None:
    request = ask(STORY, max_tokens=2)
    request.echo = True
    whole = await stub.Complete(request)
    assert whole.prompt.text == STORY
    assert list(whole.prompt.token_ids) == list(
        (await stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text=STORY)))).token_ids
    )
    assert not whole.prompt.logprobs


async def test_ignore_eos_continues_after_the_end_token(stub: Stub) -> None:
    eos = (await stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text="<|endoftext|>")))).token_ids[-1]
    ended = await greedy(stub, 6, logit_bias={eos: 100.0})
    assert ended.ids == []
    assert ended.finish == {0: STOP}
    assert ended.stop == {0: eos}
    ignored = await greedy(stub, 6, logit_bias={eos: 100.0}, ignore_eos=True)
    assert ignored.ids == [eos] * 6
    assert ignored.finish == {0: LENGTH}


async def test_n_draws_independent_continuations(stub: Stub) -> None:
    request = ask(STORY, max_tokens=16, temperature=1.0, seed=21)
    one = await generate(stub, request)
    request.n = 3
    three = await generate(stub, request)
    assert three.tokens[0] == one.ids
    assert len({tuple(tokens) for tokens in three.tokens.values()}) == 3
    assert set(three.finish) == {0, 1, 2}
    assert three.receipt.completion_tokens == 48
    complete = await stub.Complete(request)
    assert [list(choice.token_ids) for choice in complete.choices] == [three.tokens[i] for i in range(3)]


async def test_prompt_forms_agree(stub: Stub) -> None:
    prompt = api.Prompt(text=STORY)
    ids = (await stub.Tokenize(api.TokenizeRequest(prompt=prompt))).token_ids
    assert (await generate(stub, ask(list(ids), max_tokens=8))).ids == (await greedy(stub, 8)).ids


async def test_chat_is_rendered_by_the_checkpoints_template(stub: Stub) -> None:
    chat = api.Prompt(chat=api.Chat(messages=[api.ChatMessage(role="user", content=STORY)]))
    tokenized = await stub.Tokenize(api.TokenizeRequest(prompt=chat))
    assert STORY in "".join(tokenized.pieces)
    request = ask(STORY, max_tokens=8)
    request.prompt.CopyFrom(chat)
    answer = await generate(stub, request)
    assert answer.receipt.prompt_tokens == len(tokenized.token_ids)
    assert answer.ids == (await generate(stub, ask(list(tokenized.token_ids), max_tokens=8))).ids


async def test_cache_policies_control_results_and_prefixes(stub: Stub) -> None:
    def request(policy: api.CachePolicy.ValueType, text: str, max_tokens: int = 8) -> api.GenerateRequest:
        message = ask(text, max_tokens=max_tokens)
        message.cache = policy
        return message

    read_only = f"{STORY} {uuid.uuid4().hex}"
    await generate(stub, request(api.CACHE_POLICY_READ_ONLY, read_only))
    await asyncio.sleep(SETTLE_S)
    again = await generate(stub, request(api.CACHE_POLICY_READ_ONLY, read_only))
    assert not again.receipt.result_hit, "read-only stores no result"
    longer = await generate(stub, request(api.CACHE_POLICY_READ_ONLY, read_only, 9))
    assert longer.receipt.cached_tokens > 0, "read-only uses cached prefixes"

    both = f"{STORY} {uuid.uuid4().hex}"
    first = await generate(stub, request(api.CACHE_POLICY_READ_WRITE, both))
    second = await cached(stub, request(api.CACHE_POLICY_READ_WRITE, both))
    bypass = await generate(stub, request(api.CACHE_POLICY_BYPASS, both))
    assert (first.receipt.result_hit, bypass.receipt.result_hit) == (False, False)
    assert second.ids == first.ids == bypass.ids
    assert second.text == first.text
    assert second.receipt.prefill_tokens == 0
    assert not second.receipt.workers
    assert bypass.receipt.cached_tokens == 0
    assert bypass.receipt.prefill_tokens == bypass.receipt.prompt_tokens


async def test_a_retry_joins_its_own_generation(stub: Stub) -> None:
    request = ask(STORY, max_tokens=64, temperature=1.0)
    request.request_id = f"retry-{uuid.uuid4().hex}"
    responses = aiter(stub.Generate(request))
    head = [(await anext(responses)).delta for _ in range(4)]
    joined = await generate(stub, request)
    rest = [response async for response in responses]
    ids = [token for delta in head for token in delta.token_ids]
    ids += [token for response in rest for token in response.delta.token_ids]
    assert joined.ids == ids
    assert joined.receipt.joined
    assert joined.receipt.seed == rest[-1].receipt.seed
