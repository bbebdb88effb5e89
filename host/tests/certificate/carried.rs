//! What `carry` adds up and evaluates of docs/certificate.md in f32, against the same in f64: never less, and
//! hardly more. The bound that may fail is part of it.

use super::Random;
use half::f16;
use kernels_gpu::attention::Chain;
use kernels_gpu::attention::PartialRow;
use kernels_gpu::certified::carried::carried_warps;
use kernels_gpu::certified::carried::gather::{Bounds, Gathered, Moments, merge, weight};
use kernels_gpu::certified::carried::judge::Judge;
use kernels_gpu::certified::carried::likely::Noise;
use kernels_gpu::certified::layout::Annotation;
use kernels_gpu::certified::policy::rung;
use kernels_gpu::certified::query::Query;
use kernels_gpu::certified::{Certificate, Thresholds};
use simt::Zeroable;

const D: usize = 64;
const WARPS: usize = carried_warps(D as u32) as usize;
/// ln(4/δ).
const LOG_ODDS: f32 = 22.2;
/// δ_exp.
const EXP: f64 = 3.0 / 1_048_576.0;

/// A block of a row: what bounds its errors, and the sum of its weights, relative to a power of two of the
/// row's.
struct Block {
    bounds: Bounds,
    /// Σ p n / (Σ p ν) and Σ p² n² / (Σ p² ν²): how much smaller its tokens' values are than the largest.
    sizes: [f64; 2],
    mass: f64,
    /// What the squares of its weights are of the square of their sum: 1/16 to 1.
    squares: f64,
    /// Of quantized keys.
    noise: Option<Noise>,
}

struct Row {
    blocks: Vec<Block>,
    query: Query,
    output: f32,
    /// By what the references of warps differ from block to block.
    steps: f64,
}

impl Row {
    fn new(seed: u64) -> Self {
        let mut s = Random::new(seed);
        let count = 1 + s.bits() % 200;
        // From hardly any error to bounds that say nothing.
        let deltas = s.within(1e-5, 6.0);
        let values = s.within(1e-3, 1e4);
        let keys = s.within(1e-2, 1e3);
        let range = 12.0 * s.unit();
        let share = s.unit().powi(2);
        let mut blocks: Vec<Block> = (0..count)
            .map(|_| {
                let mut up = |size: f64| (size * (0.5 + s.unit())) as f32;
                let zeta = up(keys);
                let [eta, nu, eps] = [up(values) / 16.0, up(values), zeta / 256.0];
                let [spread, step] = [0.15, 0.02].map(|part: f32| part * (0.5 + s.unit() as f32));
                let annotation = Annotation { eta, nu, eps, zeta, spread, step, ..Annotation::NONE };
                let delta = deltas as f32 * (1.0 - 0.5 * s.unit() as f32);
                let promoted = [s.unit() < share, s.unit() < share];
                let noise = Noise { variance: delta * delta * 0.01, growth: (0.5 * delta).exp() };
                let delta = (!promoted[0]).then_some(delta);
                Block {
                    bounds: Bounds::of(annotation, delta, !promoted[1], true),
                    sizes: [s.within(1.0 / 64.0, 1.0), s.within(1.0 / 4096.0, 1.0)],
                    mass: 32768.0 * (-range * s.unit()).exp(),
                    squares: s.within(1.0 / 16.0, 1.0),
                    noise: delta.map(|_| noise),
                }
            })
            .collect();
        if s.one_in(4) {
            // One of them takes nearly all.
            blocks[0].mass *= 1e4;
        }
        if s.one_in(2) {
            // A trailing block.
            let [kappa, nu] = [keys, values].map(|x| (s.within(0.1, 2.0) * x) as f32);
            blocks.push(Block {
                bounds: Bounds { delta: None, eta: 0.0, nu, kappa, spreads: [0.0; 2], unit: 0.0 },
                sizes: [1.0; 2],
                mass: 32768.0 * s.unit(),
                squares: 1.0 / 16.0,
                noise: None,
            });
        }
        let norm = s.within(32.0, 500.0) as f32;
        let scale = (s.within(1e-3, 4.0) / f64::from(norm) / 8.0) as f32;
        let query = Query { pairs: [0; 32], scale, norm, finite: true };
        let largest = blocks.iter().map(|block| block.bounds.nu).fold(0.0, f32::max);
        let output = largest * s.unit() as f32 * if s.one_in(2) { 1.0 } else { 0.1 };
        Row { blocks, query, output, steps: s.unit() * 0.2 }
    }

