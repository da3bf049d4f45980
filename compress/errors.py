"""What keeps a model from being compressed."""


class CompressError(Exception):
    """The message is one line for people, whatever a checkpoint calls things."""

    def __init__(self, message: str) -> None:
        """Line breaks and the like become spaces."""
        super().__init__("".join(each if each.isprintable() else " " for each in message))
