"""How many tokens a step takes where prompts wait beside running answers. Pure: counts in, a count out.

A larger step computes prompts sooner and makes every running answer wait longer for its next token.
"""

from collections.abc import Sequence

TILE_ROWS = 64
"""Steps are filled up to a multiple of this: a part of a tile costs as much as a whole one."""
PROMPTS_PER_ANSWER = 7
"""Waiting prompts for each answer that has begun from which they are a burst: until the last of them is computed,
prompts take the whole step."""
FEW_ANSWERS, FEW_PER_PROMPT = 6, 2
"""Most answers, in all and for each waiting prompt, beside which prompts also take the whole step: few answers are
delayed, and seldom."""
ANSWERS_PER_PROMPT = 4
"""Most answers for each waiting prompt that make the prompts a backlog: until its last prompt is computed, steps have
at least `BACKLOG_TOKENS` tokens."""
BACKLOG_TOKENS = 2048
"""Larger steps do not make the matrix products faster."""
TOKENS_PER_ANSWER = 64
"""Tokens of a backlog's step for each answer in it, so that reading the answers' keys is a small part."""
EVEN_CONTEXT = 16384
"""Tokens before a token, from which its attention takes as long as its matrix products (8B shape, one H200)."""


class TokenBudget:
    """The rule. It remembers the newest prompt of the last burst and of the last backlog: all prompts up to it are
    computed as part of these."""

    def __init__(self, chunk_tokens: int, most: int) -> None:
        """chunk_tokens: prompt tokens of a step with one prompt beside many answers, about; most: tokens of a step."""
        self.chunk_tokens, self.most = chunk_tokens, most
        self._burst = self._backlog = -1

    def step(self, waiting: Sequence[int], context: int, answers: int, begun: int) -> int:
        """Tokens of the next step, including one for each answer.

        waiting: arrival numbers of the prompts that are not computed; context: tokens of the first of them that are
        computed; answers: rows of answers in the step; begun: answers with at least one known token.

        A burst: nearly all users wait for a first token, including those of a step that still runs, so prompts take the
        whole step. A backlog: the smallest steps that are efficient, also for the last prompt, which has waited
        longest. Few prompts beside many answers: `n * n * chunk_tokens` for n prompts, so that answers flow beside one
        prompt; less far into a long prompt, where each token attends to more, so that steps take equally long.
        """
        if not waiting:
            return self.most
        newest, oldest = max(waiting), min(waiting)
        if len(waiting) >= PROMPTS_PER_ANSWER * begun:
            self._burst = newest
        if ANSWERS_PER_PROMPT * len(waiting) >= answers:
            self._backlog = newest
        if oldest <= self._burst or answers <= min(FEW_ANSWERS, FEW_PER_PROMPT * len(waiting)):
            return self.most
        backlog = min(self.most, max(BACKLOG_TOKENS, TOKENS_PER_ANSWER * answers))
        if oldest <= self._backlog:
            return backlog
        wanted = answers + self.chunk_tokens * len(waiting) ** 2 * EVEN_CONTEXT / (EVEN_CONTEXT + context)
        return min(backlog, -int(-wanted // TILE_ROWS) * TILE_ROWS)
