"""Fuzzes the pure decoders: frames of the cache, whose damage must never pass, and readers of requests and files.

Guided by coverage where atheris is installed (`python -m tests.fuzz.decoders`), else by random damage.
"""

import inspect
import random
import sys

from protos import mesh_pb2
from services.errors import WeftError
from services.gateway.text import longest_token
from services.gateway.text.longest_token import most_characters
from services.scheduler import codec
from services.security import frames
from services.security.frames import FrameError, Kind
from services.worker.errors import CheckpointError
from services.worker.loader import files
from services.worker.loader.files import parse_json
from tests.fuzz.messages import damaged

_SECRET = b"s" * 32


def fuzz_decoders(cases: int, seed: int) -> int:
    """Damages frames of results and of KV blocks `cases` times: asserts that none passes. -> the number of cases."""
    draw = random.Random(seed)
    done = 0
    while done < cases:
        kind = draw.choice(list(Kind))
        secret = draw.choice((b"", _SECRET))
        key, payload = draw.randbytes(32), draw.randbytes(draw.choice((0, 1, 40, 400)))
        frame = frames.seal(kind, key, payload, secret)
        assert frames.unseal(kind, key, frame, secret) == payload
        other = frames.seal(kind, key, draw.randbytes(len(payload) or 1), b"another secret" if secret else b"x")
        for _ in range(20):
            done += 1
            wrong = draw.choice((damaged(draw, frame), other, frame[:-1], frame + b"x"))
            if wrong == frame:
                continue
            try:
                passed = frames.unseal(kind, key, wrong, secret)
            except FrameError:
                continue
            raise AssertionError(f"a damaged frame passed: {wrong.hex()} for {passed.hex()}")
        # An intact frame under another key, of another kind or for another secret does not pass either.
        for arguments in (
            (kind, draw.randbytes(32), secret),
            (Kind(kind % len(Kind) + 1), key, secret),
            (kind, key, b"y"),
        ):
            done += 1
            try:
                frames.unseal(arguments[0], arguments[1], frame, arguments[2])
            except FrameError:
                continue
            raise AssertionError("a frame passed for another key, kind or secret")
    return done


def decode(data: bytes) -> None:
    """Gives bytes to every decoder. Raises what is no refusal."""
    for read in (
        lambda: frames.unseal(Kind.RESULT, b"k", data),
        lambda: parse_json(data, "config.json"),
        lambda: most_characters(data.decode(errors="replace")),
        lambda: codec.submit_from(mesh_pb2.Submit.FromString(data)),
        lambda: codec.hello_from(mesh_pb2.WorkerHello.FromString(data)),
        lambda: codec.report_from(mesh_pb2.WorkerReport.FromString(data)),
    ):
        try:
            read()
        except (FrameError, CheckpointError, WeftError):
            continue
        except Exception as error:
            if type(error).__name__ != "DecodeError":
                raise


def main() -> None:
    """Runs atheris with its own arguments: -runs=100000 -seed=1."""
    import atheris

    for module in (frames, codec, files, longest_token):
        for function in filter(inspect.isfunction, vars(module).values()):
            atheris.instrument_func(function)
    atheris.Setup(sys.argv, decode)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
