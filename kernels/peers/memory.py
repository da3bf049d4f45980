"""Device memory that other processes of this host can read and write: allocated here, opened there by a handle.

CUDA IPC through the driver's own library, which leaves no files as torch's way does when a process is killed. Memory
that a process opened stays valid until it closes it or ends, also when the process that allocated it has ended: it is
free only then. Knows bytes and addresses, no tensor.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_CONTEXT_OF_POINTER = 1


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
    """The handle by which another process opens memory that begins at `address`: of `allocate`, or an allocation of
    cudaMalloc. Raises PeerMemoryError."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.reserved)


def open_exported(handle: bytes) -> int:
    """Open another process's memory on the current device -> its address in this process. Raises PeerMemoryError."""
    if len(handle) != HANDLE_BYTES:
        raise PeerMemoryError("not a handle of the driver")
    address = ctypes.c_uint64()
    by_value = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def close_exported(address: int) -> None:
    """Close what `open_exported` has opened. Raises PeerMemoryError."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def allocation_of(address: int) -> int:
    """Where the allocation begins that this address is in. Raises PeerMemoryError."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value


@contextlib.contextmanager
def context_of(address: int) -> Iterator[None]:
    """Make the device that memory at this address belongs to the current one of this thread, in which memory is opened
    and closed. Raises PeerMemoryError for memory that belongs to none, such as torch's expandable segments."""
    context = ctypes.c_void_p()
    _call("cuPointerGetAttribute", ctypes.byref(context), ctypes.c_int(_CONTEXT_OF_POINTER), ctypes.c_uint64(address))
    if not context.value:
        raise PeerMemoryError("this memory belongs to no context: cudaMalloc has not allocated it")
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))


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
