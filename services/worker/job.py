"""What goes into the engine and what comes out of it, as plain values. Knows no torch, no gRPC and no engine.

A job is one sequence to continue. Its `key` is chosen by the caller and unique among the jobs that the engine has.
Positions count tokens of the answer from 0, so the next position of a job is `len(token_ids) - prompt_len`.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from services.forms.form import Form


# Jobs and their parameters are not frozen: each field of a frozen dataclass is set by a call.
@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens. The meaning, order and ranges are those of `weft.v1.Sampling`, already validated. They
    do not change."""

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
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the answer does not contain; none is empty."""
    structured: Form | None = None
    """The form of the answer. An end or stop token ends it only where the form is complete."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each token of the prompt but the first."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A low-rank adapter of the worker's model."""

    name: str
    fingerprint: bytes
    """Equal for adapters that compute the same."""
    rank: int
    nbytes: int
    """Bytes of the copy in host memory."""
    weights: Any = field(repr=False)
    """That copy, as the runner's pages made it."""


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """What an encoder computes: a vector for each text of a job, or the scores of its labels."""

    lengths: tuple[int, ...]
    """Tokens of each text, none 0; the job's tokens are those of all texts, one text behind another."""
    seconds: tuple[int, ...] = ()
    """Where the second text of each pair begins, counted within the pair; empty: there are no pairs."""
    dimensions: int = 0
    """Leading numbers of each vector to keep; 0: all."""
    normalize: bool = False
    """Vectors get length 1."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """What an encoder computed for the texts of a job."""

    width: int
    """Numbers of each vector."""
    data: bytes
    """The numbers as float32, little-endian, one text behind another."""


@dataclass(slots=True)
class Job:
    """One sequence to continue, or texts to encode. Immutable."""

    key: int
    """The caller's handle."""
    token_ids: Sequence[int]
    """The prompt and, after a move, the tokens of the answer that earlier attempts produced. Not empty. Of texts to
    encode, best an array of type "i", which is not copied."""
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
    speculation: int | None = None
    """Most guesses of a step; 0: none; None: the engine's choice. Changes no token."""
    adapter: Adapter | None = None
    """What is added to the model's products; None: the model as it is."""
    encode: EncodeTask | None = None
    """What an encoder computes; None: the job is continued."""
    handoff: bool = False
    """Another worker continues the answer: the job ends after one token."""
    source: str = ""
    """host:port of a worker from which blocks of the prompt may be fetched; empty: none is known."""


class EndReason(enum.Enum):
    """Why a job ended."""

    STOP = "stop"
    """At an end or stop token."""
    LENGTH = "length"
    """At max_tokens or at the end of the context."""
    CANCELLED = "cancelled"
    """By its caller."""
    ERROR = "error"
    """It failed; `Ended.error` is the reason."""
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
    field: str = ""
    """The field of the request that is wrong, if it is one."""


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
    drafted_tokens: int = 0
    """Tokens of its answer that were guessed."""
    accepted_tokens: int = 0
    """Guesses that were right."""


@dataclass(slots=True)
class TokenOut:
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
    vectors: Vectors | None = None
    """The vectors of a job that was encoded."""
    failed_text: int | None = None
    """Index of the text that could not be encoded, if one failed."""


@dataclass(slots=True)
class GuessCounts:
    """What became of guesses."""

    rows: int = 0
    """Rows with guesses."""
    drafted: int = 0
    """Guesses."""
    accepted: int = 0
    """Guesses that were right."""
    drafted_at: list[int] = field(default_factory=list)
    """By their place in the row, from the first."""
    accepted_at: list[int] = field(default_factory=list)
    """The same of those that were right."""

    def add(self, drafted: int, accepted: int) -> None:
        """Count a row."""
        self.rows += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = [0] * (drafted - len(self.drafted_at))
        self.drafted_at += missing
        self.accepted_at += missing
        for place in range(drafted):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < accepted

    def copy(self) -> "GuessCounts":
        """The counts as of now."""
        return replace(self, drafted_at=self.drafted_at.copy(), accepted_at=self.accepted_at.copy())


@dataclass(slots=True)
class StepOutput:
    """The results of one engine step. A job's end follows its last token."""

    tokens: list[TokenOut]
    """New tokens; those of one job in the order of their positions."""
    ended: list[Ended]
    """Jobs that ended."""
    extra: list[int] = field(default_factory=list)
    """For each row that drew more than one token: the number of the others."""
    scores: list["PromptScores"] = field(default_factory=list)
    """Log-probabilities of prompts; those of one job in the order of their positions, and before its first token."""

    def take(self) -> "StepOutput":
        """The results so far, which are no longer in here."""
        taken = replace(self)
        self.tokens, self.ended, self.extra, self.scores = [], [], [], []
        return taken


class PromptScores(NamedTuple):
    """The log-probabilities of a part of a prompt."""

    key: int
    """The job."""
    position: int
    """The place of the first of these tokens in the prompt, at least 1."""
    logprobs: list[float]
    """Natural logarithm of the model's own probability of each token."""
    tops: list[list[tuple[int, float]]]
    """For each the most likely tokens and their log-probabilities, most likely first; empty lists if none were asked
    for."""


class Stats(NamedTuple):
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
    guesses: GuessCounts = field(default_factory=GuessCounts)
    """Guesses of speculation since the start."""
    resident: tuple[bytes, ...] = ()
    """Fingerprints of the adapters in device memory."""
