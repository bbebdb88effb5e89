//! What the certificates of a carried step add up over its blocks: `carried::gather` of the kernels, eight
//! rows side by side.

use crate::attention::cpu::Work;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::pieces::Pieces;
use crate::attention::cpu::softmax::{MAX_ROWS, MAX_WARPS};
use kernels_gpu::attention::PartialRow;
use kernels_gpu::certified::carried::gather::{Bounds, Gathered, growth_of_lane};
use kernels_gpu::certified::carried::likely::Noise;
use simt::math::{exp2_nonpositive, fma, max};

/// A number for each of eight rows.
pub(super) type Rows = [f32; MAX_ROWS];

/// [`Gathered`] of eight rows, and what it is relative to.
#[derive(Clone, Copy)]
pub(super) struct Gather {
    pub(super) references: Rows,
    a1: Rows,
    a2: Rows,
    a3: Rows,
    tail: Rows,
    eta: Rows,
    nu_squares: Rows,
    kappa_squares: Rows,
    eta_squares: Rows,
    twice: Rows,
    twice_values: Rows,
    noise: Rows,
    noise_values: Rows,
    fourth: Rows,
    fourth_values: Rows,
    spread: Rows,
    step: Rows,
    delta: Rows,
    /// The same for all rows, as blocks are: ν, κ and η.
    largest: [f32; 3],
}

impl Gather {
    /// No block.
    pub(super) const NONE: Gather = Gather {
        references: [PartialRow::EMPTY.reference; MAX_ROWS],
        a1: [0.0; MAX_ROWS],
        a2: [0.0; MAX_ROWS],
        a3: [0.0; MAX_ROWS],
        tail: [0.0; MAX_ROWS],
        eta: [0.0; MAX_ROWS],
        nu_squares: [0.0; MAX_ROWS],
        kappa_squares: [0.0; MAX_ROWS],
        eta_squares: [0.0; MAX_ROWS],
        twice: [0.0; MAX_ROWS],
        twice_values: [0.0; MAX_ROWS],
        noise: [0.0; MAX_ROWS],
        noise_values: [0.0; MAX_ROWS],
        fourth: [0.0; MAX_ROWS],
        fourth_values: [0.0; MAX_ROWS],
        spread: [0.0; MAX_ROWS],
        step: [0.0; MAX_ROWS],
        delta: [0.0; MAX_ROWS],
        largest: [0.0; 3],
    };

    /// Sums of weights.
    fn sums(&mut self) -> [&mut Rows; 10] {
        let Gather { a1, a2, a3, tail, eta, nu_squares, kappa_squares, eta_squares, .. } = self;
        let Gather { twice, twice_values, .. } = self;
        [a1, a2, a3, tail, eta, nu_squares, kappa_squares, eta_squares, twice, twice_values]
    }

    /// Sums of squares of weights.
    fn squares(&mut self) -> [&mut Rows; 6] {
        let Gather { noise, noise_values, fourth, fourth_values, spread, step, .. } = self;
        [noise, noise_values, fourth, fourth_values, spread, step]
    }

    /// The reference of row `r` has become another one, `factor` the weight of the old one.
    #[inline(always)]
    pub(super) fn rescale(&mut self, r: usize, factor: f32) {
        for sums in self.sums() {
            sums[r] *= factor;
        }
        for squares in self.squares() {
            squares[r] *= factor * factor;
        }
    }

    /// `Noisy::add` of the first `rows` rows and their lanes: the `mass` of the block's weights and their
    /// `moments`, Σ p², Σ p n and Σ p² n², and of quantized keys what is known of their noise.
    #[inline(always)]
    pub(super) fn add_noise(
        &mut self,
        rows: usize,
        mass: &Rows,
        [plain, first, second]: &[Rows; 3],
        noise: Option<&[Noise; MAX_ROWS]>,
        of: Bounds,
    ) {
        let mut squares: Rows = [0.0; MAX_ROWS];
        for (r, squares) in squares.iter_mut().enumerate().take(rows) {
            *squares = second[r] * of.unit * of.unit;
            self.spread[r] = fma(*squares, of.spreads[0], self.spread[r]);
            self.step[r] = fma(*squares, of.spreads[1], self.step[r]);
        }
        let Some(noise) = noise else { return };
        for (r, Noise { variance, growth }) in noise.iter().enumerate().take(rows) {
            let grown = growth * variance;
            self.twice[r] = fma(mass[r], grown, self.twice[r]);
            self.twice_values[r] = fma(first[r] * of.unit, grown, self.twice_values[r]);
            self.noise[r] = fma(plain[r], grown, self.noise[r]);
            self.noise_values[r] = fma(squares[r], grown, self.noise_values[r]);
            self.fourth[r] = fma(plain[r], grown * grown, self.fourth[r]);
            self.fourth_values[r] = fma(squares[r], grown * grown, self.fourth_values[r]);
        }
    }

