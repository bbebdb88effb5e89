//! The system's cases for `ferrokv check`: tokens that come in chunks of every cut, steps around every edge
//! of tiles, windows and splits, prompts.

pub(super) mod turning;

use super::calibrate::make_multiples;
use super::plan::attended;
use super::prompt::turn_on;
use super::store::encoded;
use super::{Books, Code, Encode, HEAD_DIMS, Handles, LayerBooks, Plan, Setting, Source, Store, Tables};
use crate::attention::StepProblem;
use crate::attention::inputs::{Batch, Input, Uploaded};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, poisoned};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::mixed;
use kernels_gpu::vecinfer::ROWS_OF_TRANSFORM;

/// A batch, how it is stored, and how it comes in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub lengths: &'static [u32],
    pub inputs: &'static [Input],
    pub kv_heads: u32,
    pub group: u32,
    pub max_tokens: u32,
    pub recent: u32,
    pub sink: u32,
    pub hadamard: bool,
    pub by_head: bool,
    /// With numbers that are none.
    pub hostile: bool,
    /// With scores of some 2^29 octaves.
    pub loud: bool,
    pub race_check: bool,
}

pub(super) const STEP: Step = Step {
    lengths: &[1, 15, 16, 17, 33, 64, 79, 80, 81, 150, 160],
    inputs: &[Input::Normal, Input::Sharp, Input::Duplicates, Input::Wide],
    kv_heads: 2,
    group: 4,
    max_tokens: 160,
    recent: 32,
    sink: 16,
    hadamard: true,
    by_head: false,
    hostile: false,
    loud: false,
    race_check: false,
};

/// One long sequence among many.
const CROWD: [u32; 33] = {
    let mut lengths = [1; 33];
    lengths[7] = 700;
    lengths
};

/// The steps of every instance.
pub(super) fn steps(coverage: Coverage) -> Vec<Step> {
    // Seventeen tiles of room are cut into two: so are sequences of more than one tile.
    let small = Step { lengths: &[70, 1, 0], kv_heads: 1, max_tokens: 272, race_check: true, ..STEP };
    let wide = Step { lengths: &[40], group: 16, recent: 0, sink: 0, by_head: true, ..small };
    if coverage == Coverage::Small {
        return vec![small, wide];
    }
    let mut steps = vec![small, wide, STEP];
    for group in [1, 3, 4, 7, 8, 11, 16] {
        steps.push(Step {
            lengths: &[159, 111],
            group,
            hadamard: group != 3,
            by_head: group % 2 == 1,
            ..STEP
        });
    }
    for recent in [0, 1, 128] {
        for sink in [0, 16] {
            steps.push(Step { lengths: &[16, 160, 143, 129], recent, sink, ..STEP });
        }
    }
    let odd = &[Input::Constant, Input::Outlier, Input::Extremal];
    steps.push(Step { lengths: &[900, 800, 530], inputs: odd, max_tokens: 900, ..STEP });
    for group in [2, 8] {
        steps.push(Step { lengths: &[150, 40], group, hostile: true, ..STEP });
    }
    // Many parts of one sequence, and a thread block for each of many.
    steps.push(Step { lengths: &[4090], kv_heads: 1, max_tokens: 4096, ..STEP });
    steps.push(Step { lengths: &CROWD, kv_heads: 8, group: 1, max_tokens: 704, ..STEP });
    if coverage == Coverage::Full {
        steps.push(Step { lengths: &[20_011, 9_000], kv_heads: 1, max_tokens: 20_480, ..STEP });
    }
    steps
}

