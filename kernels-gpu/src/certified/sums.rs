//! What a row's certificate adds up over its blocks.

use super::judge::{at_least_exp, growth};
use super::pass::Record;
use glam::UVec4;
use simt::math::{exp2_nonpositive, fma, max};
use simt::{Global, GlobalMut, Pod, Shared, Zeroable, unroll};

/// Above what a block's mass may have lost by weights below f32's smallest: 16 tokens of at most 2^15, times
/// 2^−126.5.
pub(super) const LOST: f32 = f32::from_bits((127 - 106) << 23);

/// What is taken in counts for so much more than what is taken out: 512 roundings of the sum of all. An
/// addend passes at most 2 additions of its thread, 20 over the threads and 136 over the parts; what is taken
/// out 32, 5 and 136 more; and no partial sum is larger than the sum of all.
const SLACK: f32 = 1.0 + 1.0 / 32768.0;

/// Sums over one query row. Masses are relative to the row's reference over all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct RowSums {
    /// Σ_T w.
    pub tail: f32,
    /// Σ_T w (e^Δ − 1).
    pub a1: f32,
    /// Σ_T w (e^Δ − 1) ν.
    pub a2: f32,
    /// Σ_T w (1 − e^−Δ).
    pub a3: f32,
    /// Σ w η over blocks whose values are not promoted. Where the keys are, or may be for another row's sake,
    /// times e^Δ: the weight from the original keys may be that much larger than w.
    pub eta: f32,
    /// Σ w ν² over all quantized blocks; times e^Δ where the row promotes the keys.
    pub nu_squares: f32,
    /// Σ w (ε + ζ)², likewise.
    pub kappa_squares: f32,
    /// The largest Δ of all quantized blocks.
    pub delta: f32,
    /// The largest ν + η of all quantized blocks.
    pub nu: f32,
    /// The largest ε + ζ of all quantized blocks: no key's norm is larger.
    pub kappa: f32,
    /// Whether K_max was raised.
    pub expanded: u32,
    pub(super) unused: u32,
}

/// What promotion takes out of a row's sums.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Taken {
    /// Of the sums of [`RowSums`] of the same names.
    pub tail: f32,
    /// See `tail`.
    pub a1: f32,
    /// See `tail`.
    pub a2: f32,
    /// See `tail`.
    pub a3: f32,
    /// See `tail`.
    pub eta: f32,
    /// What is added to `eta`, where weights come from the original keys and values do not.
    pub eta_added: f32,
    /// What is added to `nu_squares`, where weights come from the original keys.
    pub nu_squares_added: f32,
    /// What is added to `kappa_squares`.
    pub kappa_squares_added: f32,
    /// Σ w of blocks that are promoted in any way: what the corrections subtract.
    pub corrected: f32,
    /// Blocks whose keys are promoted for this row.
    pub keys: u32,
    /// Blocks whose values are.
    pub values: u32,
    unused: u32,
}

macro_rules! three_vectors {
    ($of:ident) => {
        impl $of {
            /// Writes row `row`.
            #[simt::device]
            pub fn store(self, rows: GlobalMut<$of>, row: usize) {
                let words: [UVec4; 3] = bytemuck::cast(self);
                unroll!(for i in 0..3 {
                    rows.cast::<UVec4>().store(row * 3 + i, words[i]);
                });
            }

            /// Reads row `row`.
            #[simt::device]
            pub fn load(rows: Global<$of>, row: usize) -> Self {
                let mut words = [UVec4::ZERO; 3];
                unroll!(for i in 0..3 {
                    words[i] = rows.cast::<UVec4>().load(row * 3 + i);
                });
                bytemuck::cast(words)
            }
        }
    };
}
three_vectors!(RowSums);
three_vectors!(Taken);

/// A block's mass relative to a row's reference, and mass times η. What is not a number is infinite: its
/// bits, which decide what is chosen, are the same everywhere.
#[inline(always)]
pub fn weights(record: Record, reference: f32) -> (f32, f32) {
    let number = |x: f32| if x < f32::INFINITY { x } else { f32::INFINITY };
    let mass = number(record.mass * exp2_nonpositive(record.reference() - reference));
    (mass, number(mass * record.eta()))
}

