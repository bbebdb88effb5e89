"""Attention over quantized KV caches: Ferrokv's kernels on the tensors of PyTorch, or the arrays of numpy.

======================  ============================================================================================
:class:`Decode`         exact attention of the last tokens of sequences over paged keys and values
:class:`Int8`           a matrix to 8 bits and back
:class:`KvCache`        keys and values of a model's layers, as any scheme keeps them: ``int8-int4``, ``certified``, ...
:func:`schemes`         the names of the schemes
======================  ============================================================================================

Plans and caches take all their memory when they are made. A call puts launches into PyTorch's current stream, waits
for nothing, and can be captured by ``torch.cuda.graph``. On the CPU the same calls give the same bits, on tensors of
PyTorch or arrays of numpy. What is read may be of other libraries (JAX, CuPy, TVM, ...) that hand their tensors over by
DLPack, outside of captures: it is taken where it lies, by way of PyTorch, or of numpy on the CPU.

What is wrong with an argument is an :class:`ArgumentError`, a ``ValueError``, that names it, its value and the way out;
the other errors are :class:`Unavailable`, :class:`OutOfMemory`, :class:`StateError`, :class:`DeviceError` and :class:`InternalError`, all
of them :class:`Error`.
"""

from ._cache import KvCache
from ._decode import Decode
from ._int8 import Int8
from ._library import (ArgumentError, DeviceError, Error, InternalError, OutOfMemory, StateError, Unavailable,
                       device_name, schemes, version)

__all__ = ["ArgumentError", "Decode", "DeviceError", "Error", "Int8", "InternalError", "KvCache", "OutOfMemory", "StateError",
           "Unavailable", "device_name", "schemes", "version"]
__version__ = version()
