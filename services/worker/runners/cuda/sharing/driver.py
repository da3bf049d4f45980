"""The calls of the CUDA driver that share memory between processes, through ctypes. Knows addresses, no tensors.

Torch could share its tensors, too, but leaves files in /dev/shm when a process is killed.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

from services.worker.kvcache.shared_memory import CannotShare

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_CONTEXT_OF_POINTER = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CannotShare("there is no CUDA driver") from error
    address, pointer = ctypes.c_uint64, ctypes.POINTER
    library.cuPointerGetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, address)
    library.cuCtxPushCurrent_v2.argtypes = (ctypes.c_void_p,)
    library.cuCtxPopCurrent_v2.argtypes = (pointer(ctypes.c_void_p),)
    library.cuMemGetAddressRange_v2.argtypes = (pointer(address), pointer(ctypes.c_size_t), address)
    library.cuIpcGetMemHandle.argtypes = (pointer(_Handle), address)
    library.cuIpcOpenMemHandle_v2.argtypes = (pointer(address), _Handle, ctypes.c_uint)
    library.cuIpcCloseMemHandle.argtypes = (address,)
    library.cuGetErrorName.argtypes = (ctypes.c_int, pointer(ctypes.c_char_p))
    return library


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises CannotShare with the names of function and error."""
    code = getattr(_library(), name)(*arguments)
    if code:
        error = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(error))
        raise CannotShare(f"{name}: {(error.value or str(code).encode()).decode()}")


@contextlib.contextmanager
def context_of(address: int) -> Iterator[None]:
    """Make the context that device memory at this address belongs to the current one of this thread. Raises CannotShare
    for memory that belongs to none, such as that of torch's expandable segments."""
    context = ctypes.c_void_p()
    _call("cuPointerGetAttribute", ctypes.byref(context), _CONTEXT_OF_POINTER, address)
    if not context.value:
        raise CannotShare("this memory belongs to no context: cudaMalloc has not allocated it")
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))


def allocation_of(address: int) -> tuple[int, int]:
    """Address and size in bytes of the allocation that this address is in. Needs a current context."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return base.value, size.value


def export(base: int) -> bytes:
    """The handle with which another process of this host opens the allocation at `base`. Needs a current context."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.reserved)


def open_handle(handle: bytes) -> int:
    """Map an allocation of another process, also one on another GPU. -> its address here. Needs a current context,
    in which the mapping stays until `close_handle`."""
    if len(handle) != HANDLE_BYTES:
        raise CannotShare("not a handle of the CUDA driver")
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def close_handle(address: int) -> None:
    """Unmap what `open_handle` has mapped. Needs the same current context."""
    _call("cuIpcCloseMemHandle", address)
