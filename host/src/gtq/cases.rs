//! The system's cases for `ferrokv check`: rows of every kind encoded at every place of a tile, and attention
//! by every instance over made-up tiles, around every edge of tiles, splits, groups and query tokens.

use super::encoder::{AppendHandles, Encoder, Places, RawHandles, rope_encode_kernels};
use super::plan::Books;
use super::sample::{Input, Sample, order};
use super::{BITS, HEAD_DIMS, Rule, Settings};
use crate::attention::dense::Problem;
use crate::attention::dense::sample::normal;
use crate::attention::rope::{Pairing, frequencies};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, poison, poisoned};
use crate::kv::PARKED;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::gtq::{attend, attend_parts, encode, encode_parts};
use kernels_gpu::mixed;
use simt::KernelInfo;

/// A batch of attention.
#[derive(Clone, Copy)]
struct Batch {
    lengths: &'static [u32],
    kv_heads: u32,
    group: u32,
    query_tokens: u32,
    max_tokens: u32,
    input: Input,
    /// Tokens at the front and at the end that are in the window.
    window: [u32; 2],
    race_check: bool,
}

const BATCH: Batch = Batch {
    lengths: &[0, 1, 15, 16, 17, 127, 128, 129, 150],
    kv_heads: 2,
    group: 4,
    query_tokens: 1,
    max_tokens: 160,
    input: Input::Normal,
    window: [0, 0],
    race_check: false,
};

/// Batches that every instance runs.
fn of_all(coverage: Coverage) -> Vec<Batch> {
    let small = Batch { lengths: &[33, 0, 70], kv_heads: 1, max_tokens: 80, race_check: true, ..BATCH };
    let near = Batch { window: [16, 16], ..small };
    if coverage == Coverage::Small {
        // Two parts, and so partial results that meet.
        let split = Batch { lengths: &[300], group: 1, max_tokens: 320, ..small };
        return vec![small, near, split];
    }
    // Several parts, of which a short sequence uses fewer.
    let split = Batch { lengths: &[1900, 17, 700], kv_heads: 1, group: 5, max_tokens: 2048, ..BATCH };
    let split = Batch { window: [16, 128], ..split };
    let several = Batch { query_tokens: 3, group: 3, window: [16, 32], ..BATCH };
    vec![small, near, BATCH, split, several]
}

/// Batches that two instances run: one of each head_dim.
fn of_some(coverage: Coverage) -> Vec<Batch> {
    let split = Batch { lengths: &[300, 17], kv_heads: 1, max_tokens: 320, race_check: true, ..BATCH };
    if coverage == Coverage::Small {
        return vec![split];
    }
    let mut batches = vec![split];
    for group in [1, 7, 8, 11, 16] {
        batches.push(Batch { lengths: &[130, 33], group, window: [16, 1 << 16], ..BATCH });
    }
    for (group, query_tokens) in [(1, 5), (3, 17), (16, 2)] {
        batches.push(Batch { lengths: &[0, 1, 2, 17, 66], group, query_tokens, ..BATCH });
    }
    for input in Input::ALL {
        batches.push(Batch { lengths: &[77, 320], group: 8, max_tokens: 320, input, ..BATCH });
        batches.push(Batch { lengths: &[2047], kv_heads: 1, max_tokens: 2048, input, ..BATCH });
        let both = Batch { lengths: &[177, 320], max_tokens: 320, window: [16, 48], ..BATCH };
        batches.push(Batch { group: 8, input, ..both });
    }
    if coverage == Coverage::Full {
        batches.push(Batch { lengths: &[8192], kv_heads: 4, max_tokens: 8192, ..BATCH });
        batches.push(Batch { lengths: &[4099, 1, 7777, 16], max_tokens: 40_000, window: [0, 128], ..BATCH });
        batches.push(Batch { lengths: &[3000; 8], kv_heads: 8, max_tokens: 3000, ..BATCH });
    }
    batches
}

/// The cases of every instance.
pub(super) fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    for (head_dim, blocks) in HEAD_DIMS.into_iter().flat_map(|dim| [(dim, false), (dim, true)]) {
        for key_bits in BITS {
            for value_bits in BITS {
                let settings = Settings { key_bits, value_bits, blocks, ..Settings::DEFAULT };
                let batches = of_all(coverage).into_iter();
                let more = if (key_bits, value_bits) == (3, 3) { of_some(coverage) } else { Vec::new() };
                cases.extend(batches.chain(more).map(|batch| attention(head_dim, settings, batch)));
                cases.push(encoding(head_dim, settings, 3, 1));
                cases.push(turning(head_dim, settings, (Pairing::HalfSplit, head_dim), 3, 1));
            }
        }
        for rule in [Rule::None, Rule::Norm, Rule::Unbiased] {
            let settings = Settings { rule, blocks, ..Settings::DEFAULT };
            cases.extend(
                [(1, 1), (2, 19), (1, 70)].map(|(heads, tokens)| encoding(head_dim, settings, heads, tokens)),
            );
            let turns =
                [(Pairing::Interleaved, head_dim), (Pairing::HalfSplit, 22), (Pairing::Interleaved, 0)];
            cases.extend(turns.map(|turn| turning(head_dim, settings, turn, 2, 19)));
        }
    }
    cases
}

