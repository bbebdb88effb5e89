//! The order of the heaviest blocks, and the paper's bound by the kernels.

use super::*;
use ferrokv::host::certified::{BLOCK_TOKENS, Bound, Geometry, reference};
use ferrokv::kernels_gpu::certified::policy::reason;

const TOKENS: usize = BLOCK_TOKENS as usize;

/// Log-masses of a head's full blocks in f64: by the keys that `key` gives.
pub(super) fn log_masses(query: &[f64], blocks: usize, key: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let root = (query.len() as f64).sqrt();
    let of_token =
        |token: usize| query.iter().enumerate().map(|(c, q)| q * key(token, c)).sum::<f64>() / root;
    (0..blocks)
        .map(|b| {
            let scores: Vec<f64> = (b * TOKENS..(b + 1) * TOKENS).map(of_token).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            most + scores.iter().map(|s| (s - most).exp()).sum::<f64>().ln()
        })
        .collect()
}

/// The first `depth` blocks by mass; and whether their order is beyond doubt: rounding could not change it,
/// and none is so light that it is nothing in f32.
fn first(masses: &[f64], depth: usize) -> (Vec<usize>, bool) {
    let mut order: Vec<usize> = (0..masses.len()).collect();
    order.sort_by(|a, b| masses[*b].total_cmp(&masses[*a]));
    let clear = order.windows(2).take(depth).all(|pair| {
        let rounding = 1e-4 + 1e-5 * masses[pair[0]].abs();
        masses[pair[0]] - masses[pair[1]] > rounding && masses[order[0]] - masses[pair[0]] < 70.0
    });
    (order.into_iter().take(depth).collect(), clear)
}

/// A head that passes has the heaviest blocks of its exact keys where its quantized keys have them; one that
/// fails is dense.
#[test]
fn heads_that_pass_have_the_exact_order() {
    let sequences: Vec<(Input, u32)> =
        Input::MADE.into_iter().enumerate().map(|(i, input)| (input, 120 + 31 * i as u32)).collect();
    let (group, head_dim) = (9, 64);
    let batch = Batch::<f16>::new(problem(sequences.len(), group, 1, head_dim, 480), &sequences, 3, 2);
    let layout = Geometry::new(1, head_dim).unwrap().layout();
    for device in devices() {
        let mut trial = loaded(device, &batch);
        let (tiles, _) = trial.quantized().unwrap();
        let (dense, _) = trial.dense().unwrap();
        let mut counts = [0u32; 4];
        for (depth, policy) in [(1, CHOOSING), (3, CHOOSING), (2, Policy::PAPER), (10, ALL)] {
            let plain = Policy { ranking: 0, bound: Bound::Sound, ..policy };
            let unchecked = step(&mut trial, &plain);
            let returned = step(&mut trial, &Policy { ranking: depth, ..plain });
            for (row, certificate) in returned.certificates.iter().enumerate() {
                let (sequence, head) = (row / group as usize, row % group as usize);
                let blocks = batch.lengths[sequence] as usize / TOKENS;
                let query: Vec<f64> =
                    batch.query(sequence, head).iter().map(|q| f64::from(q.to_f32())).collect();
                let exact = log_masses(&query, blocks, |token, c| {
                    f64::from(batch.keys[batch.row(sequence, 0, token) + c].to_f32())
                });
                let quantized = log_masses(&query, blocks, |token, c| {
                    let at =
                        batch.row(sequence, 0, token) / layout.elements() as usize * layout.bytes as usize;
                    let tile = &tiles[at..at + layout.bytes as usize];
                    reference::Tile::new(layout, tile).unwrap().key(token % TOKENS, c)
                });
                let depth = (depth as usize).min(blocks);
                let ((exact, clear), (quantized, quantized_clear)) =
                    (first(&exact, depth), first(&quantized, depth));
                let failed = certificate.reason() & (reason::RANKING | reason::BOUNDARY) != 0;
                let at = row * head_dim as usize..(row + 1) * head_dim as usize;
                if failed {
                    assert_eq!(Rung::of(certificate.rung()), Rung::Dense);
                    assert_eq!(returned.output[at.clone()], dense[at.clone()]);
                    counts[0] += 1;
                } else {
                    assert_eq!(*certificate, unchecked.certificates[row]);
                    assert_eq!(returned.output[at.clone()], unchecked.output[at.clone()]);
                    counts[1] += 1;
                }
                if !clear || !quantized_clear {
                    continue;
                }
                if !failed {
                    assert_eq!(exact, quantized, "{} head {head}", batch.inputs[sequence]);
                    counts[2] += 1;
                }
                // With everything promoted there is no boundary, and the order is all that counts.
                if policy == ALL {
                    let expected = if exact != quantized { reason::RANKING } else { 0 };
                    assert_eq!(certificate.reason(), expected, "{} head {head}", batch.inputs[sequence]);
                    counts[3] += u32::from(failed);
                }
            }
        }
        println!(
            "failed {}, passed {}, of these with a clear order {}; disorder {}",
            counts[0], counts[1], counts[2], counts[3]
        );
        assert!(counts[..3].iter().all(|count| *count > 20) && counts[3] > 0, "{counts:?}");
    }
}

