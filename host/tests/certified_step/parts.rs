//! Each part of a step against what it should be.

use super::*;
use ferrokv::host::certified::{BLOCK_TOKENS, Geometry, Layout, reference};

const TOKENS: usize = BLOCK_TOKENS as usize;

/// Without any promotion a step is attention over the quantized cache and the trailing block: f64 attention
/// over the dequantized numbers, but for rounding of scores and of sums.
fn codes_alone_are_attention_over_the_quantized_cache<E: StepElement + CertifiedElement>(
    head_dim: u32,
    layout: Layout,
) {
    let sequences = [(Input::Normal, 37), (Input::Sharp, 160), (Input::Normal, 300), (Input::Extremal, 96)];
    let batch = Batch::<E>::new(problem(sequences.len(), 4, 2, head_dim, 320), &sequences, 1, 9);
    let geometry = Geometry::new(2, head_dim).unwrap().with_layout(layout);
    // What c_D and a_D have by equation (5) and its like for the paper's layout.
    let [relative, absolute] = if layout == Layout::Paper { [1.5, 385.0] } else { [1.0, 257.0] };
    let dim = head_dim as usize;
    for device in devices() {
        let mut trial = loaded_in(device, &batch, layout);
        let codes = Policy { renew: if layout == Layout::Paper { 0 } else { 1 }, ..Policy::CODES };
        let returned = step(&mut trial, &codes);
        let (tiles, annotations) = trial.quantized().unwrap();
        for sequence in 0..sequences.len() {
            for head in 0..2 {
                let full = batch.lengths[sequence] as usize / TOKENS * TOKENS;
                // A token's row: from its tile where the block is full.
                let row = |token: usize, values: bool, out: &mut [f64]| {
                    let at = batch.row(sequence, head, token);
                    let pair = at / geometry.layout().elements() as usize;
                    let bytes = geometry.layout().bytes as usize;
                    let tile =
                        reference::Tile::new(geometry.layout(), &tiles[pair * bytes..][..bytes]).unwrap();
                    for (c, out) in out.iter_mut().enumerate() {
                        let original = if values { &batch.values } else { &batch.keys };
                        *out = match (token < full, values) {
                            (true, false) => tile.key(token % TOKENS, c),
                            (true, true) => tile.value(token % TOKENS, c),
                            (false, _) => f64::from(original[at + c].to_f32()),
                        };
                    }
                };
                let truth = batch.exact_over(
                    sequence,
                    head,
                    |token, out| row(token, false, out),
                    |token, out| row(token, true, out),
                );
                for (g, truth) in truth.iter().enumerate() {
                    let q_head = head * 4 + g;
                    let certificate = returned.certificates[sequence * 8 + q_head];
                    // Rounding of the scores by (5), without an error of the keys.
                    let norm =
                        batch.query(sequence, q_head).iter().map(|x| x.to_f32().powi(2)).sum::<f32>().sqrt();
                    let pairs = (0..full / TOKENS).map(|b| {
                        batch.row(sequence, head, b * TOKENS) / geometry.layout().elements() as usize
                    });
                    let zeta = pairs.map(|pair| annotations[pair].zeta).fold(40.0, f32::max);
                    let d = head_dim as f32;
                    let rounding = (d / 16.0 + relative) * 1.25 / 2_097_152.0 * norm * zeta / d.sqrt()
                        + absolute * d / 67_108_864.0 * norm / 32.0 / d.sqrt()
                        + 3.0e-6;
                    let allowed =
                        f64::from(certificate.e_round) + truth.largest_value * f64::from(rounding) * 1.01;
                    let at = (sequence * 8 + q_head) * dim;
                    let error = truth.error(&returned.output[at..at + dim]);
                    assert!(error <= allowed, "{sequence} {q_head}: {error:e} above {allowed:e}");
                    let lse = (f64::from(returned.lse[sequence * 8 + q_head]) - truth.lse).abs();
                    let allowed = f64::from(rounding) + 1e-5 + 1e-6 * truth.lse.abs();
                    assert!(lse <= allowed, "{sequence} {q_head}: lse off by {lse:e}");
                }
            }
        }
    }
}

