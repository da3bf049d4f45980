"""SHA-256 of a checkpoint's files, computed by threads while the checkpoint loads. Knows files, never what they mean.

A file is hashed whole, in pieces that threads share, and its digest is that of its pieces' digests. Digests of large
files are remembered by path, size, times and inode, so that the next start does not hash them again.
"""

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from services.worker.errors import CheckpointError

PIECE_BYTES = 64 << 20
_READ_BYTES = 4 << 20
_MOST_THREADS = 8
_LEAST_REMEMBERED = 64 << 20
"""Bytes of the smallest file that is remembered: hashing a smaller one takes less than 50 ms."""
_MOST_REMEMBERED = 4096
_Result = TypeVar("_Result")
_SETTLED_NS = 2_000_000_000
"""A file that changed less than this long ago is not remembered: its times could stay the same at the next change."""

Identity = tuple[int, int, int, int, int]
"""Size, times of the last change of content and of anything (ns), inode and device of a file."""


def cache_file() -> Path | None:
    """Where digests are remembered: in WEFT_HOME, else in the user's cache folder; None: there is neither."""
    try:
        if home := os.environ.get("WEFT_HOME"):
            return Path(home).absolute() / "digests.json"
        folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(folder).expanduser() / "weft" / "digests.json"
    except RuntimeError:  # The user has no home.
        return None


class DigestCache:
    """Digests of files, kept between starts. Without a readable file of its own it has none: files are hashed again."""

    def __init__(self, path: Path | None, least_bytes: int = _LEAST_REMEMBERED) -> None:
        self._path, self._least_bytes = path, least_bytes

    def find(self, file: Path, identity: Identity) -> bytes | None:
        """The digest of a file that has not changed since it was remembered."""
        entry = self._read().get(str(file.resolve()))
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] != list(identity):
            return None
        try:
            return bytes.fromhex(entry[1])
        except (TypeError, ValueError):
            return None

    def remember(self, digests: Iterable[tuple[Path, Identity, bytes]]) -> None:
        """Keep digests of files that are large and have not changed lately."""
        now = time.time_ns()
        new = {
            str(file.resolve()): [list(identity), digest.hex()]
            for file, identity, digest in digests
            if identity[0] >= self._least_bytes and now - max(identity[1:3]) > _SETTLED_NS
        }
        if not new or self._path is None:
            return
        # Another worker may have written since: what it remembered stays, and the oldest entries go.
        known = {name: entry for name, entry in self._read().items() if name not in new} | new
        kept = dict(list(known.items())[-_MOST_REMEMBERED:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".digests-")
            with os.fdopen(handle, "w") as file:
                json.dump(kept, file)
            Path(name).replace(self._path)
        except OSError:
            return

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(self._path.read_bytes()) if self._path else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


@dataclass(frozen=True, slots=True)
class _Hashed:
    """A file whose pieces are hashed, or were at an earlier start."""

    path: Path
    identity: Identity
    pieces: list["Future[bytes]"]
    known: bytes | None


class FileDigests:
    """Digests of some files. Threads begin to hash at once; leaving the context cancels what is not hashed yet."""

    def __init__(self, files: Iterable[Path], cache: DigestCache | None = None) -> None:
        """files: regular files. Raises CheckpointError if one cannot be looked at."""
        self._cache = DigestCache(cache_file()) if cache is None else cache
        self._local = threading.local()
        self.hashed_bytes = 0
        """Bytes that are read and hashed, not remembered."""
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digests")
        self._files = [self._start(path) for path in files]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def result(self) -> list[tuple[str, bytes]]:
        """Name and digest of each file, once all are hashed. Raises CheckpointError if one cannot be read or changed
        meanwhile."""
        found = [(each, each.known or self._join(each)) for each in self._files]
        for each, _ in found:
            if _identity(each.path) != each.identity:
                raise CheckpointError(f"{each.path.name} changed while it was loaded")
        self._cache.remember((each.path, each.identity, digest) for each, digest in found if each.known is None)
        return [(each.path.name, digest) for each, digest in found]

    def _start(self, path: Path) -> _Hashed:
        identity = _identity(path)
        known = self._cache.find(path, identity)
        size = identity[0]
        pieces = [] if known else [self._pool.submit(self._piece, path, at) for at in range(0, size, PIECE_BYTES)]
        self.hashed_bytes += 0 if known else size
        return _Hashed(path, identity, pieces, known)

    def _join(self, file: _Hashed) -> bytes:
        return hashlib.sha256(b"".join(_readable(file.path, piece.result) for piece in file.pieces)).digest()

    def _piece(self, path: Path, offset: int) -> bytes:
        """SHA-256 of up to PIECE_BYTES from `offset` on."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = bytearray(_READ_BYTES)
        buffer, sha, end = memoryview(self._local.buffer), hashlib.sha256(), offset + PIECE_BYTES
        with path.open("rb", buffering=0) as file:
            while offset < end:
                count = os.preadv(file.fileno(), [buffer[: end - offset]], offset)
                if not count:
                    break
                sha.update(buffer[:count])
                offset += count
        return sha.digest()


def _identity(path: Path) -> Identity:
    stat = _readable(path, path.stat)
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


def _readable(path: Path, work: Callable[[], _Result]) -> _Result:
    try:
        return work()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}") from None
