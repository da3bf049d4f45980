"""The error of the package: why a model cannot be compressed."""


class CompressError(Exception):
    """A one-line message; line breaks in names from a checkpoint are removed."""

    def __init__(self, message: str) -> None:
        """Replace line breaks and other control characters by spaces."""
        super().__init__("".join(each if each.isprintable() else " " for each in message))
