"""Lines of OpenAI's batch format: requests of an input file, answers for an output file. Knows no HTTP and no tasks."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MOST_BYTES = 4 << 20
"""Longest line."""


class InputError(Exception):
    """The input file is not in the batch format. The message names the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """A line of the input."""

    custom_id: str
    url: str
    body: Json

    @property
    def request_id(self) -> str:
        """The same for the same line: a request that is sent again joins its own answer, or repeats its draws."""
        digest = hashlib.sha256(json.dumps([self.custom_id, self.url, self.body], sort_keys=True).encode())
        return f"batch-{digest.hexdigest()[:32]}"


def read(path: Path) -> Iterator[Request]:
    """The requests of a file; empty lines are skipped. Raises InputError and OSError."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_BYTES + 1):
            number += 1
            if len(line) > MOST_BYTES:
                raise InputError(f"line {number} is longer than {MOST_BYTES >> 20} MiB")
            if line.strip():
                yield _parsed(number, line)


def _parsed(number: int, line: bytes) -> Request:
    try:
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise InputError(f"line {number} is not JSON of valid Unicode and finite numbers") from None
    if not isinstance(fields, dict):
        raise InputError(f"line {number} is not a JSON object")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise InputError(f"line {number} has no custom_id")
    if fields.get("method", "POST") != "POST":
        raise InputError(f"line {number}: the method must be POST")
    if url not in URLS:
        raise InputError(f"line {number}: the url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise InputError(f"line {number} has no body")
    if unknown := sorted(fields.keys() - {"custom_id", "method", "url", "body"}):
        raise InputError(f"line {number}: there is no field {unknown[0]!r}")
    return Request(custom_id, str(url), body)


def check(path: Path) -> dict[str, str]:
    """Reads a whole file. -> the request id of each custom id. Raises InputError and OSError."""
    found: dict[str, str] = {}
    for request in read(path):
        if request.custom_id in found:
            raise InputError(f"the custom_id {request.custom_id!r} occurs twice")
        found[request.custom_id] = request.request_id
    return found


def answered(request: Request, status: int, body: Any) -> Json:
    """The output line of a request that the mesh has answered, well or with an error."""
    return {
        "id": f"batch_req_{request.request_id.removeprefix('batch-')}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": request.request_id, "body": body},
        "error": None,
    }


def refused(request: Request, code: str, message: str) -> Json:
    """The output line of a request that was not sent."""
    return {
        "id": f"batch_req_{request.request_id.removeprefix('batch-')}",
        "custom_id": request.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