/// The steps that a pair of codes is tried on: the default ones on all. What the others, and other head_dims,
/// have of their own are operands and places of codes.
pub(super) fn steps_of(head_dim: u32, codes: [Code; 2], coverage: Coverage) -> Vec<Step> {
    let default = codes == [Setting::DEFAULT.keys, Setting::DEFAULT.values];
    match coverage {
        Coverage::Quick if !default || ![64, 128].contains(&head_dim) => {
            let mut steps = steps(Coverage::Small);
            steps.push(Step { lengths: &[1, 17, 79, 160], inputs: &[Input::Normal, Input::Wide], ..STEP });
            for group in [4, 5] {
                steps.push(Step { lengths: &[70], group, hostile: true, by_head: true, ..STEP });
            }
            if default {
                // As many warps as this head_dim has, and parts of a sequence.
                steps.push(STEP);
                steps.push(Step { lengths: &[4090], kv_heads: 1, max_tokens: 4096, ..STEP });
            }
            steps
        }
        _ => steps(coverage),
    }
}

/// Settings of all instances of a head_dim.
pub(super) fn settings(head_dim: u32) -> Vec<[Code; 2]> {
    attended(head_dim).iter().map(|(keys, values)| [Code::of(*keys), Code::of(*values)]).collect()
}

/// The cases of every instance.
pub(super) fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    for head_dim in HEAD_DIMS {
        let is_encoded = |code: &Code| code.fits(head_dim) && encoded(head_dim).contains(&code.number());
        debug_assert!(settings(head_dim).iter().flatten().all(is_encoded));
        for [keys, values] in settings(head_dim) {
            for step in steps_of(head_dim, [keys, values], coverage) {
                let Step { lengths, kv_heads, group, max_tokens, recent, sink, hadamard, by_head, .. } = step;
                let setting = Setting { keys, values, recent, sink };
                let some = lengths.iter().take(12).map(u32::to_string).collect::<Vec<_>>().join(",");
                let label = format!(
                    "heads={}/{kv_heads} recent={recent} sink={sink} hadamard={hadamard} books-by-head={by_head} \
                     hostile={} of {max_tokens}: {some}",
                    group * kv_heads,
                    step.hostile
                );
                let plan = super::plan::kernel_info(head_dim, setting, group)
                    .expect("an instance of what is attended to");
                let case = Case::new(plan[0], label, move |device| run(device, step, setting, head_dim));
                let case = plan[1..].iter().fold(case, |case, kernel| case.and(kernel));
                cases.push(if step.race_check { case.race_checked() } else { case });
            }
        }
    }
    cases.extend(turning::cases(coverage));
    cases
}

/// Numbers about N(0, 1), the same on every machine.
fn numbers(count: usize, seed: u64) -> impl Iterator<Item = f32> {
    (0..count as u64).map(move |i| {
        let uniform = |k: u64| (mixed(seed, 4 * i + k) >> 40) as f32 / 2f32.powi(24);
        (uniform(0) + uniform(1) + uniform(2) + uniform(3) - 2.0) * 1.73
    })
}

/// What made-up keys and their centroids are multiplied by, where centroids are whole numbers.
const WHOLE: f32 = 30.0;

/// Tables of one layer that nobody has calibrated.
pub(super) fn made_up(codes: [Code; 2], kv_heads: u32, head_dim: u32, step: Step) -> Books {
    let books = |code: Code, seed| -> Vec<f16> {
        let one = code.book_elements() as usize;
        let count = one * if step.by_head { kv_heads as usize } else { 1 };
        let mut books: Vec<f16> = numbers(count, seed).map(f16::from_f32).collect();
        if step.by_head {
            // Each centroid twice: the first counts.
            books.chunks_exact_mut(one).for_each(|book| book.copy_within(..one / 2, one / 2));
        }
        books
    };
    let mut transform: Vec<f32> =
        numbers((kv_heads * ROWS_OF_TRANSFORM * head_dim) as usize, 3).map(|x| 0.3 + x.abs()).collect();
    for rows in transform.chunks_exact_mut((ROWS_OF_TRANSFORM * head_dim) as usize) {
        let dim = head_dim as usize;
        for i in 0..dim {
            rows[3 * dim + i] = 1.0 / rows[dim + i];
            rows[4 * dim + i] = 1.0 / rows[2 * dim + i];
        }
    }
    let mut keys = books(codes[0], 1);
    if codes[0].whole_keys() {
        keys.iter_mut().for_each(|x| *x = f16::from_f32((x.to_f32() * WHOLE).round().clamp(-127.0, 127.0)));
        for rows in transform.chunks_exact_mut((ROWS_OF_TRANSFORM * head_dim) as usize) {
            let dim = head_dim as usize;
            rows[2 * dim..3 * dim].iter_mut().for_each(|x| *x *= WHOLE);
            rows[4 * dim..5 * dim].iter_mut().for_each(|x| *x /= WHOLE);
        }
    }
    if step.loud {
        // Keys and queries as they come, so that both stay within f16.
        for (at, x) in transform.iter_mut().enumerate() {
            let mean = (at / head_dim as usize).is_multiple_of(ROWS_OF_TRANSFORM as usize);
            *x = if mean { 0.0 } else { 1.0 };
        }
    }
    let mut values = books(codes[1], 2);
    let steps = if codes[1].whole_values() { make_multiples(&mut values, codes[1]) } else { Vec::new() };
    let layer = LayerBooks { transform, keys, values, steps };
    Books { hadamard: step.hadamard, codes, layers: vec![layer] }
}

