"""The parameters of FlashInfer's decode tests, on ours: how many apply, and how many of those pass.

    python3 python/tests/flashinfer_grid.py [--json FILE] [--device cpu]

The lists of parameters are those of `tests/attention` in FlashInfer's repository, commit fb28d7242; the code is ours.
A case applies if it has float16 or bfloat16 keys and values, 64 to 256 channels, pages of 16 and no rotation in the
kernel. Pages are kept as `HND`, keys before values: where a test of theirs names `NHD`, the case is run over the same
numbers in `HND`. A case passes if every output is

- within FlashInfer's own tolerance (1e-3 relative and absolute, 1e-2 for several query tokens) of attention in float64,
  both rounded to the type of the queries, and the log-sum within 1e-3;
- within the kernel's own bound of attention in float64 (`common.attention`), some hundred times tighter.

On a GPU every case that applies is run. With `--device cpu`, a few of the smallest of each test.
"""

import argparse
import itertools
import json
import math
import sys
import time

from common import CUDA, PAGE, attention, ferrokv, torch

DECODE = dict(batch_size=[12, 17, 128], kv_len=[54, 97, 512, 2048, 16384], page_size=[1, 8, 16], num_kv_heads=[4],
              num_qo_heads=[4, 32], head_dim=[128, 256], kv_layout=["NHD"], pos_encoding_mode=["NONE", "ROPE_LLAMA"],
              q_dtype=["float16"], kv_dtype=["float16", "float8_e4m3fn"])
TENSOR_CORES = dict(batch_size=[12, 17], kv_len=[54, 97, 512], page_size=[1, 8, 16], num_kv_heads=[4],
                    group_size=[1, 4, 8], head_dim=[128, 256], kv_layout=["HND", "NHD"],
                    pos_encoding_mode=["NONE", "ROPE_LLAMA"], kv_dtype=["float16"])

# Name of a file and a test there, how it is run here, and its parameters.
GRIDS = [
    ("test_batch_decode_kernels", "with_paged_kv_cache", "run", {**DECODE, "head_dim": [128, 256, 512]}),
    ("test_batch_decode_kernels", "with_paged_kv_cache_with_fast_plan", "again", DECODE),
    ("test_batch_decode_kernels", "with_tuple_paged_kv_cache", "pair", DECODE),
    ("test_batch_decode_kernels", "cuda_graph_batch_decode_with_paged_kv_cache", "graph",
     {**DECODE, "kv_len": [54, 2048, 16384]}),
    ("test_batch_decode_kernels", "with_paged_kv_cache_nvfp4", "run",
     dict(batch_size=[12, 17, 128], kv_len=[54, 97, 512, 2048], page_size=[1, 8, 16], num_kv_heads=[4],
          num_qo_heads=[4, 32], head_dim=[128, 256], q_dtype=["float16", "bfloat16"], kv_dtype=["nvfp4"])),
    ("test_batch_decode_kernels", "cuda_graph_uniform_multi_token_decode", "tokens",
     dict(batch_size=[4, 8], q_len_per_req=[2, 3], num_kv_heads=[2, 8], gqa_group_size=[4, 8], page_size=[16],
          head_dim=[128], kv_layout=["NHD"], kv_dtype=["bfloat16"])),
    ("test_batch_decode_kernels", "paged_decode_extreme_negative_logits", "run",
     dict(kv_dtype=["float16", "bfloat16"], page_size=[1], head_dim=[128])),
    ("test_tensor_cores_decode", "single_decode_tensor_cores", "run",
     dict(kv_len=[54, 128, 999, 32789], num_kv_heads=[4, 8], group_size=[1, 4, 8], head_dim=[64, 128, 256],
          kv_layout=["HND", "NHD"], pos_encoding_mode=["NONE", "ROPE_LLAMA"], kv_dtype=["float16"],
          page_size=[None])),
    ("test_tensor_cores_decode", "batch_decode_tensor_cores", "run", TENSOR_CORES),
    ("test_tensor_cores_decode", "batch_decode_tensor_cores_cuda_graph", "graph", TENSOR_CORES),
    ("test_tensor_cores_decode", "batch_decode_tensor_cores_with_fast_plan", "run",
     {**TENSOR_CORES, "batch_size": [5, 12], "kv_len": [4096, 8192, 5000], "invariant_bs": [4],
      "fixed_split_size": [2048], "disable_split_kv": [True, False]}),
    ("test_tensor_cores_decode", "batch_fast_decode_tensor_cores_cuda_graph", "graph", TENSOR_CORES),
    ("test_decode_prefill_lse", "mlc_failed_case", "empty",
     dict(kv_layout=["HND"], page_size=[16], head_dim=[128], num_kv_heads=[32], num_qo_heads=[32], batch_size=[2],
          kv_dtype=["float16"])),
    ("test_non_contiguous_decode", "batch_paged_decode_packed_input", "run",
     dict(batch_size=[1, 19, 99], page_size=[1, 5], num_kv_heads=[1, 4, 8], num_qo_heads=[4, 8],
          head_dim=[64, 128, 256], kv_dtype=["float16"])),
]
# Tests without parameters that are about FlashInfer's interface: what it refuses, how torch.compile sees it.
OTHERS = 4