#[test]
fn codes_alone_are_attention_over_the_quantized_cache_f16_128() {
    codes_alone_are_attention_over_the_quantized_cache::<f16>(128, Layout::Compact);
}

#[test]
fn codes_alone_are_attention_over_the_quantized_cache_f16_64() {
    codes_alone_are_attention_over_the_quantized_cache::<f16>(64, Layout::Compact);
}

#[test]
fn codes_alone_are_attention_over_the_quantized_cache_bf16() {
    codes_alone_are_attention_over_the_quantized_cache::<bf16>(64, Layout::Compact);
    codes_alone_are_attention_over_the_quantized_cache::<bf16>(128, Layout::Compact);
}

#[test]
fn codes_alone_are_attention_over_the_quantized_cache_of_the_papers_layout() {
    codes_alone_are_attention_over_the_quantized_cache::<f16>(64, Layout::Paper);
    codes_alone_are_attention_over_the_quantized_cache::<f16>(128, Layout::Paper);
    codes_alone_are_attention_over_the_quantized_cache::<bf16>(128, Layout::Paper);
}

/// With everything promoted nothing of the quantized cache is left: dense attention, but for rounding.
#[test]
fn everything_promoted_is_dense() {
    let sequences = [(Input::Normal, 40), (Input::Sharp, 170), (Input::Diffuse, 300), (Input::Outlier, 97)];
    for (group, head_dim) in [(4, 64), (9, 128)] {
        let batch = Batch::<f16>::new(problem(sequences.len(), group, 1, head_dim, 320), &sequences, 21, 4);
        for device in devices() {
            let mut trial = loaded(device, &batch);
            let returned = step(&mut trial, &ALL);
            let (output, lse) = trial.dense().unwrap();
            for (row, certificate) in returned.certificates.iter().enumerate() {
                let length = batch.lengths[row / group as usize];
                assert_eq!(certificate.promoted_keys, length / BLOCK_TOKENS, "{certificate:?}");
                assert_eq!(certificate.promoted_values, length / BLOCK_TOKENS, "{certificate:?}");
                // What is left of sums over everything after everything is taken out: their slack.
                assert!(certificate.e_val < 1e-3 && certificate.tail_mass < 1e-4, "{certificate:?}");
                let at = row * head_dim as usize..(row + 1) * head_dim as usize;
                let off = returned.output[at.clone()].iter().zip(&output[at]).map(|(a, b)| (a - b).powi(2));
                let off = off.sum::<f32>().sqrt();
                assert!(off <= 2.0 * certificate.bound() && off < 1e-3, "{row}: {off:e} {certificate:?}");
                assert!((returned.lse[row] - lse[row]).abs() < 1e-4);
            }
        }
    }
}

/// A head on the dense rung has the bits of dense attention, the others have not; heads without a token are
/// zeros.
#[test]
fn the_dense_rung_has_the_bits_of_dense() {
    let sequences = [(Input::Normal, 0), (Input::Sharp, 170), (Input::Diffuse, 300), (Input::Outlier, 97)];
    let batch = Batch::<f16>::new(problem(sequences.len(), 9, 2, 64, 320), &sequences, 8, 4);
    let truth = exact(&batch);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        let (output, lse) = trial.dense().unwrap();
        // A budget that some heads exceed.
        let codes = step(&mut trial, &Policy::CODES);
        let mut errors: Vec<f32> = codes.certificates.iter().skip(18).map(|c| c.bound() / c.norm).collect();
        errors.sort_by(f32::total_cmp);
        let some = Policy { error_budget: errors[errors.len() / 2], ..Policy::CODES };
        let mut counts = [0; 2];
        for policy in [some, DENSE] {
            let returned = step(&mut trial, &policy);
            judge(&batch, &truth, &returned, "dense rung");
            for (row, certificate) in returned.certificates.iter().enumerate() {
                let at = row * 64..(row + 1) * 64;
                if row < 18 {
                    assert_eq!(returned.output[at], [0.0; 64]);
                    assert_eq!((certificate.bound(), returned.lse[row]), (0.0, f32::NEG_INFINITY));
                    continue;
                }
                let dense = Rung::of(certificate.rung()).is_dense();
                counts[dense as usize] += 1;
                assert_eq!(dense, certificate.reason() != 0);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&returned.output[at.clone()]) == bits(&output[at]), dense, "{row}");
                if dense {
                    assert_eq!(returned.lse[row].to_bits(), lse[row].to_bits());
                    assert!(
                        f64::from(certificate.bound()) < 1e-3 * truth[row].largest_value,
                        "{certificate:?}"
                    );
                }
            }
        }
        assert!(counts[0] > 10 && counts[1] > 54, "{counts:?}");
    }
}

