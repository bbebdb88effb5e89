"""Exact attention against the formula, on everything that there is."""

import unittest

from common import ROUNDING, Paged, Torch, attention, ferrokv, libraries, needs_gpu, needs_torch, torch


def plan(lib, paged, q_heads, **extents):
    """A plan for the sequences of ``paged``, and where it goes."""
    kv_heads, head_dim = paged.keys.shape[1], paged.keys.shape[3]
    return ferrokv.Decode(sequences=len(paged.lengths), q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
                          dtype=paged.dtype, device=lib.device, **extents)


class TestDecode(unittest.TestCase):
    """What holds for a library of arrays holds for each."""

    def test_within_the_bound_of_the_formula(self):
        for lib in libraries():
            for dtype in lib.dtypes:
                for head_dim in (64, 96, 128, 256):
                    for kv_heads, group in ((2, 4), (1, 16), (3, 1)):
                        with self.subTest(lib=lib.name, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads, group=group):
                            paged = Paged(lib, [1, 16, 33, 0, 200], kv_heads, head_dim, 208, dtype)
                            queries = lib.normal(9, (5, kv_heads * group, head_dim), dtype)
                            decode = plan(lib, paged, kv_heads * group, max_tokens=208)
                            out, lse = decode(queries, paged.pages, paged.table, paged.tokens)
                            paged.check(self, queries, out, lse, decode.splits)

    def test_long_sequences_are_cut_and_merged(self):
        for lib in libraries():
            with self.subTest(lib=lib.name):
                paged = Paged(lib, [3000, 17], 1, 128, 3000)
                queries = lib.normal(9, (2, 8, 128))
                decode = plan(lib, paged, 8, max_tokens=3000)
                self.assertGreater(decode.splits, 4)
                for _ in range(2):
                    out, lse = decode(queries, paged.pages, paged.table, paged.tokens)
                    paged.check(self, queries, out, lse, decode.splits)

    def test_several_query_tokens_are_causal(self):
        for lib in libraries():
            with self.subTest(lib=lib.name):
                paged = Paged(lib, [40, 3, 129], 2, 64, 144)
                queries = lib.normal(9, (3, 3, 8, 64))
                decode = plan(lib, paged, 8, max_tokens=144, query_tokens=3)
                out, lse = decode(queries, paged.pages, paged.table, paged.tokens)
                self.assertEqual(list(out.shape), [3, 3, 8, 64])
                paged.check(self, queries, out, lse, decode.splits)

    def test_a_pair_of_pools_gives_the_bits_of_pages_of_both(self):
        for lib in libraries():
            with self.subTest(lib=lib.name):
                paged = Paged(lib, [50, 70], 2, 64, 80)
                queries = lib.normal(9, (2, 4, 64))
                decode = plan(lib, paged, 4, max_tokens=80)
                out, lse = decode(queries, paged.pages, paged.table, paged.tokens)
                pair, pair_lse = decode(queries, (paged.keys, paged.values), paged.table, paged.tokens)
                self.assertEqual(lib.bits(out), lib.bits(pair))
                self.assertEqual(lib.bits(lse), lib.bits(pair_lse))

    def test_wide_tables_and_given_outputs(self):
        for lib in libraries():
            with self.subTest(lib=lib.name):
                paged = Paged(lib, [50, 70], 2, 64, 400)
                queries = lib.normal(9, (2, 4, 64))
                decode = plan(lib, paged, 4, max_tokens=80)
                out, lse = lib.zeros((2, 4, 64), "float32"), lib.zeros((2, 4), "float32")
                for pages in (paged.pages, (paged.keys, paged.values)):
                    out[:] = 5.0
                    found = decode(queries, pages, paged.table, paged.tokens, out=out, lse=lse)
                    self.assertIs(found[0], out)
                    self.assertIs(found[1], lse)
                    paged.check(self, queries, out, lse, decode.splits)

    def test_scores_far_below_zero(self):
        """A key is a key however small its weight would be beside another: two of them, alike, and nothing else."""
        for lib in libraries():
            for dtype in lib.dtypes:
                with self.subTest(lib=lib.name, dtype=dtype):
                    paged = Paged(lib, [2], 4, 128, 16, dtype)
                    for pool, number in ((paged.keys, -64.0), (paged.values, 1.0)):
                        pool[:] = number
                    queries = lib.zeros((1, 32, 128), dtype)
                    queries[:] = 64.0
                    out, lse = plan(lib, paged, 32, max_tokens=16)(queries, (paged.keys, paged.values), paged.table,
                                                                   paged.tokens)
                    # What the bound has of probabilities in twice 16 bits, of sums, and of the division.
                    error = abs(lib.f64(out) - 1.0).max()
                    self.assertLessEqual(float(error), ROUNDING[dtype][0]**2 + 21 * 2.0**-24)
                    # ln 2 − 64 · 64 · 128 / √128, to the last bits of float32.
                    want = 0.6931471805599453 - 64 * 64 * 128**0.5
                    self.assertLess(float(abs(lib.f64(lse) - want).max()), 2.0**-23 * abs(want) * 4)


@needs_torch
class TestAgainstTorch(unittest.TestCase):
    """PyTorch's own attention, in float64, is the formula as well."""

    def test_scaled_dot_product_attention(self):
        for lib in [lib for lib in libraries() if isinstance(lib, Torch)]:
            paged = Paged(lib, [77], 2, 128, 80)
            queries = lib.normal(9, (1, 8, 128))
            decode = plan(lib, paged, 8, max_tokens=80)
            out, _ = decode(queries, paged.pages, paged.table, paged.tokens)
            keys, values = (side[0].double().permute(1, 0, 2).repeat_interleave(4, 0)[None] for side in paged.sides)
            want = torch.nn.functional.scaled_dot_product_attention(queries.double()[:, :, None], keys, values)
            bound = attention(torch, queries.double(), *(side[0].double() for side in paged.sides), "float16",
                              decode.splits)[2]
            self.assertTrue(((out.double() - want[:, :, 0]).abs() <= bound).all())


@needs_gpu
class TestBits(unittest.TestCase):
    """A GPU and the CPU give the same bits."""

    def test_equal_on_both(self):
        for dtype in ("float16", "bfloat16"):
            for head_dim in (64, 96, 128, 256):
                for lengths, max_tokens, tokens in (([1, 16, 33, 0, 200], 208, 1), ([3000, 17], 3000, 1),
                                                    ([40, 3, 129], 144, 3)):
                    with self.subTest(dtype=dtype, head_dim=head_dim, lengths=lengths):
                        found = []
                        for lib in (Torch("cpu"), Torch("cuda")):
                            paged = Paged(lib, lengths, 2, head_dim, max_tokens, dtype)
                            queries = lib.normal(9, (len(lengths), tokens, 8, head_dim), dtype)
                            decode = plan(lib, paged, 8, max_tokens=max_tokens, query_tokens=tokens)
                            results = decode(queries, paged.pages, paged.table, paged.tokens)
                            found.append([lib.bits(result) for result in results])
                        self.assertEqual(found[0], found[1])


if __name__ == "__main__":
    unittest.main()
