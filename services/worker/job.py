"""What goes into the engine and what comes out of it, as plain values. Knows no torch, no gRPC and no engine.

A job is one sequence to continue. Its `key` is chosen by the caller and unique among the jobs that the engine has.
Positions count tokens of the answer from 0, so the next position of a job is `len(token_ids) - prompt_len`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. The meaning, order and ranges are those of `weft.v1.Sampling`, already validated."""

    max_tokens: int
    """Most tokens of the answer, those of earlier attempts included."""
    min_tokens: int = 0
    """Fewest tokens of the answer before an end or stop token may be chosen."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches p."""
    min_p: float = 0.0
    """Keep tokens at least p times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides the positive, multiplies the negative logits of tokens in prompt or answer."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer has."""
    frequency_penalty: float = 0.0
    """Subtracted, times its count in the answer, from a token's logit."""
    seed: int = 0
    """64 bits, unsigned. The same seed gives the same draws."""
    stop_token_ids: frozenset[int] = frozenset()
    """The answer ends at any of these tokens, which are not part of it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    logprobs: int | None = None
    """None: not asked. 0: of the chosen token. n: also of the n most likely ones."""
    ignore_eos: bool = False
    """Do not end at the model's end tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to continue."""

    key: int
    """The caller's handle."""
    token_ids: list[int]
    """The prompt and, after a move, the tokens of the answer that earlier attempts produced. Not empty."""
    prompt_len: int
    """How many of these are the prompt."""
    params: SamplingParams
    """How to choose tokens."""
    sample_index: int = 0
    """Which continuation of its request, for the draws."""
    salt: bytes = b""
    """Prefixes are shared only between equal salts."""
    bypass_cache: bool = False
    """Neither use nor fill the prefix cache."""
    deadline: float | None = None
    """When it must have ended, on the clock `time.monotonic`."""
    priority: int = 0
    """Higher is sooner."""


class EndReason(enum.Enum):
    """Why a job ended."""

    STOP = "stop"
    """At an end or stop token."""
    LENGTH = "length"
    """At max_tokens or at the end of the context."""
    CANCELLED = "cancelled"
    """By its caller."""
    ERROR = "error"
    """It failed; `Ended.error` says why."""
    DEADLINE = "deadline"
    """Its time was over."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, ready for the client: holds no prompt text, paths or exception text."""

    code: str
    """Name of a google.rpc.Code."""
    reason: str
    """NUMERIC, INTERNAL, KV_EXHAUSTED or INVALID."""
    message: str
    """For people."""
    retryable: bool = False
    """Another attempt on another worker may succeed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a job cost."""

    queue_s: float = 0.0
    """Seconds from the job's arrival to the start of its first step."""
    prefill_s: float = 0.0
    """Seconds from there to its first token."""
    decode_s: float = 0.0
    """Seconds from its first to its last token."""
    prefill_tokens: int = 0
    """Tokens computed before its first token."""
    cached_tokens: int = 0
    """Tokens found in the device's prefix cache instead."""
    preemptions: int = 0
    """Times it was paused to make room."""
    steps: int = 0
    """Steps it took part in."""
    prefill_steps: int = 0
    """Steps in which its prompt (after a preemption: what it had to compute again) was computed."""
    fetched_tokens: int = 0
    """Tokens whose KV was fetched from a lower tier instead."""
    first_token: bool = False
    """Whether it produced a token."""
    preempted_s: tuple[float, ...] = ()
    """Seconds from its arrival to each pause."""


class TokenOut(NamedTuple):
    """A new token of an answer."""

    key: int
    """The job."""
    position: int
    """Its place in the answer, from 0."""
    token_id: int
    """The token."""
    logprob: float | None = None
    """Natural logarithm of the model's own probability of it, if asked for."""
    top: list[tuple[int, float]] | None = None
    """The most likely tokens and their log-probabilities, most likely first, if asked for."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a job: nothing follows."""

    key: int
    """The job."""
    reason: EndReason
    """Why."""
    position: int
    """Tokens of the answer so far, those of earlier attempts included."""
    cost: Cost
    """What it cost in this attempt."""
    stop_token_id: int | None = None
    """The end or stop token that ended it."""
    error: Failure | None = None
    """Why it failed, if reason is ERROR."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one engine step. A job's end follows its last token."""

    tokens: list[TokenOut]
    """New tokens; those of one job in the order of their positions."""
    ended: list[Ended]
    """Jobs that ended."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine's counters and gauges."""

    steps: int
    """Steps completed since the start."""
    running: int
    """Jobs in the batch."""
    waiting: int
    """Jobs that wait for room."""
    prefill_backlog: int
    """Tokens not yet computed before the first new one, of all jobs."""
    free_blocks: int
    """Blocks that hold nothing."""
    cached_blocks: int
    """Blocks that hold a cached prefix which no job uses."""
    active_blocks: int
    """Blocks in use by jobs."""
    total_blocks: int
    """free + cached + active."""
    prefill_rate: float
    """Measured prompt tokens per second; 0 when not yet known."""
    decode_s: float
    """Measured seconds of a step that only decodes; 0 when not yet known."""
    preemptions: int
    """Preemptions since the start."""
    predicted_step_s: float
    """Seconds that the step in flight is predicted to take; 0 when idle."""
