//! Cases of the launch that turns, appends and quantizes, for `ferrokv check`; and a test of each beside the
//! launches that it takes the place of.

use super::super::{Layout, Rounding, STEP_HEAD_DIMS};
use super::cases::{CHANCE, contents, tokens, verdict};
use super::turning::turn_append_kernel;
use super::{Extents, Geometry, Scratch, TieredCache};
use crate::attention::dense::sample::normal;
use crate::attention::rope::{Pairing, frequencies};
use crate::check::{Case, CaseError, OutputBuffer, poisoned};
use crate::kv::{self, PARKED, Raw};
use crate::{Buffer, Device, Stream};
use half::f16;

/// Rows of a batch. The last one has no sequence.
const ROWS: u32 = 5;

/// Blocks of the pool.
const BLOCKS: u32 = 16;

/// The third sequence fills a block in the first step, the first one in the second, a fork of the second one
/// in the third. The second one has a value refused there, and fills its block in the fourth, in which a key
/// of the first is refused and the third has no room. Those two are still stopped in the fifth.
const STEPS: usize = 5;

/// What is turned and appended.
#[derive(Clone, Copy, Debug)]
struct Turned {
    heads: kv::Geometry,
    layout: Layout,
    rounding: Rounding,
    pairing: Pairing,
    rotary: u32,
    /// Whether the sequences are resident: without a fork, which ends that.
    resident: bool,
}

/// Of every instance: both pairings, heads that leave threads over, more KV heads than a thread has at once.
fn all() -> impl Iterator<Item = Turned> {
    STEP_HEAD_DIMS.into_iter().flat_map(|head_dim| {
        let head_dim = head_dim as usize;
        let heads = |q_heads, kv_heads| kv::Geometry { layers: 1, q_heads, kv_heads, head_dim };
        let all = head_dim as u32;
        [
            (heads(9, 3), Layout::Compact, CHANCE, Pairing::HalfSplit, all, false),
            (heads(5, 3), Layout::Compact, CHANCE, Pairing::HalfSplit, all, true),
            (heads(9, 9), Layout::Compact, Rounding::Nearest, Pairing::Interleaved, all, false),
            (heads(2, 1), Layout::Compact, CHANCE, Pairing::HalfSplit, 22, false),
            (heads(6, 2), Layout::Paper, Rounding::Nearest, Pairing::Interleaved, 0, false),
        ]
        .map(|(heads, layout, rounding, pairing, rotary, resident)| Turned {
            heads,
            layout,
            rounding,
            pairing,
            rotary,
            resident,
        })
    })
}

/// The cases, which are small enough for any coverage.
pub(super) fn cases() -> Vec<Case> {
    let cases = all().filter_map(|what| {
        let Turned { heads, layout, pairing, rotary, resident, .. } = what;
        let kernel = turn_append_kernel(heads.head_dim as u32, layout)?;
        let label = format!(
            "heads={}x{} head_dim={} {pairing:?} turn={rotary} fill, refuse{}{}",
            heads.q_heads,
            heads.kv_heads,
            heads.head_dim,
            if resident { " resident" } else { "" },
            super::super::cases::in_layout(layout)
        );
        let run = move |device: &Device| -> Result<_, CaseError> { Ok(turned(device, what, false)?) };
        Some(Case::new(kernel.info(), label, run).race_checked())
    });
    cases.collect()
}

