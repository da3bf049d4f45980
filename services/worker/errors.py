"""Errors that a worker reports in one line. Knows no checkpoint."""

_LONGEST_MESSAGE = 400


class CheckpointError(Exception):
    """A checkpoint cannot be served; the message is one line with the reason."""

    def __init__(self, message: str) -> None:
        """What a checkpoint calls things may be of any length and hold line breaks: the line has neither."""
        line = "".join(each if each.isprintable() else " " for each in message[: _LONGEST_MESSAGE + 1])
        super().__init__(line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}...")


class AnotherRankFailed(CheckpointError):
    """Another rank of the grid could not load its part; it reports why."""
