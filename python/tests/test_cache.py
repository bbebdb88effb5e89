"""Caches by scheme: a prompt and steps, against exact attention over what was appended."""

import unittest

from common import Torch, attention, ferrokv, libraries, needs_gpu

LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 8, 2, 64
# Each scheme that needs no file made for a model, and how far an output may be from exact attention, relative to the
# largest element of the exact one, of which no output at all is 1 away: by codes of so many bits, for made-up keys. (The
# schemes' own bounds are tested where the schemes are.) `gather` attends to a constant number of keys: to all of so few.
# `gtq` and `kivi` keep so few in 16 bits, unless they are told not to.
SCHEMES = {"dense": 1e-5, "certified": 0.1, "int8": 0.02, "int8-int4": 0.15, "gather": 1e-5, "gtq": 0.002, "kivi": 1e-5}
CODES = {"gtq/k=4/v=4/recent=0/sink=0": 0.4, "kivi/k=4/v=4/residual=0": 0.3}


def fill(lib, scheme, lengths, steps, max_tokens=80):
    """A cache after prompts of some lengths and some steps: every output, and every key and value by sequence."""
    cache = ferrokv.KvCache(scheme, layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                            max_tokens=max_tokens, sequences=len(lengths), device=lib.device)
    history, outputs, seed = [[([], []) for _ in range(LAYERS)] for _ in lengths], [], 1
    for sequence, length in enumerate(lengths):
        if sequence:
            assert cache.join() == sequence
        cache.begin_prompt(sequence, length)
        for layer in range(LAYERS):
            seed += 3
            keys, values = (lib.normal(seed + i, (length, KV_HEADS, DIM)) for i in (0, 1))
            queries = lib.normal(seed + 2, (length, Q_HEADS, DIM))
            cache.append(layer, keys, values)
            out = cache.attend(layer, queries)
            history[sequence][layer][0].append(keys)
            history[sequence][layer][1].append(values)
            outputs.append(((sequence, layer), queries, out, length))
        cache.commit()
    for step in range(steps):
        cache.begin_step()
        for layer in range(LAYERS):
            seed += 3
            keys, values = (lib.normal(seed + i, (len(lengths), KV_HEADS, DIM)) for i in (0, 1))
            queries = lib.normal(seed + 2, (len(lengths), Q_HEADS, DIM))
            cache.append(layer, keys, values)
            out = cache.attend(layer, queries)
            for sequence, length in enumerate(lengths):
                history[sequence][layer][0].append(keys[sequence:sequence + 1])
                history[sequence][layer][1].append(values[sequence:sequence + 1])
                part = slice(sequence, sequence + 1)
                outputs.append(((sequence, layer), queries[part], out[part], length + step + 1))
        cache.commit()
    cache.check()
    return cache, history, outputs


def joined(lib, parts):
    """Rows of several tensors as one."""
    return lib.xp.concatenate(parts) if hasattr(lib.xp, "concatenate") else lib.xp.cat(parts)


class TestCache(unittest.TestCase):
    """What holds for a library of arrays holds for each."""

    def test_every_scheme_is_tested_or_needs_a_file(self):
        self.assertEqual(set(ferrokv.schemes()) - set(SCHEMES), {"vecinfer", "gtq-blocks", "echo"})
        with self.assertRaisesRegex(ValueError, "vecinfer needs a file made for the model"):
            ferrokv.KvCache("vecinfer", layers=1, q_heads=1, kv_heads=1, head_dim=64, max_tokens=16, device="cpu")

    def test_near_exact_attention(self):
        for lib in libraries():
            for scheme, share in (SCHEMES | CODES).items():
                with self.subTest(lib=lib.name, scheme=scheme):
                    cache, history, outputs = fill(lib, scheme, [37, 5], 20)
                    self.assertEqual([cache.tokens(0), cache.tokens(1), cache.tokens(2)], [57, 25, None])
                    self.assertGreater(cache.bytes, 0)
                    for (sequence, layer), queries, out, length in outputs:
                        keys, values = (lib.f64(joined(lib, side)[:length]) for side in history[sequence][layer])
                        want, _, _, _ = attention(lib.xp, lib.f64(queries), keys, values, "float16", 1)
                        error = float(abs(lib.f64(out) - want).max())
                        most = share * float(abs(want).max())
                        self.assertLessEqual(error, most, f"sequence {sequence}, layer {layer}, {length} tokens")

    def test_a_fork_has_its_sources_bits(self):
        for lib in libraries():
            for scheme in ("dense", "int8-int4", "gtq"):
                with self.subTest(lib=lib.name, scheme=scheme):
                    cache = ferrokv.KvCache(scheme, layers=1, q_heads=2, kv_heads=1, head_dim=64, max_tokens=64,
                                            sequences=2, device=lib.device)
                    cache.begin_prompt(0, 21)
                    cache.append(0, lib.normal(1, (21, 1, 64)), lib.normal(2, (21, 1, 64)))
                    cache.attend(0, lib.normal(3, (21, 2, 64)))
                    cache.commit()
                    self.assertEqual(cache.fork(0), 1)
                    for step in range(14):
                        one = [lib.normal(10 * step + i, (1, heads, 64)) for i, heads in ((4, 1), (5, 1), (6, 2))]
                        keys, values, queries = (joined(lib, [x, x]) for x in one)
                        cache.begin_step()
                        cache.append(0, keys, values)
                        out = cache.attend(0, queries)
                        cache.commit()
                        self.assertEqual(lib.bits(out[0]), lib.bits(out[1]))
                    cache.leave(0)
                    self.assertEqual([cache.tokens(0), cache.tokens(1)], [None, 35])
                    self.assertEqual(cache.join(), 0)

    def test_calls_out_of_order(self):
        for lib in libraries():
            with self.subTest(lib=lib.name):
                cache = ferrokv.KvCache("dense", layers=1, q_heads=1, kv_heads=1, head_dim=64, max_tokens=16,
                                        device=lib.device)
                row = lib.normal(1, (1, 1, 64))
                with self.assertRaisesRegex(ferrokv.StateError, "no chunk was begun"):
                    cache.append(0, row, row)
                with self.assertRaisesRegex(ferrokv.StateError, "17 tokens more do not fit"):
                    cache.begin_prompt(0, 17)
                with self.assertRaisesRegex(ferrokv.StateError, "no sequence 1"):
                    cache.begin_prompt(1, 1)
                with self.assertRaisesRegex(ferrokv.StateError, "room for 1"):
                    cache.join()
                cache.begin_step()
                with self.assertRaisesRegex(ferrokv.StateError, "the layer is 1"):
                    cache.append(1, row, row)


@needs_gpu
class TestBits(unittest.TestCase):
    """A GPU and the CPU give the same bits."""

    def test_equal_on_both(self):
        for scheme in SCHEMES | CODES:
            with self.subTest(scheme=scheme):
                cpu, cuda = (fill(lib, scheme, [37, 5], 20) for lib in (Torch("cpu"), Torch("cuda")))
                for (sequence, _, one, length), (_, _, other, _) in zip(cpu[2], cuda[2]):
                    self.assertEqual(Torch("cpu").bits(one), Torch("cuda").bits(other), f"{sequence} at {length}")


if __name__ == "__main__":
    unittest.main()