    /// As warps meet the blocks, four of which wait for their part at a time, and are merged: each raises its
    /// reference now and then, the row's is the largest.
    fn gather(&self) -> (PartialRow, Gathered) {
        let last = self.steps * (self.blocks.len() - 1) as f64;
        let mut rows = Vec::new();
        let mut gathered = Vec::new();
        for warp in 0..WARPS {
            let mut row = PartialRow { reference: -1.0e30, sum: 0.0 };
            let mut own = Gathered::NONE;
            let blocks: Vec<_> = self.blocks.iter().enumerate().skip(warp).step_by(WARPS).collect();
            for four in blocks.chunks(4) {
                let before = row.reference;
                let mut waiting = Vec::new();
                for (i, block) in four {
                    let reference = (self.steps * *i as f64).floor() as f32;
                    if reference > row.reference {
                        row.sum *= weight(row, reference);
                        row.reference = reference;
                    }
                    // Its mass relative to the last block's reference is what the row says.
                    let mass = (block.mass * (last.floor() - f64::from(reference)).exp2()) as f32;
                    row.sum += mass;
                    let squares = f64::from(mass).powi(2) * block.squares;
                    let moments = Moments {
                        mass,
                        sized: (f64::from(mass) * block.sizes[0] * 255.0) as f32,
                        squares: squares as f32,
                        sized_squares: (squares * block.sizes[1] * 255f64.powi(2)) as f32,
                    };
                    waiting.push((reference, moments, block));
                }
                let mut sum = Gathered::NONE;
                for (reference, moments, block) in waiting {
                    let moments = moments.times((reference - row.reference).exp2());
                    sum = Gathered::of_block(moments, block.noise, block.bounds).merged_with(sum, 1.0);
                }
                own = own.merged_with(sum, (before - row.reference).exp2());
            }
            rows.push(row);
            gathered.push(own.words());
        }
        let reference = rows.iter().map(|row| row.reference).fold(-1.0e30, f32::max);
        let sum = rows.iter().map(|row| row.sum * weight(*row, reference)).sum();
        let words = std::array::from_fn(|word| {
            let of = |w: u32| gathered[w as usize][word];
            merge(word as u32, WARPS as u32, of, |w| weight(rows[w as usize], reference))
        });
        (PartialRow { reference, sum }, Gathered::of_words(words))
    }

    fn certificate(&self) -> Certificate {
        let (row, gathered) = self.gather();
        let length = 16 * self.blocks.len() as u32;
        let judge = Judge {
            row,
            gathered,
            squares: self.output * self.output,
            promoted: [0; 3],
            length,
            chain: Chain::of_carried::<D>(length, 4, 4),
            dense: Chain::of_dense::<D>(length, 4),
            softmax_scale: 0.125,
        };
        judge.certificate::<f16, D>(
            &self.query,
            Thresholds {
                error_budget: f32::INFINITY,
                log_odds: LOG_ODDS,
                certify: 1,
                ..Thresholds::zeroed()
            },
        )
    }

    /// δ of (6) for keys of this norm, without what f32 costs.
    fn rounding(&self, kappa: f64) -> f64 {
        let (scale, norm) = (f64::from(self.query.scale), f64::from(self.query.norm));
        let c_f = (D as f64 / 16.0 + 0.5) * 1.25 * 2f64.powi(-21);
        scale * (c_f * norm * kappa + D as f64 * 2f64.powi(-30)) + EXP
    }

    /// (7) of four splits and four entries, twelve warps a thread block.
    fn e_round(&self) -> f64 {
        let most = |of: &dyn Fn(&Block) -> f32| f64::from(self.blocks.iter().map(of).fold(0.0, f32::max));
        let nu = most(&|block| block.bounds.nu) + most(&|block| block.bounds.eta);
        nu * self.bracket() + 2f64.powi(-30)
    }

