"""PyTorch's streams, graphs and devices."""

import threading
import unittest

from common import CUDA, Paged, Torch, ferrokv, needs_gpu, torch
from test_cache import DIM, KV_HEADS, LAYERS, Q_HEADS, SCHEMES
from test_decode import plan


def delay():
    """Keeps the current stream busy for some milliseconds."""
    torch.cuda._sleep(50_000_000)


@needs_gpu
class TestStreams(unittest.TestCase):
    """Work goes into the current stream and nowhere else."""

    def setUp(self):
        self.lib = Torch("cuda")
        self.paged = Paged(self.lib, [1000, 300], 2, 128, 1024)
        self.queries = self.lib.normal(9, (2, 8, 128))
        self.decode = plan(self.lib, self.paged, 8, max_tokens=1024)
        self.want = [x.clone() for x in self.run_once()]
        torch.cuda.synchronize()

    def run_once(self, **given):
        return self.decode(self.queries, self.paged.pages, self.paged.table, self.paged.tokens, **given)

    def same(self, found):
        return all(torch.equal(a, b) for a, b in zip(self.want, found))

    def test_a_second_stream(self):
        stream = torch.cuda.Stream()
        right, self.queries = self.queries, torch.zeros_like(self.queries)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # Late in the stream: a launch elsewhere would read zeros.
            delay()
            self.queries.copy_(right)
            found = self.run_once()
        self.assertFalse(stream.query(), "the call waited for the stream")
        stream.synchronize()
        self.assertTrue(self.same(found))

    def test_the_default_stream_is_in_order(self):
        right, self.queries = self.queries, torch.zeros_like(self.queries)
        torch.cuda.synchronize()
        delay()
        self.queries.copy_(right)
        found = self.run_once()
        self.queries.zero_()
        self.assertFalse(torch.cuda.current_stream().query(), "the call waited for the stream")
        self.assertTrue(self.same(found))

    def test_two_threads_with_streams_of_their_own(self):
        wrong = []

        def work():
            stream = torch.cuda.Stream()
            decode = plan(self.lib, self.paged, 8, max_tokens=1024)
            with torch.cuda.stream(stream):
                for _ in range(50):
                    found = decode(self.queries, self.paged.pages, self.paged.table, self.paged.tokens)
                    stream.synchronize()
                    if not self.same(found):
                        wrong.append(found)

        threads = [threading.Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        self.assertEqual(len(wrong), 0)

    def test_a_graph(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.run_once()
        right = self.queries.clone()
        for _ in range(3):
            self.queries.zero_()
            found[0].zero_()
            self.queries.copy_(right)
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(self.same(found))

    def test_a_graph_of_a_plan_that_never_ran(self):
        """Its kernel is loaded when the plan is made."""
        paged = Paged(self.lib, [40], 1, 96, 48, "bfloat16")
        queries = self.lib.normal(9, (1, 2, 96), "bfloat16")
        decode = plan(self.lib, paged, 2, max_tokens=48)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = decode(queries, paged.pages, paged.table, paged.tokens)
        graph.replay()
        torch.cuda.synchronize()
        paged.check(self, queries, out, lse, decode.splits)

    def test_a_graph_of_the_quantizer(self):
        for variant in ("wide", "fused"):
            int8 = ferrokv.Int8(tokens=100, channels=64, variant=variant, device="cuda")
            matrix = self.lib.normal(3, (100, 64))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                codes, scales = int8.quantize(matrix)
                back = int8.dequantize(codes, scales)
            for seed in (4, 5):
                matrix.copy_(self.lib.normal(seed, (100, 64)))
                graph.replay()
                want = int8.quantize(matrix)
                self.assertTrue(torch.equal(codes, want[0]) and torch.equal(scales, want[1]))
                self.assertTrue(torch.equal(back, int8.dequantize(*want)))

    def test_a_wait_is_refused_in_a_capture(self):
        cache = ferrokv.KvCache("dense", layers=1, q_heads=1, kv_heads=1, head_dim=64, max_tokens=16, sequences=2,
                                device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with self.assertRaisesRegex(ferrokv.StateError, "while the stream captures"):
                cache.join()
            matrix = torch.zeros(4, device="cuda") + 1
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual(matrix.tolist(), [1.0] * 4)

    def test_plans_end_while_a_stream_captures(self):
        graph = torch.cuda.CUDAGraph()
        other = plan(self.lib, self.paged, 8, max_tokens=1024)
        with torch.cuda.graph(graph):
            found = self.run_once()
            del other
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(self.same(found))


@needs_gpu
class TestCacheGraphs(unittest.TestCase):
    """A step captured once and replayed has the bits of steps that are not."""

    def test_every_scheme(self):
        for scheme in SCHEMES:
            with self.subTest(scheme=scheme):
                self.assertEqual(self.steps(scheme, False), self.steps(scheme, True))

    def steps(self, scheme, replay, count=40):
        lib, sequences = Torch("cuda"), 2
        cache = ferrokv.KvCache(scheme, layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, max_tokens=128,
                                sequences=sequences, device="cuda")
        self.assertEqual(cache.join(), 1)
        for sequence, length in ((0, 21), (1, 6)):
            cache.begin_prompt(sequence, length)
            for layer in range(LAYERS):
                cache.append(layer, lib.normal(layer, (length, KV_HEADS, DIM)),
                             lib.normal(layer + 9, (length, KV_HEADS, DIM)))
                cache.attend(layer, lib.normal(layer + 99, (length, Q_HEADS, DIM)))
            cache.commit()
        keys, values = (torch.zeros((LAYERS, sequences, KV_HEADS, DIM), dtype=torch.float16, device="cuda") for _ in "kv")
        queries = torch.zeros((LAYERS, sequences, Q_HEADS, DIM), dtype=torch.float16, device="cuda")
        outs = torch.zeros((LAYERS, sequences, Q_HEADS, DIM), device="cuda")

        def step():
            for layer in range(LAYERS):
                cache.append(layer, keys[layer], values[layer])
                cache.attend(layer, queries[layer], out=outs[layer])
            cache.advance()

        graphs, found, period = {}, [], cache.period
        for number in range(count):
            for i, tensor in enumerate((keys, values, queries)):
                tensor.copy_(lib.normal(1000 + 3 * number + i, tuple(tensor.shape)))
            cache.begin_step()
            if not replay or number < period:
                step()
            else:
                # As many graphs as a period has steps take turns, captured when steps of each kind have run.
                if number % period not in graphs:
                    graphs[number % period] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graphs[number % period]):
                        step()
                graphs[number % period].replay()
            cache.commit(advance=False)
            found.append(lib.bits(outs))
        cache.check()
        return found


@unittest.skipUnless(CUDA and torch.cuda.device_count() > 1, "PyTorch sees fewer than two GPUs")
class TestSecondDevice(unittest.TestCase):
    """A plan of a GPU that is not the current one."""

    def test_the_current_device_stays(self):
        lib = Torch("cuda:1")
        paged = Paged(lib, [40], 1, 64, 48)
        queries = lib.normal(9, (1, 2, 64))
        decode = plan(lib, paged, 2, max_tokens=48)
        out, lse = decode(queries, paged.pages, paged.table, paged.tokens)
        self.assertEqual(torch.cuda.current_device(), 0)
        self.assertEqual(torch.zeros(1, device="cuda").device.index, 0)
        paged.check(self, queries, out, lse, decode.splits)


if __name__ == "__main__":
    unittest.main()
