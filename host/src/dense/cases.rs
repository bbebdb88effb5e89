//! The dense system's cases for `ferrokv check`: every instance over lengths around every edge of tiles and
//! splits, groups, query tokens, hostile numbers; block tables shuffled, and poison wherever no token is.

use super::{AppendElement, AppendHandles, DenseElement, Handles, Plan, Problem, append};
use crate::attention::dense::sample::{Input, Sample};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, poisoned};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};

/// Lengths around tiles of 16, and the 64 that four warps take in a round.
const EDGES: [u32; 12] = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 130, 1];

/// A batch: what a case is about.
#[derive(Clone, Copy)]
struct Batch {
    lengths: &'static [u32],
    kv_heads: u32,
    group: u32,
    query_tokens: u32,
    max_tokens: u32,
    input: Input,
    race_check: bool,
}

const DECODE: Batch = Batch {
    lengths: &EDGES,
    kv_heads: 2,
    group: 4,
    query_tokens: 1,
    max_tokens: 160,
    input: Input::Normal,
    race_check: false,
};

/// The batches of every instance.
fn batches(coverage: Coverage) -> Vec<Batch> {
    let small = Batch { lengths: &[33, 0, 70], kv_heads: 1, max_tokens: 80, race_check: true, ..DECODE };
    // Twenty blocks of a table are cut into two; of the last sequence only the first part has a tile.
    let split = Batch { lengths: &[300, 17, 9], kv_heads: 1, max_tokens: 320, race_check: true, ..DECODE };
    if coverage == Coverage::Small {
        return vec![small, split];
    }
    let mut batches = vec![small, split, DECODE];
    for group in [1, 7, 8, 16] {
        batches.push(Batch { lengths: &[130, 33], group, ..DECODE });
    }
    for group in [1, 4, 7, 16] {
        batches.push(Batch { lengths: &[0, 1, 2, 3, 17, 66], group, query_tokens: 3, ..DECODE });
    }
    for input in Input::ALL {
        batches.push(Batch { lengths: &[77, 300], kv_heads: 1, group: 8, max_tokens: 320, input, ..DECODE });
    }
    // Eight and more splits, of which short sequences use fewer.
    let long = Batch { kv_heads: 1, group: 7, max_tokens: 2048, ..DECODE };
    batches.push(Batch { lengths: &[1500], ..long });
    batches.push(Batch { lengths: &[200, 2048, 0, 1033], group: 4, query_tokens: 3, ..long });
    if coverage == Coverage::Full {
        batches.push(Batch { lengths: &[8192], kv_heads: 4, max_tokens: 8192, ..long });
        batches.push(Batch { lengths: &[4099, 1, 7777, 16], kv_heads: 2, max_tokens: 40_000, ..long });
        batches.push(Batch { lengths: &[3000; 8], kv_heads: 4, group: 16, max_tokens: 3000, ..long });
    }
    batches
}

/// Batches of so few tiles that a sequence is one part: odd and even numbers of groups of rows, groups that
/// are not full, groups whose last token lies in another tile than their neighbour's, and tokens past it that
/// a group would see if it looked further than it may.
fn pairs(coverage: Coverage) -> Vec<Batch> {
    let small = Batch { lengths: &[35, 3], kv_heads: 1, query_tokens: 5, race_check: true, ..DECODE };
    let small = Batch { max_tokens: 80, ..small };
    if coverage == Coverage::Small {
        return vec![small];
    }
    let mut batches = vec![small];
    for (group, query_tokens) in [(1, 40), (4, 21), (7, 9), (16, 3), (9, 1)] {
        batches.push(Batch { lengths: &[0, 1, 40, 97, 256], max_tokens: 256, group, query_tokens, ..DECODE });
    }
    for input in Input::ALL {
        batches.push(Batch {
            lengths: &[77, 250],
            kv_heads: 1,
            query_tokens: 20,
            max_tokens: 256,
            input,
            ..DECODE
        });
    }
    if coverage == Coverage::Full {
        let chunk = Batch { lengths: &[1100], kv_heads: 8, query_tokens: 300, max_tokens: 2048, ..DECODE };
        batches.push(chunk);
    }
    batches
}

