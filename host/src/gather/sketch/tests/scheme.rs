//! The scheme: its settings, its cache, its workload, its cases.

use super::super::SketchedCache;
use super::super::workload::sketched;
use super::*;
use crate::gather::tests::scheme::given;
use crate::kv::proof::{Layer, Options, Trial, by_workload};
use crate::kv::{self, Capacity, Chunk, Geometry, KvCache, New, Opening, Rotated, Selection, Source};
use half::f16;

pub(super) fn selection(text: &str) -> Selection {
    text.parse().expect("a selection")
}

#[test]
fn settings_are_read_as_they_are_written() {
    let of = |text: &str| Budget::of(&selection(text));
    assert_eq!(of("gather:certified"), Budget::CERTIFIED);
    let support = Support { k: 5, block: 64, local: 2 };
    let budget = Budget { support, bits: 8, skip: 0.25, codes: false };
    assert_eq!(of("gather:certified/k=5/block=64/local=2/sketch=8/skip=0.25"), budget);
    for text in ["gather/skip=0.1", "gather:production/sketch=8"] {
        let error = text.parse::<Selection>().expect_err("refused").to_string();
        assert!(error.contains("options of gather:certified"), "{error}");
    }
    for (text, part) in [("skip=0", "a number from 0.000001 to 1"), ("sketch=3", "one of 4, 8")] {
        let error = format!("gather:certified/{text}").parse::<Selection>().expect_err("refused").to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_there_is_no_kernel_for_is_said() {
    let refused = |problem: StepProblem, budget: Budget| {
        let plan = Plan::<f16>::new(&device(), problem, budget).expect_err("refused").to_string();
        assert_eq!(plan, Sketches::<f16>::new(&device(), problem, budget).expect_err("refused").to_string());
        plan
    };
    for (problem, budget, part) in [
        (PROBLEM, Budget { bits: 3, ..BUDGET }, "no sketches of 3 bits; there are 4 and 8"),
        (PROBLEM, Budget { skip: 0.0, ..BUDGET }, "a share of 0 of the mass"),
        (PROBLEM, Budget { skip: f32::NAN, ..BUDGET }, "a share of NaN of the mass"),
        (StepProblem { head_dim: 96, ..PROBLEM }, BUDGET, "head_dim 96; those there are take 64 and 128"),
    ] {
        let error = refused(problem, budget);
        assert!(error.contains(part) && error.lines().count() == 1, "{error}");
    }
    assert!(kv::Error::from(crate::gather::Error::Bits { bits: 3 }).is_refusal());
}

pub(super) const GEOMETRY: Geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };

fn cache(capacity: Capacity, kernels: bool) -> SketchedCache {
    let (device, selection) = (device(), selection("gather:certified"));
    let opening =
        Opening { device: &device, geometry: GEOMETRY, rope: None, capacity, selection: &selection };
    let cache = SketchedCache::new(&opening, BUDGET).expect("a cache");
    if kernels { cache.with_kernels() } else { cache }
}

/// Appends a chunk to both layers and attends: the bits of the outputs of sequences that are there. A token's
/// numbers follow from its position.
pub(super) fn chunk(cache: &mut impl KvCache, chunk: Chunk) -> Vec<Vec<u32>> {
    chunk_of(cache, chunk, |_| 0)
}

/// The same with numbers that follow from a text of each row's, too: for a prompt row 0 is asked for.
pub(super) fn chunk_of(cache: &mut impl KvCache, chunk: Chunk, text: impl Fn(usize) -> u64) -> Vec<Vec<u32>> {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let positions = cache.held().positions(chunk);
    let there: Vec<bool> = positions.iter().map(|position| *position != kv::PARKED).collect();
    let rows = |width: usize, kind: u64| {
        let number = |text: u64, position: u32, i: usize| {
            let place = u64::from(position) * width as u64 + i as u64;
            crate::attention::dense::sample::normal(kind + 100 * text, place)
        };
        let of = |(row, position): (usize, &u32)| {
            let row = if chunk == Chunk::Step { row } else { 0 };
            let number = |i| number(text(row), *position, i);
            (0..width).map(|i| f16::from_f32(number(i))).collect::<Vec<_>>()
        };
        let rows: Vec<f16> = positions.iter().enumerate().flat_map(of).collect();
        Buffer::from_slice(&device, &rows).expect("a buffer")
    };
    let buffer = Buffer::from_slice(&device, &positions).expect("a buffer");
    let mut bits = Vec::new();
    cache.begin(&stream, chunk).expect("begun");
    for layer in 0..GEOMETRY.layers {
        let kind = 10 * layer as u64;
        let width = GEOMETRY.kv_width();
        let (keys, values) = (rows(width, kind + 1), rows(width, kind + 2));
        let new = Rotated { positions: &buffer, keys: &keys, values: &values };
        cache.append(&stream, layer, New::Rotated(new)).expect("appended");
        let queries = rows(GEOMETRY.query_width(), kind + 3);
        let mut output = Buffer::<f32>::zeroed(&device, queries.len()).expect("a buffer");
        cache.attend(&stream, layer, &queries, &mut output).expect("attended");
        let output = output.to_vec().expect("read");
        let rows = output.chunks(GEOMETRY.query_width()).zip(&there).filter(|(_, there)| **there);
        bits.extend(rows.map(|(row, _)| row.iter().map(|x| x.to_bits()).collect()));
    }
    cache.commit();
    bits
}

/// Prompts and steps in turn, over edges of blocks: the bits of the kernels, a verdict on every head, bytes
/// as they are.
#[test]
fn a_cache_is_the_same_by_kernels_and_by_slices() {
    let (mut own, mut kernels) = (cache(120.into(), false), cache(120.into(), true));
    for tokens in [40, 1, 1, 20, 1, 1, 1, 30, 1, 1, 1] {
        let of = Chunk::of_one(tokens);
        assert!(chunk(&mut kernels, of) == chunk(&mut own, of), "{tokens} tokens to {}", own.tokens());
        let report = own.report().expect("a report");
        assert_eq!(report, kernels.report().expect("a report"));
        if tokens > 1 {
            assert!(report.heads.is_empty(), "a prompt is exact");
            continue;
        }
        assert_eq!(report.heads.len(), 8);
        for head in &report.heads {
            assert!(
                head.bound.is_some_and(f32::is_finite) && head.skipped_mass.is_some_and(|mass| mass <= 0.1)
            );
            assert!(head.skipped.is_multiple_of(16) && head.source == Source::Stored || head.skipped == 0);
        }
        let count = own.tokens();
        let sketches = (2 * count.div_ceil(32) * 2 * 324 * 4) as u64;
        assert_eq!(own.bytes(), count as u64 * 1024 + sketches);
        let kept = count - count.div_ceil(16).saturating_sub(3) * 16;
        assert_eq!(own.step_bytes(), kept as u64 * 1024 + sketches);
    }
    assert_eq!(own.tokens(), 98);
}

/// Sequences beside each other, one forked in the middle of a block: each gets what it gets alone.
#[test]
fn sequences_are_alone_in_their_bits() {
    for kernels in [false, true] {
        let mut many = cache(Capacity { tokens: 120, sequences: 3 }, kernels);
        let stream = Stream::new(&device()).expect("a stream");
        chunk(&mut many, Chunk::Prompt { sequence: 0, tokens: 70 });
        let fork = many.fork(&stream, 0).expect("forked");
        assert_eq!(many.join(&stream).expect("joined"), 2);
        chunk(&mut many, Chunk::Prompt { sequence: 2, tokens: 33 });
        let mut alone = [70, 33].map(|tokens| {
            let mut one = cache(Capacity { tokens: 120, sequences: 3 }, kernels);
            chunk(&mut one, Chunk::Prompt { sequence: 0, tokens });
            one
        });
        // On to a tile that the fork's copy did not have.
        for _ in 0..28 {
            let rows = chunk(&mut many, Chunk::Step);
            let [long, short] = alone.each_mut().map(|one| chunk(one, Chunk::Step));
            for (layer, rows) in rows.chunks(3).enumerate() {
                assert!(rows[0] == long[layer] && rows[fork] == long[layer] && rows[2] == short[layer]);
            }
            // Verdicts say more than outputs: where all is kept, these are the same whatever sketches say.
            let heads = many.report().expect("a report").heads;
            let [long, short] = alone.each_ref().map(|one| one.report().expect("a report").heads);
            assert_eq!(heads.len(), 2 * 3 * 4);
            for (layer, heads) in heads.chunks(3 * 4).enumerate() {
                let of = |sequence: usize| &heads[4 * sequence..4 * (sequence + 1)];
                let [long, short] = [&long, &short].map(|own| &own[4 * layer..4 * (layer + 1)]);
                assert_eq!([of(0), of(fork), of(2)], [long, long, short]);
            }
        }
    }
}

/// Head-steps on made-up inputs, hostile ones among them: every bound holds, and most heads need no rung.
#[test]
fn head_steps_are_within_their_bounds() {
    let options = Options { head_steps: 200, max_tokens: 300, long_tokens: 500, seed: 3 };
    let device = device();
    let selection = selection("gather:certified/k=1/block=16/local=1/skip=0.1");
    let trial = Trial { device: &device, selection: &selection, options, layers: &[] };
    let findings = by_workload(&trial, &mut |_| ()).expect("proven");
    assert_eq!(findings.violations, Vec::<String>::new());
    assert!(findings.total.bounded == findings.total.head_steps && findings.total.head_steps >= 200);
    // What is kept of the originals is no rung: those that skipped nothing and those that did.
    assert!(findings.total.sources[0] > 100, "{:?}", findings.total.sources);
}

/// Query tokens of one text share its blocks, and bounds hold for all: each has the sketches of what it sees.
#[test]
fn sequences_may_share_blocks() {
    let whole = batch::<f16>(StepProblem { max_tokens: 80, ..PROBLEM }, Input::Outlier, &[77], 9);
    let dim = 64;
    let rows = |pool: &[f16]| -> Vec<f16> {
        let of = |token: usize, head: usize| pool[whole.row(0, head, token)..][..dim].to_vec();
        (0..77).flat_map(|token| (0..2).flat_map(move |head| of(token, head))).collect()
    };
    let queries = batch::<f16>(PROBLEM, Input::Sharp, &[1; 20], 4).queries;
    let layer = Layer {
        keys: rows(&whole.keys),
        values: rows(&whole.values),
        queries,
        tokens: 77,
        query_tokens: 20,
        kv_heads: 2,
        q_heads: 8,
        head_dim: 64,
    };
    let device = device();
    let selection = selection("gather:certified/k=1/block=16/local=1/skip=0.3");
    let options = Options { head_steps: 0, max_tokens: 1, long_tokens: 1, seed: 0 };
    let trial =
        Trial { device: &device, selection: &selection, options, layers: std::slice::from_ref(&layer) };
    let findings = by_workload(&trial, &mut |_| ()).expect("proven");
    assert_eq!((findings.violations, findings.total.head_steps), (Vec::new(), 160));

    let of = |batch: &Batch<f16>| {
        let (input, stream) = (given(batch), Stream::new(&device).expect("a stream"));
        let own = sketched(&input, &input.pools[0], batch.problem, BUDGET, &stream).expect("sketches");
        own.words().to_vec().expect("read")
    };
    let all = of(&layer.batch());
    for (row, own) in all.chunks(all.len() / 20).enumerate() {
        let whole = layer.batch();
        let problem = StepProblem { sequences: 1, ..whole.problem };
        let alone = Batch {
            problem,
            lengths: vec![whole.lengths[row]],
            inputs: whole.inputs[..1].to_vec(),
            queries: whole.queries[..8 * 64].to_vec(),
            table: whole.table[..5].to_vec(),
            ..whole
        };
        assert!(of(&alone) == own, "{row}");
    }
}
