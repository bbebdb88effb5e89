"""A matrix to 8 bits and back."""

from ctypes import byref

from . import _arrays as arrays
from ._library import DTYPES, ArgumentError, Handle, checked, library


class Int8:
    """Quantizes matrices [tokens, channels] of float32, float16 or bfloat16 to int8 with a float32 scale for each
    channel (``variant="wide"``), or for each channel of 16 tokens (``"fused"``).

    A value moves by half a scale at most, but for rounding. NaN has code 0, an infinity that of the largest number.

    >>> int8 = ferrokv.Int8(tokens=4096, channels=1024, device="cuda")
    >>> codes, scales = int8.quantize(keys)
    >>> back = int8.dequantize(codes, scales)
    """

    def __init__(self, *, tokens, channels, dtype="float16", variant="wide", device="cuda"):
        """All scratch is allocated here."""
        self.dtype, self.where = arrays.dtype_name(dtype), arrays.Where(device)
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise ArgumentError(f"dtype is {self.dtype}; give float32, float16 or bfloat16")
        self.shape = [arrays.extent("tokens", tokens), arrays.extent("channels", channels)]
        with self.where.chosen():
            self._handle = Handle(library.ferrokv_int8_create, library.ferrokv_int8_destroy, self.where.handle(),
                                  DTYPES[self.dtype], *self.shape, str(variant).encode())
        self._kept = arrays.Kept()
        rows = library.ferrokv_int8_scales(self._handle.value) // channels
        self.scales_shape = [channels] if variant != "fused" else [rows, channels]

    def _given(self, name, value, dtype, shape, like):
        if value is None:
            return self.where.empty(shape, dtype, like)
        return arrays.contiguous(name, arrays.writable(name, arrays.check(name, value, self.where, dtype, shape)))

    def quantize(self, matrix, *, codes=None, scales=None):
        """``(codes, scales)`` of ``matrix``: int8 [tokens, channels], and float32 [channels], or [tokens / 16, channels]
        for ``"fused"``. They go to ``codes`` and ``scales`` if these are given."""
        given, matrix = matrix, arrays.taken("matrix", matrix)
        arrays.contiguous("matrix", arrays.check("matrix", matrix, self.where, self.dtype, self.shape))
        codes = self._given("codes", codes, "int8", self.shape, matrix)
        scales = self._given("scales", scales, "float32", self.scales_shape, matrix)
        with self.where.chosen():
            checked(library.ferrokv_int8_quantize(self._handle.value, self.where.stream(),
                                                  *(byref(arrays.tensor(x)) for x in (matrix, codes, scales))))
            self._kept.until_done(self.where, [given], [matrix])
        return codes, scales

    def dequantize(self, codes, scales, *, out=None):
        """The matrix that ``codes`` and ``scales`` stand for, to ``out`` if it is given."""
        given = codes, scales
        codes, scales = arrays.taken("codes", codes), arrays.taken("scales", scales)
        arrays.contiguous("codes", arrays.check("codes", codes, self.where, "int8", self.shape))
        arrays.contiguous("scales", arrays.check("scales", scales, self.where, "float32", self.scales_shape))
        out = self._given("out", out, self.dtype, self.shape, codes)
        with self.where.chosen():
            checked(library.ferrokv_int8_dequantize(self._handle.value, self.where.stream(),
                                                    *(byref(arrays.tensor(x)) for x in (codes, scales, out))))
            self._kept.until_done(self.where, given, (codes, scales))
        return out
