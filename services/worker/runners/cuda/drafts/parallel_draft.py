"""A parallel draft model beside the served one, on a GPU: it makes all guesses of a step in one pass.

A row of a pass has the tokens that the draft lacks, up to the last known one, and a mask token for each guess but the
first (PARD, An et al., arXiv:2504.18583). Keys and values of masks are overwritten by those of the tokens that come in
their place, so right guesses are computed once more. Its passes for up to `depth` guesses have room for the depth + 1
tokens that a step draws at most, and for depth - 1 masks; after steps without guesses, larger ones have room for what
rows lack. Behind a step, each row gets all guesses for which the pass has room: the next step may want more of it.
"""

from kernels import step_io
from kernels.drafts import parallel_draft
from kernels.slot_edits import HEADER
from services.worker.runners.cuda.drafts.draft_model import CheckedStep, GpuDraftModel, Guessed
from services.worker.runners.cuda.graphs import GUESSES, MOST_GUESS_TOKENS
from services.worker.runners.cuda.step_words import put
from services.worker.runners.cuda.upload import NO_EDITS


class GpuParallelDraft(GpuDraftModel):
    """Guesses for rows of a `GpuRunner`, of which each pass has all that its rows want."""

    lengths = tuple(2 * count for count in GUESSES)
    most_tokens = 2 * MOST_GUESS_TOKENS
    redoes_guesses = True

    @property
    def _mask_token(self) -> int:
        token = self.model.config.mask_token
        assert token is not None, "no parallel draft model"
        return token

    def _pass_lengths(self) -> set[int]:
        return {*self.lengths}

    def _warm_up_follow(self) -> None:
        words, last, guesses = self._upload.words, self.forward.last_token, self._guesses
        parallel_draft.begin(words, (1, 1, 1), 0, guesses, last, guesses, words, 1, 1, 0, self._mask_token)

    def _most_known(self, rows: int, guesses: int) -> int:
        longest = max((longest for held, longest in self._graphs if held >= rows), default=0)
        return max(longest + 1 - guesses, guesses + 1)

    def _guess(self, found: list[Guessed]) -> None:
        longest = max(max(2 * row.wanted, len(row.ids) + row.wanted - 1) for row in found)
        rows, longest = self._held(len(found), longest)
        self._send(found, rows, longest)
        self._run(rows, longest)

    def _free_guesses(self, rows: int, guesses: int) -> int:
        return self._held(rows, 2 * guesses)[1] // 2

    def _guess_behind(self, checked: CheckedStep, count: int, guesses: int, all_of: int) -> bool:
        rows, longest = self._held(count, 2 * guesses)
        if (rows, longest) not in self._graphs:
            return False
        parallel_draft.begin(
            checked.words, checked.sizes, count, checked.kept, checked.last_token, self._guesses, self._upload.words,
            rows, longest // 2, all_of, self._mask_token,
        )  # fmt: skip
        self._run(rows, longest)
        return True

    def _pass(self, rows: int, longest: int) -> None:
        """All guesses of each row: as many as half of the tokens that it has room for."""
        depth = longest // 2
        drawn, slots, _ = self.forward.guess(self._upload.words, rows, longest, self._first_features, depth)
        parallel_draft.store(drawn, slots, self._guesses, depth)

    def _send(self, found: list[Guessed], rows: int, longest: int) -> None:
        """Send the words of a pass, padded to `rows` rows."""
        number, buffer = self._upload.begin()
        words, depth = self._upload.staging_buffers[buffer], longest // 2
        places = step_io.places_of(rows * longest, rows, rows * depth)
        ids, starts, contexts, owners, samples, end = (HEADER + place for place in places)
        masked = [[*row.ids, *[self._mask_token] * (row.wanted - 1)] for row in found]
        begins = [sum(map(len, masked[:row])) for row in range(len(found) + 1)]
        none = [0] * (rows - len(found))
        put(words, ids, [token for row in masked for token in row])
        put(words, starts, [*begins, *[begins[-1] for _ in none]])
        put(words, contexts, [*[row.end + row.wanted - 1 for row in found], *none])
        put(words, owners, [row.slot for row in found])
        put(words, samples, [*_samples(found, depth), *[-1] * (depth * len(none))])
        self._upload.send(buffer, end, NO_EDITS)
        self._upload.landed(number)


def _samples(found: list[Guessed], depth: int) -> list[int]:
    """`depth` samples of each row, as `kernels.drafts.parallel_draft` defines them."""
    place = step_io.GUESS_PLACE.value
    return [
        number + place * (row.wanted - 1 - guess) if guess < row.wanted else -1
        for number, row in enumerate(found)
        for guess in range(depth)
    ]
