"""FlashInfer's own decode tests, as they are, with this package in the place of FlashInfer.

    python3 python/tests/flashinfer_suite.py FLASHINFER [-k EXPRESSION]

FLASHINFER is a checkout of FlashInfer's repository (the figures in docs/library.md are of commit fb28d7242); pytest and
a GPU are needed, FlashInfer itself is not. A module of its name is put up here, with the classes and functions that the
tests of decoding call. What they test is ours: `ferrokv.Decode` over pages of 16 tokens, on the current stream, and in
torch's graphs. What they hold it against is attention in float64, rounded to the type of the queries. Where a test
holds one kernel of FlashInfer's against another (tensor cores or not), the other one is that reference. Where a test
wants the same bits in a batch of another size, the plan is for 16 sequences, of which some have no tokens.

A case that does not apply is skipped, and the reason is its own: pages of other sizes, other types, a rotation in the
kernel, no pages at all. `NHD` pages are copied to `HND` first, on the same stream.
"""

import collections
import gc
import math
import os
import sys
import types

try:
    import pytest
    import torch
except ImportError as missing:
    sys.exit(f"{missing.name} is needed")

from common import ferrokv

FILES = ["test_batch_decode_kernels", "test_tensor_cores_decode", "test_decode_prefill_lse",
         "test_non_contiguous_decode"]
# Tests of FlashInfer's own interface: what it compiles to, what it refuses.
ITS_OWN = ["test_single_decode_torch_compile_cuda_graph", "test_tensor_core_decode_rejects_mismatched_q_len"]
PAGE = 16
LOG2_E = math.log2(math.e)


def does_not_apply(why):
    pytest.skip(f"does not apply: {why}")


