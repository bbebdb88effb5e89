//! # Mathematics
//! What was found after a step decides what is returned. A head whose ranking failed is computed from the
//! originals: rung 3. Where a stored block is not what it was, nothing that rests on stored blocks is to be
//! believed: all heads of the sequence are: rung 4. Their certificates become those of exact outputs.
//!
//! # Layout
//! `flags` [sequences, query heads], 0 afterwards; `exacts` as `audit` leaves them; `certificates` and
//! `dense_rows` as `replace` does.
//!
//! # Bytes
//! 68 a query head, where something was found; else 4.
//!
//! # Work split
//! A block of 256 threads for a sequence.

use super::judge::Exact;
use super::pass::StepShape;
use super::policy::{Certificate, reason, rung};
use crate::attention::ROWS;
use glam::UVec4;
use simt::{Global, GlobalMut, bits, kernel, thread};

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Sends heads to the dense rung for what was found.
#[kernel(system = certified, max_threads = 256, overlaps = in_turn)]
pub fn settle(
    exacts: Global<Exact>,
    flags: GlobalMut<u32>,
    certificates: GlobalMut<Certificate>,
    dense_rows: GlobalMut<u32>,
    clock: GlobalMut<u32>,
    shape: StepShape,
) {
    let (sequence, t) = (thread::block_idx_x(), thread::thread_idx_x());
    let heads = shape.kv_heads * shape.group;
    let first = sequence * heads;
    if sequence == 0 && t == 0 {
        clock.store(0, clock.load(0).wrapping_add(1));
    }
    let mut any = 0;
    let mut head = t;
    while head < heads {
        any |= flags.load((first + head) as usize);
        head += THREADS;
    }
    if thread::sync_threads_or((any != 0) as u32) == 0 {
        return;
    }
    let all = thread::sync_threads_or((any & reason::CANARY != 0) as u32) != 0;

    let mut launch_row = t;
    while launch_row < shape.kv_heads * shape.row_groups() {
        let pair = bits::div_u32(launch_row, shape.row_groups());
        let row_group = bits::rem_u32(launch_row, shape.row_groups());
        let rows = (shape.group - row_group * ROWS).min(ROWS);
        let mut mask = 0u32;
        for r in 0..rows {
            let found = flags.load((first + pair * shape.group + row_group * ROWS + r) as usize);
            mask |= ((all || found != 0) as u32) << r;
        }
        let at = (sequence * shape.kv_heads * shape.row_groups() + launch_row) as usize;
        dense_rows.store(at, dense_rows.load(at) | mask);
        launch_row += THREADS;
    }
    thread::sync_threads();
    let mut head = t;
    while head < heads {
        let at = (first + head) as usize;
        let found = flags.load(at);
        if all || found != 0 {
            let of_step = Certificate::load(certificates, at);
            let exact: Exact = bytemuck::cast(exacts.cast::<UVec4>().load(at));
            let to = if all { rung::LAYER } else { rung::DENSE };
            let settled = exact.certificate(of_step, to | (of_step.reason() | found) << 16);
            settled.store(certificates, at);
            flags.store(at, 0);
        }
        head += THREADS;
    }
}