/// Steps of three sequences and of a fork, which fill blocks; tokens that are not taken, and a sequence
/// without room. With `apart`, by the launches that one takes the place of: the rotation, then an append's.
fn turned(device: &Device, what: Turned, apart: bool) -> kv::Result<Vec<OutputBuffer>> {
    let Turned { heads, layout, rounding, pairing, rotary, resident } = what;
    let stream = Stream::new(device)?;
    let geometry = Geometry::new(heads.kv_heads as u32, heads.head_dim as u32)?
        .with_layout(layout)
        .with_rounding(rounding);
    // A slot for each pair.
    let slots = BLOCKS * geometry.kv_heads();
    let extents = Extents {
        geometry,
        blocks: BLOCKS,
        sequences: ROWS,
        max_tokens: 40,
        key_slots: slots,
        value_slots: slots,
    };
    let mut cache = TieredCache::<f16>::new(device, extents)?.with_kernels();
    if resident {
        cache.begin_residence(&stream)?;
    }
    let mut names = Vec::new();
    for (seed, count) in [(1, 14), (2, 29), (3, 31)] {
        let name = cache.start_sequence()?;
        let input = |seed| Buffer::from_slice(device, &tokens::<f16>(geometry, count, seed));
        cache.prefill(&stream, name, &input(seed)?, &input(seed + 10)?)?;
        names.push(name);
    }
    if !resident {
        names.push(cache.fork(&stream, names[1])?);
    }
    // As if steps had used all originals: what is filled has to be forgotten.
    let mut directory = cache.directory.to_vec()?;
    for slot in 0..2 * slots {
        directory[Scratch::word(slot) + 1] = u64::from(slot % slots);
    }
    stream.upload(&directory, &mut cache.directory, 0)?;
    let (query_width, kv_width) = (heads.query_width(), heads.kv_width());
    let (rows, width) = (ROWS as usize, query_width + 2 * kv_width);
    // One more than is read: an empty table has no memory to point at.
    let turns = Buffer::from_slice(device, &frequencies(500_000.0, rotary as usize + 2))?;
    let mut outputs = Vec::new();
    let mut refused = Vec::new();
    for step in 0..STEPS {
        let mut qkv: Vec<f32> = (0..rows * width).map(|i| normal(40 + step as u64, i as u64) * 3.0).collect();
        let mut lengths = cache.lengths.to_vec()?;
        match step {
            // Of a query it is passed on.
            0 => qkv[1] = f32::from_bits(0xffc1_2345),
            // A value of the last KV head of the second sequence.
            2 => qkv[2 * width - 1] = f32::NEG_INFINITY,
            3 => {
                // A key of the first that f16 does not hold, in its middle KV head.
                let head = heads.kv_heads / 2;
                qkv[query_width + (head + 1) * heads.head_dim - 2] = 1.0e6;
                // The third has no room, of which the host knows nothing, as in a captured step.
                stream.upload(&[lengths[2]], &mut cache.limits, 2)?;
            }
            // A model counts on where a sequence has stopped.
            4 => lengths[0] += 1,
            _ => {}
        }
        let positions: Vec<u32> =
            (0..rows).map(|row| if row < names.len() { lengths[row] } else { PARKED }).collect();
        let positions = Buffer::from_slice(device, &positions)?;
        let qkv = Buffer::from_slice(device, &qkv)?;
        let mut queries = poisoned::<f16>(&stream, rows * query_width)?;
        let mut keys = Buffer::<f16>::zeroed(device, rows * kv_width)?;
        let mut values = Buffer::<f16>::zeroed(device, rows * kv_width)?;
        let raw = Raw {
            qkv: &qkv,
            positions: &positions,
            frequencies: &turns,
            pairing,
            rotary,
            queries: &mut queries,
            keys: &mut keys,
            values: &mut values,
        };
        if apart {
            let new = raw.rotate(&stream, heads, rows)?;
            cache.append(&stream, new.keys, new.values)?;
        } else {
            cache.turn_and_append(&stream, heads, raw)?;
        }
        stream.synchronize()?;
        outputs.push(OutputBuffer::download("queries", &queries)?);
        if step == 2 {
            refused.push(verdict(cache.check(&stream)));
        }
    }
    outputs.push(OutputBuffer::download("refusals", &cache.refusals[0])?);
    outputs.push(OutputBuffer::download("stopped", &cache.limits)?);
    refused.push(verdict(cache.check(&stream)));
    outputs.extend(contents(&cache, &stream)?);
    outputs.push(OutputBuffer::new("refused", refused));
    for (title, name) in ["first", "second", "third", "fork"].into_iter().zip(names) {
        let [keys, values] = cache.read(&stream, name)?;
        outputs.push(OutputBuffer::new(title, [keys, values].concat()));
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels_gpu::certified::Refusals;
    use simt::emu::EmuOptions;

    fn words_of<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// The bits of the launch that turns, the append and the quantization one after another.
    #[test]
    fn a_token_in_one_launch_has_the_bits_of_three() {
        let device = Device::cpu(EmuOptions::default());
        for what in all() {
            let [one, three] = [false, true].map(|apart| turned(&device, what, apart).expect("steps"));
            assert_eq!(one.len(), three.len());
            for (one, three) in one.iter().zip(&three) {
                assert!(one.bytes() == three.bytes(), "{what:?}: {}", one.name());
            }
            // All happens that is meant to.
            let found = |name| one.iter().find(|output| output.name() == name).expect("an output");
            let words = |name| words_of::<u32>(found(name).bytes());
            let fork = if what.resident { 0 } else { 34 };
            assert_eq!(words("lengths"), [17, 33, 34, fork, 0], "{what:?}");
            let [value, key] = words("refused")[..] else { panic!("two verdicts") };
            assert_eq!([value >> 24 & 0x1f, key >> 24 & 0x1f], [0x11, 0], "{what:?}");
            let refusals: Refusals = bytemuck::pod_read_unaligned(found("refusals").bytes());
            assert_ne!(refusals.key_not_finite, u64::MAX, "{what:?}");
            assert_eq!(refusals.full, 2, "{what:?}");
            // Four blocks are filled: their keys and values are forgotten, and nothing else is.
            let directory = words_of::<u64>(found("directory").bytes());
            let tags = directory[Scratch::word(0)..].iter().skip(1).step_by(2);
            let forgotten = tags.filter(|tag| **tag == u64::from(Scratch::EMPTY)).count();
            let filled = if what.resident { 3 } else { 4 };
            assert_eq!(forgotten, filled * 2 * what.heads.kv_heads, "{what:?}");
        }
    }
}
