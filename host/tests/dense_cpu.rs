//! Dense attention on slices gives the emulator's bits, on every path that this machine has.

use half::{bf16, f16};
use host::Device;
use host::attention::PagedPool;
use host::dense::cpu::{Level, Slices, attend, attend_at};
use host::dense::sample::{Input, Paged, Sample, random};
use host::dense::{DenseElement, Error, HEAD_DIMS, Problem};
use proptest::prelude::*;
use simt::emu::EmuOptions;

const PROBLEM: Problem =
    Problem { sequences: 1, q_heads: 9, kv_heads: 3, head_dim: 64, query_tokens: 1, max_tokens: 320 };

/// Blocks of every sequence; what no length reaches is none of the pool's.
fn table(problem: Problem, tables: &[Vec<u32>]) -> Vec<u32> {
    let mut table = vec![u32::MAX; (problem.sequences * problem.max_blocks()) as usize];
    for (row, blocks) in table.chunks_mut(problem.max_blocks() as usize).zip(tables) {
        row[..blocks.len()].copy_from_slice(blocks);
    }
    table
}

/// Compares all paths with the emulator.
fn compare<E: DenseElement>(sample: &Sample<E>, paged: &Paged<E>) {
    let device = Device::cpu(EmuOptions::default());
    let expected = sample.run(&device, paged).unwrap();
    let problem = sample.problem;
    let table = table(problem, &paged.tables);
    let slices = Slices {
        queries: &sample.queries,
        keys: &paged.keys,
        values: &paged.values,
        table: &table,
        lengths: &sample.lengths,
    };
    for level in Level::available() {
        let mut output = vec![f32::from_bits(0xffff_ffff); expected.0.len()];
        let mut lse = vec![f32::from_bits(0xffff_ffff); expected.1.len()];
        attend_at(*level, problem, slices, &mut output, &mut lse).unwrap();
        for (what, got, expected) in [("lse", &lse, &expected.1), ("output", &output, &expected.0)] {
            let other = got.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
            if let Some(i) = other {
                panic!(
                    "{what} {i}: {:e}, the emulator gives {:e}; {level:?}, {} of {problem:?}, lengths {:?}",
                    got[i],
                    expected[i],
                    E::NAME,
                    sample.lengths
                );
            }
        }
    }
}

/// Values of the last token are infinite: groups of rows that see nothing of its tile leave it out, on each
/// path alike, and stay finite.
#[test]
fn tiles_that_no_row_of_a_group_sees_are_left_out() {
    let problem = Problem { q_heads: 8, kv_heads: 2, query_tokens: 40, max_tokens: 96, ..PROBLEM };
    for length in [65, 80, 96] {
        let mut sample = Sample::<f16>::new(problem, &[length], Input::Normal, 5);
        let of_head = (length * problem.head_dim) as usize;
        for head in sample.values[0].chunks_exact_mut(of_head) {
            head[of_head - problem.head_dim as usize..].fill(f16::INFINITY);
        }
        let paged = sample.paged(5, 2);
        compare(&sample, &paged);
        let (output, _) = sample.run(&Device::cpu(EmuOptions::default()), &paged).unwrap();
        // The first query token's: 40 before the last, in another tile.
        let first = (problem.q_heads * problem.head_dim) as usize;
        assert!(output[..first].iter().all(|x| x.is_finite()), "{length}");
        assert!(output[output.len() - first..].iter().all(|x| !x.is_finite()), "{length}");
    }
}

fn check<E: DenseElement>(problem: Problem, lengths: &[u32], input: Input, seed: u64) {
    let problem = Problem { sequences: lengths.len() as u32, ..problem };
    let sample = Sample::<E>::new(problem, lengths, input, seed);
    let paged = sample.paged(seed, 2);
    compare(&sample, &paged);
}

#[test]
fn every_head_dim_and_type_over_the_edges_of_tiles_and_parts() {
    let lengths = [0, 1, 15, 16, 17, 127, 128, 130, 300];
    for head_dim in HEAD_DIMS {
        let problem = Problem { head_dim, q_heads: 3, kv_heads: 1, ..PROBLEM };
        check::<f16>(problem, &lengths, Input::Normal, 1);
        check::<bf16>(problem, &lengths, Input::Normal, 2);
        check::<f16>(problem, &[300], Input::Normal, 3);
    }
}

#[test]
fn every_kind_of_input() {
    for input in Input::ALL {
        check::<f16>(PROBLEM, &[77, 300], input, 4);
        check::<bf16>(PROBLEM, &[300, 77], input, 5);
        check::<f16>(Problem { query_tokens: 3, ..PROBLEM }, &[1, 40], input, 6);
    }
}

#[test]
fn many_parts_are_added_up_in_the_kernels_order() {
    // 40 parts: more than the lanes of the warp that adds up their sums.
    let problem = Problem { q_heads: 2, kv_heads: 1, max_tokens: 16 * 16 * 40, ..PROBLEM };
    check::<f16>(problem, &[1300], Input::Normal, 7);
    check::<bf16>(problem, &[700], Input::Dominant, 8);
}

/// What becomes of some of the elements.
#[derive(Clone, Copy, Debug)]
enum Spoilt {
    /// Nothing.
    No,
    /// Any bits: infinities, NaN, subnormal numbers.
    AnyBits,
    /// A few infinities and NaN.
    Infinite,
    /// Largest and smallest numbers of both signs.
    Extremes,
    /// All mantissa bits set, one exponent: the largest sums that there are.
    Full,
}