/// Queries and keys that point one way, as long as f16 and the tables let them be.
fn raise_voice(batch: &mut Batch<f16>) {
    let dim = batch.problem.head_dim as usize;
    let sign = |at: usize| if mixed(11, (at % dim) as u64).is_multiple_of(2) { 1.0 } else { -1.0 };
    for (at, x) in batch.queries.iter_mut().enumerate() {
        *x = f16::from_f32(60_000.0 * sign(at));
    }
    for (at, x) in batch.keys.iter_mut().enumerate() {
        *x = f16::from_f32((500 + at / dim % 90) as f32 * sign(at));
    }
}

/// Some keys and values that are no numbers, or the largest there are, in codes and in f16.
fn hurt(batch: &mut Batch<f16>) {
    let hostile = [f16::NAN, f16::INFINITY, f16::NEG_INFINITY, f16::MAX, f16::MIN_POSITIVE_SUBNORMAL];
    for sequence in 0..batch.lengths.len() {
        for token in (sequence..batch.lengths[sequence] as usize).step_by(13) {
            let (head, number) = (token % batch.problem.kv_heads as usize, hostile[token / 13 % 5]);
            let at = batch.row(sequence, head, token) + 7 * token % 60;
            if token % 2 == 0 {
                batch.keys[at] = number;
            } else {
                batch.values[at] = number;
            }
        }
    }
}

/// What a run leaves.
#[cfg_attr(not(test), expect(dead_code, reason = "tests look at what went in"))]
pub(super) struct Ran {
    pub batch: Batch<f16>,
    pub books: Books,
    pub store: Store,
    /// Of the first sequence, as encoding stored it: keys, values.
    pub encoded: [Vec<f16>; 2],
    /// Of the first sequence, restored.
    pub pool: [Buffer<f16>; 2],
    /// The queries of a prompt of as many tokens as there are sequences.
    pub turned: Buffer<f16>,
    pub lengths: Buffer<u32>,
    pub output: Buffer<f32>,
}

