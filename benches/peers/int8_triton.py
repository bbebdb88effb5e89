"""INT8 per-channel KV quantization in Triton: the strongest peer that is quick to write.

Matrices are row-major [T, D], one column a channel. Every kernel walks tiles of BT rows by BD
columns, columns first, so that programs that run together read neighbouring memory. Divisions are
correctly rounded (`div_rn`; a plain `/` is approximate in Triton) and codes round half to even.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _tile(T, D, first_row, column_blocks, BT: tl.constexpr, BD: tl.constexpr):
    """Row and column indices of this program's tile, offsets into [T, D], and the mask."""
    pid = tl.program_id(0)
    col = (pid % column_blocks) * BD + tl.arange(0, BD)
    row = first_row + tl.arange(0, BT)
    offset = row[:, None].to(tl.int64) * D + col[None, :]
    return col, offset, (row[:, None] < T) & (col[None, :] < D)


@triton.jit
def _encode(x, scale):
    code = libdevice.rint(tl.div_rn(x, scale))
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)


@triton.jit
def quantize(x, scales, codes, T, D, BT: tl.constexpr, BD: tl.constexpr):
    column_blocks = tl.cdiv(D, BD)
    first = tl.program_id(0) // column_blocks * BT
    col, offset, mask = _tile(T, D, first, column_blocks, BT, BD)
    scale = tl.load(scales + col, mask=col < D, other=1.0)
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(codes + offset, _encode(value, scale[None, :].broadcast_to(BT, BD)), mask=mask)


@triton.jit
def dequantize(codes, scales, out, T, D, BT: tl.constexpr, BD: tl.constexpr):
    column_blocks = tl.cdiv(D, BD)
    first = tl.program_id(0) // column_blocks * BT
    col, offset, mask = _tile(T, D, first, column_blocks, BT, BD)
    scale = tl.load(scales + col, mask=col < D, other=1.0)
    code = tl.load(codes + offset, mask=mask, other=0).to(tl.float32)
    tl.store(out + offset, (code * scale[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def block_quantize(x, scales, codes, T, D, BT: tl.constexpr, BD: tl.constexpr):
    """Scales of each block of BT tokens, [ceil(T/BT), D], and its codes, in one read."""
    column_blocks = tl.cdiv(D, BD)
    block = tl.program_id(0) // column_blocks
    col, offset, mask = _tile(T, D, block * BT, column_blocks, BT, BD)
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(value), axis=0), 127.0)
    tl.store(scales + block.to(tl.int64) * D + col, scale, mask=col < D)
    tl.store(codes + offset, _encode(value, scale[None, :].broadcast_to(BT, BD)), mask=mask)


@triton.jit
def column_max(x, partial, T, D, rows, BT: tl.constexpr, BD: tl.constexpr):
    """Largest magnitude of each column over a run of `rows` tokens (a multiple of BT)."""
    column_blocks = tl.cdiv(D, BD)
    run = tl.program_id(0) // column_blocks
    best = tl.zeros([BT, BD], dtype=tl.float32)
    for step in range(0, rows, BT):
        _, offset, mask = _tile(T, D, run * rows + step, column_blocks, BT, BD)
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.abs(value))
    col = (tl.program_id(0) % column_blocks) * BD + tl.arange(0, BD)
    tl.store(partial + run * D + col, tl.max(best, axis=0), mask=col < D)


@triton.jit
def merge_scales(partial, scales, runs, D, BP: tl.constexpr, BD: tl.constexpr):
    """scales = max over the runs / 127."""
    col = tl.program_id(0) * BD + tl.arange(0, BD)
    best = tl.zeros([BP, BD], dtype=tl.float32)
    for first in range(0, runs, BP):
        row = first + tl.arange(0, BP)
        mask = (row[:, None] < runs) & (col[None, :] < D)
        value = tl.load(partial + row[:, None] * D + col[None, :], mask=mask, other=0.0)
        best = tl.maximum(best, value)
    tl.store(scales + col, tl.div_rn(tl.max(best, axis=0), 127.0), mask=col < D)


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n), mask=offset < n)


@triton.jit
def read(x, out, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """One maximum per program: a read of everything that writes next to nothing."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    best = tl.zeros([BLOCK], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        offset = first + step * BLOCK + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(x + offset, mask=offset < n, other=0.0).to(tl.float32))
    tl.store(out + tl.program_id(0), tl.max(best, axis=0))


# How a tile is cut: (elements in a tile, most columns, warps).
TILES = ((2048, 256, 4), (4096, 1024, 4), (8192, 256, 8), (8192, 1024, 8))
# The same for the column maximum, and how many programs a multiprocessor gets.
RUNS = ((4096, 256, 4, 4), (4096, 256, 4, 8), (4096, 256, 4, 16), (8192, 1024, 8, 4))
COPY_BLOCKS = ((4096, 4), (8192, 8))


def columns_of(channels, most):
    return min(triton.next_power_of_2(channels), most)


def tilings(channels):
    """Distinct (BT, BD, warps) for a matrix of that many channels."""
    found = []
    for elements, most, warps in TILES:
        bd = columns_of(channels, most)
        cut = (max(elements // bd, 1), bd, warps)
        if cut not in found:
            found.append(cut)
    return found


def launch_tiles(kernel, source, scales, target, tokens, channels, cut):
    bt, bd, warps = cut
    grid = (triton.cdiv(tokens, bt) * triton.cdiv(channels, bd),)
    kernel[grid](source, scales, target, tokens, channels, BT=bt, BD=bd, num_warps=warps)


def block_tilings(channels, block):
    """Distinct (BT, BD, warps) with BT = `block` tokens, a power of two."""
    cuts = ((columns_of(channels, most), warps) for most, warps in ((64, 4), (128, 4), (256, 8)))
    return [(block, bd, warps) for bd, warps in dict.fromkeys(cuts)]


def run_plans(tokens, channels, multiprocessors):
    """Distinct (BT, BD, warps, rows, runs) for the column maximum."""
    found = []
    for elements, most, warps, each in RUNS:
        bd = columns_of(channels, most)
        bt = max(elements // bd, 1)
        want = max(multiprocessors * each // triton.cdiv(channels, bd), 1)
        rows = triton.cdiv(triton.cdiv(tokens, want), bt) * bt
        plan = (bt, bd, warps, rows, triton.cdiv(tokens, rows))
        if plan not in found:
            found.append(plan)
    return found


def launch_scales(source, partial, scales, tokens, channels, plan):
    """`partial` holds at least runs * channels floats."""
    bt, bd, warps, rows, runs = plan
    grid = (runs * triton.cdiv(channels, bd),)
    column_max[grid](source, partial, tokens, channels, rows, BT=bt, BD=bd, num_warps=warps)
    merge_scales[(triton.cdiv(channels, 16),)](partial, scales, runs, channels, BP=128, BD=16,
                                               num_warps=4)
