"""OpenAI's API on a real mesh: the same tokens as over gRPC, cached prompts, recovery, and clients that leave."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from protos import inference_pb2 as api
from tests.mesh.harness import Answer, Mesh, Stub, ask, generate
from tests.ports import free_port
from tests.telemetry.scraping import scrape

pytestmark = pytest.mark.asyncio(loop_scope="module")

FINISH: dict[str | None, "api.FinishReason.ValueType"] = {
    None: api.FINISH_REASON_UNSPECIFIED,
    "stop": api.FINISH_REASON_STOP,
    "length": api.FINISH_REASON_LENGTH,
    "content_filter": api.FINISH_REASON_ERROR,
}
STORY = "Once upon a time there was a fox who lived in a dark wood near the old mill"
MODEL = "weft-story-2m"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "top_p": 0.95, "frequency_penalty": 0.5}
EXTENDED: dict[str, Any] = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """Two workers, whose second one a story may kill, without caches of results."""
    folder = tmp_path_factory.mktemp("openai")
    async with Mesh(folder, model, workers=2, worker_env={"WEFT_DETERMINISTIC": "true"}) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grpc(running: Mesh) -> Stub:
    """A client over gRPC."""
    return running.stub()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ai(running: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    """The unmodified client of OpenAI."""
    async with openai.AsyncOpenAI(base_url=f"{running.url()}/v1", api_key="none", timeout=60) as client:
        yield client


async def streamed(ai: openai.AsyncOpenAI, **fields: Any) -> Answer:
    """A streamed completion, collected as those over gRPC are."""
    answer = Answer()
    chunks = await ai.completions.create(model=MODEL, stream=True, **fields)
    async for chunk in chunks:
        for choice in chunk.choices:
            ids = list(getattr(choice, "token_ids", []))
            position = len(answer.tokens.get(choice.index, []))
            reason = FINISH[choice.finish_reason]
            answer.add(
                api.Delta(index=choice.index, text=choice.text, token_ids=ids, position=position, finish_reason=reason)
            )
    return answer


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED, SAMPLED | EXTENDED])
async def test_the_same_tokens_over_grpc_and_http(
    grpc: Stub, ai: openai.AsyncOpenAI, sampling: dict[str, Any], n: int
) -> None:
    request = ask(STORY, max_tokens=24, **sampling)
    request.n = n
    request.cache = api.CACHE_POLICY_BYPASS
    expected = await generate(grpc, request)
    extra = {name: value for name, value in sampling.items() if name in EXTENDED}
    fields = {name: value for name, value in sampling.items() if name not in EXTENDED}
    extra |= {"cache": "bypass", "return_token_ids": True}
    stream = await streamed(ai, prompt=STORY, max_tokens=24, n=n, extra_body=extra, **fields)
    assert stream.tokens == expected.tokens
    assert stream.texts == expected.texts
    assert stream.finish == expected.finish
    whole = await ai.completions.create(model=MODEL, prompt=STORY, max_tokens=24, n=n, extra_body=extra, **fields)
    assert {choice.index: choice.token_ids for choice in whole.choices} == expected.tokens
    assert {choice.index: choice.text for choice in whole.choices} == expected.texts
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(map(len, expected.tokens.values()))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED])
async def test_a_chat_has_the_same_tokens_over_grpc_and_http(
    grpc: Stub, ai: openai.AsyncOpenAI, sampling: dict[str, Any]
) -> None:
    turns = [("system", "You tell stories."), ("user", STORY)]
    chat = api.Chat(messages=[api.ChatMessage(role=role, content=content) for role, content in turns])
    request = ask("", max_tokens=20, logprobs=2, **sampling)
    request.prompt.CopyFrom(api.Prompt(chat=chat))
    request.cache = api.CACHE_POLICY_BYPASS
    expected = await generate(grpc, request)
    messages: Any = [{"role": role, "content": content} for role, content in turns]
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 20, **sampling}
    extra = {"cache": "bypass"}
    whole = await ai.chat.completions.create(model=MODEL, messages=messages, extra_body=extra, **fields)
    [choice] = whole.choices
    assert choice.message.content == expected.text
    assert choice.logprobs is not None
    assert [entry.logprob for entry in choice.logprobs.content or []] == pytest.approx(expected.logprobs[0], abs=1e-6)
    chunks = await ai.chat.completions.create(
        model=MODEL, messages=messages, stream=True, extra_body=extra, stream_options={"include_usage": True}, **fields
    )
    received = [chunk async for chunk in chunks]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in received if chunk.choices) == expected.text
    usage = received[-1].usage
    assert usage is not None
    assert usage == whole.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        expected.receipt.prompt_tokens,
        expected.receipt.completion_tokens,
    )


async def test_structured_answers_are_the_same_over_grpc_and_http(grpc: Stub, ai: openai.AsyncOpenAI) -> None:
    ages: dict[str, Any] = {"age": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": ages, "required": ["age"], "additionalProperties": False}
    common: dict[str, Any] = {"prompt": STORY, "max_tokens": 60, "temperature": 0}
    whole = await ai.completions.create(model=MODEL, **common, extra_body={"structured_outputs": {"json": schema}})
    assert whole.choices[0].finish_reason == "stop"
    assert json.loads(whole.choices[0].text)["age"] <= 99
    request = ask(STORY, max_tokens=60, structured=api.Structured(json_schema=json.dumps(schema)))
    assert (await generate(grpc, request)).text == whole.choices[0].text
    ids = {"return_token_ids": True}
    choice = await streamed(ai, **common, extra_body={"guided_choice": ["red", "blue"], **ids})
    assert choice.text in ("red", "blue")
    older = await streamed(ai, **common, extra_body={"guided_regex": "[0-9]{3}", **ids})
    assert older.text.isdecimal()
    with pytest.raises(openai.BadRequestError, match="unclosed group") as caught:
        await ai.completions.create(model=MODEL, **common, extra_body={"guided_regex": "(a"})
    assert caught.value.param == "guided_regex"


async def test_stop_strings_biases_and_token_prompts(grpc: Stub, ai: openai.AsyncOpenAI) -> None:
    greedy = await generate(grpc, ask(STORY, max_tokens=16))
    word = greedy.text.split()[3]
    stopped = await ai.completions.create(model=MODEL, prompt=STORY, max_tokens=16, temperature=0, stop=[word])
    assert stopped.choices[0].text == greedy.text.partition(word)[0]
    assert stopped.choices[0].finish_reason == "stop"
    banned = await ai.completions.create(
        model=MODEL,
        prompt=STORY,
        max_tokens=1,
        temperature=0,
        logit_bias={str(greedy.ids[0]): -100},
        extra_body={"return_token_ids": True},
    )
    assert banned.choices[0].token_ids != greedy.ids[:1]
    tokens = await grpc.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text=STORY)))
    by_ids = await ai.completions.create(model=MODEL, prompt=list(tokens.token_ids), max_tokens=16, temperature=0)
    assert by_ids.choices[0].text == greedy.text


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_answered_in_one_request(ai: openai.AsyncOpenAI, stream: bool) -> None:
    prompts = [STORY, "The owl", "A little girl"]
    fields: dict[str, Any] = {"max_tokens": 12, "n": 2, **SAMPLED, "extra_body": {"cache": "bypass"}}
    texts: dict[int, str] = {}
    if stream:
        async for chunk in await ai.completions.create(model=MODEL, prompt=prompts, stream=True, **fields):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    else:
        whole = await ai.completions.create(model=MODEL, prompt=prompts, **fields)
        texts = {choice.index: choice.text for choice in whole.choices}
        assert whole.usage is not None
        assert whole.usage.completion_tokens <= 72
        assert whole.usage.prompt_tokens > 20
    assert sorted(texts) == list(range(6))
    for place, prompt in enumerate(prompts):
        alone = await ai.completions.create(model=MODEL, prompt=prompt, **fields)
        assert [choice.text for choice in alone.choices] == [texts[2 * place], texts[2 * place + 1]]
    with pytest.raises(openai.BadRequestError) as caught:
        await ai.completions.create(model=MODEL, prompt=[STORY, ""], **fields)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_prompts_log_probabilities(grpc: Stub, ai: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await generate(grpc, ask(STORY, max_tokens=8, logprobs=0))
    tokens = await grpc.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text=STORY)))
    prompt = [*tokens.token_ids, *answer.ids]
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    for _ in range(2):  # The second request finds the prefix in the cache.
        text, values = "", list[float | None]()
        if stream:
            async for chunk in await ai.completions.create(model=MODEL, stream=True, **fields):
                for choice in chunk.choices:
                    text += choice.text
                    values += (choice.logprobs and choice.logprobs.token_logprobs) or []
        else:
            whole = await ai.completions.create(model=MODEL, **fields)
            [choice_] = whole.choices
            assert choice_.logprobs is not None
            text, values = choice_.text, list(choice_.logprobs.token_logprobs or [])
            assert len(choice_.logprobs.tokens or []) == len(choice_.logprobs.top_logprobs or []) == len(prompt)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 0
        assert text.endswith(STORY + answer.text)
        assert values[0] is None
        assert values[-8:] == pytest.approx(answer.logprobs[0], abs=1e-3)
        assert len(values) == len(prompt)
    plain = await ai.completions.create(model=MODEL, prompt=STORY, echo=True, max_tokens=8, temperature=0, n=2)
    assert [choice.text for choice in plain.choices] == [STORY + answer.text] * 2


async def test_a_prompt_that_was_computed_before_is_cached(ai: openai.AsyncOpenAI) -> None:
    prompt = "The owl " + "and the owl " * 40
    cached = []
    for _ in range(3):
        answer = await ai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=2, temperature=0.9, extra_body={"cache": "read_only"}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    # Two workers: at the latest the third request meets a worker that has the prompt.
    assert cached[0] == 0
    assert cached[2] > 40


async def test_a_client_that_disconnects_frees_the_kv_blocks(tmp_path: Path, model: Path) -> None:
    mesh = Mesh(tmp_path, model, worker_env={"WEFT_METRICS_PORT": str(free_port())})
    async with mesh:

        async def active() -> float:
            return (await scrape(mesh.workers[0])).value("weft_worker_kv_blocks", state="active")

        for stream in (True, False):
            body = json.dumps({"prompt": STORY, "max_tokens": 400, "ignore_eos": True, "stream": stream}).encode()
            url, port = mesh.url().rpartition(":")[::2]
            reader, writer = await asyncio.open_connection(url.removeprefix("http://"), int(port))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            if stream:
                await reader.readuntil(b"data: ")
            for _ in range(400):
                if await active() > 0:
                    break
                await asyncio.sleep(0.005)
            else:
                raise AssertionError("the request never ran")
            writer.close()
            for _ in range(40):
                if await active() == 0:
                    break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("the blocks are still in use")


async def test_a_killed_worker_costs_the_client_nothing(running: Mesh, grpc: Stub) -> None:
    await running.revive()
    request = ask(STORY, max_tokens=200, ignore_eos=True)
    request.n, request.cache = 8, api.CACHE_POLICY_BYPASS
    expected = await generate(grpc, request)
    body = {"prompt": STORY, "max_tokens": 200, "temperature": 0, "n": 8, "stream": True, "ignore_eos": True}
    extra = {"cache": "bypass", "return_token_ids": True}
    tokens: dict[int, list[int]] = {index: [] for index in range(8)}
    receipt: dict[str, Any] = {}
    async with (
        httpx.AsyncClient(base_url=running.url(), timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body | extra) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith(": receipt "):
                receipt = json.loads(line.removeprefix(": receipt "))
            elif line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens[choice["index"]] += choice["token_ids"]
            killed = running.workers[1]
            if (
                killed.popen is not None
                and killed.popen.poll() is None
                and all(len(each) > 8 for each in tokens.values())
            ):
                killed.kill(signal.SIGKILL)
                assert any(len(each) < 150 for each in tokens.values())
    assert tokens == expected.tokens
    assert receipt["attempts"] >= 2  # More than two where a busy machine moved a sample once more.
    assert len(receipt["workers"]) == 2
