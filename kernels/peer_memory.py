"""Device memory that other processes of this host can read and write: allocated here, opened there by a handle.

CUDA IPC through the driver's own library. Memory that a process opened stays valid until the process that allocated it
ends, and nothing of it is left then. Knows bytes and addresses, no tensor.
"""

import ctypes
from functools import cache
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class PeerMemoryError(Exception):
    """The driver refused: no peer access between two devices, or no memory."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def allocate(size: int) -> int:
    """Allocate `size` bytes of zeros on the current device -> their address. They are freed when the process ends.
    Raises PeerMemoryError."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    _call("cuCtxSynchronize")
    return address.value


def export(address: int) -> bytes:
    """The handle by which another process opens memory that `allocate` returned. Raises PeerMemoryError."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.reserved)


def open_exported(handle: bytes) -> int:
    """Open another process's memory on the current device -> its address in this process. Raises PeerMemoryError."""
    assert len(handle) == HANDLE_BYTES, len(handle)
    address = ctypes.c_uint64()
    by_value = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerMemoryError(str(error)) from None


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise PeerMemoryError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
