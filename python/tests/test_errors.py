"""What is wrong with an argument is said with its name, its value and the way out."""

import re
import unittest
from pathlib import Path

from common import CUDA, Numpy, Paged, Torch, ferrokv, libraries, needs_gpu, needs_torch, numpy, torch
from ferrokv import _library


class TestArguments(unittest.TestCase):
    """What holds for a library of arrays holds for each."""

    def test_plans(self):
        extents = dict(sequences=1, q_heads=4, kv_heads=2, head_dim=64, max_tokens=64, device="cpu")
        for change, text in [
            (dict(head_dim=80), "no kernel for head_dim 80; there are 64, 96, 128 and 256"),
            (dict(q_heads=5), "5 query heads are no multiple of 2 KV heads"),
            (dict(q_heads=34), "17 query heads on a KV head"),
            (dict(sequences=0), "sequences is 0"),
            (dict(max_tokens=-1), "max_tokens is -1; give a whole number"),
            (dict(max_tokens=1.5), "max_tokens is 1.5; give a whole number"),
            (dict(dtype="float32"), "dtype is float32; give float16 or bfloat16"),
            (dict(device="tpu"), "device is tpu; give 'cpu'"),
        ]:
            with self.subTest(text=text), self.assertRaisesRegex(ValueError, re.escape(text)):
                ferrokv.Decode(**{**extents, **change})
        for change, text in [
            (dict(variant="narrow"), "there is no INT8 variant 'narrow'; there are naive"),
            (dict(tokens=0), "a matrix of 0 tokens and 8 channels has no element"),
            (dict(dtype="int8"), "dtype is int8; give float32"),
        ]:
            with self.subTest(text=text), self.assertRaisesRegex(ValueError, re.escape(text)):
                ferrokv.Int8(**{**dict(tokens=8, channels=8, device="cpu"), **change})
        for scheme, text in [
            ("int8-int5", "there is no KV scheme 'int8-int5'; there is dense"),
            ("certified:stern", "certified has no preset 'stern'; its presets are"),
            ("gtq/k=99", "gtq/k=99"),
        ]:
            with self.subTest(text=text), self.assertRaisesRegex(ValueError, re.escape(text)):
                ferrokv.KvCache(scheme, layers=1, q_heads=1, kv_heads=1, head_dim=64, max_tokens=16, device="cpu")

    def test_tensors(self):
        for lib in libraries():
            paged = Paged(lib, [20, 30], 2, 64, 32)
            queries = lib.normal(9, (2, 4, 64))
            decode = ferrokv.Decode(sequences=2, q_heads=4, kv_heads=2, head_dim=64, max_tokens=32, device=lib.device)
            right = dict(queries=queries, pages=paged.pages, table=paged.table, lengths=paged.tokens)
            cross = lib.normal(9, (2, 64, 4)).transpose(*((0, 2, 1) if lib.xp is numpy else (1, 2)))
            for change, text in [
                (dict(queries=queries[:1]), "queries has shape [1, 4, 64], and [2, 4, 64] is needed"),
                (dict(queries=lib.normal(9, (2, 4, 64), "float32")), "queries is of float32, and float16 is needed"),
                (dict(queries=cross), "queries is not contiguous (shape [2, 4, 64]"),
                (dict(queries=[1.0]), "queries is a list; give a tensor"),
                (dict(pages=paged.keys), "pages has shape"),
                (dict(pages=(paged.keys,)), "pages are 1 tensors; give keys and values"),
                (dict(pages=(paged.keys, paged.values[:2])), "values 2; give as many of both"),
                (dict(table=paged.table[:, :1]), "table has 1 pages of a sequence, and 32 tokens have 2"),
                (dict(table=lib.normal(1, (2, 2))), "table is of float16, and int32 is needed"),
                (dict(lengths=paged.tokens[:1]), "lengths has shape [1], and [2] is needed"),
                (dict(out=lib.zeros((2, 4, 64), "float16")), "out is of float16, and float32 is needed"),
                (dict(lse=lib.zeros((2, 64), "float32")), "lse has shape [2, 64], and [2, 4] is needed"),
            ]:
                with self.subTest(lib=lib.name, text=text), self.assertRaisesRegex(ValueError, re.escape(text)):
                    decode(**{**right, **change})
            # And what is right goes on to work.
            out, lse = decode(**right)
            paged.check(self, queries, out, lse, decode.splits)

    def test_the_cpu_sees_tables_that_lead_nowhere(self):
        lib = next(libraries())
        paged = Paged(lib, [20], 1, 64, 32)
        queries = lib.normal(9, (1, 1, 64))
        decode = ferrokv.Decode(sequences=1, q_heads=1, kv_heads=1, head_dim=64, max_tokens=32, device=lib.device)
        for table, lengths in ((lib.int32([[99, 0]]), paged.tokens), (paged.table, lib.int32([33])),
                               (lib.int32([[-1, 0]]), paged.tokens)):
            with self.assertRaises(ValueError):
                decode(queries, (paged.keys, paged.values), table, lengths)

    @unittest.skipIf(numpy is None, "numpy is not installed")
    def test_arrays_that_must_not_be_written(self):
        int8 = ferrokv.Int8(tokens=4, channels=4, device="cpu")
        codes = numpy.zeros((4, 4), numpy.int8)
        codes.flags.writeable = False
        with self.assertRaisesRegex(ValueError, "codes is read-only"):
            int8.quantize(Numpy().normal(1, (4, 4)), codes=codes)

    def test_memory_that_is_not_aligned(self):
        for lib in libraries():
            with self.subTest(lib=lib.name):
                int8 = ferrokv.Int8(tokens=4, channels=4, device=lib.device)
                matrix = lib.normal(1, (17,))[1:].reshape(4, 4)
                with self.assertRaisesRegex(ValueError, "matrix is at 0x.* no multiple of 16 bytes"):
                    int8.quantize(matrix)

    @needs_torch
    def test_gradients(self):
        int8 = ferrokv.Int8(tokens=4, channels=4, device="cpu")
        matrix = Torch("cpu").normal(1, (4, 4)).requires_grad_()
        with self.assertRaisesRegex(ValueError, "matrix requires a gradient"):
            int8.quantize(matrix)
        with torch.no_grad():
            int8.quantize(matrix)

    @needs_gpu
    def test_tensors_of_another_device(self):
        int8 = ferrokv.Int8(tokens=4, channels=4, device="cuda")
        with self.assertRaisesRegex(ValueError, "matrix is on cpu, and the plan is for cuda:0"):
            int8.quantize(Torch("cpu").normal(1, (4, 4)))

    @unittest.skipIf(CUDA, "there is a GPU")
    def test_no_gpu(self):
        try:
            ferrokv.device_name("cuda")
        except ferrokv.Unavailable:
            pass
        else:
            self.skipTest("there is a GPU, and no PyTorch that sees it")
        with self.assertRaises(ferrokv.Unavailable) as caught:
            ferrokv.Int8(tokens=4, channels=4, device="cuda")
        self.assertRegex(str(caught.exception), "cpu backend")
        self.assertIsInstance(caught.exception, RuntimeError)


