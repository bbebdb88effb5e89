"""Tensors of libraries that are not known, handed over by DLPack: the results are those of the same memory."""

import re
import unittest
from unittest import mock

from common import Handed, Numpy, Paged, ferrokv, libraries, numpy
from ferrokv import _arrays


class Copied(Handed):
    """One that hands over a copy each time."""

    def __dlpack__(self, **options):
        value = self._value
        return (value.clone() if hasattr(value, "clone") else value.copy()).__dlpack__(**options)


class TestHandedOver(unittest.TestCase):
    """What holds for a library of arrays holds for each."""

    def test_attention(self):
        for lib in libraries():
            paged = Paged(lib, [20, 30], 2, 64, 32)
            queries = lib.normal(9, (2, 4, 64))
            decode = ferrokv.Decode(sequences=2, q_heads=4, kv_heads=2, head_dim=64, max_tokens=32, device=lib.device)
            want = decode(queries, paged.pages, paged.table, paged.tokens)
            for pages in (Handed(paged.pages), (Handed(paged.keys), Handed(paged.values))):
                with self.subTest(lib=lib.name, pages=type(pages).__name__):
                    rest = (Handed(queries), pages, Handed(paged.table), Handed(paged.tokens))
                    for have, same in zip(decode(*rest), want):
                        self.assertEqual(lib.bits(have), lib.bits(same))
                    # A library may hand over a copy, which nobody but the call has.
                    copies = [Copied(x._value) for x in rest if isinstance(x, Handed)]
                    if len(copies) == 4:
                        self.assertEqual([lib.bits(x) for x in decode(*copies)], [lib.bits(x) for x in want])

    def test_codes(self):
        for lib in libraries():
            int8 = ferrokv.Int8(tokens=32, channels=8, device=lib.device)
            matrix = lib.normal(3, (32, 8))
            codes, scales = int8.quantize(Handed(matrix))
            self.assertEqual([lib.bits(x) for x in (codes, scales)], [lib.bits(x) for x in int8.quantize(matrix)])
            back = int8.dequantize(Handed(codes), Handed(scales))
            self.assertEqual(lib.bits(back), lib.bits(int8.dequantize(codes, scales)))
            # Results go to what can be seen to be writable.
            with self.assertRaisesRegex(ValueError, "out is a Handed; give a tensor of PyTorch or an array of numpy"):
                int8.dequantize(codes, scales, out=Handed(back))

    def test_a_cache(self):
        for lib in libraries():
            rows = [lib.normal(seed, (5, heads, 64)) for seed, heads in ((1, 1), (2, 1), (3, 2))]
            results = []
            for hand in (lambda x: x, Handed):
                cache = ferrokv.KvCache("int8-int4", layers=1, q_heads=2, kv_heads=1, head_dim=64, max_tokens=32,
                                        device=lib.device)
                cache.begin_prompt(0, 5)
                keys, values, queries = map(hand, rows)
                cache.append(0, keys, values)
                results.append(lib.bits(cache.attend(0, queries)))
                cache.commit()
            self.assertEqual(*results)

    @unittest.skipIf(numpy is None, "numpy is not installed")
    def test_what_is_not_handed_over(self):
        int8 = ferrokv.Int8(tokens=4, channels=4, device="cpu")
        matrix = Numpy().normal(1, (4, 4))

        class Elsewhere(Handed):
            """On a device that nobody here has."""

            def __dlpack_device__(self):
                return 15, 0

            def __dlpack__(self, **options):
                raise BufferError("no such device")

        with self.assertRaisesRegex(ValueError, "matrix is a Elsewhere"):
            int8.quantize(Elsewhere(matrix))
        with mock.patch.object(_arrays, "torch", lambda: None), mock.patch.dict("sys.modules", numpy=None):
            with self.assertRaisesRegex(ValueError, re.escape("matrix is a Handed, which is taken by way of")):
                int8.quantize(Handed(matrix))
        with self.assertRaisesRegex(ValueError, re.escape("matrix has shape [4], and [4, 4] is needed")):
            int8.quantize(Handed(matrix[0].copy()))


if __name__ == "__main__":
    unittest.main()
