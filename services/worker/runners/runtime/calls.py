"""Divides the ragged rows of a step into calls of a runtime, whose rows have equal lengths. Knows lengths, no tensor.

Rows of one token are computed together, padded to the longest past among them; one more call reads all weights once
more, which costs as much as `padding_tokens` places of padding. Longer rows are computed one by one.
"""

from collections.abc import Sequence


def divide(lengths: Sequence[int], contexts: Sequence[int], padding_tokens: int) -> list[list[int]]:
    """The rows of each call. lengths, contexts [R]: tokens of each row, and of its sequence up to its end.

    No call has more than `padding_tokens` places of padding, and the order within a call is the same in the next step.
    """
    singles = sorted((row for row, length in enumerate(lengths) if length == 1), key=lambda row: -contexts[row])
    calls: list[list[int]] = []
    padding = 0
    for row in singles:
        padding = padding + contexts[calls[-1][0]] - contexts[row] if calls else padding_tokens + 1
        if padding > padding_tokens:
            calls.append([])
            padding = 0
        calls[-1].append(row)
    return calls + [[row] for row, length in enumerate(lengths) if length > 1]
