"""The gateway smg in front of a worker of Weft: chats, completions, streams, stops, several draws, errors.

Each answer is compared with that of Weft's own gateway in front of the same worker.
"""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import openai

MODEL = os.environ["WEFT_MODEL"]
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
START_S = 60


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


@contextlib.contextmanager
def gateway() -> Iterator[str]:
    """smg in front of the worker. -> its URL, once it serves the model."""
    port, url = free_port(), ""
    command = ["venv/bin/smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command += ["--worker-urls", f"grpc://{os.environ['WEFT_WORKER']}", "--prometheus-port", str(free_port())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline, url = time.monotonic() + START_S, f"http://127.0.0.1:{port}/v1"
        while MODEL not in models(url):
            assert time.monotonic() < deadline, "smg does not serve the model"
            assert process.poll() is None, "smg has ended"
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def models(url: str) -> str:
    """What smg lists; empty while it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5) as response:
            return str(response.read())
    except OSError:
        return ""


with gateway() as address:
    smg = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    weft = openai.OpenAI(base_url=f"{os.environ['WEFT_HTTP']}/v1", api_key="none", max_retries=0)

    def chat(client: openai.OpenAI, **fields: object) -> openai.types.chat.ChatCompletion:
        """A chat of 16 tokens, greedy unless the fields say otherwise."""
        fields = {"temperature": 0, "max_completion_tokens": 16} | fields
        return client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)

    def chats() -> None:
        """The same text and usage as through Weft's own gateway, greedy and seeded."""
        for fields in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
            ours, theirs = chat(weft, **fields), chat(smg, **fields)
            assert theirs.choices[0].message.content == ours.choices[0].message.content, (theirs, ours)
            assert theirs.choices[0].finish_reason == ours.choices[0].finish_reason
            assert theirs.usage.prompt_tokens == ours.usage.prompt_tokens
            assert theirs.usage.completion_tokens == ours.usage.completion_tokens == 16

    def streams() -> None:
        """A stream has the text of the whole answer, and its usage."""
        whole, text, usage = chat(smg).choices[0].message.content, "", None
        for chunk in chat(smg, stream=True, stream_options={"include_usage": True}):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole
        assert usage.completion_tokens == 16

    def completions() -> None:
        """A plain prompt. smg adds no special tokens to it: the one that the tokenizer adds is part of the prompt."""
        prompt = "Once upon a time"
        body = {"prompt": prompt}
        request = urllib.request.Request(f"{os.environ['WEFT_HTTP']}/tokenize", json.dumps(body).encode())
        with urllib.request.urlopen(request) as response:
            first = json.load(response)["token_strs"][0]
        fields = {"model": MODEL, "max_tokens": 16, "temperature": 0}
        ours = weft.completions.create(prompt=prompt, **fields)
        theirs = smg.completions.create(prompt=first + prompt, **fields)
        assert theirs.choices[0].text == ours.choices[0].text, (theirs, ours)

    def stops() -> None:
        """A stop string ends the answer before it."""
        word = chat(weft).choices[0].message.content.split()[3]
        ours, theirs = (chat(each, stop=[word]) for each in (weft, smg))
        assert theirs.choices[0].message.content == ours.choices[0].message.content
        assert theirs.choices[0].finish_reason == "stop"

    def several() -> None:
        """Several continuations and log-probabilities."""
        fields = {"temperature": 0.9, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2}
        ours, theirs = (chat(each, **fields) for each in (weft, smg))
        texts = [sorted(choice.message.content for choice in each.choices) for each in (ours, theirs)]
        assert texts[0] == texts[1]
        assert all(len(choice.logprobs.content) == 16 for choice in theirs.choices)

    def errors() -> None:
        """A request that the worker refuses is an error of the caller."""
        error = None
        try:
            chat(smg, max_completion_tokens=100_000)
        except openai.APIStatusError as raised:
            error = raised
        assert error is not None
        assert error.status_code == 400, error

    for story in (chats, streams, completions, stops, several, errors):
        story()
        print(story.__name__)