/// With nothing promoted no order can be known; where there is nothing to order, nothing is wrong.
#[test]
fn without_promoted_blocks_the_order_is_unknown() {
    let sequences = [(Input::Normal, 0), (Input::Normal, 9), (Input::Normal, 40)];
    let batch = Batch::<f16>::new(problem(3, 2, 1, 64, 64), &sequences, 3, 2);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        let returned = step(&mut trial, &Policy { ranking: 1, renew: 0, ..Policy::CODES });
        let reasons: Vec<u32> = returned.certificates.iter().map(|c| c.reason()).collect();
        assert_eq!(reasons, [0, 0, 0, 0, reason::BOUNDARY, reason::BOUNDARY]);
    }
}

/// The kernels' evaluation of the paper's bound is (15) by the certificate's own Δ and mass, and no error is
/// beyond it.
#[test]
fn the_papers_bound_is_equation_15() {
    let sequences: Vec<(Input, u32)> =
        Input::MADE.into_iter().enumerate().map(|(i, input)| (input, 100 + 29 * i as u32)).collect();
    let batch = Batch::<f16>::new(problem(sequences.len(), 4, 1, 128, 448), &sequences, 7, 2);
    let truth = exact(&batch);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        let (_, annotations) = trial.quantized().unwrap();
        let worst =
            annotations.iter().filter(|a| a.eta.is_finite()).map(|a| a.eta / a.nu).fold(0f32, f32::max);
        let mut seen = 0;
        for policy in
            [Policy { ranking: 0, ..Policy::PAPER }, Policy { bound: Bound::Paper, ..Policy::CODES }]
        {
            let returned = step(&mut trial, &policy);
            let sound = step(&mut trial, &Policy { bound: Bound::Sound, ..policy });
            judge(&batch, &truth, &returned, "the paper's bound");
            for (row, certificate) in returned.certificates.iter().enumerate() {
                if Rung::of(certificate.rung()).is_dense() {
                    continue;
                }
                let at = row * 128..(row + 1) * 128;
                assert_eq!(returned.output[at.clone()], sound.output[at]);
                let grown = (2.0 * f64::from(certificate.delta)).exp();
                let share = grown * f64::from(certificate.tail_mass) * (grown - 1.0);
                let least = 2.0 * truth[row].largest_value * share;
                let ratio = f64::from(certificate.e_key) / least;
                if share < 1e-9 {
                    continue;
                }
                // ν has the error of the values in it.
                let most = 1.0 + f64::from(worst) + 1e-3;
                assert!((1.0 - 1e-6..=most).contains(&ratio), "{ratio} of {most}: {certificate:?}");
                assert!(certificate.e_round > sound.certificates[row].e_round);
                seen += 1;
            }
        }
        assert!(seen > 50, "{seen}");
    }
}
