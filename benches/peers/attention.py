#!/usr/bin/env python3
"""Decode attention as PyTorch's backends do it, and what the memory allows.

One query token a sequence, no mask: q [B, Hq, 1, D] against contiguous K and V [B, Hkv, N, D].

Needs PyTorch with CUDA; flashinfer is measured too where it can be imported. Every row is timed
as in common.py: calls are captured in a CUDA graph, over as many sets of keys and values as make
three times the L2 cache, so that no call finds its input there; the graph is replayed many times
between events, and a row's time is that of a replay divided by its calls: median, 10th and 90th
percentile. `bytes` counts what the formula must move, not what a program moved:

    decode   2 e B Hkv N D + 2 e B Hq D     keys and values, query and output; e = 2
    read     2 e B Hkv N D                  a sum over keys and values
    copy     2 e B Hkv N D                  the keys alone, read and written

Peers: `torch cudnn`, `torch flash`, `torch efficient` (scaled_dot_product_attention held to that
backend: it refuses rather than fall back), `torch math` (small contexts), `torch flex` (asked for
with --flex, it compiles for seconds a shape), `flashinfer`, and `torch` for read and copy.
`config` says which form of the call it was:

    gqa      enable_gqa=True, one query token
    rows     the heads of a group as query tokens, q [B, Hkv, Hq/Hkv, D], not causal: the same
             numbers for one token of decode, for backends that refuse groups or are slow on them
    f16, u32 what a sum read the memory as: elements, or words of two

`skipped` and `errors` are lines `row: reason`. `checks` compares every peer and form with f64 on a
small shape; the exit status is 1 if one is outside its bound.
"""

import argparse
import gc
import math
import sys
import warnings

import common
from common import first_line

PROGRAM = "attention peers"
SHAPES = ((32, 8, 128), (28, 4, 128))
BATCHES = (1, 8)
CONTEXTS = tuple(8192 << i for i in range(7))
DTYPES = ("f16", "bf16")
BACKENDS = ("cudnn", "flash", "efficient", "math")
FORMS = ("gqa", "rows")
MATH_TOKENS = 65536  # of a batch together: the math backend repeats keys and values in f32
CALL_BYTES = 2 << 30  # of a graph's calls together: short calls are repeated to outweigh its launch
CALLS = (2, 32)
ROW_SECONDS = 0.1
REPLAYS = (10, 200)
PAGE = 16  # tokens, of flashinfer's paged cache


def import_torch():
    """PyTorch's names as globals: --help and --list do without."""
    global torch, functional, sdpa_kernel, backend_of, dtype_of
    torch = common.import_torch(PROGRAM)
    import torch._dynamo
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backend_of = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
                  "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    dtype_of = {"f16": torch.float16, "bf16": torch.bfloat16}


def library(name):
    """An optional module, and why it is not there: a broken one raises more than ImportError."""
    try:
        return __import__(name), None
    except Exception as error:
        return None, f"{type(error).__name__}: {first_line(error)}"


def form_query(form, q, kv_heads):
    """q [B, Hq, 1, D] as a form wants it: heads of one group are neighbours."""
    batch, heads, _, dim = q.shape
    return q if form == "gqa" else q.view(batch, kv_heads, heads // kv_heads, dim)


def attend(backend, form, q, k, v):
    with sdpa_kernel(backend_of[backend]):
        out = functional.scaled_dot_product_attention(
            form_query(form, q, k.shape[1]), k, v, enable_gqa=form == "gqa")
    return out.reshape(q.shape)


def flex_of(k, form):
    """flex_attention compiled for the shape of k."""
    from torch.nn.attention.flex_attention import flex_attention
    torch._dynamo.reset()
    fast = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call(q, k, v):
        out = fast(form_query(form, q, k.shape[1]), k, v, enable_gqa=form == "gqa")
        return out.reshape(q.shape)
    return call


def flashinfer_of(flashinfer, q, kv):
    """A planned call over a paged cache; the pages are those of `kv` [2, B, Hkv, N, D] as memory."""
    _, batch, kv_heads, tokens, dim = kv.shape
    pages = tokens // PAGE
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND",
                                                            use_tensor_cores=True)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    indices = torch.arange(batch * pages, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), PAGE, dtype=torch.int32, device="cuda")
    wrapper.plan(indptr, indices, last, q.shape[1], kv_heads, dim, PAGE,
                 q_data_type=q.dtype, kv_data_type=kv.dtype)

    def call(q, kv):
        cache = kv.view(batch * pages, 2, kv_heads, PAGE, dim)
        return wrapper.run(q.squeeze(2), cache).unsqueeze(2)
    return call