/// What a thread adds up over its blocks, as if nothing were promoted.
#[derive(Clone, Copy)]
pub struct Own {
    a1: f32,
    a2: f32,
    a3: f32,
    eta: f32,
    nu_squares: f32,
    kappa_squares: f32,
    /// Σ w η, without slack.
    error: f32,
    delta: f32,
    nu: f32,
    kappa: f32,
}

impl Own {
    /// How many words it has.
    pub const WORDS: usize = 10;
    /// Of its words, those before this one are sums, the others maxima.
    pub const FIRST_MAXIMUM: u32 = 7;
    /// Which of the words is Σ w η.
    pub const ERROR: u32 = 6;
    /// Which is the largest ν + η.
    pub const NU: u32 = 8;

    /// No block.
    #[inline(always)]
    pub fn new() -> Self {
        Own {
            a1: 0.0,
            a2: 0.0,
            a3: 0.0,
            eta: 0.0,
            nu_squares: 0.0,
            kappa_squares: 0.0,
            error: 0.0,
            delta: 0.0,
            nu: 0.0,
            kappa: 0.0,
        }
    }

    /// In the order of the fields.
    #[inline(always)]
    pub fn words(self) -> [f32; Self::WORDS] {
        let Own { a1, a2, a3, eta, nu_squares, kappa_squares, .. } = self;
        let Own { error, delta, nu, kappa, .. } = self;
        [a1, a2, a3, eta, nu_squares, kappa_squares, error, delta, nu, kappa]
    }

    /// The row's sums from all threads' words; `mass` is Σ p of the pass, the sum of all w.
    #[inline(always)]
    pub fn row(words: [f32; Self::WORDS], mass: f32, expanded: u32) -> RowSums {
        // What is lost of a block is 2^−119 of the whole at most; the additions of the pass are the judge's
        // to count.
        let tail = mass * SLACK;
        let [a1, a2, a3, eta, nu_squares, kappa_squares, _, delta, nu, kappa] = words;
        RowSums { tail, a1, a2, a3, eta, nu_squares, kappa_squares, delta, nu, kappa, expanded, unused: 0 }
    }

    /// Takes a block in.
    #[inline(always)]
    pub fn add(&mut self, mass: f32, error: f32, per_group: bool, record: Record) {
        let share = Share::of(mass, error, record);
        self.a1 = fma(share.a1, SLACK, self.a1);
        self.a2 = fma(share.a2, SLACK, self.a2);
        self.a3 = fma(share.a3, SLACK, self.a3);
        self.eta = fma(if per_group { share.exact_error } else { error }, SLACK, self.eta);
        self.nu_squares = fma(share.nu_squares, SLACK, self.nu_squares);
        self.kappa_squares = fma(share.kappa_squares, SLACK, self.kappa_squares);
        self.error += error;
        self.delta = max(self.delta, record.delta());
        self.nu = max(self.nu, record.nu + record.eta());
        self.kappa = max(self.kappa, record.kappa());
    }
}

impl Default for Own {
    fn default() -> Self {
        Own::new()
    }
}

impl Taken {
    /// Words of it.
    pub const WORDS: u32 = size_of::<Taken>() as u32 / 4;

    /// Writes that of row `r` to shared memory.
    #[simt::device]
    pub fn keep(self, rows: Shared<u32>, r: u32) {
        let words: [UVec4; 3] = bytemuck::cast(self);
        unroll!(for i in 0..3 {
            rows.store_vector(Self::WORDS * r + 4 * i as u32, words[i]);
        });
    }

    /// Reads it back.
    #[simt::device]
    pub fn kept(rows: Shared<u32>, r: u32) -> Self {
        bytemuck::cast([0, 1, 2].map(|i| rows.load_vector::<UVec4>(Self::WORDS * r + 4 * i)))
    }

