"""Speculation of an engine: whose answers are guessed, how far, and what became of the guesses. Knows no device.

The planner asks for guesses, the runner checks them, the engine reports what was drawn. Owned by the engine's thread.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from services.worker.job import GuessCounts, Job
from services.worker.planner.planner import Row
from services.worker.planner.sequence import Sequence
from services.worker.runners.step import MOST_GUESSES, OWN_GUESS
from services.worker.speculative.catch_up_budget import CatchUpBudget
from services.worker.speculative.depth import Acceptance, DepthChooser
from services.worker.speculative.draft_model import CatchUp, DraftProgress
from services.worker.speculative.proposer import Proposer

_LONGEST_PAUSE = 8
"""Steps at most for which an answer is not searched after its searches found nothing."""
_PLAIN_STEPS, _MOST_PLAIN_STEPS = 32, 256
"""Steps without a question after no answer gained by a guess, and at most until the next look at guesses."""
_MEASURED_STEPS = 4
"""Steps without guesses that show what such steps take, while guesses pay."""
_MOST_LOST_STEPS = 12
"""Steps without guesses in whose time guesses of a draft model may lose by chance, before they are given up."""
_STEADY_TOKENS = MOST_GUESSES + 2
"""Tokens that a draft model computes of a sequence before each guess, at most: more are the price of a pause."""


InForm = Callable[[Sequence, Many[int]], Many[int]]
"""An answer with a form, and guesses for it -> those that the form prescribes or allows."""


def no_form(sequence: Sequence, guesses: Many[int]) -> Many[int]:
    """Of engines without forms."""
    return ()


@dataclass(slots=True)
class _Answer:
    """What is known of one answer."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    pause: int = 0
    """Steps for which it is not searched."""
    misses: int = 0
    """Searches without a guess, one after another."""
    barred: bool = False
    """Its guesses led to numbers that are not finite."""