class TestInterface(unittest.TestCase):
    """The package declares what the header has."""

    def test_functions_and_structs_of_the_header(self):
        beside = Path(_library.__file__).with_name("ferrokv.h")
        tree = Path(__file__).resolve().parents[2] / "crates/capi/include/ferrokv.h"
        text = re.sub(r"/\*.*?\*/", "", (beside if beside.exists() else tree).read_text(), flags=re.DOTALL)
        functions = re.findall(r"\b(ferrokv_\w+)\(([^)]*)\)", text)
        self.assertEqual([name for name, _ in functions], list(_library.FUNCTIONS))
        for name, arguments in functions:
            expected = 0 if arguments == "void" else arguments.count(",") + 1
            self.assertEqual(len(_library.FUNCTIONS[name][1]), expected, name)
        structs = {"ferrokv_tensor": _library.Tensor, "ferrokv_dense_problem": _library.DenseProblem,
                   "ferrokv_dense_tensors": _library.DenseTensors, "ferrokv_cache_extents": _library.CacheExtents}
        found = re.findall(r"typedef struct (\w+) \{(.*?)\}", text, flags=re.DOTALL)
        self.assertEqual({name for name, _ in found}, set(structs))
        for name, body in found:
            fields = [field.split()[-1].lstrip("*") for field in body.split(";") if field.strip()]
            self.assertEqual([field for field, _ in structs[name]._fields_], fields, name)
        self.assertIn(f"#define FERROKV_ABI {_library.ABI}\n", text)


if __name__ == "__main__":
    unittest.main()
