"""Gives short texts that come alone to one runner and all others to another one. Knows no jobs."""

from collections.abc import Sequence

from services.worker.runners.base import EncoderRunner, TextTokens, Vectors

SHORT = 64
"""Most tokens of a text that counts as short: from about 100 tokens on products take most of the time everywhere."""


class LoneTextRunner:
    """An `EncoderRunner` over two of the same model, both of which compute a batch when it is launched."""

    depth = 1

    def __init__(self, alone: EncoderRunner[Vectors], together: EncoderRunner[Vectors]) -> None:
        self.alone, self.together = alone, together
        self.most_tokens, self.width = together.most_tokens, together.width

    def launch(self, batch: Sequence[TextTokens], /) -> Vectors:
        """Compute a vector for each text. Raises ValueError for too many tokens."""
        is_lone = len(batch) == 1 and len(batch[0].token_ids) <= SHORT
        runner = self.alone if is_lone else self.together
        return runner.collect(runner.launch(batch))

    def collect(self, launched: Vectors, /) -> Vectors:
        """The vectors."""
        return launched