/// The entry of a kernel that a settings' launch takes.
fn attend_info(head_dim: u32, settings: Settings) -> &'static KernelInfo {
    let (of, instances) = match settings.blocks {
        false => ("attend", attend::INSTANCES),
        true => ("attend_parts", attend_parts::INSTANCES),
    };
    let name = format!("gtq_{of}_{head_dim}_{}_{}", settings.key_bits, settings.value_bits);
    instances.iter().find(|info| info.name == name).expect("an instance of each layout")
}

fn attention(head_dim: u32, settings: Settings, batch: Batch) -> Case {
    let Batch { lengths, kv_heads, group, query_tokens, max_tokens, input, window, race_check } = batch;
    let settings = Settings { sink: window[0], recent: window[1], ..settings };
    let of = if lengths.len() > 3 { format!("{} lengths", lengths.len()) } else { format!("{lengths:?}") };
    let label = format!(
        "tokens={of} kv_heads={kv_heads} group={group} queries={query_tokens} room={max_tokens} sink={} recent={} {}",
        window[0],
        window[1],
        input.name()
    );
    let run = move |device: &Device| -> Result<Vec<OutputBuffer>, CaseError> {
        let q_heads = kv_heads * group;
        let problem = Problem { sequences: 1, q_heads, kv_heads, head_dim, query_tokens, max_tokens };
        let sample = Sample::new(settings, problem, lengths, input)?;
        let (output, lse) = sample.attend(device, false, poison(device.kind()))?;
        Ok(vec![OutputBuffer::new("output", output), OutputBuffer::new("lse", lse)])
    };
    let case = Case::new(attend_info(head_dim, settings), label, run);
    if race_check { case.race_checked() } else { case }
}

/// Element `index` of a row of some kind: the same on every machine.
pub(super) fn element(row: usize, index: usize) -> f16 {
    let x = normal(7, (row * 128 + index) as u64);
    match row % 12 {
        0 => f16::ZERO,
        1 => f16::from_bits(mixed(9, (row * 128 + index) as u64) as u16 & 0x83ff),
        // The largest there are, all alike, and as the signs are: one coordinate has everything.
        2 => f16::MAX,
        3 => f16::from_f32(super::rows::sign(index) as f32),
        4 if index == 3 => f16::from_f32(-5.0),
        4 => f16::ZERO,
        5 if index == 11 => f16::NAN,
        6 if index == 60 => f16::NEG_INFINITY,
        // Few values: coordinates meet thresholds.
        7 => f16::from_f32([-1.0, 0.0, 1.0, 2.0][mixed(2, index as u64) as usize % 4]),
        8 => f16::from_f32(x * 1000.0),
        _ => f16::from_f32(x),
    }
}

fn encoding(head_dim: u32, settings: Settings, kv_heads: u32, tokens: u32) -> Case {
    let label = format!(
        "k={} v={} {:?} kv_heads={kv_heads} tokens={tokens}",
        settings.key_bits, settings.value_bits, settings.rule
    );
    let info = match (head_dim, settings.blocks) {
        (64, false) => encode::kernel::<64>().info(),
        (_, false) => encode::kernel::<128>().info(),
        (64, true) => encode_parts::kernel::<64>().info(),
        (_, true) => encode_parts::kernel::<128>().info(),
    };
    let case =
        Case::new(info, label, move |device| encoded(device, head_dim, settings, kv_heads, tokens, None));
    if tokens < 4 { case.race_checked() } else { case }
}

/// The same with rotation in the launch, of `rotary` channels.
fn turning(
    head_dim: u32,
    settings: Settings,
    (pairing, rotary): (Pairing, u32),
    kv_heads: u32,
    tokens: u32,
) -> Case {
    let label = format!(
        "k={} v={} {:?} kv_heads={kv_heads} tokens={tokens} turn={rotary}",
        settings.key_bits, settings.value_bits, settings.rule
    );
    let (whole, parts) = rope_encode_kernels(head_dim, pairing);
    let info = if settings.blocks { parts.info() } else { whole.info() };
    let case = Case::new(info, label, move |device| {
        encoded(device, head_dim, settings, kv_heads, tokens, Some((pairing, rotary)))
    });
    if tokens < 4 { case.race_checked() } else { case }
}

