"""Checks requests. Gateway and worker run the same checks, so neither relies on those of the other."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError, invalid
from services.forms.request import form_of
from services.validate_chat import calls_required, check_chat

MAX_N = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_TOKENS = 64
MAX_LOGPROBS = 20
MAX_PRIORITY = 100
MAX_SPECULATION = 8
MAX_REQUEST_ID_CHARS = 128
DEFAULT_MAX_TOKENS = 256

_POLICIES = frozenset(api.CachePolicy.values())
_CRITICALITIES = frozenset(api.Criticality.values())
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID_CHARS}}}")
_RANGES: dict[str, tuple[float, float, bool]] = {
    # field: minimum, maximum, whether the minimum itself is allowed
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 10.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}


def check_request(request: api.GenerateRequest) -> None:
    """Checks what can be checked without the model's card. Raises WeftError."""
    check_known(request, "request")
    _check_form(request.prompt)
    if request.n > MAX_N:
        raise invalid("n", f"must be at most {MAX_N}")
    if abs(request.priority) > MAX_PRIORITY:
        raise invalid("priority", f"between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    check_policy("cache", request.cache)
    if request.criticality not in _CRITICALITIES:
        raise invalid("criticality", "must be a criticality")
    check_request_id("request_id", request.request_id)
    if request.sampling.HasField("structured") and calls_required(request.prompt.chat):
        raise invalid("sampling.structured", "not together with required tool calls, which are a form of their own")
    check_speculation(request)
    check_stops(request.sampling)


def check_policy(field: str, policy: int) -> None:
    """Checks that a number is a cache policy. Raises WeftError."""
    if policy not in _POLICIES:
        raise invalid(field, "must be a cache policy")


def check_request_id(field: str, request_id: str) -> None:
    """Checks a request's id; it may be empty. Raises WeftError."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise invalid(field, f"1 to {MAX_REQUEST_ID_CHARS} characters of A-Z a-z 0-9 . _ : -")


def check_speculation(message: api.GenerateRequest | mesh.Job) -> int | None:
    """Checks how many guesses a step may have. -> the number; None: not set. Raises WeftError."""
    if not message.HasField("speculation"):
        return None
    if message.speculation > MAX_SPECULATION:
        raise invalid("speculation", f"at most {MAX_SPECULATION}")
    return message.speculation


def check_prompt(prompt: api.Prompt) -> None:
    """Checks that a prompt has one form and is not empty. Raises WeftError."""
    check_known(prompt, "prompt")
    _check_form(prompt)


def _check_form(prompt: api.Prompt) -> None:
    form = prompt.WhichOneof("form")
    if form is None:
        raise invalid("prompt", "one of text, chat or token_ids is required", "EMPTY_PROMPT")
    if form == "text" and not prompt.text:
        raise invalid("prompt.text", "empty", "EMPTY_PROMPT")
    if form == "token_ids" and not prompt.token_ids.ids:
        raise invalid("prompt.token_ids", "empty", "EMPTY_PROMPT")
    if form == "chat":
        check_chat(prompt.chat)


def check_stops(sampling: api.Sampling) -> None:
    """Checks the stop strings and bad words, which only the gateway receives. Raises WeftError."""
    if len(sampling.stop) > MAX_STOPS:
        raise invalid("sampling.stop", f"at most {MAX_STOPS}")
    if sampling.stop and any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in sampling.stop):
        raise invalid("sampling.stop", f"each 1 to {MAX_STOP_CHARS} characters")
    if sampling.include_stop_string and not sampling.stop:
        raise invalid("sampling.include_stop_string", "only with stop strings")
    words = sampling.bad_words
    if len(words) > MAX_BAD_WORDS:
        raise invalid("sampling.bad_words", f"at most {MAX_BAD_WORDS}")
    if words and any(not 1 <= len(word) <= MAX_STOP_CHARS or word.isspace() for word in words):
        raise invalid("sampling.bad_words", f"each 1 to {MAX_STOP_CHARS} characters, not space alone")


def check_sampling(sampling: api.Sampling, card: mesh.ModelCard) -> dict[str, Any]:
    """Checks the sampling parameters against the model's vocabulary. Raises WeftError.

    Returns the fields that are set, by name: a dict is faster to read than the message. `structured` is a Form.
    """
    given = {field.name: value for field, value in sampling.ListFields()}
    if "structured" in given:
        given["structured"] = form_of(sampling.structured)
    for name, value in given.items():  # A field that is not set has 0 or a default, and both are valid.
        if name in _RANGES:
            _check_range(name, value, *_RANGES[name])
    if "max_tokens" in given and given["max_tokens"] == 0:
        raise invalid("sampling.max_tokens", "at least 1")
    if "min_tokens" in given and given["min_tokens"] > given.get("max_tokens", math.inf):
        raise invalid("sampling.min_tokens", "more than max_tokens")
    if "logprobs" in given and given["logprobs"] > MAX_LOGPROBS:
        raise invalid("sampling.logprobs", f"at most {MAX_LOGPROBS}")
    if "prompt_logprobs" in given and given["prompt_logprobs"] > MAX_LOGPROBS:
        raise invalid("sampling.prompt_logprobs", f"at most {MAX_LOGPROBS}")
    if "stop_token_ids" in given:
        if len(given["stop_token_ids"]) > MAX_STOP_TOKENS:
            raise invalid("sampling.stop_token_ids", f"at most {MAX_STOP_TOKENS}")
        check_token_ids("sampling.stop_token_ids", given["stop_token_ids"], card)
    if "logit_bias" in given:
        _check_biases(given["logit_bias"], card)
    if "bad_token_sequences" in given:
        _check_bad_sequences([each.ids for each in given["bad_token_sequences"]], card)
    return given


def check_bad_words(sequences: Sequence[Sequence[int]]) -> None:
    """Checks the tokens of the bad words. Raises WeftError."""
    if any(len(token_ids) > MAX_BAD_TOKENS for token_ids in sequences):
        raise invalid("sampling.bad_words", f"each at most {MAX_BAD_TOKENS} tokens")


def _check_biases(biases: Mapping[int, float], card: mesh.ModelCard) -> None:
    if len(biases) > MAX_BIASES:
        raise invalid("sampling.logit_bias", f"at most {MAX_BIASES} entries")
    for bias in biases.values():
        _check_range("logit_bias", bias, -100.0, 100.0, True)
    check_token_ids("sampling.logit_bias", list(biases), card)


def _check_bad_sequences(sequences: Sequence[Sequence[int]], card: mesh.ModelCard) -> None:
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise invalid("sampling.bad_token_sequences", f"at most {MAX_BAD_SEQUENCES}")
    for token_ids in sequences:
        if not 1 <= len(token_ids) <= MAX_BAD_TOKENS:
            raise invalid("sampling.bad_token_sequences", f"each 1 to {MAX_BAD_TOKENS} tokens")
        check_token_ids("sampling.bad_token_sequences", token_ids, card)


def check_tokens(token_ids: Sequence[int], sampling: api.Sampling, card: mesh.ModelCard) -> None:
    """Checks that a tokenized prompt is not empty, in the vocabulary and short enough to answer. Raises WeftError."""
    if not token_ids:
        raise invalid("prompt", "no tokens", "EMPTY_PROMPT")
    wanted = sampling.max_tokens if sampling.HasField("max_tokens") else max(1, sampling.min_tokens)
    if len(token_ids) + wanted > card.context_length:
        raise invalid(
            "prompt",
            f"{len(token_ids)} tokens and {wanted} for the answer exceed the context of {card.context_length}",
            "CONTEXT_EXCEEDED",
        )
    check_token_ids("prompt.token_ids", token_ids, card)


def default_max_tokens(prompt_tokens: int, sampling: api.Sampling, card: mesh.ModelCard) -> int:
    """The greatest answer length, in tokens, for a request that does not set one."""
    return max(min(DEFAULT_MAX_TOKENS, card.context_length - prompt_tokens), sampling.min_tokens)


def check_known(message: Message, field: str) -> None:
    """Refuses fields that this version does not have, at any depth, rather than ignore them. Raises WeftError."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != message.ByteSize():
        _refuse_unknown(message, field)


def _refuse_unknown(message: Message, field: str) -> None:
    """Finds the unknown field by walking through the whole message, which is slow. Raises WeftError."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        numbers = sorted({unknown[i].field_number for i in range(len(unknown))})
        raise WeftError(
            grpc.StatusCode.UNIMPLEMENTED,
            "UNKNOWN_FIELD",
            f"{field}: field number {numbers[0]} does not exist in this version",
            field=field,
        )
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for child in [value] if isinstance(value, Message) else value:
            _refuse_unknown(child, descriptor.name if field == "request" else f"{field}.{descriptor.name}")


def _check_range(name: str, value: float, least: float, most: float, inclusive: bool) -> None:
    within = math.isfinite(value) and value <= most and (value >= least if inclusive else value > least)
    if not within:
        opening = "from" if inclusive else "above"
        raise invalid(f"sampling.{name}", f"{opening} {least:g} to {most:g}")


def check_token_ids(field: str, token_ids: Sequence[int], card: mesh.ModelCard) -> None:
    """Checks that token ids are in the model's vocabulary. Raises WeftError."""
    if token_ids and max(token_ids) >= card.vocab_size:
        raise invalid(field, f"not in the vocabulary of {card.vocab_size}", "TOKEN_OUT_OF_RANGE")
