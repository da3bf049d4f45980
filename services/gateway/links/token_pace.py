"""When tokens that a step with guesses drew together go on to their reader: one after another, at even times. Pure;
every time is an argument.

A step with guesses takes longer than a plain one, and draws one token or several. A reader who gets the tokens of a
step together waits a whole step for the next ones. Some tokens are held here, so that a step that draws a single one
leaves no gap either: the fewer are held, the longer the next one waits, but never as long as a step.
"""

from dataclasses import dataclass, field

_MOST_HELD = 10
"""Tokens that are held while enough arrive: steps draw so differently that fewer would be used up now and then."""
_FADING = 1 / 128
"""Weight of the last step in the means."""
_PART = 0.4
"""How far from the mean time of a token to that of a step the wait grows while nothing is held."""
_MOST_LATE_S = 0.002
"""Most lateness of a wait that enters the mean: if the process itself pauses, later waits are not as late."""
_LEAST_S = 0.001
"""Shortest wait: readers need no more messages."""
_USUAL_STEPS = 32
"""Steps of an earlier answer that an answer's means contain, at most."""


@dataclass(slots=True)
class StepMeans:
    """What steps took and drew; earlier ones count less."""

    span_s: float = 0.0
    """Sum of the times between steps."""
    steps: float = 0.0
    tokens: float = 0.0

    @property
    def guessed(self) -> bool:
        """Steps drew several tokens."""
        return self.tokens > self.steps

    def add_step(self, seconds: float) -> None:
        """A step has come so long after the one before."""
        kept = 1 - _FADING
        self.span_s = self.span_s * kept + seconds
        self.steps, self.tokens = self.steps * kept + 1, self.tokens * kept

    def add_some(self, other: "StepMeans") -> None:
        """Count some steps of another answer, too."""
        part = min(_USUAL_STEPS / other.steps, 1.0)
        self.span_s += part * other.span_s
        self.steps += part * other.steps
        self.tokens += part * other.tokens


@dataclass(slots=True)
class TokenPace:
    """The pace of one answer's tokens. Times are on one clock, in seconds."""

    hold_s: float
    """Seconds for which a token is held, about; 0: tokens go on as they arrive."""
    usual: StepMeans | None = None
    """Those of an earlier answer with guesses: what is expected of this one once it has guesses, too."""
    means: StepMeans = field(default_factory=StepMeans)
    """What its own steps took and drew, and some of the usual ones."""
    held: int = 0
    """Tokens that have arrived and were not released."""
    _at: float | None = None
    """When the last step's tokens arrived."""
    _due: float = 0.0
    """When the first held token is to be released."""
    _late_s: float = 0.0
    """Mean lateness of waits: the process may be busy when they end."""

    def arrived(self, now: float) -> None:
        """A token has arrived. Tokens of the same time are of one step."""
        if not self.held:
            self._due = max(self._due, now)
        self.held += 1
        if self._at is not None and now != self._at:
            self.means.add_step(now - self._at)
        if self.means.steps:  # Tokens that come with the first one may be of many steps.
            self.means.tokens += 1
            if now == self._at and self.usual is not None:
                self.means.add_some(self.usual)
                self.usual = None
        self._at = now

    def release(self, now: float) -> tuple[int, float]:
        """Releases tokens. Not to be called again before the wait is over. -> how many, and seconds to wait before the
        next ones; 0: all are released, and later ones go on as they arrive."""
        self._late_s += _FADING * (min(now - self._due, _MOST_LATE_S) - self._late_s)
        gap = self._gap_s()
        if gap * self.held <= _LEAST_S:
            count, wait = self.held, 0.0
        else:  # More than one where they are closer than messages are, or when this call is late.
            count = min(max(int((now - self._due + _LEAST_S) / gap), 1), self.held)
            wait = max(count * gap - self._late_s, _LEAST_S)
        self.held -= count
        self._due = now + wait
        return count, wait

    def _gap_s(self) -> float:
        """Seconds from a token to the next one; 0 before two steps have arrived, and where no token is to be held."""
        means = self.means
        if not means.steps:
            return 0.0
        mean, step, drawn = means.span_s / means.tokens, means.span_s / means.steps, means.tokens / means.steps
        room = min(_MOST_HELD, self.hold_s / mean) * min(2 * (drawn - 1), 1.0)
        if room < 1:
            return 0.0
        if self.held > room:
            return mean * room / self.held
        return mean + _PART * (step - mean) * (1 - self.held / room)
