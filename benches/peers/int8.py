#!/usr/bin/env python3
"""What PyTorch and Triton reach on the INT8 per-channel formula, and what the memory allows.

    scales     = amax(|K|, dim 0) / 127
    codes      = int8(clamp(round(K / scales), -127, 127))      round: half to even
    dequantize = codes * scales

Needs PyTorch with CUDA (Triton comes with it); `ferrokv bench int8 --peers` runs it and merges its
rows. Every row is timed the same way: calls are captured in a CUDA graph, over as many sets of
inputs and outputs as make three times the L2 cache, so that no call finds its input there; the
graph is replayed many times between events, and a row's time is that of a replay divided by its
calls: median, 10th and 90th percentile. `bytes` counts what the formula must move, not what a
program moved:

    copy            2 e T D            e: bytes of an element of K
    read            e T D
    narrow, widen   (e + 1) T D        the traffic of quantize and dequantize without arithmetic
    scales          e T D + 4 D
    quantize        (e + 1) T D + 4 D
    dequantize      (e + 1) T D + 4 D
    scales_quantize (2 e + 1) T D + 8 D          scales over all tokens need a read of their own
    block_quantize  (e + 1) T D + 4 D ceil(T/B)  scales of each B tokens, in the same read

Peers: `torch` (the library's own copy and sum), `torch eager` (one kernel an operation),
`torch.compile`, `torch.compile max-autotune`, `triton` (int8_triton.py, tuned over a few tilings).
"""

import argparse
import gc
import math
import sys

import common

PROGRAM = "int8 peers"
torch = common.import_torch(PROGRAM)
import torch._dynamo  # noqa: E402

SIZES = ((131072, 8192), (131072, 4096), (131072, 2048), (131072, 1024), (262144, 128),
         (131072, 256), (65536, 256), (16384, 256), (2048, 128), (1024, 64))
QUICK_SIZES = ((65536, 256), (1024, 64))
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
ROW_SECONDS = 0.06  # of replays a row, within the limits below
REPLAYS = (20, 200)


def column_scales(k):
    return k.float().abs().amax(0) / 127.0


def encode(k, scales):
    return torch.clamp(torch.round(k.float() / scales), -127.0, 127.0).to(torch.int8)


def decode_to(dtype):
    def decode(codes, scales):
        return (codes.float() * scales).to(dtype)
    return decode


def scales_encode(k):
    scales = column_scales(k)
    return scales, encode(k, scales)


