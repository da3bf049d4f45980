"""OpenAI's Python client: models, completions, chats, streams, log-probabilities, errors."""

import os
from collections.abc import Callable

import openai

client = openai.OpenAI(base_url=f"{os.environ['WEFT_HTTP']}/v1", api_key="none", max_retries=0)
MODEL = os.environ["WEFT_MODEL"]
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


def models() -> None:
    """The model is listed and described."""
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def completions() -> None:
    """A stream has the text of the whole answer, and its usage."""
    fields = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**fields, logprobs=2)
    text, usage = "", None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].text, (text, whole.choices[0].text)
    assert usage.completion_tokens == whole.usage.completion_tokens == 16
    assert len(whole.choices[0].logprobs.token_logprobs) == 16


def chats() -> None:
    """A chat in one piece, as a stream, and with the client's own accumulation of events."""
    fields = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0, "seed": 5}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = client.chat.completions.create(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    with client.chat.completions.stream(**fields) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == text


def several() -> None:
    """Independent draws that a seed repeats."""
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3}
    first, second = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]


def refused(kind: type[openai.APIStatusError], work: Callable[[], object]) -> str | None:
    """The field that the client's exception names."""
    try:
        work()
    except kind as error:
        return error.param
    raise AssertionError("the request was accepted")


def errors() -> None:
    """Errors arrive as the client's own exceptions and name the field."""
    chat, bad = client.chat.completions.create, openai.BadRequestError
    assert refused(openai.NotFoundError, lambda: chat(model="nobody", messages=MESSAGES)) == "model"
    assert refused(bad, lambda: chat(model=MODEL, messages=MESSAGES, temperature=-1)) == "temperature"
    assert refused(bad, lambda: client.embeddings.create(model=MODEL, input="fox")) == "model"


for story in (models, completions, chats, several, errors):
    story()
    print(story.__name__)
