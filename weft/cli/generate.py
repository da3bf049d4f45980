"""The commands that call a mesh: generate, chat, models."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.answer_form import (
    Choice,
    GrammarFile,
    JsonObject,
    JsonSchema,
    Regex,
    form_options,
)
from weft.cli.flags import LOCAL, Address, ApiKey, Caching, Deadline, Model, fail

if TYPE_CHECKING:
    from weft.client.blocking import SyncClient
    from weft.client.requests import Options

MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.", show_default="up to 256")]
MinTokens = Annotated[int | None, typer.Option(help="Fewest tokens before the answer may end.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="1")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.", show_default="0")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this probability.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens at least this likely, relative to the most likely one.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: tokens that occurred become less likely.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Subtracted from logits of tokens in the answer.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same, times the count of the token.")]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal answers.", show_default="random")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")]
StopTokenId = Annotated[list[int] | None, typer.Option(help="End at this token; may be repeated.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=BIAS", help="Add to a token's logit; may be repeated.")
]
Logprobs = Annotated[int | None, typer.Option(help="Show log-probabilities, with this many alternatives.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Do not end at the model's end tokens.")]
Count = Annotated[int, typer.Option(help="Number of continuations.")]
Speculation = Annotated[
    int | None, typer.Option(min=0, max=8, help="Most guesses of a step; 0: none. Changes no token.")
]
Priority = Annotated[int, typer.Option(help="Higher is served sooner when the mesh is full.")]
Cache = Annotated[Caching | None, typer.Option(help="Use of the caches.", show_default="read_write")]
RequestId = Annotated[str, typer.Option(help="Id of the request.", show_default="random")]
Stats = Annotated[bool, typer.Option("--stats", help="Print what the answer cost.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    address: Address = LOCAL,
    api_key: ApiKey = "",
    model: Model = "",
    max_tokens: MaxTokens = None,
    min_tokens: MinTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    logit_bias: LogitBias = None,
    logprobs: Logprobs = None,
    ignore_eos: IgnoreEos = False,
    json_schema: JsonSchema = "",
    json_object: JsonObject = False,
    regex: Regex = "",
    choice: Choice = None,
    grammar: GrammarFile = "",
    n: Count = 1,
    priority: Priority = 0,
    speculation: Speculation = None,
    cache: Cache = None,
    request_id: RequestId = "",
    deadline: Deadline = None,
    stats: Stats = False,
) -> None:
    """Continue a prompt and print the tokens as they arrive."""
    options: Any = {
        "model": model,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "logit_bias": _biases(logit_bias) if logit_bias else None,
        "logprobs": logprobs,
        "ignore_eos": ignore_eos,
        **form_options(json_schema, json_object, regex, choice, grammar),
        "n": n,
        "priority": priority,
        "speculation": speculation,
        "cache": cache,
        "request_id": request_id,
    }
    with client_of(address, api_key, deadline) as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        _answer(client, text, options, n, logprobs is not None, stats)


def chat(
    address: Address = LOCAL,
    api_key: ApiKey = "",
    model: Model = "",
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    deadline: Deadline = None,
    stats: Stats = False,
) -> None:
    """Chat with a model; --stats prints time to first token and speed after each answer."""
    from weft.cli import chat as conversation
    from weft.client.requests import not_served

    options: Any = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    with client_of(address, api_key, deadline) as client:
        served = [known for known in client.models() if known.workers]
        chosen = [known for known in served if (model in (known.name, *known.aliases) if model else not known.base)]
        if not chosen:
            fail(not_served(address, model, [known.name for known in served]))
        if not model and len(chosen) > 1:
            fail(f"--model: one of {', '.join(known.name for known in chosen)}", usage=True)
        conversation.run(client, chosen[0], system, options, stats)


def models(address: Address = LOCAL, api_key: ApiKey = "") -> None:
    """List the models that a mesh serves, and the progress of those that it is loading."""
    from report.console import console
    from weft.cli.terminal import models_table

    with client_of(address, api_key, deadline_s=10) as client:
        out = console()
        out.print(models_table(client.models(), out.width))


def _answer(client: "SyncClient", prompt: str, options: "Options", n: int, logprobs: bool, stats: bool) -> None:
    from report.console import console
    from weft.cli.terminal import AnswerWriter, print_receipt

    writer = AnswerWriter(n, logprobs)
    answer = client.generate(prompt, **options)
    for delta in answer:
        writer.add(delta)
    if stats and answer.receipt is not None:
        print_receipt(console(), answer.receipt)


@contextlib.contextmanager
def client_of(address: str, api_key: str, deadline_s: float | None) -> "Iterator[SyncClient]":
    """A client of the mesh at `address`. An error inside the block ends the command with one line."""
    from weft.cli.reach import require_mesh
    from weft.client.blocking import SyncClient
    from weft.client.errors import WeftError

    require_mesh(address)
    with SyncClient(address, api_key=api_key, deadline_s=deadline_s) as client:
        try:
            yield client
        except WeftError as error:
            if not error.reason and error.code.name == "UNAVAILABLE":
                secure = address.startswith("https:")
                hint = (
                    "its certificate is for another name or not trusted: see WEFT_CA_FILE"
                    if secure
                    else "it is the HTTP port or needs https"
                )
                fail(f"the connection to {address} was lost and could not be made again; perhaps {hint}")
            if not error.reason and error.code.name == "UNIMPLEMENTED":
                fail(f"{address} is no gateway of Weft")
            fail(str(error))
        except (TypeError, ValueError) as error:
            fail(str(error), usage=True)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _biases(pairs: list[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token_id, _, bias = pair.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            fail(f"--logit-bias: {pair!r} is not ID=BIAS", usage=True)
    return biases