/// The cases of every instance.
pub fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    for batch in batches(coverage) {
        for head_dim in super::HEAD_DIMS {
            add::<f16>(&mut cases, batch, head_dim);
            add::<bf16>(&mut cases, batch, head_dim);
        }
    }
    for batch in pairs(coverage) {
        for head_dim in super::HEAD_DIMS {
            add_pairs::<f16>(&mut cases, batch, head_dim);
            add_pairs::<bf16>(&mut cases, batch, head_dim);
        }
    }
    for (tokens, kv_heads, head_dim) in [(1, 3, 64), (1, 8, 128), (5, 1, 96), (19, 2, 256)] {
        add_append::<f16>(&mut cases, tokens, kv_heads, head_dim);
        add_append::<bf16>(&mut cases, tokens, kv_heads, head_dim);
    }
    cases
}

fn add<E: DenseElement + crate::check::OutputElement>(cases: &mut Vec<Case>, batch: Batch, head_dim: u32) {
    let Batch { lengths, kv_heads, group, query_tokens, max_tokens, input, race_check } = batch;
    let problem = Problem {
        sequences: lengths.len() as u32,
        q_heads: group * kv_heads,
        kv_heads,
        head_dim,
        query_tokens,
        max_tokens,
    };
    let lengths_text = lengths.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let label = format!(
        "{input} heads={}/{kv_heads} query_tokens={query_tokens} of {max_tokens}: {lengths_text}",
        problem.q_heads
    );
    let some = race_check || query_tokens > 1;
    for (kernel, bytes) in E::kernels(head_dim) {
        let run = move |device: &Device| {
            run::<E>(device, Plan::with_pairs_from(device, problem, u32::MAX)?, lengths, input, [some, false])
        };
        let case = Case::new(kernel.info(), label.clone(), run).within(*bytes);
        cases.push(if race_check { case.race_checked() } else { case });
    }
}

/// Two groups of rows at a time, where a sequence is one part; the kernel for one at a time says the same.
fn add_pairs<E: DenseElement + crate::check::OutputElement>(
    cases: &mut Vec<Case>,
    batch: Batch,
    head_dim: u32,
) {
    let Batch { lengths, kv_heads, group, query_tokens, max_tokens, input, race_check } = batch;
    let Some((kernel, bytes)) = E::pair_kernel(head_dim) else { return };
    let (sequences, q_heads) = (lengths.len() as u32, group * kv_heads);
    let problem = Problem { sequences, q_heads, kv_heads, head_dim, query_tokens, max_tokens };
    let lengths_text = lengths.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let label =
        format!("{input} heads={q_heads}/{kv_heads} query_tokens={query_tokens}, pairs: {lengths_text}");
    let run = move |device: &Device| {
        let pairs = Plan::with_pairs_from(device, problem, 0)?;
        let row_groups = (group * query_tokens).div_ceil(8);
        if pairs.launch_shape().grid.y != kv_heads * row_groups.div_ceil(2) {
            return Err("this batch is not for two groups of rows".into());
        }
        let pairs = run::<E>(device, pairs, lengths, input, [true; 2])?;
        let alone = Plan::with_pairs_from(device, problem, u32::MAX)?;
        let alone = run::<E>(device, alone, lengths, input, [true; 2])?;
        match pairs.iter().zip(&alone).find(|(pairs, alone)| pairs.bytes() != alone.bytes()) {
            Some(_) => Err("two groups of rows give other bits than one".into()),
            None => Ok(pairs),
        }
    };
    let case = Case::new(kernel.info(), label, run).within(bytes);
    cases.push(if race_check { case.race_checked() } else { case });
}

/// Tokens of three sequences on their way into shuffled blocks; the last sequence has one that is past its
/// table.
fn add_append<E: AppendElement + crate::check::OutputElement>(
    cases: &mut Vec<Case>,
    tokens: u32,
    kv_heads: u32,
    head_dim: u32,
) {
    let label = format!("{tokens} tokens of {kv_heads} heads of {head_dim}");
    let case = Case::new(E::append_kernel().info(), label, move |device| {
        let problem = Problem {
            sequences: 3,
            q_heads: kv_heads,
            kv_heads,
            head_dim,
            query_tokens: tokens,
            max_tokens: 48,
        };
        let elements = (kv_heads * head_dim) as usize;
        let number = |i: usize| E::from_f32((i % 509) as f32 - 254.0);
        let rows = 3 * tokens as usize * elements;
        let new_keys: Vec<E> = (0..rows).map(number).collect();
        let new_values: Vec<E> = (0..rows).map(|i| number(7 * i + 3)).collect();
        let positions: Vec<u32> = [0, 15, 48 - tokens + 1].iter().flat_map(|&at| at..at + tokens).collect();
        let table = [7, 2, 5, 0, 8, 3, 1, 6, 4];
        let stream = Stream::new(device)?;
        let (new_keys, new_values) =
            (Buffer::from_slice(device, &new_keys)?, Buffer::from_slice(device, &new_values)?);
        let (positions, table) =
            (Buffer::from_slice(device, &positions)?, Buffer::from_slice(device, &table)?);
        let mut lengths = Buffer::from_slice(device, &[9u32; 3])?;
        let pool = |byte: u8| -> crate::Result<Buffer<E>> {
            let mut pool = Buffer::new(device, 9 * 16 * elements)?;
            stream.fill_u8(&mut pool, .., byte)?;
            Ok(pool)
        };
        let (mut keys, mut values) = (pool(0x11)?, pool(0x22)?);
        let handles = AppendHandles {
            new_keys: new_keys.global(),
            new_values: new_values.global(),
            positions: positions.global(),
            table: table.global(),
            lengths: lengths.global_mut(),
            keys: keys.global_mut(),
            values: values.global_mut(),
        };
        // SAFETY: buffers of the device, read back before they go; the table's entries are the pool's nine
        // blocks, and no two sequences share one.
        unsafe { append(&stream, problem, handles)? };
        Ok(vec![
            OutputBuffer::download("keys", &keys)?,
            OutputBuffer::download("values", &values)?,
            OutputBuffer::download("lengths", &lengths)?,
        ])
    });
    cases.push(case.race_checked());
}