def paged(kv):
    """The same tokens in the order of a paged cache."""
    _, batch, kv_heads, tokens, dim = kv.shape
    blocks = kv.view(2, batch, kv_heads, tokens // PAGE, PAGE, dim)
    return blocks.permute(1, 3, 0, 2, 4, 5).contiguous().view(kv.shape)


class Refused(Exception):
    """A peer did not run; the message has what PyTorch warned of, where it says why."""


def explained(function):
    """Call it; what it warned of joins the message of its exception."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return function()
        except torch.cuda.OutOfMemoryError:
            raise Refused("the device has too little memory") from None
        except Exception as error:  # backends and compilers fail in many ways
            said = [first_line(error)]
            for warning in caught:
                line = first_line(warning.message).split(" (Triggered internally")[0]
                if line and line not in said:
                    said.append(line)
            raise Refused(f"{type(error).__name__}: {' | '.join(said)}") from None


class Bench(common.Rows):
    def __init__(self, args, flashinfer):
        super().__init__(args.seconds)
        self.args = args
        self.flashinfer = flashinfer

    def row(self, peer, op, config, size, make_calls):
        """Time what `make_calls` returns; a peer that fails costs its row, not the report."""
        name = f"{peer} {op} {config or ''} {self.label}".replace("  ", " ")
        if self.is_late():
            self.skipped.append(f"{name}: no time left (--seconds {self.args.seconds:g})")
            return
        try:
            calls = explained(make_calls)
            timing = explained(lambda: common.time_calls(calls, ROW_SECONDS, REPLAYS))
        except Refused as error:
            self.errors.append(f"{name}: {error}")
            try:
                torch.cuda.synchronize()
            except RuntimeError as fault:
                sys.exit(f"{PROGRAM}: {name}: the device is lost: {first_line(fault)}")
            return
        about = {"peer": peer, "op": op, "dtype": self.dtype, "batch": self.batch,
                 "q_heads": self.q_heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
                 "context": self.context}
        self.add(name, about, size, calls, timing, config=config)

    def size(self, shape, batch, context, dtype_name):
        self.q_heads, self.kv_heads, self.head_dim = shape
        self.batch, self.context, self.dtype = batch, context, dtype_name
        self.label = f"{'/'.join(map(str, shape))} {dtype_name} batch {batch} context {context}"
        if self.is_late():
            self.skipped.append(f"{self.label}: no time left (--seconds {self.args.seconds:g})")
            return
        q_heads, kv_heads, dim = shape
        dtype = dtype_of[dtype_name]
        kv_bytes = 2 * dtype.itemsize * batch * kv_heads * context * dim
        size = kv_bytes + 2 * dtype.itemsize * batch * q_heads * dim
        sets = max(1, math.ceil(3 * self.l2 / kv_bytes))
        # Half a set more for the copy, and a gigabyte of workspaces.
        need = (sets + 0.5) * kv_bytes + (1 << 30)
        free = torch.cuda.mem_get_info()[0]
        if need > free:
            self.skipped.append(f"{self.label}: needs {need / 1e9:.1f} GB of device memory, "
                                f"{free / 1e9:.1f} GB are free")
            return
        generator = torch.Generator(device="cuda").manual_seed(1)

        def normal(*shape):
            return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

        caches = [normal(2, batch, kv_heads, context, dim) for _ in range(sets)]
        queries = [normal(batch, q_heads, 1, dim) for _ in range(sets)]
        repeats = max(CALLS[0], min(CALLS[1], CALL_BYTES // kv_bytes), sets)

        def rotated(call):
            """Calls over all sets in turn."""
            return [(lambda q=queries[i % sets], kv=caches[i % sets]: call(q, kv))
                    for i in range(repeats)]

        target = torch.empty_like(caches[0][0])
        self.row("torch", "copy", None, kv_bytes, lambda: rotated(
            lambda q, kv: target.copy_(kv[0])))
        self.row("torch", "read", dtype_name, kv_bytes, lambda: rotated(lambda q, kv: kv.sum()))
        # Integers of two elements: the sum's arithmetic is less likely to be what limits it.
        self.row("torch", "read", "u32", kv_bytes, lambda: rotated(
            lambda q, kv: kv.view(torch.int32).sum(dtype=torch.int32)))
        del target
        for backend in BACKENDS:
            if backend == "math" and batch * context > MATH_TOKENS:
                self.skipped.append(f"torch math decode {self.label}: only up to {MATH_TOKENS} "
                                    "tokens of a batch")
                continue
            for form in FORMS:
                self.row(f"torch {backend}", "decode", form, size, lambda: rotated(
                    lambda q, kv: attend(backend, form, q, kv[0], kv[1])))
        if self.args.flex:
            def compiled():
                call = flex_of(caches[0][0], "gqa")
                for _ in range(2):
                    call(queries[0], caches[0][0], caches[0][1])
                return rotated(lambda q, kv: call(q, kv[0], kv[1]))
            self.row("torch flex", "decode", "gqa", size, compiled)
        if self.flashinfer and context % PAGE == 0:
            def planned():
                return rotated(flashinfer_of(self.flashinfer, queries[0], caches[0]))
            self.row("flashinfer", "decode", f"paged {PAGE}", size, planned)


def check(args, flashinfer):
    """Every peer and form against f64, on a context that is no multiple of any tile."""
    reports, errors = [], []
    unit = {"f16": 2.0 ** -11, "bf16": 2.0 ** -8}
    for q_heads, kv_heads, dim in args.shapes:
        for dtype_name in args.dtypes:
            for context in (1000, 4096):
                generator = torch.Generator().manual_seed(2)
                kv = torch.randn(2, 2, kv_heads, context, dim, generator=generator)
                q = torch.randn(2, q_heads, 1, dim, generator=generator)
                # Some heads look at one token, others at all.
                q *= torch.arange(q_heads).remainder(7).add(1).view(1, -1, 1, 1)
                q, kv = (t.to(dtype_of[dtype_name]) for t in (q, kv))
                group = q_heads // kv_heads
                k, v = kv.double().repeat_interleave(group, 2)
                weights = torch.softmax(q.double() @ k.transpose(2, 3) / math.sqrt(dim), -1)
                want, scale = weights @ v, weights @ v.abs()
                q, kv = q.cuda(), kv.cuda()
                calls = [(f"torch {b}", f, lambda b=b, f=f: attend(b, f, q, kv[0], kv[1]))
                         for b in BACKENDS for f in FORMS]
                if args.flex:
                    calls.append(("torch flex", "gqa", lambda: flex_of(kv[0], "gqa")(
                        q, kv[0], kv[1])))
                if flashinfer and context % PAGE == 0:
                    calls.append(("flashinfer", f"paged {PAGE}", lambda: flashinfer_of(
                        flashinfer, q, kv)(q, paged(kv))))
                for peer, config, call in calls:
                    name = f"check {peer} {config} {q_heads}/{kv_heads}/{dim} {dtype_name} {context}"
                    try:
                        got = explained(call)
                        error = (got.cpu().double() - want).abs()
                    except (Refused, RuntimeError) as refusal:
                        errors.append(f"{name}: {first_line(refusal)}")
                        continue
                    # The query scaled, the probabilities and the output may be rounded to the type;
                    # logits and sums are f32 in every backend.
                    relative = float((error / (unit[dtype_name] * scale)).max())
                    reports.append({
                        "peer": peer, "config": config, "dtype": dtype_name, "q_heads": q_heads,
                        "kv_heads": kv_heads, "head_dim": dim, "context": context,
                        "max_abs_error": float(error.max()),
                        "max_error_in_units": round(relative, 3),
                        "within_bound": relative <= 8.0,
                    })
    return reports, errors


def numbers(text, separator=","):
    return tuple(int(part) for part in text.split(separator))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the report there (else stdout)")
    parser.add_argument("--shapes", help="Hq/Hkv/D,... (default 32/8/128,28/4/128)")
    parser.add_argument("--batches", help="sequences, a,b (default 1,8)")
    parser.add_argument("--contexts", help="tokens, a,b (default 8192 to 524288 by doubling)")
    parser.add_argument("--dtype", default=",".join(DTYPES), help="f16, bf16 or f16,bf16")
    parser.add_argument("--seconds", type=float, default=300.0,
                        help="start no row after this many seconds; skipped rows are listed")
    parser.add_argument("--flex", action="store_true",
                        help="measure compiled flex_attention too: seconds of compilation a shape")
    parser.add_argument("--quick", action="store_true", help="two small contexts, to try it out")
    parser.add_argument("--list", action="store_true", help="print what would be measured")
    args = parser.parse_args()
    args.dtypes = args.dtype.split(",")
    if unknown := [d for d in args.dtypes if d not in DTYPES]:
        parser.error(f"--dtype {unknown[0]}: expected f16 or bf16")
    text = args.shapes
    try:
        args.shapes = ([numbers(s, "/") for s in args.shapes.split(",")] if args.shapes
                       else list(SHAPES))
        if any(len(s) != 3 or min(s) < 1 or s[0] % s[1] for s in args.shapes):
            raise ValueError
    except ValueError:
        parser.error(f"--shapes {text}: expected Hq/Hkv/D with Hkv dividing Hq, for "
                     "instance 32/8/128")
    quick = {"batches": (1,), "contexts": (8192, 32768)}
    for option, default in (("batches", BATCHES), ("contexts", CONTEXTS)):
        text = getattr(args, option)
        try:
            found = numbers(text) if text else quick[option] if args.quick else default
            if min(found) < 1:
                raise ValueError
        except ValueError:
            parser.error(f"--{option} {text}: expected positive integers a,b")
        setattr(args, option, found)
    return args


def main():
    args = parse_arguments()
    jobs = [(shape, batch, context, dtype_name) for dtype_name in args.dtypes
            for shape in args.shapes for batch in args.batches for context in args.contexts]
    if args.list:
        for shape, batch, context, dtype_name in jobs:
            print(f"{'/'.join(map(str, shape))} {dtype_name} batch {batch} context {context}")
        return
    import_torch()
    common.require_gpu(PROGRAM)
    torch.set_warn_always(True)  # the reasons of a refusal are warnings, else given once
    flashinfer, absent = library("flashinfer")
    with torch.no_grad():
        bench = Bench(args, flashinfer)
        if absent:
            bench.skipped.append(f"flashinfer: {absent}")
        if not args.flex:
            bench.skipped.append("torch flex: not asked for (--flex)")
        checks, bench.errors = check(args, flashinfer)
        gc.collect()
        gc.freeze()  # capturing a graph collects garbage first
        for job in jobs:
            try:
                bench.size(*job)
            except torch.cuda.OutOfMemoryError:
                bench.errors.append(f"{bench.label}: the device has too little memory")
            gc.collect()
            torch.cuda.empty_cache()
    versions = {"cudnn": torch.backends.cudnn.version(),
                "flashinfer": getattr(flashinfer, "__version__", None)}
    common.finish(PROGRAM, args.json, bench, checks, versions, "skipped, see `skipped`",
                  "a peer is outside its error bound")


if __name__ == "__main__":
    main()
