//! The tensor cores: matrix multiply-accumulate by whole warps, and the loads that feed it.
//!
//! All 32 lanes make the call together. With `g = lane / 4` and `q = lane % 4` a lane holds, for
//! [`mma_f16`] and [`mma_bf16`] (m16n8k16; two elements a register, the lower index in the low half):
//!
//! | operand | register | row | column |
//! |---|---|---|---|
//! | A, 16 × 16 | 0, 1, 2, 3 | g, g + 8, g, g + 8 | 2q, 2q + 1 (+ 8 in 2 and 3) |
//! | B, 16 × 8 | 0, 1 | 2q, 2q + 1 (+ 8 in 1) | g |
//! | C and D, 16 × 8, f32 | 0, 1, 2, 3 | g, g, g + 8, g + 8 | 2q, 2q + 1, 2q, 2q + 1 |
//!
//! and for [`mma_i8`] (m16n8k32; four bytes a register) the same with columns of A and rows of B 4q to 4q + 3
//! (+ 16 in A's registers 2 and 3 and B's register 1).
//!
//! Integer products are exact. The float ones follow the arithmetic of `simt::emu::tensor`, which was
//! measured: one truncating sum of seventeen terms.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu::{self, Format, MatrixOp};
#[cfg(target_arch = "nvptx64")]
use crate::ptx::convergent;
use crate::{Pod, Shared};

sides! {
    /// A·B + C of f16 matrices with f32 accumulation. PTX:
    /// `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32`.
    pub fn mma_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        device { convergent::mma_f16(a, b, c) }
        emulator { emu::matrix(MatrixOp::Float(Format::F16), a, b, c.map(f32::to_bits)).map(f32::from_bits) }
    }

    /// A·B + C of bf16 matrices with f32 accumulation. PTX:
    /// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`.
    pub fn mma_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        device { convergent::mma_bf16(a, b, c) }
        emulator { emu::matrix(MatrixOp::Float(Format::Bf16), a, b, c.map(f32::to_bits)).map(f32::from_bits) }
    }

    /// A·B + C of int8 matrices, modulo 2^32. PTX: `mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32`.
    pub fn mma_i8(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
        device { convergent::mma_i8(a, b, c) }
        emulator { emu::matrix(MatrixOp::Integer, a, b, c.map(|x| x as u32)).map(|x| x as i32) }
    }
}

/// What a chain of [`mma_f16`] or [`mma_bf16`] may lose on the tensor cores that run it, over what it may
/// lose on those of sm_90 and newer: 2 before sm_90, whose sixteen products are two sums of eight that keep
/// one bit less. On sm_90 n steps from 0 lose at most n · 1.25 · 2^−21 of the sum of all absolute products,
/// but for subnormal operands. Bounds on results are multiplied by it. Of a program on the host it is 1.
#[inline(always)]
pub fn truncation() -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return if crate::thread::target_has::<90>() { 1.0 } else { 2.0 };
    #[cfg(not(target_arch = "nvptx64"))]
    emu::current_target().tensor_cores().truncation()
}

/// Four 8 × 8 matrices of 16-bit elements. Lane `8m + r` names row `r` of matrix `m`: the 16 bytes from
/// element `index` of `rows` on, aligned to 16. In register `m` a lane gets elements 2q and 2q + 1 of row g.
/// PTX: `ldmatrix.sync.aligned.m8n8.x4.b16`.
#[crate::device]
pub fn load_matrix<T: Pod>(rows: Shared<T>, index: u32) -> [u32; 4] {
    #[cfg(target_arch = "nvptx64")]
    return convergent::load_matrix::<false>(rows.byte_offset(index));
    #[cfg(not(target_arch = "nvptx64"))]
    emu::load_matrix(rows, index, false)
}

/// [`load_matrix`], each matrix transposed: in register `m` a lane gets column g of rows 2q and 2q + 1.
/// PTX: `ldmatrix.sync.aligned.m8n8.x4.trans.b16`.
#[crate::device]
pub fn load_matrix_transposed<T: Pod>(rows: Shared<T>, index: u32) -> [u32; 4] {
    #[cfg(target_arch = "nvptx64")]
    return convergent::load_matrix::<true>(rows.byte_offset(index));
    #[cfg(not(target_arch = "nvptx64"))]
    emu::load_matrix(rows, index, true)
}