    /// Its bracket.
    fn bracket(&self) -> f64 {
        let blocks = self.blocks.len() as f64;
        // A warp's tiles of its split, and one entry; then the warps and four splits are merged.
        let warps = WARPS as f64;
        let chain = ((blocks / 4.0).ceil() / warps).ceil() + 1.0;
        let additions = chain + 2.0 * (4.0 + warps) + 8.0;
        chain * 1.26 * 2f64.powi(-21)
            + (additions + 4.0) * 2f64.powi(-24)
            + 2f64.powi(-23)
            + 16.0 * blocks * 2f64.powi(-36)
    }

    /// E_val, and E_key with the rounding of this certificate.
    fn errors(&self, e_val: f64, e_round: f64) -> [f64; 2] {
        let sum: f64 = self.blocks.iter().map(|block| block.mass).sum();
        let of = |f: &dyn Fn(&Bounds) -> f64| {
            self.blocks.iter().map(|block| block.mass / sum * f(&block.bounds)).sum::<f64>()
        };
        let largest = |f: &dyn Fn(&Bounds) -> f32| {
            f64::from(self.blocks.iter().map(|b| f(&b.bounds)).fold(0.0, f32::max))
        };
        // Of blocks whose keys are quantized.
        let tail = |of: &Bounds, f: &dyn Fn(f64) -> f64| of.delta.map_or(0.0, |delta| f(f64::from(delta)));
        let nu_most = largest(&|b| b.nu) + largest(&|b| b.eta);
        let kappa_most = largest(&|b| b.kappa);
        let delta_t = largest(&|b| b.delta.unwrap_or(0.0));
        let delta_f = self.rounding(kappa_most);
        let output = f64::from(self.output);
        let alpha = of(&|b| tail(b, &|_| 1.0));
        let a1 = of(&|b| tail(b, &f64::exp_m1));
        let a2 = of(&|b| tail(b, &f64::exp_m1) * f64::from(b.nu));
        let a3 = of(&|b| tail(b, &|x| -(-x).exp_m1())) + delta_f.exp_m1();
        let least = (output - e_val - e_round).max(0.0);
        let value = of(&|b| f64::from(b.nu).powi(2)).sqrt();
        let kappa = of(&|b| f64::from(b.kappa).powi(2)).sqrt();
        let spread = (value * value - least * least).max(0.0).sqrt();
        let growth = self.rounding(kappa) * delta_f.exp_m1() / delta_f;
        let ratio = if a3 < 1.0 {
            (a1 * (output + e_val + e_round) + a2 + growth * spread) / (1.0 - a3)
        } else {
            f64::INFINITY
        };
        let one_b = 2.0 * nu_most * (delta_t.max(delta_f) / 2.0).min(1.0);
        let (c, k) = (1.0 - alpha * -(-delta_t).exp_m1(), delta_t.exp() - (-delta_t).exp());
        let u = alpha.min(((c * delta_t.exp()).sqrt() - c) / k);
        let variation = if delta_t > 0.0 { u * (delta_t.exp() / (c + k * u) - 1.0) } else { 0.0 };
        let one_c = 2.0 * nu_most * (variation + delta_f.min(2.0) / 2.0);
        [of(&|b| f64::from(b.eta)), ratio.min(one_b).min(one_c)]
    }
}

