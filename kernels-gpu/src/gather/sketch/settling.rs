//! `settle`: what a head's output may be off by, and which heads need all of the sequence.
//!
//! # Mathematics
//! With S the mass of what is left out, at most, M its moment Σ mass·‖v‖, K the mass attended to, at least, o
//! what attention returned and E what its rounding may be (docs/certificate.md, "A sketch of every key"):
//!
//! ```text
//! α = S/(S + K)      bound = E + min( (M + S·R)/K, α·(ν_rest + R) )      R = ‖o‖₂ + E
//! ```
//!
//! A head with α above the budget is attended to again, over the whole sequence: the dense rung, whose bound
//! is its E.
//!
//! Where what is kept was attended to by its codes ([`Codes`]), E is the bound that came with the output, on
//! its distance from exact attention over the same tokens, and K is less by what codes may add to a
//! log-sum-exp. A head of which codes say nothing goes to the rung as well.
//!
//! # Layout
//! `skipped` [sequences, kv_heads, heads] and `whole` [sequences, kv_heads] of [`decide`](fn@super::decide);
//! `queries`, `output` [sequences, q_heads, D]; `lse`, and of codes `certificates`, [sequences, q_heads].
//! Written: `verdicts` [sequences, q_heads]; `wanted` [sequences, kv_heads · row groups], a bit for each head
//! that goes to the rung.
//!
//! # Work split
//! Grid (kv_heads · row groups, 1, sequences), a warp a query head.

use super::counting::{Skipped, Whole, heads_of};
use super::scanning::{SCAN_THREADS, ScanShape};
use crate::attention::outward::norm_bound;
use crate::attention::query::{LOG2_E, LOG2_E_ABOVE, Query, delta_dense};
use crate::attention::{BLOCK_TOKENS, Chain, Half, ROWS};
use crate::certified::Certificate;
use glam::UVec4;
use half::{bf16, f16};
use simt::math::{abs, canonical_nan, exp2, fma, min};
use simt::warp;
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block of [`settle`](fn@settle).
pub const SETTLE_THREADS: u32 = SCAN_THREADS;

/// What is known of a query head's output.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Verdict {
    /// ‖output − exact output‖₂, at most.
    pub bound: f32,
    /// The share of the head's mass that was left out, at most.
    pub mass: f32,
    /// Tokens left out.
    pub tokens: u32,
    /// 1: the head went to the dense rung.
    pub dense: u32,
}

/// The extents of a launch of [`settle`](fn@settle).
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SettleShape {
    /// Those of [`scan`](fn@super::scan).
    pub scan: ScanShape,
    /// The share of a head's mass that may be left out.
    pub budget: f32,
    /// Parts that attention to what is kept is cut into, where its originals are read, and those of the dense
    /// rung.
    pub splits: [u32; 2],
    /// 1: what is kept is attended to by its codes, with a certificate of each head.
    pub codes: u32,
}

/// What a verdict follows from.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Of what was left out.
    pub skipped: Skipped,
    /// Of the sequence and KV head.
    pub whole: Whole,
    /// At least ‖q‖₂, and ‖o‖₂.
    pub query: f32,
    /// See `query`.
    pub output: f32,
    /// Natural log-sum-exp over what was attended to.
    pub lse: f32,
    /// Tokens of the sequence.
    pub length: u32,
    /// Of attention by codes; nothing where it was `dense`.
    pub codes: Option<Codes>,
}

/// What is known of a head that was attended to by the codes of what is kept, but for a probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Codes {
    /// What its output is away from exact attention over the same tokens, at most, in the Euclidean norm.
    pub error: f32,
    /// What its log-sum-exp is off by, at most; infinite where codes say nothing: where a query or scores are
    /// no numbers.
    pub log_sum: f32,
}

impl Codes {
    /// What a certificate says.
    #[inline(always)]
    pub fn of(certificate: &Certificate) -> Self {
        Codes { error: certificate.likely, log_sum: certificate.log_sum }
    }

    #[inline(always)]
    // What is no number is not less.
    #[allow(clippy::neg_cmp_op_on_partial_ord)]
    fn say_nothing(self) -> bool {
        !(self.log_sum < f32::INFINITY)
    }
}

/// What rounding does to the output of `dense` over `tokens` tokens, at most, and to its log-sum-exp.
#[inline(always)]
fn rounding<E: Half, const D: usize>(facts: &Facts, scale: f32, tokens: u32, splits: u32) -> [f32; 2] {
    let query = Query { pairs: [0; 32], scale, norm: facts.query, finite: true };
    let delta = delta_dense::<D>(&query, scale, facts.whole.kappa);
    let chain = Chain::of_dense::<D>(tokens, splits);
    let output = fma(facts.whole.nu, delta + chain.bracket::<E>(), Chain::underflow());
    [output, delta + chain.bracket::<E>()]
}

/// The largest mass attended to that is counted, in octaves relative to the head's level: together with any
/// that is left out it is a finite number.
const MOST_OCTAVES: f32 = 100.0;

