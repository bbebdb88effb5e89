"""A matrix to 8 bits and back: the scales and codes of the paper's equations, and half a scale of error."""

import unittest

from common import Torch, ferrokv, libraries, needs_gpu

SHAPES = [(1, 1), (17, 5), (64, 48), (100, 129), (256, 128)]


class TestInt8(unittest.TestCase):
    """What holds for a library of arrays holds for each."""

    def test_codes_and_scales_by_their_equations(self):
        for lib in libraries():
            for dtype in ["float32", *lib.dtypes]:
                for tokens, channels in SHAPES:
                    for variant in ("wide", "fused", "naive"):
                        with self.subTest(lib=lib.name, dtype=dtype, shape=(tokens, channels), variant=variant):
                            self.one(lib, dtype, tokens, channels, variant)

    def one(self, lib, dtype, tokens, channels, variant):
        matrix = lib.normal(3, (tokens, channels), dtype)
        int8 = ferrokv.Int8(tokens=tokens, channels=channels, dtype=dtype, variant=variant, device=lib.device)
        codes, scales = int8.quantize(matrix)
        back = int8.dequantize(codes, scales)
        exact, rows = lib.f64(matrix), 16 if variant == "fused" else tokens
        self.assertEqual(list(scales.shape), [-(-tokens // 16), channels] if variant == "fused" else [channels])
        for start in range(0, tokens, rows):
            part = exact[start:start + rows]
            scale = lib.f64(scales[start // rows] if variant == "fused" else scales)
            largest = lib.xp.amax(abs(part), 0)
            # One rounding to float32 of a division by 127; a column of zeros has 1/127.
            want = lib.xp.where(largest == 0, largest * 0 + 1.0, largest) / 127
            self.assertTrue((abs(scale - want) <= want * 2.0**-24).all())
            nearest = part / scale
            # Half to even, and its quotient rounded to float32 before: both are within half a code and that rounding.
            self.assertTrue((abs(lib.f64(codes[start:start + rows]) - nearest) <= 0.5 + 127 * 2.0**-23).all())
            # Half a scale, the rounding of the product, and that to the matrix's type.
            ulp = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
            error = abs(lib.f64(back[start:start + rows]) - part)
            self.assertTrue((error <= scale * 0.5 * (1 + 2.0**-15) + abs(part) * ulp + scale * ulp).all())

    def test_given_outputs(self):
        for lib in libraries():
            with self.subTest(lib=lib.name):
                matrix = lib.normal(3, (32, 16))
                int8 = ferrokv.Int8(tokens=32, channels=16, device=lib.device)
                codes, scales = int8.quantize(matrix)
                given = lib.zeros((32, 16), "int8"), lib.zeros((16,), "float32")
                found = int8.quantize(matrix, codes=given[0], scales=given[1])
                self.assertIs(found[0], given[0])
                self.assertEqual([lib.bits(x) for x in found], [lib.bits(x) for x in (codes, scales)])
                out = lib.zeros((32, 16), "float16")
                self.assertIs(int8.dequantize(codes, scales, out=out), out)
                self.assertEqual(lib.bits(out), lib.bits(int8.dequantize(codes, scales)))


@needs_gpu
class TestBits(unittest.TestCase):
    """A GPU and the CPU give the same bits."""

    def test_equal_on_both(self):
        for dtype in ("float32", "float16", "bfloat16"):
            for tokens, channels in SHAPES:
                for variant in ("wide", "fused", "naive", "tiled", "coarsened", "vectorized", "rows"):
                    with self.subTest(dtype=dtype, shape=(tokens, channels), variant=variant):
                        found = []
                        for lib in (Torch("cpu"), Torch("cuda")):
                            int8 = ferrokv.Int8(tokens=tokens, channels=channels, dtype=dtype, variant=variant,
                                                device=lib.device)
                            codes, scales = int8.quantize(lib.normal(3, (tokens, channels), dtype))
                            back = int8.dequantize(codes, scales)
                            found.append([lib.bits(x) for x in (codes, scales, back)])
                        self.assertEqual(found[0], found[1])


if __name__ == "__main__":
    unittest.main()
