//! The matrix operations of a warp: registers of 32 lanes to tiles and back.

use super::collective::{WarpCall, WarpOp};
use super::lane::{Lane, warp_call, with_lane};
use super::shared::{check_shared_read, locate_shared};
use super::tensor::{self, Format, TensorCores};
use super::wgmma::{self, GroupCall};
use crate::warp::FULL_MASK;
use crate::{Pod, Shared};
use core::panic::Location;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatrixOp {
    /// m16n8k16.
    Float(Format),
    /// m16n8k32.
    Integer,
    /// Four 8 × 8 matrices of 16-bit elements, a row a lane.
    Load { transposed: bool },
    /// A call of a group of warps; the value is the address of the lane's [`Fragments`](wgmma::Fragments).
    Group(GroupCall),
}

/// A lane's registers, while it is parked: not on its stack, which another block may use meanwhile.
#[derive(Clone, Copy, Default)]
pub(super) struct Operands {
    a: [u32; 4],
    b: [u32; 2],
    c: [u32; 4],
    d: [u32; 4],
}

#[track_caller]
#[inline(always)]
fn meet(op: MatrixOp, a: [u32; 4], b: [u32; 2], c: [u32; 4]) -> [u32; 4] {
    let value = with_lane(|lane| {
        lane.operands.set(Operands { a, b, c, d: [0; 4] });
        lane.operands.as_ptr() as u64
    });
    warp_call(WarpCall::new(FULL_MASK, WarpOp::Matrix(op), value, 0));
    with_lane(|lane| lane.operands.get().d)
}

#[track_caller]
#[inline(always)]
pub(crate) fn matrix(op: MatrixOp, a: [u32; 4], b: [u32; 2], c: [u32; 4]) -> [u32; 4] {
    meet(op, a, b, c)
}

#[track_caller]
pub(crate) fn load_matrix<T: Pod>(rows: Shared<T>, index: u32, transposed: bool) -> [u32; 4] {
    let place = Location::caller();
    let row = with_lane(|lane| read_row(lane, rows, index, place));
    let words = [0, 1, 2, 3].map(|i| (row >> (32 * i)) as u32);
    meet(MatrixOp::Load { transposed }, words, [0; 2], [0; 4])
}

fn read_row<T: Pod>(lane: &Lane, rows: Shared<T>, index: u32, place: &'static Location<'static>) -> u128 {
    let (base, len) = rows.extent();
    let offset = locate_shared::<T, u128>(lane, base, len, index, false, place);
    check_shared_read(lane, (offset, index), 16, place);
    lane.block().shared.read_unit(offset)
}

/// Computes every lane's result; `addresses` are those of the lanes' operands.
pub(super) fn exchange(op: MatrixOp, addresses: &[u64; 32], tensor_cores: TensorCores) {
    if let MatrixOp::Group(_) = op {
        return wgmma::exchange(addresses);
    }
    // SAFETY: all 32 lanes are parked in `meet`, their operands are in their `Lane`s, and this thread runs
    // them all.
    let lanes = addresses.map(|address| unsafe { &*(address as *const Operands) });
    let results = match op {
        MatrixOp::Float(format) => float(format, &lanes, tensor_cores),
        MatrixOp::Integer => integer(&lanes),
        MatrixOp::Load { transposed } => distribute(&lanes, transposed),
        MatrixOp::Group(_) => return,
    };
    for (address, result) in addresses.iter().zip(results) {
        // SAFETY: as above; the shared references are gone.
        unsafe { (*(*address as *mut Operands)).d = result }
    }
}

/// Row and column of accumulator register `i` of a lane.
fn accumulator(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2)
}

fn gather_accumulator(lanes: &[&Operands; 32]) -> [[u32; 8]; 16] {
    let mut c = [[0; 8]; 16];
    for (lane, operands) in lanes.iter().enumerate() {
        for (i, value) in operands.c.iter().enumerate() {
            let (row, column) = accumulator(lane, i);
            c[row][column] = *value;
        }
    }
    c
}

fn scatter(d: &[[u32; 8]; 16]) -> [[u32; 4]; 32] {
    core::array::from_fn(|lane| {
        core::array::from_fn(|i| {
            let (row, column) = accumulator(lane, i);
            d[row][column]
        })
    })
}

fn float(format: Format, lanes: &[&Operands; 32], tensor_cores: TensorCores) -> [[u32; 4]; 32] {
    let mut a = [[0u16; 16]; 16];
    let mut b = [[0u16; 16]; 8];
    for (lane, operands) in lanes.iter().enumerate() {
        let (g, q) = (lane / 4, lane % 4);
        for half in 0..2 {
            let part = |word: u32| (word >> (16 * half)) as u16;
            for (i, word) in operands.a.iter().enumerate() {
                a[g + 8 * (i % 2)][2 * q + half + 8 * (i / 2)] = part(*word);
            }
            for (i, word) in operands.b.iter().enumerate() {
                b[g][2 * q + half + 8 * i] = part(*word);
            }
        }
    }
    scatter(&tensor_cores.mma_16x8x16(format, &a, &b, &gather_accumulator(lanes)))
}

fn integer(lanes: &[&Operands; 32]) -> [[u32; 4]; 32] {
    let mut a = [[0i8; 32]; 16];
    let mut b = [[0i8; 32]; 8];
    for (lane, operands) in lanes.iter().enumerate() {
        let (g, q) = (lane / 4, lane % 4);
        for byte in 0..4 {
            let part = |word: u32| (word >> (8 * byte)) as i8;
            for (i, word) in operands.a.iter().enumerate() {
                a[g + 8 * (i % 2)][4 * q + byte + 16 * (i / 2)] = part(*word);
            }
            for (i, word) in operands.b.iter().enumerate() {
                b[g][4 * q + byte + 16 * i] = part(*word);
            }
        }
    }
    scatter(&tensor::mma_16x8x32(&a, &b, &gather_accumulator(lanes)))
}

/// Lane `8m + r` holds row `r` of matrix `m` in its operand `a`.
fn distribute(lanes: &[&Operands; 32], transposed: bool) -> [[u32; 4]; 32] {
    let element = |matrix: usize, row: usize, column: usize| {
        lanes[8 * matrix + row].a[column / 2] >> (16 * (column % 2)) & 0xffff
    };
    core::array::from_fn(|lane| {
        let (g, q) = (lane / 4, lane % 4);
        core::array::from_fn(|matrix| {
            let pick = |i: usize| {
                if transposed { element(matrix, 2 * q + i, g) } else { element(matrix, g, 2 * q + i) }
            };
            pick(0) | pick(1) << 16
        })
    })
}
