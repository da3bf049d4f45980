"""The forms that requests ask of their answers: read, written as grammars, and checked within limits."""