/// The verdict of a head.
#[inline(always)]
pub fn verdict<E: Half, const D: usize>(facts: &Facts, shape: SettleShape) -> Verdict {
    const ROUNDED: f32 = 1.0 + 1.0 / 65536.0;
    let Facts { skipped, whole, output, lse, length, .. } = *facts;
    let scale = shape.scan.softmax_scale;
    let [of_kept, of_lse] = match facts.codes {
        Some(Codes { error, log_sum }) => [error, log_sum],
        None => rounding::<E, D>(facts, scale, length - whole.tokens, shape.splits[0]),
    };
    let unsaid = match facts.codes {
        Some(codes) => codes.say_nothing(),
        None => false,
    };
    if whole.tokens == 0 && !unsaid {
        return Verdict { bound: canonical_nan(of_kept * ROUNDED), mass: 0.0, tokens: 0, dense: 0 };
    }
    let lost = (abs(lse) + abs(skipped.level)) * (1.0 / 2_097_152.0) + of_lse * LOG2_E_ABOVE;
    let exponent = lse * LOG2_E - skipped.level - lost - 1.0 / 65536.0;
    // A lower bound may be lower, and is a number that can be added to; what is no number stays so.
    let kept = exp2(if exponent > MOST_OCTAVES { MOST_OCTAVES } else { exponent });
    // What exponents and sums lose, and sums below 2^−126.
    let above = |x: f32| fma(x, 1.0 + 1.0 / 32768.0, 1.0e-30);
    let (mass, moment) = (above(skipped.mass), above(skipped.moment));
    // A share is never none: a quotient may be less than f32 has.
    let share = fma(mass / (mass + kept), ROUNDED, f32::MIN_POSITIVE);
    // Not what is no number.
    let within = !unsaid && share <= 2.0 && min(share, 1.0) <= shape.budget;
    if !within {
        let [bound, _] = rounding::<E, D>(facts, scale, length, shape.splits[1]);
        return Verdict { bound: canonical_nan(bound * ROUNDED), mass: 0.0, tokens: 0, dense: 1 };
    }
    let (share, norm) = (min(share, 1.0), output + of_kept);
    let left_out = min(fma(mass, norm, moment) / kept, share * (skipped.nu_rest + norm));
    let bound = canonical_nan((of_kept + left_out) * ROUNDED);
    Verdict { bound, mass: share, tokens: whole.tokens, dense: 0 }
}

const fn flags() -> Shared<u32> {
    SharedPlan::new().array(ROWS)
}

/// Shared memory of [`settle`](fn@settle).
pub const fn settle_bytes() -> u32 {
    4 * flags().len()
}

/// Judges every head, and says which the dense rung shall take.
#[kernel(
    system = gather,
    instances((f16, 64), (f16, 128), (bf16, 64), (bf16, 128)),
    max_threads = 256,
    overlaps
)]
pub fn settle<E: Half, const D: usize>(
    queries: Global<E>,
    output: Global<f32>,
    lse: Global<f32>,
    certificates: Global<Certificate>,
    lengths: Global<u32>,
    skipped: Global<Skipped>,
    whole: Global<Whole>,
    verdicts: GlobalMut<Verdict>,
    wanted: GlobalMut<u32>,
    shape: SettleShape,
) {
    let sequence = thread::block_idx_z();
    let groups = shape.scan.row_groups();
    let head = bits::div_u32(thread::block_idx_x(), groups);
    let row_group = bits::rem_u32(thread::block_idx_x(), groups);
    let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + warp;
    let row = sequence * shape.scan.kv_heads + head;
    if in_group < shape.scan.group {
        let query_row = (row * shape.scan.group + in_group) as usize;
        // All that is loaded is on its way before the first of it is waited for.
        let skipped = skipped.load_vector((row * heads_of(shape.scan.group) + in_group) as usize);
        let (whole, lse) = (whole.load_vector(row as usize), lse.load_streaming(query_row));
        let length = lengths.load(sequence as usize).min(shape.scan.max_blocks * BLOCK_TOKENS);
        let codes = if shape.codes != 0 {
            let words: [UVec4; 3] =
                [0, 1, 2].map(|i| certificates.cast::<UVec4>().load_streaming(3 * query_row + i));
            Some(Codes::of(&bytemuck::cast(words)))
        } else {
            None
        };
        let (mut q, mut o) = (0f32, 0f32);
        unroll!(for i in 0..(D / 64), at_most 2 {
            let at = query_row * D + 64 * i + 2 * lane as usize;
            let [a, b] = E::unpack(queries.load_vector::<u32>(at));
            let c: [f32; 2] = output.load_vector(at);
            q = fma(b, b, fma(a, a, q));
            o = fma(c[1], c[1], fma(c[0], c[0], o));
        });
        let (query, output) = (norm_bound(warp::warp_sum_f32(q)), norm_bound(warp::warp_sum_f32(o)));
        let facts = Facts { skipped, whole, query, output, lse, length, codes };
        let verdict = verdict::<E, D>(&facts, shape);
        if lane == 0 {
            verdicts.store(query_row, verdict);
            flags().store(warp, verdict.dense << warp);
        }
    } else if lane == 0 {
        flags().store(warp, 0);
    }
    thread::sync_threads();
    if t == 0 {
        let mut bits = 0;
        unroll!(for w in 0..8 {
            bits |= flags().load(w as u32);
        });
        wanted.store((sequence * thread::grid_dim_x() + thread::block_idx_x()) as usize, bits);
    }
}