impl Row {
    /// (9) with the rounding of this certificate, and Y.
    fn likely(&self, e_round: f64) -> (f64, f64) {
        let u = f64::from(LOG_ODDS);
        let sum: f64 = self.blocks.iter().map(|block| block.mass).sum();
        let linear = |f: &dyn Fn(&Block) -> f64| {
            self.blocks.iter().map(|block| block.mass / sum * f(block)).sum::<f64>()
        };
        let squared = |f: &dyn Fn(&Block) -> f64| {
            let of = |block: &Block| (block.mass / sum).powi(2) * block.squares * f(block);
            self.blocks.iter().map(of).sum::<f64>()
        };
        let grown = |b: &Block| b.noise.map_or(0.0, |n| f64::from(n.growth) * f64::from(n.variance));
        let nu = |b: &Block| f64::from(b.bounds.nu);
        // Squares of sizes, as weights have them.
        let sized = |b: &Block| (f64::from(b.bounds.unit) * 255.0).powi(2) * b.sizes[1];
        let trace = squared(&|b| sized(b) * f64::from(b.bounds.spreads[0]));
        let largest = squared(&|b| sized(b) * f64::from(b.bounds.spreads[1])).min(trace);
        let e_val = (trace + 2.0 * (trace * largest * u).sqrt() + 2.0 * largest * u).sqrt()
            + trace.sqrt() * (16.0 * self.blocks.len() as f64).sqrt() / 65536.0;
        let kappa = self.blocks.iter().map(|b| f64::from(b.bounds.kappa)).fold(0.0, f64::max);
        let (scale, norm) = (f64::from(self.query.scale), f64::from(self.query.norm));
        let c = (D as f64 / 16.0 + 2.0) * 1.25 * 2f64.powi(-21);
        let a = 257.0 * D as f64 * 2f64.powi(-26);
        let rounding = (scale * (c * norm * kappa + a) + EXP).exp_m1();
        let value = linear(&|b| nu(b).powi(2)).sqrt();
        let (first, second) = ((1.0 + 2.0 * u.sqrt() + 2.0 * u).sqrt(), u + u.sqrt());
        let free = first * squared(&|b| grown(b) * sized(b)).sqrt()
            + 0.5 * linear(&|b| grown(b) * f64::from(b.bounds.unit) * 255.0 * b.sizes[0])
            + second * squared(&|b| grown(b).powi(2) * sized(b)).sqrt()
            + rounding * value;
        let by_norm = first * squared(&grown).sqrt()
            + 0.5 * linear(&grown)
            + second * squared(&|b| grown(b).powi(2)).sqrt()
            + rounding;
        let known = e_round + e_val;
        let bound = if by_norm < 1.0 {
            known + (by_norm * (f64::from(self.output) + known) + free) / (1.0 - by_norm)
        } else {
            f64::INFINITY
        };
        (bound, by_norm)
    }
}

#[test]
fn the_likely_bound_is_never_less_than_in_f64_and_hardly_more() {
    let (mut ratios, mut least) = (Vec::new(), 0);
    for seed in 0..40_000 {
        let row = Row::new(seed);
        let certificate = row.certificate();
        if certificate.rung() == rung::DENSE {
            continue;
        }
        let (exact, by_norm) = row.likely(certificate.e_round.into());
        let worst = f64::from(certificate.bound());
        let likely = f64::from(certificate.likely);
        assert!(likely <= worst, "seed {seed}: {likely:e} is more than the worst case, {worst:e}");
        if likely == worst {
            least += 1;
            // 1 − Y is small where Y is near 1, and every rounding counts. A product of two sums may be
            // beyond f32, which leaves the worst case.
            let (_, gathered) = row.gather();
            let far = by_norm > 0.9 || !(gathered.spread * gathered.step).is_finite();
            // e^δ − 1 has a slack of 2^−21, beside which rounding alone is small.
            let largest = row.blocks.iter().map(|block| block.bounds.nu).fold(0.0, f32::max);
            let slack = f64::from(largest + row.output) * 2f64.powi(-20);
            assert!(far || exact * 1.01 + slack >= worst, "seed {seed}: {exact:e} is less than {worst:e}");
            continue;
        }
        assert!(likely >= exact, "seed {seed}: {likely:e} is less than {exact:e}");
        if by_norm < 0.9 {
            ratios.push(likely / exact);
        }
    }
    ratios.sort_by(f64::total_cmp);
    let [middle, high] = [ratios.len() / 2, ratios.len() * 19 / 20].map(|i| ratios[i]);
    println!(
        "{} rows: {middle:.5} times what f64 says, {high:.5} in 19 of 20; {least} worst cases",
        ratios.len()
    );
    assert!(ratios.len() > 10_000, "{} rows have a likely bound", ratios.len());
    assert!(middle < 1.001 && high < 1.01, "{middle} {high} times what f64 says");
}

