"""The shared library: where it is, what its functions take, and its statuses as exceptions.

By ctypes: the interface is some thirty plain functions, and a package without a compiled module of its own serves every
version of Python.
"""

import contextlib
import ctypes
import os
import sys
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

ABI = 1


class Error(Exception):
    """What the library reports."""


class Unavailable(Error, RuntimeError):
    """There is no such device, no driver, or no kernels for it."""


class OutOfMemory(Error, MemoryError):
    """The memory is not there."""


class StateError(Error, RuntimeError):
    """A call that does not fit what was called before it."""


class DeviceError(Error, RuntimeError):
    """The device failed. A GPU may say so at a later call than the one that caused it."""


class InternalError(Error, RuntimeError):
    """A mistake of the library."""


class ArgumentError(Error, ValueError):
    """An argument that is wrong."""


STATUSES = {1: ArgumentError, 2: Unavailable, 3: OutOfMemory, 4: StateError, 5: DeviceError, 6: InternalError}
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int32": 4}


class Tensor(ctypes.Structure):
    """``ferrokv_tensor``."""

    _fields_ = [("data", c_void_p), ("elements", c_uint64), ("dtype", c_uint32), ("reserved", c_uint32)]


class DenseProblem(ctypes.Structure):
    """``ferrokv_dense_problem``."""

    _fields_ = [(name, c_uint32) for name in ("sequences", "q_heads", "kv_heads", "head_dim", "query_tokens",
                                              "max_tokens")]


class DenseTensors(ctypes.Structure):
    """``ferrokv_dense_tensors``."""

    _fields_ = [(name, Tensor) for name in ("queries", "keys", "values", "table", "lengths", "output", "lse")]


class CacheExtents(ctypes.Structure):
    """``ferrokv_cache_extents``."""

    _fields_ = [(name, c_uint32) for name in ("layers", "q_heads", "kv_heads", "head_dim", "max_tokens", "sequences")]


HANDLE, OUT, TENSOR = c_void_p, POINTER(c_void_p), POINTER(Tensor)

# Result and arguments of each function, in the order of ferrokv.h.
FUNCTIONS = {
    "ferrokv_abi": (c_uint32, []),
    "ferrokv_version": (c_char_p, []),
    "ferrokv_schemes": (c_char_p, []),
    "ferrokv_last_error": (c_char_p, []),
    "ferrokv_device_open_cpu": (c_int, [OUT]),
    "ferrokv_device_open_cuda": (c_int, [c_uint32, OUT]),
    "ferrokv_device_name": (c_char_p, [HANDLE]),
    "ferrokv_device_close": (None, [HANDLE]),
    "ferrokv_tensor_from_dlpack": (c_int, [HANDLE, c_void_p, TENSOR]),
    "ferrokv_dense_create": (c_int, [HANDLE, c_uint32, POINTER(DenseProblem), OUT]),
    "ferrokv_dense_run": (c_int, [HANDLE, c_void_p, POINTER(DenseTensors)]),
    "ferrokv_dense_splits": (c_uint32, [HANDLE]),
    "ferrokv_dense_destroy": (None, [HANDLE]),
    "ferrokv_int8_create": (c_int, [HANDLE, c_uint32, c_uint64, c_uint64, c_char_p, OUT]),
    "ferrokv_int8_scales": (c_uint64, [HANDLE]),
    "ferrokv_int8_quantize": (c_int, [HANDLE, c_void_p, TENSOR, TENSOR, TENSOR]),
    "ferrokv_int8_dequantize": (c_int, [HANDLE, c_void_p, TENSOR, TENSOR, TENSOR]),
    "ferrokv_int8_destroy": (None, [HANDLE]),
    "ferrokv_cache_create": (c_int, [HANDLE, c_char_p, POINTER(CacheExtents), OUT]),
    "ferrokv_cache_join": (c_int, [HANDLE, c_void_p, POINTER(c_uint32)]),
    "ferrokv_cache_fork": (c_int, [HANDLE, c_void_p, c_uint32, POINTER(c_uint32)]),
    "ferrokv_cache_leave": (c_int, [HANDLE, c_void_p, c_uint32]),
    "ferrokv_cache_begin_prompt": (c_int, [HANDLE, c_void_p, c_uint32, c_uint32]),
    "ferrokv_cache_begin_step": (c_int, [HANDLE, c_void_p]),
    "ferrokv_cache_append": (c_int, [HANDLE, c_void_p, c_uint32, TENSOR, TENSOR, TENSOR]),
    "ferrokv_cache_attend": (c_int, [HANDLE, c_void_p, c_uint32, TENSOR, TENSOR]),
    "ferrokv_cache_commit": (c_int, [HANDLE]),
    "ferrokv_cache_check": (c_int, [HANDLE, c_void_p]),
    "ferrokv_cache_tokens": (c_int64, [HANDLE, c_uint32]),
    "ferrokv_cache_bytes": (c_uint64, [HANDLE]),
    "ferrokv_cache_period": (c_uint32, [HANDLE]),
    "ferrokv_cache_destroy": (None, [HANDLE]),
}


def _load():
    # The variable is for who builds the library: a wheel holds it beside this file.
    named = os.environ.get("FERROKV_LIBRARY")
    path = Path(named) if named else Path(__file__).with_name("libferrokv_c.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"the shared library of ferrokv cannot be loaded: {error}; install a wheel, or build it "
                          "(cargo build --release -p ferrokv-capi) and name it in FERROKV_LIBRARY") from error
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.ferrokv_abi() != ABI:
        raise ImportError(f"{path} has interface {library.ferrokv_abi()}, and this package needs {ABI}; take both from "
                          "one version")
    return library


library = _load()


def checked(status):
    """Raises what ``status`` stands for, if it is an error."""
    if status:
        message = library.ferrokv_last_error().decode("utf-8", "replace")
        raise STATUSES.get(status, Error)(message)


class Handle:
    """Something that the library made; ended with the object."""

    def __init__(self, create, destroy, *arguments):
        self._destroy, self.value = destroy, None
        out = c_void_p()
        checked(create(*arguments, byref(out)))
        self.value = out.value

    def __del__(self):
        if getattr(self, "value", None):
            with _device_kept():
                self._destroy(self.value)


def _device_kept():
    """PyTorch's current device stays what it is while the library ends something on its own."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    return torch.cuda.device(torch.cuda.current_device())


_devices = {}
_lock = threading.Lock()


def device(kind, index):
    """The handle of a device, opened once and kept."""
    with _lock:
        if (kind, index) not in _devices:
            close = library.ferrokv_device_close
            if kind == "cpu":
                _devices[kind, index] = Handle(library.ferrokv_device_open_cpu, close)
            else:
                _devices[kind, index] = Handle(library.ferrokv_device_open_cuda, close, index)
        return _devices[kind, index].value


def version():
    """The library's version."""
    return library.ferrokv_version().decode()


def schemes():
    """The names of the schemes that a :class:`KvCache` can be made by."""
    return library.ferrokv_schemes().decode().split()


def device_name(where="cpu"):
    """What a device is called: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. Raises :class:`Unavailable` if it is not there."""
    from ._arrays import Where
    where = Where(where)
    with where.chosen():
        return library.ferrokv_device_name(where.handle()).decode()
