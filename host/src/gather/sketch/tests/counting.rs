//! Masses in whole numbers, and choices by several thread blocks.

use super::certificate::check;
use super::*;
use half::{bf16, f16};
use kernels_gpu::gather::sketch::{
    Edges, MASS_BINS, bin_of, decide_parts, in_units, inverse_of, ratio_of, scale_of, unit_of, units,
};

/// What is counted is no less than the mass and its moment, and more by a unit and roundings at the most.
#[test]
fn what_is_counted_is_no_less_than_the_mass() {
    for blocks in [1, 4096, 1 << 20] {
        let units = units(blocks);
        // A block's largest mass, and another head's.
        for step in 1..4000 {
            let rank = -0.011 * step as f32;
            let bin = bin_of(rank);
            assert!(bin < MASS_BINS);
            let unit = f64::from(unit_of(bin, units));
            for x in [rank, rank - 0.37 * (step % 50) as f32, rank - 200.0] {
                for (nu, nu_all) in [(1.0f32, 1.0f32), (0.3, 7.0), (0.0, 2.0), (1e-30, 3e5)] {
                    let ratio = ratio_of(nu, inverse_of(nu_all));
                    let [mass, moment] = in_units(x, ratio, bin, units);
                    // What `settle` adds for exponents and sums.
                    let slack = 1.0 + 1.0 / 32768.0;
                    let exact = f64::from(x).exp2();
                    let counted = f64::from(mass) * unit;
                    assert!(exact <= counted * slack && counted <= exact * slack + unit, "{x} {bin} {mass}");
                    let exact = exact * f64::from(nu);
                    let counted = f64::from(moment) * unit * f64::from(nu_all);
                    let most = exact * slack + unit * f64::from(nu_all);
                    assert!(exact <= counted * slack && counted <= most, "{x} {nu} {nu_all} {moment}");
                }
            }
        }
        // All of them in one bin fit a word.
        let [most, moment] = in_units(-1e-6, 1.0, MASS_BINS - 1, units);
        assert!(u64::from(most) * u64::from(blocks) <= u64::from(u32::MAX) && moment == most);
    }
    assert_eq!([0.0, 1.0, f32::NAN, f32::INFINITY].map(bin_of), [MASS_BINS; 4]);
    assert_eq!(bin_of(f32::NEG_INFINITY), 0);
    assert_eq!(in_units(f32::NEG_INFINITY, 1.0, 0, 4.0), [0, 0]);
    // Two logarithms far from 0 are each off by half an ULP.
    assert!(scale_of(1000.0f32.log2()) >= 1000.0 && scale_of(100.0) > 100f32.exp2());
}

/// Edges of a bin tell what is in it, and above it, as its number does.
#[test]
fn edges_are_those_of_bins() {
    let steps = (-2100..20).map(|step| step as f32 / 64.0);
    let around = steps.flat_map(|x| [x.next_down(), x, x.next_up()]);
    let ends = [f32::NEG_INFINITY, -1e30, -1e-40, -0.0, 1e-40, 1e30, f32::INFINITY, f32::NAN];
    let all: Vec<f32> = around.chain(ends).collect();
    for bin in 0..=MASS_BINS {
        let edges = Edges::of(bin);
        for x in &all {
            let own = bin_of(*x);
            assert_eq!(edges.place(*x), (own > bin, own == bin), "{x} {own} {bin}");
        }
    }
}

/// Of blocks whose masses are no numbers fewer are kept than there are: nothing is known of what is left out.
#[test]
fn blocks_in_no_bin_are_left_out_too() {
    let mut batch = batch::<bf16>(PROBLEM, Input::Normal, &[400], 3);
    for block in 3..9 {
        let at = batch.row(0, 0, 16 * block + 4);
        batch.keys[at] = bf16::from_f32(1.0e6);
    }
    let stepped = check(&batch, Budget { bits: 8, skip: 1.0, ..BUDGET });
    let most = stepped.list.len() / 2;
    // The first of those that tie: sketches are of two blocks.
    assert_eq!(stepped.list[..stepped.counts[0] as usize], [0, 2, 24]);
    assert!(stepped.verdicts[..4].iter().all(|verdict| verdict.dense == 1), "{:?}", stepped.verdicts);
    assert_eq!(stepped.counts[1], 3, "{:?}", &stepped.list[most..]);
}

/// Rows of several shares, in a batch with rows of one; budgets that cut at a bin, inside one and at ties.
#[test]
fn several_thread_blocks_choose_together() {
    let problem = StepProblem { max_tokens: 4700, kv_heads: 1, q_heads: 9, ..PROBLEM };
    for input in [Input::Sharp, Input::Normal, Input::Duplicates] {
        let batch = batch::<f16>(problem, input, &[4690, 700], 8);
        for (skip, k) in [(0.05, 2), (1.0, 40), (0.9, 250)] {
            let support = Support { k, ..BUDGET.support };
            let stepped = check(&batch, Budget { support, bits: 8, skip, ..BUDGET });
            if skip == 1.0 {
                assert_eq!(stepped.counts, [42, 42], "{input}");
            }
        }
    }
}

/// A row that one thread block has, in rounds, as rows enough fill the machine; and more blocks of one mass
/// than are ranked by counting.
#[test]
fn a_thread_block_has_a_whole_row() {
    let mut lengths = vec![1; 140];
    lengths[3] = 9700;
    assert_eq!(decide_parts(140, 9700 / 16 + 1), 1);
    let problem = StepProblem { max_tokens: 9700, kv_heads: 1, q_heads: 3, ..PROBLEM };
    for equal in [false, true] {
        let mut batch = batch::<f16>(problem, Input::Normal, &lengths, 8);
        if equal {
            let key = batch.keys[..64].to_vec();
            batch.keys.chunks_exact_mut(64).for_each(|keys| keys.copy_from_slice(&key));
        }
        for (skip, k) in [(0.05, 2), (1.0, 40)] {
            let support = Support { k, ..BUDGET.support };
            let stepped = check(&batch, Budget { support, bits: 8, skip, ..BUDGET });
            if skip == 1.0 {
                assert_eq!(stepped.counts[3], 42, "{equal}");
            }
            if skip == 1.0 && equal {
                // Of equal ones the first.
                let row = &stepped.list[3 * (stepped.list.len() / 140)..][..42];
                assert!(row.iter().copied().eq((0..41).chain([606])), "{row:?}");
            }
        }
    }
}