/// What a log-sum-exp may be off by: (8e), or the largest Δ where that is less; and the rounding of its sum.
#[test]
fn the_bound_of_a_log_sum_is_never_less_than_in_f64_and_hardly_more() {
    let (mut ratios, mut worst) = (Vec::new(), 0);
    for seed in 0..40_000 {
        let row = Row::new(seed);
        let certificate = row.certificate();
        let found = f64::from(certificate.log_sum);
        if certificate.rung() == rung::DENSE {
            assert_eq!(found, f64::INFINITY, "seed {seed}: nothing is known of the codes");
            continue;
        }
        let (_, by_norm) = row.likely(certificate.e_round.into());
        let largest = f64::from(certificate.delta);
        let of_chance = if by_norm < 1.0 { by_norm / (1.0 - by_norm) } else { f64::INFINITY };
        // The sum of two f32 is rounded.
        let exact = (of_chance.min(largest) + row.bracket()) * (1.0 - 2f64.powi(-22));
        assert!(found >= exact, "seed {seed}: {found:e} is less than {exact:e}");
        worst += u32::from(of_chance >= largest);
        if by_norm < 0.5 {
            // e^δ − 1 has a slack of 2^−21, twice as much after the division.
            ratios.push(found / (exact + 2f64.powi(-20)));
        }
    }
    ratios.sort_by(f64::total_cmp);
    let [middle, high] = [ratios.len() / 2, ratios.len() * 19 / 20].map(|i| ratios[i]);
    println!("{} rows: {middle:.5} times what f64 says, {high:.5} in 19 of 20; {worst} by Δ", ratios.len());
    assert!(ratios.len() > 10_000 && worst > 100, "{} rows, {worst} by Δ", ratios.len());
    assert!(middle < 1.001 && high < 1.01, "{middle} {high} times what f64 says");
}

#[test]
fn errors_are_never_less_than_in_f64_and_hardly_more() {
    let mut ratios = Vec::new();
    for seed in 0..40_000 {
        let row = Row::new(seed);
        let certificate = row.certificate();
        if certificate.rung() == rung::DENSE {
            continue;
        }
        let [e_key, e_val, e_round] =
            [certificate.e_key, certificate.e_val, certificate.e_round].map(f64::from);
        let of_rounding = row.e_round();
        // Three roundings of f32 may take a part of it.
        assert!(
            (of_rounding * (1.0 - 2f64.powi(-22))..=of_rounding * 1.0001).contains(&e_round),
            "seed {seed}: {e_round:e} is not {of_rounding:e}"
        );
        let [of_values, of_keys] = row.errors(e_val, e_round);
        assert!(e_val >= of_values, "seed {seed}: {e_val:e} is less than {of_values:e}");
        assert!(e_val <= of_values * 1.001, "seed {seed}: {e_val:e} is more than {of_values:e}");
        // (1b) leaves the rounding of its product to the 2^−18 in Δ.
        assert!(e_key >= of_keys * (1.0 - 2f64.powi(-23)), "seed {seed}: {e_key:e} is less than {of_keys:e}");
        ratios.push(e_key / of_keys);
    }
    ratios.sort_by(f64::total_cmp);
    let [middle, high] = [ratios.len() / 2, ratios.len() * 19 / 20].map(|i| ratios[i]);
    println!("{} rows: {middle:.4} times what f64 says in the median, {high:.4} in 19 of 20", ratios.len());
    assert!(ratios.len() > 30_000, "{} rows have a bound", ratios.len());
    // The polynomials of Δ up to 1 and what Δ below 10^−4 is rounded up by take a part.
    assert!(middle < 1.01 && high < 1.2, "{middle} {high} times what f64 says");
}

/// A block whose weights f32 has lost may still matter by e^Δ: it is in the tail with what f32 may have lost.
#[test]
fn what_f32_has_lost_is_counted() {
    let annotation = Annotation { nu: 1.0, zeta: 1.0, ..Annotation::NONE };
    let bounds = |delta| Bounds::of(annotation, delta, true, true);
    let sizes = [1.0; 2];
    let lost = Block { bounds: bounds(Some(75.0)), sizes, mass: 0.0, squares: 1.0, noise: None };
    let query = Query { pairs: [0; 32], scale: 1e-3, norm: 100.0, finite: true };
    let row = |blocks| Row { blocks, query, output: 1.0, steps: 0.0 };
    let heavy = || Block { bounds: bounds(None), sizes, mass: 32768.0, squares: 1.0, noise: None };
    let without = row(vec![heavy()]).certificate();
    let with = row(vec![heavy(), lost]).certificate();
    // 2^−106 of the reference and e^75, over the heavy block's 2^15.
    let least = 2f64.powi(-106 - 15) * 75f64.exp();
    assert!(f64::from(with.e_key) > least && f64::from(without.e_key) < least, "{with:?} {without:?}");
}
