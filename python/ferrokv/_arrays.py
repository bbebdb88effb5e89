"""Tensors of PyTorch and arrays of numpy: what they are, checked, and as the library takes them.

Neither is imported: who has a tensor has imported its library.
"""

import contextlib
import sys

from ._library import DTYPES, ArgumentError, Tensor, device


def torch():
    """PyTorch, if it was imported."""
    return sys.modules.get("torch")


def is_tensor(value):
    """Whether ``value`` is a tensor of PyTorch."""
    return torch() is not None and isinstance(value, torch().Tensor)


def is_array(value):
    """Whether ``value`` is an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def dtype_name(dtype):
    """``torch.float16``, ``numpy.float16`` or ``"float16"`` as the last."""
    name = getattr(dtype, "__name__", None) or str(dtype)
    return name.removeprefix("torch.")


def taken(name, value):
    """``value``, where it is of PyTorch or numpy. What another library has and hands over by DLPack is taken as a tensor
    of PyTorch if that was imported, which makes its stream wait for the other's, and else as an array of numpy: the same
    memory. For what is read alone: PyTorch does not tell what must not be written."""
    if is_tensor(value) or is_array(value) or not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        return value
    kind, numpy = type(value).__name__, sys.modules.get("numpy")
    if torch() is not None and torch().cuda.is_available() and torch().cuda.is_current_stream_capturing():
        raise ArgumentError(f"{name} is a {kind}, and the stream captures; take it ahead of the capture, by "
                            "torch.from_dlpack, and keep both")
    try:
        if torch() is not None:
            return torch().from_dlpack(value)
        # The CPU is DLPack's device of type 1.
        if numpy is not None and value.__dlpack_device__()[0] == 1:
            return numpy.from_dlpack(value)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is a {kind} that is not handed over: {error}; give a tensor of PyTorch or an array of "
                            "numpy") from error
    raise ArgumentError(f"{name} is a {kind}, which is taken by way of another library; import torch first, or numpy for the "
                        "CPU")


class Kept:
    """What calls were given that other libraries own: kept until the work that reads it is done."""

    def __init__(self):
        self._pending = []

    def until_done(self, where, given, taken):
        """Keeps those of ``taken`` that are not ``given``, and forgets what is done."""
        self._pending = [(event, values) for event, values in self._pending if not event.query()]
        values = [value for value, own in zip(taken, given) if value is not own]
        if values and where.kind == "cuda":
            event = torch().cuda.Event()
            event.record(torch().cuda.current_stream(where.index))
            self._pending.append((event, values))


class Where:
    """A device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or what PyTorch has for it."""

    def __init__(self, place):
        kind, _, index = str(place).partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
            raise ArgumentError(f"device is {place}; give 'cpu', 'cuda' or 'cuda:0'")
        if kind == "cuda" and not index:
            index = torch().cuda.current_device() if torch() is not None and torch().cuda.is_available() else 0
        self.kind, self.index = kind, int(index or 0) if kind == "cuda" else 0

    def __eq__(self, other):
        return (self.kind, self.index) == (other.kind, other.index)

    def __str__(self):
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def stream(self):
        """PyTorch's current stream on the device, as the library takes it."""
        if self.kind == "cpu":
            return None
        return self._torch().cuda.current_stream(self.index).cuda_stream

    def _torch(self):
        """PyTorch, without which there are no tensors of a GPU."""
        if torch() is None:
            raise ArgumentError(f"device is {self}, and PyTorch, whose tensors and streams it takes, was not imported; import "
                                "torch first, or give 'cpu'")
        return torch()

    def chosen(self):
        """PyTorch's current device stays what it is: the library sets its own, and leaves it, in the thread."""
        if self.kind == "cpu" or torch() is None or not torch().cuda.is_available():
            return contextlib.nullcontext()
        # Before PyTorch has a device, the library's would become its first.
        torch().cuda.init()
        if torch().cuda.current_device() == self.index:
            return contextlib.nullcontext()
        return torch().cuda.device(self.index)

    def handle(self):
        """The library's handle, which is opened once."""
        return device(self.kind, self.index)

    def empty(self, shape, dtype, like=None):
        """New memory: of PyTorch, or of numpy where ``like`` is of numpy or PyTorch is not there."""
        if is_array(like) or (torch() is None and self.kind == "cpu"):
            import numpy
            # More than what is asked for, to begin at a multiple of 64 bytes.
            size = numpy.dtype(dtype).itemsize
            count = 1
            for extent in shape:
                count *= extent
            memory = numpy.empty(count * size + 64, numpy.uint8)
            start = -memory.ctypes.data % 64
            return memory[start:start + count * size].view(dtype).reshape(shape)
        # A plan's own tensors are written to outside of an inference mode that it was made in.
        with self._torch().inference_mode(False):
            return torch().empty(shape, dtype=getattr(torch(), dtype), device=str(self))


def where_is(name, value):
    """The device that a tensor or an array is on."""
    if is_tensor(value):
        return Where(value.device)
    if is_array(value):
        return Where("cpu")
    raise ArgumentError(f"{name} is a {type(value).__name__}; give a tensor of PyTorch or an array of numpy")


def check(name, value, where, dtype, shape):
    """Raises unless ``value`` is on ``where``, of ``dtype``, and of ``shape``, in which None is any extent."""
    found = where_is(name, value)
    if found != where:
        raise ArgumentError(f"{name} is on {found}, and the plan is for {where}; use {name}.to('{where}')")
    if dtype_name(value.dtype) != dtype:
        raise ArgumentError(f"{name} is of {dtype_name(value.dtype)}, and {dtype} is needed; convert it")
    if len(value.shape) != len(shape) or any(want not in (None, have) for want, have in zip(shape, value.shape)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ArgumentError(f"{name} has shape {list(value.shape)}, and [{wanted}] is needed; give it in that shape, or "
                            "make the plan for other extents")
    if is_tensor(value) and value.requires_grad and torch().is_grad_enabled():
        raise ArgumentError(f"{name} requires a gradient, and there is none through this call; use torch.no_grad() or "
                            f"{name}.detach()")
    return value


def contiguous(name, value):
    """Raises unless the elements lie one after another."""
    if not (value.is_contiguous() if is_tensor(value) else value.flags.c_contiguous):
        strides = value.stride() if is_tensor(value) else value.strides
        raise ArgumentError(f"{name} is not contiguous (shape {list(value.shape)}, strides {list(strides)}); use "
                            f"{name}.contiguous(), or numpy.ascontiguousarray")
    return value


def writable(name, value):
    """Raises for an array that must not be written."""
    if is_array(value) and not value.flags.writeable:
        raise ArgumentError(f"{name} is read-only; give an array that may be written")
    return value


def address(value):
    """Where the first element is."""
    return value.data_ptr() if is_tensor(value) else value.ctypes.data


def count(value):
    """How many elements there are."""
    return value.numel() if is_tensor(value) else value.size


def tensor(value):
    """``value`` as the library takes it."""
    return Tensor(address(value), count(value), DTYPES[dtype_name(value.dtype)], 0)


def extent(name, value):
    """A number that the library takes in 32 bits."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() < 1 << 32:
        raise ArgumentError(f"{name} is {value!r}; give a whole number from 0 to 2^32 - 1")
    return value.__index__()
