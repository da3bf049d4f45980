"""One attempt of a continuation at one worker: its tokens, its cost, how it ended. Knows no scheduler, no clients."""

from collections.abc import Callable
from dataclasses import dataclass, field

from grpc import StatusCode

from protos import inference_pb2 as api
from services import telemetry
from services.errors import WeftError
from services.gateway.answers.receipt import AttemptCosts
from services.gateway.links.worker_link import JobStream, worker_lost
from services.gateway.text.journal import Ending, Journal
from services.gateway.traffic import ModelCounts


@dataclass(slots=True, eq=False)
class Answer:
    """What the attempts of one continuation share."""

    journal: Journal
    deadline: Callable[[], float]
    """The latest deadline of the current subscribers, on `time.monotonic`. A later subscriber may extend it."""
    notify: Callable[[], None]
    """Informs the subscribers that there is something to take."""
    traffic: Callable[[], ModelCounts]
    """The counts of this second, for the tokens and their times."""
    began: float
    """When the request arrived, on `time.monotonic`."""
    cost_wait_s: float
    """How long to wait for the worker's report of the cost after a stop string has ended the answer."""
    hold_s: float = 0.0
    """How long tokens of a step with guesses may be held back so that they reach the subscribers at even times."""
    costs: AttemptCosts = field(default_factory=AttemptCosts)
    first_token_at: float | None = None
    last_token_at: float = 0.0

    def first_token(self, now: float) -> None:
        """Notes the arrival of the first token."""
        self.first_token_at = self.last_token_at = now
        self.traffic().first_token.add(now - self.began)

    def end(self, ending: Ending) -> None:
        """Ends the answer."""
        self.journal.end(ending)
        self.notify()


class Attempt:
    """One job stream, or one subscription to another job, as a part of an answer."""

    __slots__ = ("_answer", "_deadline", "span", "stream")

    def __init__(self, answer: Answer, stream: JobStream, span: telemetry.Span, deadline: float) -> None:
        """`deadline` is the one that the worker received."""
        self.stream = stream
        self.span = span
        self._answer = answer
        self._deadline = deadline

    async def run(self) -> WeftError | None:
        """Waits for the end of the stream. -> None once the answer has ended or is handed off, else why it has not."""
        answer, stream = self._answer, self.stream
        try:
            await stream.closed
        finally:
            stream.link.cancel(stream, len(answer.journal.tokens))
        self.advance()
        has_cost = stream.end is not None and stream.end.HasField("cost")
        answer.costs.add(stream.end.cost if stream.end is not None and has_cost else stream.observed_cost())
        return None if answer.journal.ending is not None else self._conclude()

    @property
    def handed_off(self) -> bool:
        """The worker has ended its part of the answer, which another one continues."""
        end = self.stream.end
        return end is not None and end.handed_off and self._answer.journal.ending is None

    def advance(self) -> None:
        """Moves the tokens that have arrived to the journal. A stop string among them ends the answer and the job."""
        answer, stream = self._answer, self.stream
        if stream.scores:
            scores, stream.scores = stream.scores, []
            for position, details in scores:
                answer.journal.score(position, details)
        if not stream.tokens:
            return
        tokens, details = stream.take()
        if not tokens:
            return
        gaps = len(tokens)
        traffic = answer.traffic()
        traffic.tokens += gaps
        if answer.first_token_at is None:
            assert stream.first_at is not None
            answer.first_token(stream.first_at)
            gaps -= 1
        if gaps:
            traffic.inter_token.add((stream.taken_at - answer.last_token_at) / gaps, gaps)
            answer.last_token_at = stream.taken_at
        answer.journal.extend(tokens, details)
        if answer.journal.ending is not None:
            stream.link.cancel(stream, len(answer.journal.tokens), answer.cost_wait_s)

    def _conclude(self) -> WeftError | None:
        """Ends the answer as the worker did. -> None, or why the worker did not end it."""
        end = self.stream.end
        if end is None:
            return self.stream.loss or worker_lost()
        if end.handed_off:
            return None
        if end.reason in (api.FINISH_REASON_STOP, api.FINISH_REASON_LENGTH):
            stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
            self._answer.end(Ending(end.reason, stop_token_id=stop_token_id))
            return None
        if end.reason == api.FINISH_REASON_ERROR and end.HasField("failure"):
            return self._failure(WeftError.from_failure(end.failure))
        return worker_lost()  # The worker cancelled a job that this gateway had not cancelled.

    def _failure(self, failure: WeftError) -> WeftError:
        """The worker's failure. An expired deadline is retryable if it was the leader's, or was extended since."""
        if failure.code is StatusCode.DEADLINE_EXCEEDED:
            failure.retryable = self._answer.costs.joined or self._answer.deadline() > self._deadline
        return failure