/// Tokens in chunks of several lengths, then a step.
pub(super) fn ran(
    device: &Device,
    step: Step,
    setting: Setting,
    head_dim: u32,
    slices: bool,
) -> Result<Ran, CaseError> {
    let Step { lengths, inputs, kv_heads, group, max_tokens, .. } = step;
    let sequences = lengths.len() as u32;
    let problem = StepProblem { sequences, q_heads: group * kv_heads, kv_heads, head_dim, max_tokens };
    let mut batch = Batch::<f16>::in_turns(problem, inputs, lengths, 5, 9);
    if step.hostile {
        hurt(&mut batch);
    }
    if step.loud {
        raise_voice(&mut batch);
    }
    let books = made_up([setting.keys, setting.values], kv_heads, head_dim, step);
    let stream = Stream::new(device)?;
    let tables = Tables::new(device, &books, 0)?;
    let Uploaded { queries, keys, values, table, .. } = batch.upload(device)?;
    let max_blocks = (batch.table.len() / lengths.len()) as u32;
    let mut store = Store::new(device, problem, setting)?;
    let mut ends = Buffer::<u32>::zeroed(device, lengths.len())?;
    let blocks = (max_tokens.div_ceil(16) * kv_heads * 16 * head_dim) as usize;
    let mut pool = [Buffer::<f16>::zeroed(device, blocks)?, Buffer::<f16>::zeroed(device, blocks)?];
    for (sequence, length) in lengths.iter().enumerate() {
        // Half of the tokens at once, one more, then the rest.
        let cuts = [0, length / 2, (length / 2 + 1).min(*length), *length];
        for cut in cuts.windows(2).filter(|cut| cut[0] < cut[1]) {
            let tokens = cut[1] - cut[0];
            let positions = Buffer::from_slice(device, &(cut[0]..cut[1]).collect::<Vec<u32>>())?;
            let row = sequence * max_blocks as usize..(sequence + 1) * max_blocks as usize;
            let [pool_keys, pool_values] = &mut pool;
            let encode = Encode {
                sequence: sequence as u32,
                counts: [1, tokens],
                source: Source::Pool { table: table.global_range(row)?, max_blocks },
                keys: keys.global(),
                values: values.global(),
                positions: positions.global(),
                lengths: ends.global_range_mut(sequence..sequence + 1)?,
                pool: (sequence == 0).then(|| [pool_keys.global_mut(), pool_values.global_mut()]),
            };
            // SAFETY: buffers of the device, host memory on the CPU; the table's entries up to each length
            // are the pool's. Dropping a buffer waits for the device.
            unsafe { store.encode_on(&stream, slices, &tables, encode) }?;
        }
    }
    // What encoding puts into a prompt's pool, before restoring does.
    let encoded = [pool[0].to_vec()?, pool[1].to_vec()?];
    if lengths[0] > 1 {
        let [pool_keys, pool_values] = &mut pool;
        let pools = [pool_keys.global_mut(), pool_values.global_mut()];
        // SAFETY: as above.
        unsafe { store.restore_on(&stream, slices, &tables, (0, lengths[0]), pools) }?;
    }
    let mut turned = poisoned::<f16>(&stream, queries.len())?;
    let (own, shape) = (turned.global_mut(), store.shape());
    // SAFETY: as above.
    unsafe { turn_on(&stream, slices, &tables, problem, shape, queries.global(), own) }?;
    let mut plan = Plan::new(device, problem, setting)?;
    let mut output = poisoned::<f32>(&stream, queries.len())?;
    let handles = Handles { queries: queries.global(), lengths: ends.global(), output: output.global_mut() };
    // SAFETY: as above.
    unsafe { plan.run_on(&stream, slices, &store, &tables, handles) }?;
    stream.synchronize()?;
    Ok(Ran { batch, books, store, encoded, pool, turned, lengths: ends, output })
}

impl Ran {
    /// All that was written.
    pub fn outputs(&self) -> Result<Vec<OutputBuffer>, CaseError> {
        let [recent_keys, recent_values] = self.store.recent();
        Ok(vec![
            OutputBuffer::download("codes", self.store.codes())?,
            OutputBuffer::download("recent keys", recent_keys)?,
            OutputBuffer::download("recent values", recent_values)?,
            OutputBuffer::new("encoded keys", self.encoded[0].clone()),
            OutputBuffer::new("encoded values", self.encoded[1].clone()),
            OutputBuffer::download("refused", self.store.refused())?,
            OutputBuffer::download("restored keys", &self.pool[0])?,
            OutputBuffer::download("restored values", &self.pool[1])?,
            OutputBuffer::download("turned", &self.turned)?,
            OutputBuffer::download("lengths", &self.lengths)?,
            OutputBuffer::download("output", &self.output)?,
        ])
    }
}

fn run(device: &Device, step: Step, setting: Setting, head_dim: u32) -> Result<Vec<OutputBuffer>, CaseError> {
    ran(device, step, setting, head_dim, false)?.outputs()
}