/// Sequences whose chunks begin at every place of a tile, one of them past the table, one parked.
fn encoded(
    device: &Device,
    head_dim: u32,
    settings: Settings,
    kv_heads: u32,
    tokens: u32,
    turn: Option<(Pairing, u32)>,
) -> Result<Vec<OutputBuffer>, CaseError> {
    let stream = Stream::new(device)?;
    // Of chunks of 19 tokens and more not all are in the window.
    let books = Books::new(head_dim, Settings { recent: 16, ..settings })?;
    let sequences = if tokens == 1 { 18 } else { 3 };
    let max_tokens = 96;
    let q_heads = if turn.is_some() { 3 * kv_heads } else { kv_heads };
    let problem = Problem { sequences, q_heads, kv_heads, head_dim, query_tokens: tokens, max_tokens };
    let first = |sequence: u32| match sequence {
        2 if tokens > 1 => max_tokens - tokens / 2,
        16 => PARKED,
        17 => max_tokens - tokens.min(2),
        _ => 5 * sequence,
    };
    let positions: Vec<u32> =
        (0..sequences).flat_map(|sequence| (0..tokens).map(move |i| first(sequence) + i)).collect();
    let blocks = sequences * problem.max_blocks();
    let table: Vec<u32> = (0..blocks).rev().collect();
    let rows = positions.len() * kv_heads as usize;
    let of = |shift: usize| -> Vec<f16> {
        (0..rows).flat_map(|row| (0..head_dim as usize).map(move |d| element(row + shift, d))).collect()
    };
    let (keys, values) = (Buffer::from_slice(device, &of(0))?, Buffer::from_slice(device, &of(5))?);
    let (positions, table) = (Buffer::from_slice(device, &positions)?, Buffer::from_slice(device, &table)?);
    // The same on every device: what is not written has to stay as it was.
    let mut lengths = Buffer::from_slice(device, &vec![7u32; sequences as usize])?;
    let words = (blocks * kv_heads * books.layout.bytes()) as usize / 4;
    let mut tiles = Buffer::from_slice(device, &vec![0x5555_aaaau32; words])?;
    let mut near = Buffer::from_slice(device, &vec![0x5555_aaaau32; books.window_words(problem)])?;
    let mut problems = Buffer::from_slice(device, &[u32::MAX; 2])?;
    let order = Buffer::from_slice(device, &order(&books, kv_heads))?;
    let encoder = Encoder::new(device, books)?;
    let places = Places {
        positions: positions.global(),
        table: table.global(),
        order: order.global(),
        lengths: lengths.global_mut(),
        tiles: tiles.global_mut(),
        near: near.global_mut(),
        problems: problems.global_mut(),
    };
    let mut outputs = Vec::new();
    if let Some((pairing, rotary)) = turn {
        let (tokens, heads) = (positions.len(), (q_heads + 2 * kv_heads) as usize);
        let qkv =
            (0..tokens * heads).flat_map(|row| (0..head_dim as usize).map(move |d| element(row, d).to_f32()));
        let qkv = Buffer::from_slice(device, &qkv.collect::<Vec<_>>())?;
        // One more than is read: an empty table has no memory to point at.
        let turns = Buffer::from_slice(device, &frequencies(500_000.0, rotary as usize + 2))?;
        let mut queries = poisoned::<f16>(&stream, tokens * (q_heads * head_dim) as usize)?;
        let handles = RawHandles {
            qkv: qkv.global(),
            frequencies: turns.global_range(..rotary as usize / 2)?,
            rotary,
            pairing,
            queries: queries.global_mut(),
            places,
        };
        // SAFETY: as below.
        unsafe { encoder.rotate_and_run(&stream, problem, handles) }?;
        stream.synchronize()?;
        outputs.push(OutputBuffer::download("queries", &queries)?);
    } else {
        let handles = AppendHandles { new_keys: keys.global(), new_values: values.global(), places };
        // SAFETY: buffers of this device as the problem wants them; the table's entries are the pool's
        // blocks, the order's channels of the head, and no two tokens have one place. They are there until
        // the stream has been waited for.
        unsafe { encoder.run_on(&stream, problem, false, handles) }?;
        stream.synchronize()?;
    }
    outputs.extend([
        OutputBuffer::download("tiles", &tiles)?,
        OutputBuffer::download("window", &near)?,
        OutputBuffer::download("lengths", &lengths)?,
        OutputBuffer::download("problems", &problems)?,
    ]);
    Ok(outputs)
}
