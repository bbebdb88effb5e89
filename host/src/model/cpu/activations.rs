//! Values to fixed point, with RMSNorm or SwiGLU in front: `kernels_gpu::model::activations` on slices.

use super::Level;
use kernels_gpu::model::activations::{THREADS, gated, norm_factor, normed};
use kernels_gpu::model::fixed::{self, BLOCK, Part, Record, digits, magnitude};
use rayon::prelude::*;

/// What is quantized.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Values [tokens, columns].
    Plain(&'a [f32]),
    /// RMSNorm of [tokens, columns].
    Normed {
        /// The values.
        x: &'a [f32],
        /// The norm's weights, \[columns\].
        weight: &'a [f32],
        /// ε.
        epsilon: f32,
    },
    /// SwiGLU of [tokens, 2·columns].
    Gated(&'a [f32]),
}

const CHANNELS: usize = BLOCK as usize;
/// Chains of a sum of squares.
const CHAINS: usize = 4 * THREADS as usize;

/// Records of every token: `records` [tokens, columns / 32].
///
/// # Panics
/// If a slice does not fit, or `columns` is no multiple of 32.
pub fn quantize(source: Source<'_>, columns: usize, records: &mut [Record]) {
    quantize_at(Level::best(), source, columns, records);
}

/// [`quantize`] on a path, or on the best below it that the machine has.
///
/// # Panics
/// As [`quantize`].
pub fn quantize_at(level: Level, source: Source<'_>, columns: usize, records: &mut [Record]) {
    assert!(columns > 0 && columns.is_multiple_of(CHANNELS), "{columns} channels are no multiple of 32");
    let blocks = columns / CHANNELS;
    assert!(records.len().is_multiple_of(blocks), "{} records for rows of {blocks}", records.len());
    let tokens = records.len() / blocks;
    let (x, row) = match source {
        Source::Plain(x) => (x, columns),
        Source::Normed { x, weight, .. } => {
            assert_eq!(weight.len(), columns, "one weight a channel");
            (x, columns)
        }
        Source::Gated(x) => (x, 2 * columns),
    };
    assert_eq!(x.len(), tokens * row, "values of {tokens} tokens");
    let one = |(x, records): (&[f32], &mut [Record])| one_token(level.checked(), source, x, records);
    if tokens < 4 {
        x.chunks_exact(row).zip(records.chunks_exact_mut(blocks)).for_each(one);
    } else {
        x.par_chunks_exact(row).zip(records.par_chunks_exact_mut(blocks)).for_each(one);
    }
}

fn one_token(level: Level, source: Source<'_>, x: &[f32], records: &mut [Record]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(source: Source<'_>, x: &[f32], records: &mut [Record]) {
            body(source, x, records);
        }
        if level >= Level::Avx2 {
            // SAFETY: the machine has these instructions.
            return unsafe { avx2(source, x, records) };
        }
    }
    let _ = level;
    body(source, x, records);
}

#[inline(always)]
fn body(source: Source<'_>, x: &[f32], records: &mut [Record]) {
    match source {
        Source::Plain(_) => {
            for (x, record) in x.chunks_exact(CHANNELS).zip(records) {
                let mut v = [0f32; CHANNELS];
                v.copy_from_slice(x);
                *record = make_record(v);
            }
        }
        Source::Normed { weight, epsilon, .. } => {
            let factor = norm_factor(sum_of_squares(x), x.len() as u32, epsilon);
            for ((x, weight), record) in
                x.chunks_exact(CHANNELS).zip(weight.chunks_exact(CHANNELS)).zip(records)
            {
                let mut v = [0f32; CHANNELS];
                for (v, (x, weight)) in v.iter_mut().zip(x.iter().zip(weight)) {
                    *v = normed(*x, factor, *weight);
                }
                *record = make_record(v);
            }
        }
        Source::Gated(_) => {
            let (gates, ups) = x.split_at(x.len() / 2);
            for ((gate, up), record) in
                gates.chunks_exact(CHANNELS).zip(ups.chunks_exact(CHANNELS)).zip(records)
            {
                let mut v = [0f32; CHANNELS];
                for (v, (gate, up)) in v.iter_mut().zip(gate.iter().zip(up)) {
                    *v = gated(*gate, *up);
                }
                *record = make_record(v);
            }
        }
    }
}

/// Σ x² in the kernel's tree.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut chains = [0f32; CHAINS];
    for x in x.chunks(CHAINS) {
        for (chain, x) in chains.iter_mut().zip(x) {
            *chain = x.mul_add(*x, *chain);
        }
    }
    let mut total = 0f32;
    for (warp, chains) in chains.chunks_exact(128).enumerate() {
        let mut lanes = [0f32; 32];
        for (lane, c) in lanes.iter_mut().zip(chains.chunks_exact(4)) {
            *lane = (c[0] + c[1]) + (c[2] + c[3]);
        }
        // A butterfly: each lane ends with the same sum, that of the halves.
        for half in [16, 8, 4, 2, 1] {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
        }
        total = if warp == 0 { lanes[0] } else { total + lanes[0] };
    }
    total
}

#[inline(always)]
fn make_record(v: [f32; CHANNELS]) -> Record {
    let largest = v.iter().fold(0, |largest: u32, x| largest.max(magnitude(*x)));
    let step = fixed::step(largest);
    let fixed = v.map(|x| step.fixed(x));
    let sum = step.sum(fixed.iter().sum());
    let mut planes = [[0i8; CHANNELS]; 3];
    for (k, x) in fixed.iter().enumerate() {
        let [a, b, c] = digits(*x);
        planes[0][k] = a as i8;
        planes[1][k] = b as i8;
        planes[2][k] = c as i8;
    }
    std::array::from_fn(|j| {
        let eight = |plane: [i8; CHANNELS]| std::array::from_fn(|i| plane[8 * j + i]);
        Part { high: eight(planes[0]), middle: eight(planes[1]), low: eight(planes[2]), step: step.step, sum }
    })
}