def why_not(case):
    """What keeps a case from applying; None if nothing does."""
    if case["kv_dtype"] not in ("float16", "bfloat16"):
        return f"keys and values in {case['kv_dtype'].split('_')[0]}"
    if case["page_size"] is None:
        return "no pages"
    if case["page_size"] != PAGE:
        return f"pages of {case['page_size']}"
    if not 64 <= case["head_dim"] <= 256:
        return f"head_dim {case['head_dim']}"
    if case.get("pos_encoding_mode", "NONE") != "NONE":
        return "rotation in the kernel"
    if "fixed_split_size" in case:
        return "asks for splits of a size"
    return None


def cases(grid):
    """Every combination."""
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


class Run:
    """One case: made, run, judged."""

    def __init__(self, case, how, device):
        self.how, self.device, self.dtype = how, device, case["kv_dtype"]
        self.batch, self.dim, self.kv_heads = case["batch_size"], case["head_dim"], case["num_kv_heads"]
        self.group = case.get("group_size") or case.get("gqa_group_size") or case["num_qo_heads"] // self.kv_heads
        self.tokens = case.get("q_len_per_req", 1)
        if how == "tokens":
            # Captured with 129 tokens, run again with others: the lists are theirs.
            self.rounds = [[129] * self.batch, [[33, 17, 65, 129][i % 4] for i in range(self.batch)],
                           [[self.tokens, 128, 64, 100][i % 4] for i in range(self.batch)]]
        elif how == "empty":
            self.rounds = [[0, 129]]
        elif how == "graph":
            # Captured for full pages, fewer tokens in between, the test's own last.
            self.rounds = [[-(-case["kv_len"] // PAGE) * PAGE] * self.batch, [PAGE] * self.batch,
                           [case["kv_len"]] * self.batch]
        else:
            self.rounds = [[case["kv_len"]] * self.batch]
        self.tolerance = 1e-2 if how == "tokens" else 1e-3
        self.longest = max(max(lengths) for lengths in self.rounds)

    def make(self):
        """Numbers in pages, in an order that is not the natural one."""
        dtype, device = getattr(torch, self.dtype), self.device
        width = -(-self.longest // PAGE)
        count = self.batch * width
        self.pages = torch.randn(count, 2, self.kv_heads, PAGE, self.dim, dtype=dtype, device=device)
        q_heads = self.kv_heads * self.group
        shape = (self.batch, q_heads, self.dim) if self.tokens == 1 else (self.batch, self.tokens, q_heads, self.dim)
        self.queries = torch.randn(shape, dtype=dtype, device=device)
        self.table = torch.randperm(count, device=device).to(torch.int32).reshape(self.batch, width)
        self.lengths = torch.tensor(self.rounds[0], dtype=torch.int32, device=device)
        self.decode = self.plan()

    def plan(self):
        return ferrokv.Decode(sequences=self.batch, q_heads=self.kv_heads * self.group, kv_heads=self.kv_heads,
                              head_dim=self.dim, max_tokens=self.longest, query_tokens=self.tokens, dtype=self.dtype,
                              device=self.device)

    def go(self):
        """Runs and judges; gives what is wrong, or None, and the largest error in bounds."""
        self.make()
        if self.how not in ("graph", "tokens") or self.device == "cpu":
            pages = self.pages
            if self.how == "pair":
                pages = (self.pages[:, 0].contiguous(), self.pages[:, 1].contiguous())
            if self.how == "again":
                self.decode = self.plan()
            worst = 0.0
            for lengths in self.rounds:
                self.lengths.copy_(torch.tensor(lengths))
                out, lse = self.decode(self.queries, pages, self.table, self.lengths)
                wrong, share = self.judge(out, lse, lengths)
                worst = max(worst, share)
                if wrong:
                    return wrong, worst
            given = torch.empty_like(out)
            self.decode(self.queries, pages, self.table, self.lengths, out=given)
            return (None if torch.equal(out, given) else "another run gave other bits"), worst
        self.decode(self.queries, self.pages, self.table, self.lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = self.decode(self.queries, self.pages, self.table, self.lengths)
        worst = 0.0
        for lengths in self.rounds:
            self.lengths.copy_(torch.tensor(lengths))
            graph.replay()
            wrong, share = self.judge(out, lse, lengths)
            worst = max(worst, share)
            if wrong:
                return wrong, worst
        return None, worst

    def judge(self, out, lse, lengths):
        q_heads, dtype = self.kv_heads * self.group, getattr(torch, self.dtype)
        queries = self.queries.double().reshape(self.batch, self.tokens, q_heads, self.dim)
        out, lse = out.reshape(queries.shape), lse.reshape(queries.shape[:3])
        worst = 0.0
        for i, length in enumerate(lengths):
            if length == 0:
                if out[i].any() or not torch.isneginf(lse[i]).all():
                    return f"sequence {i} has no key and a result", worst
                continue
            rows = self.pages[self.table[i, :-(-length // PAGE)].long()]
            keys, values = (rows[:, side].transpose(1, 2).reshape(-1, self.kv_heads, self.dim)[:length].double()
                            for side in (0, 1))
            want, want_lse, bound, lse_bound = attention(torch, queries[i], keys, values, self.dtype, self.decode.splits)
            error, lse_error = (out[i].double() - want).abs(), (lse[i].double() - want_lse).abs()
            worst = max(worst, float((error / bound).max()), float((lse_error / lse_bound).max()))
            if not bool(torch.isfinite(out[i]).all()) or worst > 1:
                return f"sequence {i} is {worst:.3g} bounds off", worst
            theirs = torch.isclose(out[i].to(dtype).double(), want.to(dtype).double(), rtol=self.tolerance,
                                   atol=self.tolerance)
            if not bool(theirs.all()) or not bool((lse_error <= 1e-3 + 1e-3 * want_lse.abs()).all()):
                return f"sequence {i} is not within {self.tolerance}", worst
        return None, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if CUDA else "cpu")
    parser.add_argument("--json", help="writes what was found there")
    arguments = parser.parse_args()
    if torch is None:
        sys.exit("the grid needs PyTorch")
    torch.manual_seed(42)
    report, total, applicable, passed, run, reasons, failures = [], 0, 0, 0, 0, {}, []
    worst = 0.0
    for file, test, how, grid in GRIDS:
        every = cases(grid)
        fit = [case for case in every if why_not(case) is None]
        for case in every:
            if why_not(case):
                reasons[why_not(case)] = reasons.get(why_not(case), 0) + 1
        chosen = fit
        if arguments.device == "cpu":
            chosen = [case for case in fit if case.get("kv_len", 0) <= 97 and case["batch_size"] <= 12][:2]
        start, good = time.time(), 0
        for case in chosen:
            wrong, share = Run(case, how, arguments.device).go()
            worst = max(worst, share)
            good += wrong is None
            if wrong:
                failures.append(f"{file}::{test} {case}: {wrong}")
        report.append(dict(file=file, test=test, cases=len(every), apply=len(fit), run=len(chosen), passed=good))
        print(f"{file}::{test}: {len(every)} cases, {len(fit)} apply, {good} of {len(chosen)} run passed, "
              f"{time.time() - start:.1f} s", flush=True)
        total, applicable, passed, run = total + len(every), applicable + len(fit), passed + good, run + len(chosen)
    total += OTHERS
    reasons["about FlashInfer's interface"] = OTHERS
    print(f"\n{applicable} of {total} cases apply; {passed} of {run} run passed; largest error {worst:.3f} of its bound, "
          f"on {ferrokv.device_name(arguments.device)}")
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"  {count:5} do not apply: {reason}")
    for failure in failures:
        print(f"FAILED {failure}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(dict(device=ferrokv.device_name(arguments.device), version=ferrokv.version(), tests=report,
                           cases=total, apply=applicable, run=run, passed=passed, largest_share=worst,
                           why_not=reasons, failures=failures), file, indent=1)
    sys.exit(0 if run and passed == run and math.isfinite(worst) else 1)


if __name__ == "__main__":
    main()