class Speculation:
    """Guesses for an engine's steps."""

    def __init__(
        self,
        proposer: Proposer | DraftProgress,
        depth: int | None = None,
        most: int = MOST_GUESSES,
        overlaps: bool = False,
        limit: Callable[[int], int] | None = None,
    ) -> None:
        """proposer: who guesses; a DraftProgress: the runner itself. depth: guesses of each row; None: chosen from what
        is measured, at most `most`. overlaps: steps without guesses are planned while another one runs, so a question
        costs time also if nothing is guessed. limit: most guesses of each row, from the step's number of rows."""
        self.counts = GuessCounts()
        """Guesses of all rows since the start."""
        self._depth, self._most, self._limit = depth, most, limit
        self._draft_model = proposer if isinstance(proposer, DraftProgress) else None
        self._proposer = None if isinstance(proposer, DraftProgress) else proposer
        self._behind: list[CatchUp] = []
        self._caught_up = 0
        """Tokens that the draft model computes in this step, if that is more than steady guesses need."""
        self._catches_up = True
        """There is time for the draft model to catch up in this step."""
        self._right = 0
        """Right guesses of this step."""
        self._budget = CatchUpBudget(self._draft_model.most_caught_up) if self._draft_model else CatchUpBudget()
        self._chooser = DepthChooser(most, draft=self._draft_model is not None and overlaps)
        self._answers: dict[int, _Answer] = {}
        self._overlaps = overlaps
        self._plain_steps = 0
        """Steps to come that are planned without a question."""
        self._in_vain = 0
        """Questions without a guess, one after another."""

    def fresh(self, depth: int | None, proposer: Proposer | None = None) -> "Speculation":
        """The same with nothing measured, or the same for another proposer; for measurements, while there are no
        jobs."""
        guessing = proposer or self._draft_model or self._proposer
        assert guessing is not None
        return Speculation(guessing, depth, self._most, self._overlaps, self._limit)

    def waits(self, running: Iterable[Sequence], in_form: InForm = no_form) -> bool:
        """Whether the next step is to be planned when none is in flight any more, because some answer is likely to be
        guessed then: what is known of the answers before that decides, so that steps overlap where nothing is."""
        if self._plain_steps:
            return False
        asking = [sequence for sequence in running if sequence.total > sequence.prefill_end]
        if not asking or (self._limit is not None and not self._limit(len(asking))):
            return False
        if self._rests(asking, len(asking)):
            return False
        if self._proposer is None or any(self._is_promising(sequence, in_form) for sequence in asking):
            return True
        self._found_nothing()
        return False

    def begins_step(self) -> bool:
        """Whether the step that is planned now is to have guesses if none is in flight. To be asked for every step."""
        self._behind.clear()
        if self._plain_steps:
            self._plain_steps -= 1
            return False
        return True

    def guess(self, asked: list[tuple[Sequence, int]], rows: int, in_form: InForm = no_form) -> list[Many[int]]:
        """The planner's question: guesses for these answers, each with the number that it has room for. rows: answers
        in the step, those that do not ask included. in_form: what of guesses an answer's form allows."""
        if self._draft_model is not None:
            self._draft_model.begin_step()
        if self._rests([sequence for sequence, _ in asked], rows):
            return [()] * len(asked)
        most = self._most if self._limit is None else self._limit(rows)
        drafts = [self._draft(sequence, min(room, most), in_form) for sequence, room in asked]
        if any(drafts) or self._behind:
            self._in_vain = 0
        elif self._overlaps:
            self._found_nothing()
        if self._depth is not None:
            return drafts
        rates = [self._answers[sequence.job.key].acceptance.rate(self._chooser.mean_rate) for sequence, _ in asked]
        chosen = self._chooser.choose(rows, rates, [len(draft) for draft in drafts])
        if not any(chosen) and any(drafts):
            pays = self._chooser.pays(rows)
            self._plain_steps = _MEASURED_STEPS if pays else _PLAIN_STEPS
            if self._chooser.tried(rows) and not pays:
                self._budget.looked(rows)
        return [draft[:count] for draft, count in zip(drafts, chosen, strict=True)]

    def new_blocks(self, sequence: Sequence) -> None:
        """The device is about to be sent new blocks of the sequence."""
        if self._draft_model is not None:
            self._draft_model.new_blocks(sequence)

    def overwritten(self, blocks: Iterable[int]) -> None:
        """These blocks got other contents, without keys and values of the draft model."""
        if self._draft_model is not None:
            self._draft_model.overwritten(blocks)

    def catch_ups(self, rows: Iterable[Row]) -> list[CatchUp]:
        """What the runner's draft model is to compute in the step with these rows."""
        if self._draft_model is None:
            return []
        guessed = self._draft_model.before_guesses([row.sequence for row in rows if row.guesses])
        late = [each for each in guessed if each.end - each.first > _STEADY_TOKENS]
        self._caught_up = sum(each.end - each.first for each in late + self._behind)
        return guessed + [each for each in self._behind if each.sequence.slot is not None]

    def drawn(self, row: Row, tokens: int) -> tuple[int, int]:
        """A row of guesses is computed and drew this number of tokens. -> guesses, and how many were right."""
        drafted, accepted = len(row.guesses), max(tokens - 1, 0)
        answer = self._answers.get(row.sequence.job.key)
        if answer is not None:
            answer.barred = answer.barred or not tokens
            answer.acceptance.observe(drafted, accepted)
        if self._draft_model is not None:
            self._draft_model.drawn(row.sequence, drafted, accepted)
        self._chooser.observe_guesses(drafted, accepted)
        self._right += accepted
        self.counts.add(drafted, accepted)
        return drafted, accepted

    def stepped(self, rows: Iterable[Row], seconds: float, overlapped: bool) -> None:
        """A step of these rows, without prompts, took this many seconds. overlapped: it was planned while another one
        ran. A step without guesses that could have been, and was not, shows nothing about such steps."""
        depths, right, self._right = [len(row.guesses) for row in rows], self._right, 0
        if not depths:
            return
        count, depth = len(depths), max(depths)
        plain_s, usual_s = self._chooser.step_s(count, 0), seconds
        if self._caught_up and plain_s is not None:
            usual_s = min(self._chooser.step_s(count, depth) or plain_s, seconds)
            self._budget.spend(self._caught_up, seconds - usual_s, count)
        if depth and plain_s is not None and self._chooser.pays(count):
            self._gained(plain_s * (1 + right / count) - usual_s, count)
        if self._caught_up:
            return
        if not depth:
            self._budget.earn(seconds)
        if overlapped or depth or not self._overlaps:
            self._chooser.observe_step(count, depth, seconds)

    def _gained(self, seconds: float, rows: int) -> None:
        """Guesses of a draft model are given up where they cost more than the times of their steps show."""
        self._budget.gain(seconds, rows)
        plain_s = self._chooser.step_s(rows, 0)
        if self._draft_model and plain_s and self._budget.lost_s(rows) > _MOST_LOST_STEPS * plain_s:
            self._chooser.give_up(rows)
            self._budget.looked(rows)

    def ended(self, sequence: Sequence) -> None:
        """The sequence's job has ended."""
        known = self._answers.pop(sequence.job.key, None) is not None
        if self._draft_model is not None:
            self._draft_model.ended(sequence)
        elif known and self._proposer is not None:
            self._proposer.ended(sequence.job, sequence.tokens)

    def _found_nothing(self) -> None:
        """No answer can be guessed: ask again after a pause."""
        self._in_vain += 1
        self._plain_steps = min(self._in_vain, _LONGEST_PAUSE)

    def _rests(self, asking: list[Sequence], rows: int) -> bool:
        """Whether steps without guesses follow, because no guess is due to be tried or all would cost too much."""
        rest = self._rest(asking, rows) if self._depth is None else 0
        self._plain_steps = min(rest, _MOST_PLAIN_STEPS)
        return rest > 0

    def _rest(self, asking: list[Sequence], rows: int) -> int:
        """Find out whether there is time to catch up: with all answers before a look, while guesses pay with some. ->
        steps without guesses from here on."""
        rest = self._chooser.rest(rows)
        if rest or self._draft_model is None:
            return rest
        missing = [self._draft_model.missing(sequence) for sequence in asking]
        behind = sum(tokens for tokens in missing if tokens > _STEADY_TOKENS)
        pays = self._chooser.pays(rows)
        due = min(behind, self._draft_model.most_caught_up) if pays else behind
        self._catches_up = self._budget.allows(due, rows)
        return 0 if self._catches_up or pays else _PLAIN_STEPS

    def _draft(self, sequence: Sequence, room: int, in_form: InForm) -> Many[int]:
        job = sequence.job
        answer = self._answers.setdefault(job.key, _Answer())
        most = min(room, self._room_of(job, sequence.position))
        if answer.barred or most <= 0 or not sequence.guessable:
            return ()
        if answer.pause:
            answer.pause -= 1
            answer.acceptance.fade()
            return ()
        found = self._own_guesses(sequence, most) if self._draft_model else self._propose(sequence, most, in_form)
        if found:
            answer.misses = 0
            return found
        answer.misses += 1
        if self._depth is None and self._proposer is not None:
            answer.pause = min(answer.misses - 1, _LONGEST_PAUSE)
        answer.acceptance.fade()
        return ()

    def _is_promising(self, sequence: Sequence, in_form: InForm) -> bool:
        """Whether guesses are found behind the tokens that are known: then there will be some behind the next one."""
        answer = self._answers.setdefault(sequence.job.key, _Answer())
        if answer.barred or not sequence.guessable or self._room_of(sequence.job, sequence.position) <= 0:
            return False
        if not answer.pause and self._propose(sequence, 1, in_form):
            return True
        answer.pause = max(answer.pause - 1, 0)
        answer.acceptance.fade()
        return False

    def _propose(self, sequence: Sequence, most: int, in_form: InForm) -> Many[int]:
        assert self._proposer is not None
        found = self._proposer.propose(sequence.job, sequence.tokens, most)
        return found if sequence.job.params.structured is None else in_form(sequence, found)[:most]

    def _own_guesses(self, sequence: Sequence, most: int) -> Many[int]:
        assert self._draft_model is not None
        if not self._catches_up and self._draft_model.missing(sequence) > _STEADY_TOKENS:
            return []
        room = self._draft_model.room(sequence, most)
        if room <= 0 and (behind := self._draft_model.behind(sequence)):
            self._behind.append(behind)
        return [OWN_GUESS] * room

    def _room_of(self, job: Job, position: int) -> int:
        """Most guesses after the token at this position of the answer. A row does not cross the position at which
        min_tokens ends: what is banned is the same at all of its tokens. An answer with a form has no guesses of a
        draft model: the host, which computes the masks behind them, would have to wait for them."""
        if job.params.structured is not None and self._draft_model is not None:
            return 0
        most = self._most if self._depth is None else self._depth
        if job.speculation is not None:
            most = min(most, job.speculation)
        if job.params.bad_sequences:  # What they ban depends on each token before.
            return 0
        left = job.params.min_tokens - position
        return min(most, left - 1) if left > 0 else most