def attended(q, k, v, scale=None):
    """Attention of [query tokens, heads, D] over [tokens, KV heads, D] in float64, and its log-sum in base 2; a query
    token sees the keys up to its own."""
    rows, heads, dim = q.shape
    if len(k) == 0:
        return torch.zeros_like(q), torch.full((rows, heads), -math.inf, dtype=torch.float32, device=q.device)
    group = heads // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * (dim ** -0.5 if scale is None else scale)
    places = torch.arange(len(k), device=q.device)
    hidden = places[None, :] > places[len(k) - rows:][:, None]
    scores = scores.masked_fill(hidden[None], -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.to(q.dtype), (scores.logsumexp(-1).T * LOG2_E).float()


def single_decode_with_kv_cache(q, k, v, kv_layout="NHD", pos_encoding_mode="NONE", use_tensor_cores=False, **_):
    if use_tensor_cores:
        does_not_apply("no pages")
    if pos_encoding_mode != "NONE":
        does_not_apply("rotation in the kernel")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    return attended(q[None], k, v)[0][0]


class BatchDecodeWithPagedKVCacheWrapper:
    """The wrapper by FlashInfer's name and arguments."""

    def __init__(self, workspace, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
                 paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, **_):
        self.layout, self.in_graphs = kv_layout, use_cuda_graph
        # Where a test holds two kernels against each other, the one without tensor cores is the reference.
        asked = sys._getframe(1).f_globals.get("__name__", "")
        self.is_reference = not use_tensor_cores and asked.endswith(("tensor_cores_decode", "decode_prefill_lse"))
        self.room = None if paged_kv_indices_buffer is None else paged_kv_indices_buffer.numel()
        self.plan_of = self.referred_to = None

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
             data_type=None, sm_scale=None, q_len_per_req=1, fixed_split_size=None, disable_split_kv=False, **_):
        kv_type = kv_data_type or data_type or q_data_type
        q_data_type, kv_type = (getattr(torch, kind) if isinstance(kind, str) else kind
                                for kind in (q_data_type, kv_type))
        if q_data_type not in (torch.float16, torch.bfloat16) or kv_type != q_data_type:
            does_not_apply(f"keys and values in {kv_type}")
        if page_size != PAGE:
            does_not_apply(f"pages of {page_size}")
        if not 64 <= head_dim <= 256:
            does_not_apply(f"head_dim {head_dim}")
        if pos_encoding_mode != "NONE" or window_left != -1 or logits_soft_cap:
            does_not_apply("rotation, a window or a cap in the kernel")
        if sm_scale is not None and not math.isclose(sm_scale, head_dim ** -0.5):
            does_not_apply("another scale of the scores")
        indptr, indices = indptr.cpu().long(), indices.cpu().int()
        pages = indptr[1:] - indptr[:-1]
        lengths = torch.where(pages > 0, (pages - 1) * PAGE + last_page_len.cpu().long(), 0).int()
        self.batch, most = len(pages), int(pages.max())
        sequences = 16 if fixed_split_size or disable_split_kv else self.batch
        # What is captured has to do for every later plan.
        if self.in_graphs:
            most = max(most, -(-self.room // sequences))
        key = (sequences, num_qo_heads, num_kv_heads, head_dim, q_len_per_req, q_data_type)
        if self.plan_of is None or self.plan_of[0] != key or self.most < most or not self.in_graphs:
            self.most = max(most, 1)
            self.decode = ferrokv.Decode(
                sequences=sequences, q_heads=num_qo_heads, kv_heads=num_kv_heads, head_dim=head_dim,
                max_tokens=self.most * PAGE, query_tokens=q_len_per_req, dtype=str(q_data_type).split(".")[1],
                device="cuda:0")
            self.table = torch.zeros(sequences, self.most, dtype=torch.int32, device="cuda:0")
            self.lengths = torch.zeros(sequences, dtype=torch.int32, device="cuda:0")
        self.plan_of = key, indptr, indices, lengths
        table = torch.zeros(sequences, self.most, dtype=torch.int32)
        for sequence, (first, count) in enumerate(zip(indptr.tolist(), pages.tolist())):
            table[sequence, :count] = indices[first:first + count]
        self.table.copy_(table)
        self.lengths[:self.batch].copy_(lengths)
        self.lengths[self.batch:] = 0
        self.query_tokens = q_len_per_req

    begin_forward = plan

    def pools(self, cache):
        """Keys and values as pools of `HND` pages."""
        keys, values = cache if isinstance(cache, tuple) else (cache[:, 0], cache[:, 1])
        if self.layout == "NHD":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return keys.contiguous(), values.contiguous()

    def run(self, q, paged_kv_cache, *_, out=None, lse=None, return_lse=False, **__):
        keys, values = self.pools(paged_kv_cache)
        rows = q.reshape(-1, self.query_tokens, *q.shape[-2:])
        if self.is_reference and torch.cuda.is_current_stream_capturing():
            # Of the same tensors as the call ahead of the capture: the reference cannot be captured itself.
            result, sums = (value.clone() for value in self.referred_to)
        elif self.is_reference:
            result, sums = self.referred_to = self.referred(rows, paged_kv_cache)
        else:
            absent = rows.new_zeros(len(self.lengths) - self.batch, *rows.shape[1:])
            queries = torch.cat([rows, absent]) if len(absent) else rows.contiguous()
            result, sums = self.decode(queries, (keys, values), self.table, self.lengths)
            result, sums = result[:self.batch].to(q.dtype), sums[:self.batch] * LOG2_E
        result, sums = result.reshape(q.shape), sums.reshape(q.shape[:-1])
        if out is not None:
            result = out.copy_(result)
        return (result, sums) if return_lse else result

    def run_return_lse(self, q, paged_kv_cache):
        return self.run(q, paged_kv_cache, return_lse=True)

    def referred(self, rows, cache):
        keys, values = self.pools(cache)
        _, indptr, indices, lengths = self.plan_of
        results = []
        for sequence, length in enumerate(lengths.tolist()):
            own = indices[indptr[sequence]:indptr[sequence + 1]].long().to(keys.device)
            tokens = [pool[own].transpose(1, 2).flatten(0, 1)[:length] for pool in (keys, values)]
            results.append(attended(rows[sequence], *tokens))
        return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    def __init__(self, workspace, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout="NHD",
                 use_tensor_cores=False):
        super().__init__(workspace, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer)


class BatchPrefillWithPagedKVCacheWrapper:
    """What a test of several query tokens holds decoding against."""

    def __init__(self, workspace, kv_layout="NHD", **_):
        self.reference = BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout)
        self.reference.is_reference = True

    def plan(self, qo_indptr, indptr, indices, last_page_len, *extents, q_data_type, **_):
        self.reference.plan(indptr, indices, last_page_len, *extents, q_data_type=q_data_type,
                            q_len_per_req=int(qo_indptr[1] - qo_indptr[0]))

    def run(self, q, cache):
        return self.reference.run(q, cache)


def fast_decode_plan(wrapper, *args, **kwargs):
    kwargs.pop("global_override_indptr_cpu", None)
    return type(wrapper).plan(wrapper, *args, **kwargs)


def stand_in():
    """The modules that the tests import."""
    package = types.ModuleType("flashinfer")
    for name in ("decode", "jit", "utils"):
        setattr(package, name, types.ModuleType(f"flashinfer.{name}"))
        sys.modules[f"flashinfer.{name}"] = getattr(package, name)
    for own in (single_decode_with_kv_cache, BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan,
                CUDAGraphBatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(package, own.__name__, own)
        setattr(package.decode, own.__name__, own)
    package.jit.build_jit_specs = lambda *_, **__: None
    package.utils.has_flashinfer_jit_cache = lambda: True
    package.utils.get_compute_capability = torch.cuda.get_device_capability
    sys.modules["flashinfer"] = package
    tests, helpers = types.ModuleType("tests"), types.ModuleType("tests.test_helpers")
    jit, fp4 = types.ModuleType("tests.test_helpers.jit_utils"), types.ModuleType("tests.test_helpers.utils_fp4")
    jit.gen_decode_attention_modules = jit.gen_prefill_attention_modules = lambda *_, **__: []
    fp4.create_nvfp4_kv = fp4.nvfp4_to_float = lambda *_, **__: does_not_apply("keys and values in nvfp4")
    for module in (tests, helpers, jit, fp4):
        sys.modules[module.__name__] = module


class Count:
    """What came of each case, and why some were skipped."""

    def __init__(self):
        self.outcomes, self.reasons = collections.Counter(), collections.Counter()

    def pytest_collection_modifyitems(self, items):
        for item in items:
            if item.name in ITS_OWN:
                item.add_marker(pytest.mark.skip("does not apply: FlashInfer's own interface"))

    def pytest_runtest_setup(self, item):
        # A case that does not apply makes its tensors all the same, up to 24 GiB of them.
        if torch.cuda.memory_reserved() > 8 << 30:
            gc.collect()
            torch.cuda.empty_cache()

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.outcomes["skipped"] += 1
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.when == "call" or report.failed:
            self.outcomes[report.outcome] += 1


def main():
    if len(sys.argv) < 2 or not torch.cuda.is_available():
        sys.exit(__doc__)
    folder = os.path.join(sys.argv[1], "tests", "attention")
    files = [os.path.join(folder if os.path.isdir(folder) else sys.argv[1], f"{name}.py") for name in FILES]
    absent = [file for file in files if not os.path.isfile(file)]
    if absent:
        sys.exit(f"no {absent[0]}: give a checkout of FlashInfer")
    stand_in()
    count = Count()
    code = pytest.main([*files, "--noconftest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-rN",
                        "--import-mode=importlib", *sys.argv[2:]], plugins=[count])
    print(dict(count.outcomes))
    for reason, cases in count.reasons.most_common():
        print(f"{cases:6}  {reason}")
    sys.exit(int(code))


if __name__ == "__main__":
    main()