    /// `Gather::add` of the first `rows` rows and their lanes: a block whose tokens weigh `mass` in each row;
    /// its keys are quantized if there are `deltas`, whatever `of` says of them.
    #[inline(always)]
    pub(super) fn add(&mut self, rows: usize, mass: &Rows, deltas: Option<&Rows>, of: Bounds) {
        let Bounds { eta, nu, kappa, .. } = of;
        for (r, mass) in mass.iter().enumerate() {
            self.eta[r] = fma(*mass, eta, self.eta[r]);
            self.nu_squares[r] = fma(*mass, nu * nu, self.nu_squares[r]);
            self.kappa_squares[r] = fma(*mass, kappa * kappa, self.kappa_squares[r]);
            self.eta_squares[r] = fma(*mass, eta * eta, self.eta_squares[r]);
        }
        for (largest, own) in self.largest.iter_mut().zip([nu, kappa, eta]) {
            *largest = max(*largest, own);
        }
        let Some(deltas) = deltas else { return };
        for (r, delta) in deltas.iter().enumerate().take(rows) {
            let (up, down) = (growth_of_lane(*delta, 0), growth_of_lane(*delta, 2));
            let of_tail = growth_of_lane(*delta, 3);
            self.a1[r] = fma(mass[r], up, self.a1[r]);
            self.a2[r] = fma(mass[r], up * nu, self.a2[r]);
            self.a3[r] = fma(mass[r], down, self.a3[r]);
            self.tail[r] = fma(mass[r], of_tail, self.tail[r]);
            self.delta[r] = max(self.delta[r], *delta);
        }
    }

    /// Adds up some parts in their order, relative to the largest reference: `merge` of the kernels over
    /// warps, and over splits.
    #[inline(always)]
    pub(super) fn merge<'a>(parts: impl Iterator<Item = &'a Gather> + Clone) -> Gather {
        let mut all = Gather::NONE;
        for part in parts.clone() {
            for (reference, own) in all.references.iter_mut().zip(part.references) {
                *reference = max(*reference, own);
            }
        }
        for part in parts {
            let mut weights = [0f32; MAX_ROWS];
            for (r, weight) in weights.iter_mut().enumerate() {
                *weight = exp2_nonpositive(part.references[r] - all.references[r]);
            }
            let mut own = *part;
            for (sums, own) in all.sums().into_iter().zip(own.sums()) {
                for (sum, (x, weight)) in sums.iter_mut().zip(own.iter().zip(&weights)) {
                    *sum = fma(*x, *weight, *sum);
                }
            }
            for (sum, own) in all.squares().into_iter().zip(own.squares()) {
                for (sum, (x, weight)) in sum.iter_mut().zip(own.iter().zip(&weights)) {
                    *sum = fma(*x, *weight * *weight, *sum);
                }
            }
            for (delta, own) in all.delta.iter_mut().zip(part.delta) {
                *delta = max(*delta, own);
            }
            for (largest, own) in all.largest.iter_mut().zip(part.largest) {
                *largest = max(*largest, own);
            }
        }
        all
    }

    /// What a row's certificate follows from.
    pub(super) fn of_row(&self, r: usize) -> Gathered {
        let [nu, kappa, largest_eta] = self.largest;
        Gathered {
            a1: self.a1[r],
            eta: self.eta[r],
            delta: self.delta[r],
            twice: self.twice[r],
            noise: self.noise[r],
            twice_values: self.twice_values[r],
            noise_values: self.noise_values[r],
            spread: self.spread[r],
            fourth: self.fourth[r],
            step: self.step[r],
            fourth_values: self.fourth_values[r],
            a2: self.a2[r],
            nu_squares: self.nu_squares[r],
            nu,
            a3: self.a3[r],
            kappa_squares: self.kappa_squares[r],
            kappa,
            tail: self.tail[r],
            eta_squares: self.eta_squares[r],
            largest_eta,
        }
    }
}

/// Adds up what the warps of a thread block have gathered, in the order of [`Pieces`].
pub(super) struct MergeWarps<'a> {
    pub(super) of_warps: &'a [Gather; MAX_WARPS],
    pub(super) pieces: Pieces,
}

impl Work for MergeWarps<'_> {
    type Output = Gather;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Gather {
        let MergeWarps { of_warps, pieces } = self;
        Gather::merge((0..pieces.warps).map(|warp| &of_warps[pieces.place(warp)]))
    }
}
