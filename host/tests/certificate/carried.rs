//! What `carry` adds up and evaluates of docs/certificate.md in f32, against the same in f64: never less, and
//! hardly more.

use super::Random;
use half::f16;
use kernels_gpu::attention::Chain;
use kernels_gpu::attention::PartialRow;
use kernels_gpu::certified::carried::gather::{Bounds, Gather, Gathered, merge, weight};
use kernels_gpu::certified::carried::judge::Judge;
use kernels_gpu::certified::layout::Annotation;
use kernels_gpu::certified::policy::rung;
use kernels_gpu::certified::query::{Query, Slack};
use kernels_gpu::certified::{Certificate, Thresholds};
use simt::Zeroable;

const D: usize = 64;
const WARPS: usize = 8;

/// A block of a row: what bounds its errors, and the sum of its weights, relative to a power of two of the
/// row's.
struct Block {
    bounds: Bounds,
    mass: f64,
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
        let mut s = Random(seed);
        let count = 1 + s.bits() % 200;
        // From hardly any error to bounds that say nothing.
        let deltas = s.within(1e-5, 6.0);
        let values = s.within(1e-3, 1e4);
        let keys = s.within(1e-2, 1e3);
        let spread = 12.0 * s.unit();
        let share = s.unit().powi(2);
        let mut blocks: Vec<Block> = (0..count)
            .map(|_| {
                let mut up = |size: f64| (size * (0.5 + s.unit())) as f32;
                let zeta = up(keys);
                let annotation =
                    Annotation { eta: up(values) / 16.0, nu: up(values), eps: zeta / 256.0, zeta };
                let delta = deltas as f32 * (1.0 - 0.5 * s.unit() as f32);
                let promoted = [s.unit() < share, s.unit() < share];
                let delta = (!promoted[0]).then_some(delta);
                Block {
                    bounds: Bounds::of(annotation, delta, !promoted[1]),
                    mass: 32768.0 * (-spread * s.unit()).exp(),
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
                bounds: Bounds { delta: None, eta: 0.0, nu, kappa },
                mass: 32768.0 * s.unit(),
            });
        }
        let norm = s.within(32.0, 500.0) as f32;
        let scale = (s.within(1e-3, 4.0) / f64::from(norm) / 8.0) as f32;
        let query = Query { pairs: [0; 32], scale, norm, finite: true };
        let largest = blocks.iter().map(|block| block.bounds.nu).fold(0.0, f32::max);
        let output = largest * s.unit() as f32 * if s.one_in(2) { 1.0 } else { 0.1 };
        Row { blocks, query, output, steps: s.unit() * 0.2 }
    }

    /// As warps meet the blocks and are merged: each raises its reference now and then, the row's is the
    /// largest.
    fn gather(&self) -> (PartialRow, Gathered) {
        let mut rows = Vec::new();
        let mut lanes = Vec::new();
        for warp in 0..WARPS {
            let mut own = [Gather::new(); 4];
            let mut row = PartialRow { reference: -1.0e30, sum: 0.0 };
            for (i, block) in self.blocks.iter().enumerate().skip(warp).step_by(WARPS) {
                let reference = (self.steps * i as f64).floor() as f32;
                if reference > row.reference {
                    for lane in &mut own {
                        lane.rescale(row.reference, reference);
                    }
                    row.sum *= weight(row, reference);
                    row.reference = reference;
                }
                // Its mass relative to the last block's reference is what the row says.
                let last = self.steps * (self.blocks.len() - 1) as f64;
                let mass = (block.mass * (last.floor() - f64::from(reference)).exp2()) as f32;
                row.sum += mass;
                for (q, lane) in own.iter_mut().enumerate() {
                    lane.add(mass, block.bounds, q as u32);
                }
            }
            rows.push(row);
            lanes.push(own.map(|lane| lane.words()).concat());
        }
        let reference = rows.iter().map(|row| row.reference).fold(-1.0e30, f32::max);
        let sum = rows.iter().map(|row| row.sum * weight(*row, reference)).sum();
        let words: Vec<f32> = (0..Gathered::WORDS)
            .map(|word| {
                merge(
                    word,
                    WARPS as u32,
                    |w| lanes[w as usize][word as usize],
                    |w| weight(rows[w as usize], reference),
                )
            })
            .collect();
        (PartialRow { reference, sum }, bytemuck::pod_read_unaligned(bytemuck::cast_slice(&words)))
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
                key_budget: f32::INFINITY,
                value_budget: f32::INFINITY,
                certify: 1,
                ..Thresholds::zeroed()
            },
        )
    }

    /// δ of (6) for keys of this norm, without what f32 costs.
    fn rounding(&self, kappa: f64) -> f64 {
        let (scale, norm) = (f64::from(self.query.scale), f64::from(self.query.norm));
        let c_f = f64::from(Slack::rounding_original::<D>());
        scale * (c_f * norm * kappa + D as f64 * 2f64.powi(-30)) + f64::from(Slack::EXP)
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
    let annotation = Annotation { eta: 0.0, nu: 1.0, eps: 0.0, zeta: 1.0 };
    let bounds = |delta| Bounds::of(annotation, delta, true);
    let lost = Block { bounds: bounds(Some(75.0)), mass: 0.0 };
    let query = Query { pairs: [0; 32], scale: 1e-3, norm: 100.0, finite: true };
    let row = |blocks| Row { blocks, query, output: 1.0, steps: 0.0 };
    let heavy = || Block { bounds: bounds(None), mass: 32768.0 };
    let without = row(vec![heavy()]).certificate();
    let with = row(vec![heavy(), lost]).certificate();
    // 2^−106 of the reference and e^75, over the heavy block's 2^15.
    let least = 2f64.powi(-106 - 15) * 75f64.exp();
    assert!(f64::from(with.e_key) > least && f64::from(without.e_key) < least, "{with:?} {without:?}");
}
