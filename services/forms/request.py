"""Reads the form that a request asks of its answer. Knows its bounds, no compiler and no tokenizer."""

import json

from protos import inference_pb2 as api
from services.errors import invalid
from services.forms.form import Form

MOST_BYTES = 1 << 17
MOST_CHOICES = 1024
FIELD = "sampling.structured"


def check_size(structured: api.Structured, field: str) -> None:
    """Raises WeftError, which names the field of the request, for a form that is too large."""
    if structured.ByteSize() > MOST_BYTES:
        raise invalid(field, f"at most {MOST_BYTES >> 10} KiB")


def form_of(structured: api.Structured) -> Form:
    """The form of a request. Checks what can be checked without compiling it. Raises WeftError."""
    field = structured.WhichOneof("form")
    if field is None:
        raise invalid(FIELD, "one of json_schema, json_object, regex, choice or grammar is required")
    check_size(structured, f"{FIELD}.{field}")
    if field == "json_object":
        if not structured.json_object:
            raise invalid(f"{FIELD}.json_object", "must be true")
        return Form(field, '{"type":"object"}')
    if field == "choice":
        texts = list(structured.choice.texts)
        if not 1 <= len(texts) <= MOST_CHOICES or len(set(texts)) < len(texts) or "" in texts:
            raise invalid(f"{FIELD}.choice", f"1 to {MOST_CHOICES} different texts, none of them empty")
        return Form(field, json.dumps(texts))
    text: str = getattr(structured, field)
    if not text:
        raise invalid(f"{FIELD}.{field}", "empty")
    return Form(field, text)