/// Makes the values of each sequence's last token infinite: a row that does not see it must not look.
fn with_infinite_ends<E: DenseElement>(sample: &mut Sample<E>) {
    let Problem { kv_heads, head_dim, .. } = sample.problem;
    for (values, length) in sample.values.iter_mut().zip(&sample.lengths) {
        let of_head = (length * head_dim) as usize;
        for head in values.chunks_exact_mut(of_head.max(1)).take(kv_heads as usize) {
            head[of_head - head_dim as usize..].fill(E::from_f32(f32::INFINITY));
        }
    }
}

/// One launch for all rows, and if `some` is asked for, another for some of them.
fn run<E: DenseElement>(
    device: &Device,
    mut plan: Plan<E>,
    lengths: &[u32],
    input: Input,
    [some, infinite_ends]: [bool; 2],
) -> Result<Vec<OutputBuffer>, CaseError> {
    let (stream, problem) = (Stream::new(device)?, plan.problem());
    let mut sample = Sample::<E>::new(problem, lengths, input, 7);
    if infinite_ends {
        with_infinite_ends(&mut sample);
    }
    let paged = sample.paged(11, 3);
    // Entries past a sequence's blocks are none of the pool's.
    let mut table = vec![u32::MAX; lengths.len() * problem.max_blocks() as usize];
    for (row, blocks) in table.chunks_mut(problem.max_blocks() as usize).zip(&paged.tables) {
        row[..blocks.len()].copy_from_slice(blocks);
    }
    let queries = Buffer::from_slice(device, &sample.queries)?;
    let (keys, values) =
        (Buffer::from_slice(device, &paged.keys)?, Buffer::from_slice(device, &paged.values)?);
    let (table, lengths) = (Buffer::from_slice(device, &table)?, Buffer::from_slice(device, lengths)?);
    // Every other row of some groups: the rest must stay as it was filled, the same on each device.
    let words: Vec<u32> = (0..plan.wanted_words()).map(|i| if i % 3 == 1 { 0 } else { 0x55 }).collect();
    let words = Buffer::from_slice(device, &words)?;
    let mut passes = vec![(["output", "lse"], None)];
    if some {
        passes.push((["wanted output", "wanted lse"], Some(&words)));
    }
    let mut outputs = Vec::new();
    for (names, wanted) in passes {
        let rows = problem.query_rows();
        let mut output = poisoned::<f32>(&stream, rows * problem.head_dim as usize)?;
        let mut lse = poisoned::<f32>(&stream, rows)?;
        if wanted.is_some() {
            stream.fill_u8(&mut output, .., 0x11)?;
            stream.fill_u8(&mut lse, .., 0x11)?;
        }
        let handles = Handles {
            queries: queries.global(),
            keys: keys.global(),
            values: values.global(),
            table: table.global(),
            lengths: lengths.global(),
            near: true,
            wanted: wanted.map(Buffer::global),
            output: output.global_mut(),
            lse: lse.global_mut(),
        };
        // SAFETY: buffers of the device, read back before they go; lengths fit the table, and their entries
        // the pool.
        unsafe { plan.run_on(&stream, handles)? };
        outputs.push(OutputBuffer::download(names[0], &output)?);
        outputs.push(OutputBuffer::download(names[1], &lse)?);
    }
    Ok(outputs)
}