/// Queries that are no numbers, and caches with scores beyond what the pass represents, end on the dense
/// rung.
#[test]
fn what_the_pass_cannot_hold_is_dense() {
    let sequences = [(Input::Normal, 50), (Input::Huge, 90)];
    let mut batch = Batch::<f16>::new(problem(2, 2, 1, 64, 96), &sequences, 8, 4);
    batch.queries[5] = f16::NAN;
    batch.queries[64 + 7] = f16::INFINITY;
    for query in &mut batch.queries[2 * 64..] {
        *query = f16::from_f32(query.to_f32() * 400.0);
    }
    let truth = exact(&batch);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        // A step of one pass holds scores of any size.
        let one_pass = step(&mut trial, &Policy::CODES);
        for (row, certificate) in one_pass.certificates.iter().enumerate() {
            if row < 2 {
                assert!(Rung::of(certificate.rung()).is_dense() && certificate.bound() == f32::INFINITY);
            } else {
                let error = truth[row].error(&one_pass.output[row * 64..][..64]);
                assert!(error <= f64::from(certificate.bound()), "{error} {certificate:?}");
            }
        }
        let returned = step(&mut trial, &Policy { renew: 0, ..Policy::CODES });
        let reasons: Vec<_> = returned
            .certificates
            .iter()
            .map(|c| (Rung::of(c.rung()), ferrokv::host::certified::reasons(c.reason())))
            .collect();
        for (row, (rung, reasons)) in reasons.iter().enumerate() {
            assert_eq!(*rung, Rung::Dense);
            let expected =
                if row < 2 { "the query is not finite" } else { "scores beyond what the records hold" };
            assert!(reasons.contains(&expected), "{row}: {reasons:?}");
        }
        assert!(returned.certificates[..2].iter().all(|c| c.bound() == f32::INFINITY));
        let outputs = returned.output.chunks_exact(64);
        for ((exact, output), certificate) in truth.iter().zip(outputs).zip(&returned.certificates).skip(2) {
            let error = exact.error(output);
            assert!(error <= f64::from(certificate.bound()), "{error} {certificate:?}");
        }
    }
}

/// A trailing block with a token that is no number has no bound: never a finite one beside an output that is
/// none.
#[test]
fn a_trailing_block_that_is_no_number_has_no_bound() {
    for of_key in [true, false] {
        let mut batch = Batch::<f16>::new(problem(1, 4, 1, 64, 48), &[(Input::Normal, 37)], 8, 4);
        let at = batch.row(0, 0, 36) + 5;
        let tokens = if of_key { &mut batch.keys } else { &mut batch.values };
        tokens[at] = f16::NAN;
        for device in devices() {
            let mut trial = loaded(device, &batch);
            for policy in [Policy::CODES, Policy::SOUND, CHOOSING, ALL] {
                let returned = step(&mut trial, &policy);
                for (row, certificate) in returned.certificates.iter().enumerate() {
                    let bound = certificate.bound();
                    assert!(bound.is_nan() || bound == f32::INFINITY, "{of_key} {row}: {certificate:?}");
                    assert!(returned.output[row * 64..][..64].iter().any(|x| x.is_nan()), "{row}");
                }
            }
        }
    }
}
