"""How many tokens a step takes where prompts are in line beside running answers. Pure: counts in, a count out.

Each token more brings prompts nearer to their first token and holds every running answer up a little longer.
"""

from collections.abc import Sequence

TILE_ROWS = 64
"""Steps are filled up to a multiple of this: a part of a tile costs what a whole one costs."""
PROMPTS_PER_ANSWER = 7
"""With at least so many prompts in line for each answer that has begun a burst has come: these take all of a step, to
the last one."""
FEW_ANSWERS, FEW_PER_PROMPT = 6, 2
"""With at most so many answers, and so many for each prompt in line, prompts take all of a step, too: few answers wait,
and seldom."""
ANSWERS_PER_PROMPT = 4
"""With at most so many there is a backlog: these take `BACKLOG_TOKENS` or more, to the last one."""
BACKLOG_TOKENS = 2048
"""From here on the matrix products are as fast as they get."""
TOKENS_PER_ANSWER = 64
"""A step with a backlog has so many for each answer in it, so that reading the answers' keys is a small part of it."""
EVEN_CONTEXT = 16384
"""After so many tokens a token's attention takes as long as its matrix products (8B shape, one H200)."""


class TokenBudget:
    """The rule, and who was in line when there last was a burst or a backlog: all of these are computed as such."""

    def __init__(self, chunk_tokens: int, most: int) -> None:
        """chunk_tokens: of one prompt beside many answers, about; most: tokens of a step."""
        self.chunk_tokens, self.most = chunk_tokens, most
        self._burst = self._backlog = -1

    def step(self, line: Sequence[int], context: int, answers: int, begun: int) -> int:
        """Tokens of the next step, its answers' own included. `line`: the numbers of the prompts in line, as they
        arrived; `context`: what the first of them has behind; `begun`: answers of which a token is known.

        A burst: nearly all users wait for their first token, those of a step that still runs too, so prompts take all
        of a step. A backlog: steps as small as they are efficient, also for the last in line, who waited longest. Few
        prompts beside many answers: n * n * `chunk_tokens` for n prompts, so that answers flow beside one; less far
        into a long prompt, where each token attends to more, so that steps stay equally long.
        """
        if not line:
            return self.most
        newest, oldest = max(line), min(line)
        if len(line) >= PROMPTS_PER_ANSWER * begun:
            self._burst = newest
        if ANSWERS_PER_PROMPT * len(line) >= answers:
            self._backlog = newest
        if oldest <= self._burst or answers <= min(FEW_ANSWERS, FEW_PER_PROMPT * len(line)):
            return self.most
        backlog = min(self.most, max(BACKLOG_TOKENS, TOKENS_PER_ANSWER * answers))
        if oldest <= self._backlog:
            return backlog
        wanted = answers + self.chunk_tokens * len(line) ** 2 * EVEN_CONTEXT / (EVEN_CONTEXT + context)
        return min(backlog, -int(-wanted // TILE_ROWS) * TILE_ROWS)
