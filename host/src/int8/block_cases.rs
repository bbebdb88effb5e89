//! Cases of the kernels behind a growing cache: appended in two pieces, then restored; of two sequences, the
//! second of which is there or not.

use crate::attention::dense::sample::normal;
use crate::check::{Case, CaseError, OutputBuffer, poisoned};
use crate::kv::PARKED;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::int8::{BlockShape, append_blocks, restore_blocks};
use simt::LaunchShape;

/// Tokens of the first and of the second piece, KV heads, head_dim, and blocks that there is room for.
const EXTENTS: [(u32, u32, u32, u32, u32); 5] =
    [(1, 1, 1, 64, 1), (15, 1, 3, 64, 2), (16, 20, 2, 96, 3), (37, 11, 1, 256, 3), (30, 9, 2, 128, 2)];

/// The cases of both kernels; in the last the second piece is longer than the room.
pub(super) fn add(cases: &mut Vec<Case>) {
    for extents in EXTENTS {
        let (first, second, kv_heads, head_dim, blocks) = extents;
        for both in [true, false] {
            let who = if both { "two sequences" } else { "one sequence" };
            let label = format!(
                "f16 {first} + {second} tokens of {kv_heads} heads of {head_dim}, {blocks} blocks, {who}"
            );
            let run = move |device: &Device| run(device, extents, both);
            let case = Case::new(append_blocks::kernel::<f16>().info(), label, run);
            cases.push(case.and(restore_blocks::kernel::<f16>().info()).race_checked());
        }
    }
}

fn run(
    device: &Device,
    (first, second, kv_heads, head_dim, blocks): (u32, u32, u32, u32, u32),
    both: bool,
) -> Result<Vec<OutputBuffer>, CaseError> {
    let stream = Stream::new(device)?;
    let all = 2 * blocks;
    let shape = |tokens: u32| BlockShape { tokens, kv_heads, head_dim, blocks: all, max_blocks: blocks };
    let pairs = (all * kv_heads) as usize;
    // Blocks of the two take turns.
    let table: Vec<u32> = (0..all).map(|i| 2 * (i % blocks) + i / blocks).collect();
    let table = Buffer::from_slice(device, &table)?;
    // Where the second sequence's tokens go.
    let of_second = |positions: &[u32]| match both {
        true => positions.to_vec(),
        false => vec![PARKED; positions.len()],
    };
    let tile = 16 * head_dim as usize;
    let mut codes = poisoned::<i8>(&stream, 2 * pairs * tile)?;
    let mut scales = poisoned::<f32>(&stream, 2 * pairs * head_dim as usize)?;
    let mut fresh = Buffer::<f16>::zeroed(device, 4 * kv_heads as usize * tile)?;
    for (position, tokens, seed) in [(0, first, 1), (first, second, 3)] {
        let elements = 0..u64::from(2 * tokens * kv_heads * head_dim);
        // One channel of 64 is large, one zero, and now and then a number is none.
        let number = |seed: u64, i: u64| match (i % 64, i % 1009) {
            (_, 1008) => f16::NAN,
            (_, 1007) => f16::NEG_INFINITY,
            (5, _) => f16::ZERO,
            (9, _) => f16::from_f32(1000.0 * normal(seed, i)),
            _ => f16::from_f32(normal(seed, i)),
        };
        let new = |seed: u64| {
            Buffer::from_slice(device, &elements.clone().map(|i| number(seed, i)).collect::<Vec<_>>())
        };
        let (keys, values) = (new(seed)?, new(seed + 1)?);
        let positions: Vec<u32> = (position..position + tokens).collect();
        let positions = Buffer::from_slice(device, &[&positions[..], &of_second(&positions)].concat())?;
        let arguments = append_blocks::Args {
            new_keys: keys.global(),
            new_values: values.global(),
            positions: positions.global(),
            table: table.global(),
            fresh: fresh.global_mut(),
            codes: codes.global_mut(),
            scales: scales.global_mut(),
            shape: shape(tokens),
        };
        let launch = LaunchShape::new((kv_heads, 2, 2), head_dim);
        // SAFETY: buffers of these extents, which wait for the device before they go.
        unsafe { stream.launch(&append_blocks::kernel::<f16>(), launch, arguments) }?;
    }
    let length = (first + second).min(16 * blocks);
    let last = [length - 1];
    let positions = Buffer::from_slice(device, &[&last[..], &of_second(&last)].concat())?;
    // One without a sequence stays as it was.
    let mut lengths = Buffer::<u32>::zeroed(device, 2)?;
    let (mut keys, mut values) =
        (poisoned::<f16>(&stream, pairs * tile)?, poisoned::<f16>(&stream, pairs * tile)?);
    // What no token is written to stays as it was, the same everywhere.
    stream.fill_u8(&mut keys, .., 0x11)?;
    stream.fill_u8(&mut values, .., 0x22)?;
    let arguments = restore_blocks::Args {
        positions: positions.global(),
        table: table.global(),
        fresh: fresh.global(),
        codes: codes.global(),
        scales: scales.global(),
        lengths: lengths.global_mut(),
        keys: keys.global_mut(),
        values: values.global_mut(),
        shape: shape(1),
    };
    let launch = LaunchShape::new((blocks, kv_heads, 4), head_dim);
    // SAFETY: as above.
    unsafe { stream.launch(&restore_blocks::kernel::<f16>(), launch, arguments) }?;
    Ok(vec![
        OutputBuffer::download("keys", &keys)?,
        OutputBuffer::download("values", &values)?,
        OutputBuffer::download("lengths", &lengths)?,
        OutputBuffer::download("fresh", &fresh)?,
    ])
}
