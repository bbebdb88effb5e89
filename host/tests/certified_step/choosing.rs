//! What a step promotes is what its policy says, by masses in f64.

use super::ranking::log_masses;
use super::*;
use ferrokv::host::certified::{BLOCK_TOKENS, Geometry, reference};

const TOKENS: usize = BLOCK_TOKENS as usize;

/// Blocks are chosen by eighths of an octave: those of one bin differ by no more, a little for rounding
/// added.
const BIN: f64 = 1.126;
const ROUNDING: f64 = 1e-3;

/// What limits a choice.
struct Limits {
    wanted: f64,
    least: usize,
    most: usize,
    floor: f64,
}

/// Checks how many of `sizes` were chosen, the largest first; says what ended the choice: what was wanted,
/// the most, the floor.
fn check(mut sizes: Vec<f64>, chosen: usize, limits: Limits, what: &str) -> [u32; 3] {
    sizes.sort_by(|a, b| b.total_cmp(a));
    let least = limits.least.min(sizes.len());
    let most = limits.most.min(sizes.len());
    assert!(least <= chosen && chosen <= most, "{what}: {chosen} of {least} to {most}");
    let sum = |n: usize| sizes[..n].iter().sum::<f64>();
    if chosen > least {
        let last = sizes[chosen - 1];
        assert!(last >= limits.floor * (1.0 - ROUNDING), "{what}: {last:e} below {:e}", limits.floor);
        // Without the last it would not have been enough; in its bin the smallest may have been taken first.
        let enough = sum(chosen - 1) / BIN;
        let wanted = limits.wanted;
        assert!(
            enough <= wanted * (1.0 + ROUNDING),
            "{what}: {chosen} chosen, {enough:e} enough for {wanted:e}; {sizes:?}"
        );
    }
    if sum(chosen) * BIN >= limits.wanted * (1.0 - ROUNDING) {
        return [1, 0, 0];
    }
    if chosen == most {
        return [0, 1, 0];
    }
    let next = sizes[chosen];
    assert!(next < limits.floor * BIN, "{what}: {next:e} left out, the floor is {:e}", limits.floor);
    [0, 0, 1]
}

#[test]
fn what_is_promoted_is_what_the_policy_says() {
    let sequences: Vec<(Input, u32)> =
        Input::MADE.into_iter().enumerate().map(|(i, input)| (input, 400 + 47 * i as u32)).collect();
    let (group, head_dim) = (4, 64);
    let batch = Batch::<f16>::new(problem(sequences.len(), group, 1, head_dim, 1024), &sequences, 5, 2);
    let layout = Geometry::new(1, head_dim).unwrap().layout();
    let apart = Policy {
        coverage: 0.95,
        max_keys: 16,
        key_floor: 1.0 / 256.0,
        value_tolerance: 0.01,
        value_floor: 1.0 / 4096.0,
        max_values: 32,
        per_group: false,
        ..CHOOSING
    };
    let policies = [
        apart,
        Policy { coverage: 0.6, key_floor: 0.0, value_tolerance: 0.02, value_floor: 0.0, ..apart },
        Policy {
            coverage: 1.0,
            max_keys: 1000,
            key_floor: 0.02,
            max_values: 1000,
            value_floor: 0.002,
            ..apart
        },
        Policy { min_keys: 7, key_floor: 1.0, max_values: 5, ..apart },
    ];
    for device in devices() {
        let mut trial = loaded(device, &batch);
        let (tiles, annotations) = trial.quantized().unwrap();
        // Of keys and of values, what ended the choices.
        let mut ends = [[0u32; 3]; 2];
        for (i, policy) in policies.iter().enumerate() {
            let returned = step(&mut trial, policy);
            for (row, certificate) in returned.certificates.iter().enumerate() {
                let (sequence, head) = (row / group as usize, row % group as usize);
                if Rung::of(certificate.rung()).is_dense() {
                    continue;
                }
                let blocks = batch.lengths[sequence] as usize / TOKENS;
                let pair = |b: usize| batch.row(sequence, 0, b * TOKENS) / layout.elements() as usize;
                let query: Vec<f64> =
                    batch.query(sequence, head).iter().map(|q| f64::from(q.to_f32())).collect();
                let masses = log_masses(&query, blocks, |token, c| {
                    let tile =
                        &tiles[pair(token / TOKENS) * layout.bytes as usize..][..layout.bytes as usize];
                    reference::Tile::new(layout, tile).unwrap().key(token % TOKENS, c)
                });
                let most = masses.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = masses.iter().map(|mass| (mass - most).exp()).sum();
                let shares: Vec<f64> = masses.iter().map(|mass| (mass - most).exp() / sum).collect();
                let what = format!("policy {i}, {} head {head}", batch.inputs[sequence]);
                let limits = Limits {
                    wanted: f64::from(policy.coverage),
                    least: policy.min_keys as usize,
                    most: policy.max_keys as usize,
                    floor: f64::from(policy.key_floor),
                };
                let end = check(
                    shares.clone(),
                    certificate.promoted_keys as usize,
                    limits,
                    &format!("keys, {what}"),
                );
                (0..3).for_each(|k| ends[0][k] += end[k]);

                let annotation = |b: usize| annotations[pair(b)];
                let nu = (0..blocks).map(|b| annotation(b).nu + annotation(b).eta).fold(0.0, f32::max);
                let (nu, tolerance) = (f64::from(nu), f64::from(policy.value_tolerance));
                let errors: Vec<f64> =
                    (0..blocks).map(|b| shares[b] * f64::from(annotation(b).eta)).collect();
                // Blocks of small errors are within the tolerance together and do not take part; η is noted
                // to 1/128.
                let ranks =
                    |b: &usize| f64::from(annotation(*b).eta) > tolerance * f64::from(annotation(*b).nu);
                let ranked: Vec<f64> =
                    (0..blocks).filter(ranks).map(|b| errors[b] * (1.0 + 1.0 / 256.0)).collect();
                let limits = Limits {
                    wanted: errors.iter().sum::<f64>() - tolerance * nu,
                    least: 0,
                    most: policy.max_values as usize,
                    floor: f64::from(policy.value_floor) * nu * (1.0 - 1.0 / 128.0),
                };
                let chosen = certificate.promoted_values as usize;
                let end = check(ranked, chosen, limits, &format!("values, {what}"));
                (0..3).for_each(|k| ends[1][k] += end[k]);
            }
        }
        println!("ended by what was wanted, the most, the floor: keys {:?}, values {:?}", ends[0], ends[1]);
        assert!(ends.iter().flatten().all(|end| *end > 5), "{ends:?}");
    }
}