fn spoil<E: DenseElement>(elements: &mut [E], spoilt: Spoilt, every: u64, seed: u64) {
    let elements: &mut [u16] = bytemuck::cast_slice_mut(elements);
    for (i, x) in elements.iter_mut().enumerate() {
        let z = random(seed, i as u64);
        if !z.is_multiple_of(every) {
            continue;
        }
        let pick = (z >> 32) as usize;
        let inf = if E::IS_F16 { 0x7c00 } else { 0x7f80 };
        *x = match spoilt {
            Spoilt::No => *x,
            Spoilt::AnyBits => pick as u16,
            Spoilt::Infinite => [inf, inf | 0x8000, 0x7fff, 0][pick % 4],
            Spoilt::Extremes => [inf - 1, (inf - 1) | 0x8000, 1, 0x8001, inf / 2, 0x8000][pick % 6],
            // Of one sign, or of both.
            Spoilt::Full => 0x3fff | if seed & 4 == 0 { 0 } else { pick as u16 & 0x8000 },
        };
    }
}

fn spoilt<E: DenseElement>(
    problem: Problem,
    lengths: &[u32],
    input: Input,
    seed: u64,
    [queries, keys, values]: [Spoilt; 3],
    every: u64,
) {
    let problem = Problem { sequences: lengths.len() as u32, ..problem };
    let mut sample = Sample::<E>::new(problem, lengths, input, seed);
    spoil(&mut sample.queries, queries, every, seed ^ 1);
    sample.keys.iter_mut().for_each(|x| spoil(x, keys, every, seed ^ 2));
    sample.values.iter_mut().for_each(|x| spoil(x, values, every, seed ^ 3));
    let paged = sample.paged(seed, 1);
    compare(&sample, &paged);
}

#[test]
fn the_largest_sums_there_are() {
    for seed in [0, 4] {
        let problem = Problem { q_heads: 3, kv_heads: 1, max_tokens: 600, ..PROBLEM };
        spoilt::<f16>(problem, &[300], Input::Normal, seed, [Spoilt::Full; 3], 1);
        spoilt::<bf16>(problem, &[300], Input::Normal, seed, [Spoilt::Full; 3], 1);
    }
}

fn spoilts() -> impl Strategy<Value = Spoilt> {
    use Spoilt::{AnyBits, Extremes, Full, Infinite, No};
    prop_oneof![3 => Just(No), 1 => Just(AnyBits), 1 => Just(Infinite), 1 => Just(Extremes), 1 => Just(Full)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_problem_gives_the_emulators_bits(
        head_dim in prop::sample::select(HEAD_DIMS.to_vec()),
        group in 1u32..=16,
        kv_heads in 1u32..3,
        query_tokens in 1u32..4,
        lengths in prop::collection::vec(prop_oneof![0u32..40, 0u32..400], 1..3),
        spare in 0u32..200,
        input in prop::sample::select(Input::ALL.to_vec()),
        wrong in [spoilts(), spoilts(), spoilts()],
        every in prop::sample::select(vec![1u64, 2, 16, 1000, 20_000]),
        half_floats in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let max_tokens = lengths.iter().max().unwrap() + spare + 1;
        let problem = Problem { sequences: 1, q_heads: group * kv_heads, kv_heads, head_dim, query_tokens, max_tokens };
        if half_floats {
            spoilt::<f16>(problem, &lengths, input, seed, wrong, every);
        } else {
            spoilt::<bf16>(problem, &lengths, input, seed, wrong, every);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let problem = Problem { max_tokens: 20, ..PROBLEM };
    let sample = Sample::<f16>::new(problem, &[20], Input::Normal, 9);
    let paged = sample.paged(1, 0);
    let table = table(problem, &paged.tables);
    let blocks = PagedPool::from_slices(
        &Device::cpu(EmuOptions::default()),
        problem.kv_heads,
        problem.head_dim,
        &paged.keys,
        &paged.values,
    );
    assert_eq!(blocks.unwrap().blocks(), 2);
    let slices = Slices {
        queries: &sample.queries,
        keys: &paged.keys,
        values: &paged.values,
        table: &table,
        lengths: &sample.lengths,
    };
    let refused = |slices: Slices<'_, f16>, problem: Problem, part: &str| {
        let (mut output, mut lse) = (vec![1.0; 9 * 64], vec![1.0; 9]);
        let error = attend(problem, slices, &mut output, &mut lse).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert_eq!(error.lines().count(), 1);
        assert!(output.iter().chain(&lse).all(|x| *x == 1.0), "written in spite of {error}");
    };
    refused(slices, Problem { head_dim: 80, ..problem }, "head_dim 80");
    refused(Slices { queries: &sample.queries[1..], ..slices }, problem, "the slice of queries has 575");
    refused(Slices { values: &paged.values[1..], ..slices }, problem, "the slice of values");
    let (keys, values) = (&paged.keys[1..], &paged.values[1..]);
    refused(Slices { keys, values, ..slices }, problem, "the slice of keys");
    refused(Slices { table: &[0], ..slices }, problem, "the block table has 1");
    refused(Slices { table: &[0, 2], ..slices }, problem, "block 2 is not in the pool, which has 2");
    refused(Slices { lengths: &[33], ..slices }, problem, "33 tokens do not fit 2 blocks");
    refused(Slices { lengths: &[], ..slices }, problem, "the slice of lengths has 0");
    let mut output = vec![0.0; 9 * 64];
    assert!(matches!(attend(problem, slices, &mut output, &mut [0.0; 8]), Err(Error::Length { .. })));
    attend(problem, slices, &mut output, &mut [0.0; 9]).unwrap();
}
