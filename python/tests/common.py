"""What the tests share: data, the formula in float64, and how far from it a result may be.

The tests need numpy or PyTorch, and run with what there is: on arrays of numpy, on PyTorch's tensors on the CPU, and on
those of a GPU. A line says what was left out.
"""

import importlib
import os
import sys
import unittest
from pathlib import Path

# The package that is installed; with a library of one's own, that of the tree.
if os.environ.get("FERROKV_LIBRARY"):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def _there(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


numpy, torch = _there("numpy"), _there("torch")
if numpy is None and torch is None:
    raise ImportError("the tests need numpy or PyTorch: pip install numpy")

import ferrokv  # noqa: E402

PAGE = 16
CUDA = torch is not None and torch.cuda.is_available()
if os.environ.get("FERROKV_REQUIRE_GPU") and not CUDA:
    raise RuntimeError("FERROKV_REQUIRE_GPU is set, and PyTorch sees no GPU")


class Numpy:
    """Arrays of numpy."""

    name, device, dtypes = "numpy", "cpu", ["float16"]

    def normal(self, seed, shape, dtype="float16", scale=1.0):
        """Numbers that depend on seed and shape alone."""
        return (numpy.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)

    def int32(self, values):
        """The numbers of a list."""
        return numpy.array(values, numpy.int32)

    def zeros(self, shape, dtype):
        """Zeros."""
        return numpy.zeros(shape, dtype)

    def stack(self, parts):
        """Side by side along a second axis."""
        return numpy.stack(parts, 1)

    def f64(self, value):
        """In float64, where it lies."""
        return value.astype(numpy.float64)

    def bits(self, value):
        """The bytes; of a tensor of PyTorch on the CPU too, which results for arrays of other libraries are."""
        return numpy.asarray(value).tobytes()

    xp = numpy


class Torch:
    """Tensors of PyTorch on a device."""

    dtypes = ["float16", "bfloat16"]

    def __init__(self, device):
        self.name, self.device = f"torch on {device}", device

    def normal(self, seed, shape, dtype="float16", scale=1.0):
        """Numbers that depend on seed and shape alone: the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(shape, generator=generator) * scale
        return values.to(getattr(torch, dtype)).to(self.device)

    def int32(self, values):
        """The numbers of a list."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def zeros(self, shape, dtype):
        """Zeros."""
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def stack(self, parts):
        """Side by side along a second axis."""
        return torch.stack(parts, 1)

    def f64(self, value):
        """In float64, where it lies."""
        return value.double()

    def bits(self, value):
        """The bytes."""
        return bytes(value.cpu().contiguous().view(torch.uint8).flatten().tolist())

    xp = torch


def libraries():
    """All that there is here."""
    if numpy is not None:
        yield Numpy()
    if torch is not None:
        yield Torch("cpu")
    if CUDA:
        yield Torch("cuda")


class Handed:
    """A tensor of which nothing is known but that its library hands it over by DLPack."""

    def __init__(self, value):
        self._value = value

    def __dlpack__(self, **options):
        return self._value.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._value.__dlpack_device__()


needs_torch = unittest.skipIf(torch is None, "PyTorch is not installed")
needs_gpu = unittest.skipUnless(CUDA, "PyTorch sees no GPU")

# Of each type: the relative error of a rounding, and the smallest normal number.
ROUNDING = {"float16": (2.0**-11, 2.0**-14), "bfloat16": (2.0**-8, 2.0**-126)}


def attention(xp, queries, keys, values, dtype, splits):
    """Attention of the last tokens of one sequence by the formula, and how far the kernel may be from it.

    ``queries`` [T, Hq, D], ``keys`` and ``values`` [L, Hkv, D], all in float64. Gives ``(out, lse, out_bound,
    lse_bound)``. The bound is that of host/src/attention/dense/bound.rs, where it is derived; the names are the same.
    """
    tokens, q_heads, dim = queries.shape
    length, kv_heads, _ = keys.shape
    half_ulp, normal = ROUNDING[dtype]
    subnormal_error = normal * half_ulp
    u = 2.0**-24
    kappa = 17.0 * u / 2.0 + 2.0 * u
    log2e = 1.4426950408889634
    q = queries.reshape(tokens, kv_heads, q_heads // kv_heads, dim)

    def counted(x):
        size = xp.abs(x)
        return xp.where(size == 0, size, xp.where(size < normal, size * 0 + normal, size))

    scale = dim**-0.5
    logits = xp.einsum("thgd,lhd->thgl", q, keys) * scale
    magnitude = xp.einsum("thgd,lhd->thgl", counted(q), counted(keys))
    for token in range(tokens):
        # The last token sees all; each before it one fewer.
        logits[token, :, :, length - tokens + token + 1:] = float("-inf")
    largest = xp.amax(logits, -1)[..., None]
    weights = xp.exp(logits - largest)
    total = weights.sum(-1)[..., None]
    weights = weights / total
    lse = (largest + xp.log(total))[..., 0]
    out = xp.einsum("thgl,lhd->thgd", weights, values)

    seen = weights > 0
    at = xp.where(seen, logits, largest)
    score, below = at * log2e, (largest - at) * log2e
    error = scale * log2e * kappa * (dim // 16) * magnitude + 2.0 * u * xp.abs(score) + u * (17.0 + below)
    share = xp.where(seen, weights * xp.expm1(0.6931471805599453 * error + 2.0 * u), weights)
    moved = share.sum(-1)[..., None]
    size = xp.abs(values)
    visible = xp.where(xp.isinf(logits), weights * 0, weights * 0 + 1.0)
    moved_values = xp.einsum("thgl,lhd->thgd", share, size)
    weighted = xp.einsum("thgl,lhd->thgd", weights, size)
    plain = xp.einsum("thgl,lhd->thgd", visible, size)
    most = xp.amax(counted(values), 0)[None, :, None, :]
    extreme = xp.amax(xp.where(seen, xp.abs(score), weights * 0), -1)[..., None]
    reference = xp.where(extreme < 2.0**23, extreme * 0 + 2.0**-14, extreme * 0 + 1.0)
    tiles = -(-length // 16)
    of_split = -(-tiles // splits)
    warps = 8 if dim <= 128 else 4
    steps, used = -(-of_split // warps), -(-tiles // max(of_split, 1))
    in_all = u * (steps + used + 10.0)
    shifted = (moved_values + xp.abs(out) * moved) / (1.0 - moved)
    rounded = half_ulp**2 * weighted + subnormal_error * reference * plain
    stepped = kappa * steps * (1.0 + half_ulp) * (weighted + 2.0 * warps * used * normal * reference * most)
    merged = u * (used + 8.0) * weighted
    bound = 1.01 * (shifted + rounded + stepped + merged + in_all * xp.abs(out)) + 1e-36
    bound = xp.where(moved < 0.5, bound, bound * 0 + 2.0 * most)
    apart = xp.where(moved < 0.5, -xp.log1p(-xp.where(moved < 0.5, moved, moved * 0)), moved * 0 + float("inf"))
    lse_bound = 1.01 * (apart[..., 0] + in_all + 80.0 * u + 4.0 * u * xp.abs(lse))
    wide = (tokens, q_heads, dim)
    return out.reshape(wide), lse.reshape(wide[:2]), bound.reshape(wide), lse_bound.reshape(wide[:2])


class Paged:
    """Sequences of some lengths with keys and values in shuffled pages, poison wherever no token is."""

    def __init__(self, lib, lengths, kv_heads, head_dim, max_tokens, dtype="float16", seed=1, scale=1.0):
        self.lib, self.lengths, self.dtype = lib, lengths, dtype
        self.sides = [[lib.normal(seed + 100 * i + side, (length, kv_heads, head_dim), dtype, scale)
                       for i, length in enumerate(lengths)] for side in (1, 2)]
        needed = [-(-length // PAGE) for length in lengths]
        count = sum(needed) + 3
        # A fixed order that is not the natural one, for a number of pages that 7919 does not divide.
        order = [(7919 * page + 5) % count for page in range(count)]
        pools = []
        for side in self.sides:
            pool = lib.zeros((count, kv_heads, PAGE, head_dim), dtype)
            pool[:] = float("nan")
            for i, rows in enumerate(side):
                for page in range(needed[i]):
                    part = rows[page * PAGE:(page + 1) * PAGE]
                    at = order[sum(needed[:i]) + page]
                    for head in range(kv_heads):
                        pool[at, head, :part.shape[0]] = part[:, head]
            pools.append(pool)
        self.keys, self.values = pools
        self.pages = lib.stack(pools)
        width = -(-max_tokens // PAGE)
        rows = []
        for i in range(len(lengths)):
            start = sum(needed[:i])
            rows.append(order[start:start + needed[i]] + [1 << 30] * (width - needed[i]))
        self.table, self.tokens = lib.int32(rows), lib.int32(lengths)

    def check(self, test, queries, out, lse, splits):
        """Every sequence's results against the formula, by its bound."""
        lib, rows = self.lib, len(self.lengths)
        queries = queries.reshape(rows, -1, *queries.shape[-2:])
        out, lse = out.reshape(queries.shape), lse.reshape(queries.shape[:-1])
        for i, length in enumerate(self.lengths):
            if length == 0:
                test.assertTrue((lib.f64(out[i]) == 0).all(), "zeros where there is no key")
                test.assertTrue((lib.f64(lse[i]) == float("-inf")).all(), "no sum where there is no key")
                continue
            keys, values = (lib.f64(side[i]) for side in self.sides)
            want, want_lse, bound, lse_bound = attention(lib.xp, lib.f64(queries[i]), keys, values, self.dtype, splits)
            error, lse_error = abs(lib.f64(out[i]) - want), abs(lib.f64(lse[i]) - want_lse)
            test.assertTrue((error <= bound).all(), f"sequence {i}: {float((error / bound).max())} bounds off")
            test.assertTrue((lse_error <= lse_bound).all(), f"sequence {i}: log-sum off")
            # The bound is worth something: far below what a result in 16 bits could show.
            if self.dtype == "float16":
                test.assertLess(float(bound.max()), 1e-3 * float(abs(values).max()))