def block_encode_of(block):
    def block_encode(k):
        tokens, channels = k.shape
        k = k.float().view(tokens // block, block, channels)
        scales = k.abs().amax(1) / 127.0
        codes = torch.clamp(torch.round(k / scales[:, None, :]), -127.0, 127.0).to(torch.int8)
        return scales, codes.view(tokens, channels)
    return block_encode


def formula_bytes(op, tokens, channels, element, block):
    n = tokens * channels
    return {
        "copy": 2 * element * n,
        "read": element * n,
        "narrow": (element + 1) * n,
        "widen": (element + 1) * n,
        "scales": element * n + 4 * channels,
        "quantize": (element + 1) * n + 4 * channels,
        "dequantize": (element + 1) * n + 4 * channels,
        "scales_quantize": (2 * element + 1) * n + 8 * channels,
        "block_quantize": (element + 1) * n + 4 * channels * math.ceil(tokens / block),
    }[op]


def time_calls(calls, seconds=ROW_SECONDS, limits=REPLAYS):
    return common.time_calls(calls, seconds, limits)


class Bench(common.Rows):
    def __init__(self, args, triton_peer):
        super().__init__(args.budget_s)
        self.args = args
        self.triton = triton_peer

    def row(self, peer, op, make_calls):
        """Time what `make_calls` returns; a peer that fails costs its row, not the report."""
        name = f"{peer} {op} {self.tokens}x{self.channels} {self.dtype_name}"
        if self.is_late():
            self.skipped.append(name)
            return
        try:
            made = make_calls()
            calls, config = made if isinstance(made, tuple) else (made, None)
            timing = time_calls(calls)
        except Exception as error:  # compilers fail in many ways
            self.errors.append(f"{name}: {type(error).__name__}: {common.first_line(error)}")
            torch.cuda.synchronize()
            return
        size = formula_bytes(op, self.tokens, self.channels, self.element, self.args.block_tokens)
        about = {"peer": peer, "op": op, "tokens": self.tokens, "channels": self.channels,
                 "dtype": self.dtype_name}
        block = self.args.block_tokens if op == "block_quantize" else None
        self.add(name, about, size, calls, timing, block_tokens=block, config=config)

    def size(self, tokens, channels, dtype_name, full, autotune=False):
        """The rows of one size: all peers (`full` adds those that are there once), or only
        the slow search of max-autotune."""
        self.tokens, self.channels, self.dtype_name = tokens, channels, dtype_name
        dtype = DTYPES[dtype_name]
        self.element = dtype.itemsize
        n = tokens * channels
        # Code tensors are the smallest inputs: count them, so that `dequantize` rotates too.
        sets = max(1, math.ceil(3 * self.l2 / n))
        generator = torch.Generator(device="cuda").manual_seed(1)
        inputs = [torch.rand(tokens, channels, device="cuda", generator=generator)
                  .mul_(2).sub_(1).to(dtype) for _ in range(sets)]
        scales = column_scales(inputs[0])
        for other in inputs[1:]:
            scales = torch.maximum(scales, column_scales(other))
        codes = [encode(k, scales) for k in inputs]
        outs = [torch.empty_like(k) for k in inputs]

        decode = decode_to(dtype)
        block = self.args.block_tokens
        one_input = [(k,) for k in inputs]
        operations = [
            ("scales", column_scales, one_input),
            ("quantize", encode, [(k, scales) for k in inputs]),
            ("dequantize", decode, [(c, scales) for c in codes]),
            ("scales_quantize", scales_encode, one_input),
        ]
        if tokens % block == 0:
            operations.append(("block_quantize", block_encode_of(block), one_input))
        plain = []
        if full:
            # The low byte of the bits: random, where the numbers themselves would all become 0.
            plain = [("narrow", lambda k: k.view(BITS[dtype]).to(torch.int8), one_input),
                     ("widen", lambda c: c.to(dtype), [(c,) for c in codes])]

        def compiled(function, arguments, **options):
            # Dynamo keeps few versions of one function and then stops compiling: forget the last.
            torch._dynamo.reset()
            fast = torch.compile(function, dynamic=False, fullgraph=True, **options)
            for _ in range(2):
                fast(*arguments[0])
            return [(lambda a=a: fast(*a)) for a in arguments]

        if autotune:
            # Without the graphs of its own: they would be captured inside ours.
            for op, function, arguments in operations:
                self.row("torch.compile max-autotune", op, lambda: compiled(
                    function, arguments, mode="max-autotune-no-cudagraphs"))
            return
        self.row("torch", "copy", lambda: [
            (lambda k=k, o=o: o.copy_(k)) for k, o in zip(inputs, outs)])
        self.row("torch", "read", lambda: [(lambda k=k: k.sum()) for k in inputs])
        for op, function, arguments in operations + plain:
            self.row("torch.compile", op, lambda: compiled(function, arguments))
        if self.triton:
            self.triton_rows(inputs, scales, codes, outs)
        if full:
            for op, function, arguments in operations:
                self.row("torch eager", op, lambda: [
                    (lambda a=a: function(*a)) for a in arguments])

    def triton_rows(self, inputs, scales, codes, outs):
        peer, tokens, channels = self.triton, self.tokens, self.channels
        n, block = tokens * channels, self.args.block_tokens

        def tuned(choices, calls_of):
            """The calls of the choice that is fastest on a short timing."""
            def make():
                best = None
                for choice in choices:
                    calls = calls_of(choice)
                    median = time_calls(calls[:32], seconds=0.005, limits=(3, 10))[0]
                    if best is None or median < best[0]:
                        best = (median, calls, choice)
                return best[1], str(best[2])
            return make

        def tiles(kernel, sources, targets):
            def calls_of(cut):
                return [(lambda s=s, t=t: peer.launch_tiles(
                    kernel, s, scales, t, tokens, channels, cut))
                    for s, t in zip(sources, targets)]
            return calls_of

        # Results go to memory of their own: the inputs of later rows stay what they are.
        new_codes = [torch.empty_like(c) for c in codes]
        plans = peer.run_plans(tokens, channels, self.multiprocessors)
        most_runs = max(plan[4] for plan in plans)
        partial = torch.empty(most_runs, channels, device="cuda")
        found = torch.empty_like(scales)

        def scales_calls(plan):
            return [(lambda k=k: peer.launch_scales(k, partial, found, tokens, channels, plan))
                    for k in inputs]

        self.row("triton", "copy", tuned(peer.COPY_BLOCKS, lambda c: [
            (lambda k=k, o=o: peer.copy[(math.ceil(n / c[0]),)](
                k, o, n, BLOCK=c[0], num_warps=c[1])) for k, o in zip(inputs, outs)]))
        maxima = torch.empty(math.ceil(n / 4096), device="cuda")
        self.row("triton", "read", tuned(((2048, 4), (4096, 4), (4096, 8)), lambda c: [
            (lambda k=k: peer.read[(math.ceil(n / (c[0] * 8)),)](
                k, maxima, n, BLOCK=c[0], STEPS=8, num_warps=c[1])) for k in inputs]))
        self.row("triton", "scales", tuned(plans, scales_calls))
        cuts = peer.tilings(channels)
        self.row("triton", "quantize", tuned(cuts, tiles(peer.quantize, inputs, new_codes)))
        self.row("triton", "dequantize", tuned(cuts, tiles(peer.dequantize, codes, outs)))

        def both(choice):
            plan, cut = choice
            def one(k, c):
                peer.launch_scales(k, partial, found, tokens, channels, plan)
                peer.launch_tiles(peer.quantize, k, found, c, tokens, channels, cut)
            return [(lambda k=k, c=c: one(k, c)) for k, c in zip(inputs, new_codes)]

        self.row("triton", "scales_quantize", tuned(
            [(plan, cut) for plan in plans[1:] or plans for cut in cuts[:2]], both))
        if block & (block - 1) == 0:
            block_scales = torch.empty(math.ceil(tokens / block), channels, device="cuda")
            self.row("triton", "block_quantize", tuned(
                peer.block_tilings(channels, block), lambda cut: [
                    (lambda k=k, c=c: peer.launch_tiles(
                        peer.block_quantize, k, block_scales, c, tokens, channels, cut))
                    for k, c in zip(inputs, new_codes)]))


def check(triton_peer, block, multiprocessors):
    """Compare every peer with the formula in f64 on a small matrix that holds exact ties."""
    tokens, channels = 5 * block, 100
    generator = torch.Generator().manual_seed(2)
    k = torch.rand(tokens, channels, generator=generator) * 2 - 1
    k[:, 0] = torch.arange(tokens) % 100 + 0.5  # with the 127 below, its scale is exactly 1
    k[0, 0] = 127.0
    exact_scales = k.double().abs().amax(0) / 127.0
    # Codes follow the rounded scales (they are what is stored), in f64 without another rounding.
    stored = exact_scales.float()
    quotient = k.double() / stored.double()
    want = quotient.round().clamp(-127, 127)
    ieee = torch.clamp(torch.round(k / stored), -127, 127)
    device_k, device_scales = k.cuda(), stored.cuda()

    def report(peer, scales, codes, decoded):
        codes, scales = codes.cpu().double(), scales.cpu()
        error = (codes * stored.double() - k.double()).abs() / stored.double()
        return {
            "peer": peer,
            "scales_differ": int((scales != stored).sum()),
            "codes_differ_from_f64": int((codes != want).sum()),
            "codes_differ_from_ieee_f32": int((codes != ieee.double()).sum()),
            "ties_to_even": bool((codes[:, 0] == want[:, 0]).all()),
            "decoded_differ": int((decoded.cpu() != codes.float() * stored).sum()),
            "max_error_in_scales": float(error.max()),
            # Half a step, and the rounding of a quotient of up to 127.
            "within_bound": bool(error.max() <= 0.5 + 127 * 2.0 ** -22),
        }

    decode = decode_to(torch.float32)
    reports = []
    codes = encode(device_k, device_scales)
    reports.append(report("torch eager", column_scales(device_k), codes,
                          decode(codes, device_scales)))
    torch._dynamo.reset()
    fast = [torch.compile(f, dynamic=False) for f in (column_scales, encode, decode)]
    codes = fast[1](device_k, device_scales)
    reports.append(report("torch.compile", fast[0](device_k), codes,
                          fast[2](codes, device_scales)))
    if triton_peer:
        scales, codes = torch.empty_like(device_scales), torch.empty_like(codes)
        decoded = torch.empty_like(device_k)
        plan = triton_peer.run_plans(tokens, channels, multiprocessors)[0]
        partial = torch.empty(plan[4], channels, device="cuda")
        cut = triton_peer.tilings(channels)[0]
        triton_peer.launch_scales(device_k, partial, scales, tokens, channels, plan)
        triton_peer.launch_tiles(triton_peer.quantize, device_k, device_scales, codes, tokens,
                                 channels, cut)
        triton_peer.launch_tiles(triton_peer.dequantize, codes, device_scales, decoded, tokens,
                                 channels, cut)
        reports.append(report("triton", scales, codes, decoded))
    return reports


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the report there (else stdout)")
    parser.add_argument("--sizes", help="TxD,TxD,... instead of the paper's ten")
    parser.add_argument("--dtype", default="f32", help="of K: f32, f16, bf16, or several a,b")
    parser.add_argument("--block-tokens", type=int, default=64,
                        help="tokens a block of block_quantize (default 64)")
    parser.add_argument("--budget-s", type=float, default=60.0,
                        help="start no row after this many seconds; skipped rows are listed")
    parser.add_argument("--quick", action="store_true", help="two small sizes, to try it out")
    args = parser.parse_args()
    args.dtypes = args.dtype.split(",")
    if unknown := [d for d in args.dtypes if d not in DTYPES]:
        parser.error(f"--dtype {unknown[0]}: expected f32, f16 or bf16")
    if args.block_tokens < 1:
        parser.error(f"--block-tokens {args.block_tokens}: must be at least 1")
    args.shapes = QUICK_SIZES if args.quick else SIZES
    if args.sizes:
        try:
            args.shapes = [tuple(map(int, s.lower().split("x"))) for s in args.sizes.split(",")]
            if any(len(s) != 2 or min(s) < 1 for s in args.shapes):
                raise ValueError
        except ValueError:
            parser.error(f"--sizes {args.sizes}: expected TxD,TxD, for instance 1024x64")
    return args


def main():
    args = parse_arguments()
    common.require_gpu(PROGRAM)
    triton_peer, triton_version = None, None
    try:
        import int8_triton as triton_peer
        import triton
        triton_version = triton.__version__
    except ImportError as error:
        print(f"{PROGRAM}: no Triton rows: {error}", file=sys.stderr)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        bench = Bench(args, triton_peer)
        checks = check(triton_peer, args.block_tokens, bench.multiprocessors)
        largest = max(args.shapes, key=lambda s: s[0] * s[1])
        # Capturing a graph collects garbage first; without this it would walk the compiler's
        # whole heap every time.
        gc.collect()
        gc.freeze()
        jobs = [(shape, dtype_name, shape == largest, False)
                for dtype_name in args.dtypes for shape in args.shapes]
        jobs += [(largest, dtype_name, False, True) for dtype_name in args.dtypes]
        for shape, dtype_name, full, autotune in jobs:
            try:
                bench.size(*shape, dtype_name, full, autotune)
            except torch.cuda.OutOfMemoryError:
                bench.errors.append(f"{shape[0]}x{shape[1]} {dtype_name}: the device has too "
                                    "little memory")
            torch.cuda.empty_cache()
    common.finish(PROGRAM, args.json, bench, checks, {"triton": triton_version},
                  f"rows skipped after {args.budget_s:g} s (--budget-s)",
                  "a peer broke the error bound of half a scale")


if __name__ == "__main__":
    main()
