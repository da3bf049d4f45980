"""What keeps a model from being compressed."""


class CompressError(Exception):
    """The message is one line for people."""