    /// Takes out what a promoted block has no part in.
    #[inline(always)]
    pub fn add(&mut self, mass: f32, error: f32, [key, value]: [bool; 2], per_group: bool, record: Record) {
        let share = Share::of(mass, error, record);
        if key {
            self.tail += share.mass;
            self.a1 += share.a1;
            self.a2 += share.a2;
            self.a3 += share.a3;
            self.nu_squares_added = fma(share.nu_squares * share.up, SLACK, self.nu_squares_added);
            self.kappa_squares_added = fma(share.kappa_squares * share.up, SLACK, self.kappa_squares_added);
        }
        if value {
            self.eta += if per_group { share.exact_error } else { error };
        } else if !per_group {
            // Its weights come from the original keys now.
            self.eta_added = fma(share.exact_error - error, SLACK, self.eta_added);
        }
        self.corrected += mass;
        self.keys += key as u32;
        self.values += value as u32;
    }

    /// The sum of two.
    #[inline(always)]
    pub fn plus(self, other: Taken) -> Taken {
        Taken {
            tail: self.tail + other.tail,
            a1: self.a1 + other.a1,
            a2: self.a2 + other.a2,
            a3: self.a3 + other.a3,
            eta: self.eta + other.eta,
            eta_added: self.eta_added + other.eta_added,
            nu_squares_added: self.nu_squares_added + other.nu_squares_added,
            kappa_squares_added: self.kappa_squares_added + other.kappa_squares_added,
            corrected: self.corrected + other.corrected,
            keys: self.keys + other.keys,
            values: self.values + other.values,
            unused: 0,
        }
    }

    /// The sum over lanes whose numbers differ in the bits of `lanes`, the same in each of them.
    #[simt::device]
    pub fn over_lanes(self, lanes: u32) -> Taken {
        let mut sum = self;
        unroll!(for i in 0..5 {
            let step = 16u32 >> i;
            if lanes & step != 0 {
                let words: [u32; 12] = bytemuck::cast(sum);
                let mut other = [0u32; 12];
                unroll!(for k in 0..11 {
                    other[k] = simt::warp::warp_shuffle_xor(simt::warp::FULL_MASK, words[k], step, 32);
                });
                sum = sum.plus(bytemuck::cast(other));
            }
        });
        sum
    }
}

impl RowSums {
    /// What is left when `taken` is out: what rounding made negative is 0, what is not a number stays none.
    #[inline(always)]
    pub fn without(self, taken: Taken) -> RowSums {
        let left = |all: f32, out: f32| if all - out < 0.0 { 0.0 } else { all - out };
        RowSums {
            tail: left(self.tail, taken.tail),
            a1: left(self.a1, taken.a1),
            a2: left(self.a2, taken.a2),
            a3: left(self.a3, taken.a3),
            eta: left(self.eta, taken.eta) + taken.eta_added,
            nu_squares: self.nu_squares + taken.nu_squares_added,
            kappa_squares: self.kappa_squares + taken.kappa_squares_added,
            ..self
        }
    }
}

/// A block's part of the sums. Computed twice, with the same bits.
struct Share {
    /// With what may have been lost.
    mass: f32,
    a1: f32,
    a2: f32,
    a3: f32,
    nu_squares: f32,
    kappa_squares: f32,
    /// w·η if the weights come from the original keys: times e^Δ.
    exact_error: f32,
    /// e^Δ − 1.
    up: f32,
}

impl Share {
    #[inline(always)]
    fn of(mass: f32, error: f32, record: Record) -> Self {
        let (delta, eta) = (record.delta(), record.eta());
        let grown = at_least_exp(delta);
        // Weights that are nothing in f32 may be something by e^Δ.
        let mass = mass + LOST;
        let up = growth(grown);
        // 1 − e^−Δ <= (e^Δ − 1)/e^Δ.
        let down = if delta > 80.0 { 1.0 } else { up / grown };
        Share {
            mass,
            a1: mass * up,
            a2: mass * up * record.nu,
            a3: mass * down,
            nu_squares: mass * record.nu * record.nu,
            kappa_squares: mass * record.kappa() * record.kappa(),
            exact_error: fma(LOST, eta, error) * grown,
            up,
        }
    }
}
