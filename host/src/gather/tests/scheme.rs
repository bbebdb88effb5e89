//! The scheme: its settings, its cache, its workload, its cases.

use super::super::staging::Staging;
use super::super::{Auditor, Error, GatherCache, SYSTEM};
use super::*;
use crate::check::{Coverage, not_covered};
use crate::kv::proof::{Options, Trial, by_workload};
use crate::kv::workload::{AnyInput, Figure, Input as Given, Opening as Workloads, Originals};
use crate::kv::{self, Chunk, Geometry, KvCache, New, Opening, Rotated, Selection};
use half::f16;
use std::sync::Arc;

fn selection(text: &str) -> Selection {
    text.parse().expect("a selection")
}

#[test]
fn settings_are_read_as_they_are_written() {
    let of = |text: &str| Support::of(&selection(text));
    assert_eq!(of("gather"), Support { k: 32, block: 128, local: 4 });
    assert_eq!(of("gather:production"), Support { k: 8, block: 128, local: 4 });
    assert_eq!(of("gather:production/block=16/local=2"), Support { k: 8, block: 16, local: 2 });
    assert_eq!(of("gather/k=5/block=64"), Support { k: 5, block: 64, local: 4 });
    // Policies beside each other keep as many tokens.
    let kept = |text: &str| of(text).kept(100_000);
    assert_eq!([kept("gather:window"), kept("gather")], [(1 + 36) * 128 - 96; 2]);
    assert_eq!(kept("gather:quest"), (1 + 256 + 32) * 16);
    let refused = |text: &str| text.parse::<Selection>().expect_err("refused").to_string();
    for (text, part) in [
        ("gather/k=0", "k is a whole number from 1 up"),
        ("gather/local=0", "local is a whole number from 1 up"),
        ("gather/block=0", "block is one of 16, 32, 64, 128"),
        ("gather/block=48", "block is one of 16, 32, 64, 128"),
        ("gather:nothing", "its presets are assured, production, quest, window, certified"),
        ("gather:window/k=3", "gather:window reads no distant block"),
        ("gather:certified/dense=1", "dense is for keys and values on the GPU"),
        ("gather/staging=64/dense=2", "dense is for keys and values on the GPU"),
        ("gather/score=median", "score is one of bounds, mean"),
        ("gather/list=head", "list is one of kv, query"),
        ("gather/staging=64/score=mean", "score=mean does not go with staging"),
        ("gather/bounds=4", "bounds is one of 8, 16"),
        ("gather/bounds=8/score=mean", "bounds=8 does not go with score=mean"),
        ("gather:window/bounds=16", "bounds=16 does not go with :window"),
        ("gather/staging=64/list=query", "leave list out, or staging"),
        ("gather:certified/list=query", "leave list out, or :certified"),
        ("gather:window/score=mean", "leave score out, or :window"),
        ("gather/ranks=all", "ranks is one of each, one"),
        ("gather/staging=64/ranks=each", "ranks does not go with staging; leave ranks out, or staging"),
        ("gather:certified/ranks=one", "leave ranks out, or :certified"),
    ] {
        assert!(refused(text).contains(part), "{text}: {}", refused(text));
    }
}

#[test]
fn what_there_is_no_kernel_for_is_said() {
    let refused = |problem: StepProblem, support: Support| {
        let plan = Plan::<f16>::new(&device(), problem, support).expect_err("refused");
        let bounds = Bounds::<f16>::new(&device(), problem, support).expect_err("refused");
        assert_eq!(plan.to_string(), bounds.to_string());
        plan.to_string()
    };
    let support = Support::ASSURED;
    for (problem, support, part) in [
        (PROBLEM, Support { local: 0, ..support }, "local is 0; give it at least one block"),
        (PROBLEM, Support { block: 24, ..support }, "of 24 tokens; there are 16, 32, 64 and 128"),
        (StepProblem { head_dim: 80, ..PROBLEM }, support, "head_dim 80"),
        (StepProblem { max_tokens: 1 << 31 | 1, ..PROBLEM }, support, "2147483649 tokens a sequence"),
        (StepProblem { q_heads: 7, ..PROBLEM }, support, "7 query heads are no multiple of 2 KV heads"),
        (StepProblem { sequences: 0, ..PROBLEM }, support, "sequences is 0"),
    ] {
        let error = refused(problem, support);
        assert!(error.contains(part) && error.lines().count() == 1, "{error}");
    }
    let error = Support { block: 0, ..support }.checked().expect_err("refused");
    assert!(matches!(error, Error::Block { block: 0 }) && kv::Error::from(error).is_refusal());
}

/// Options have fewer kernels than the default.
#[test]
fn head_dims_that_an_option_has_no_kernels_for_are_said() {
    let support = Support { k: 3, block: 16, local: 2 };
    let of = |head_dim: u32| StepProblem { head_dim, ..PROBLEM };
    let by = |score: Score| Ranking { score, list: List::KvHead };
    let plan = |problem, ranking| Plan::<f16>::ranked(&device(), problem, support, ranking);
    let said = |error: Error, what: &str, head_dim: u32, takes: &str| {
        let expected = format!("{what} has no kernels for head_dim {head_dim}; those there are take {takes}");
        assert_eq!(error.to_string(), expected);
        assert!(kv::Error::from(error).is_refusal());
    };
    for head_dim in super::super::HEAD_DIMS {
        plan(of(head_dim), by(Score::Bounds)).expect("a plan");
        plan(of(head_dim), by(Score::Mean)).expect("a plan");
    }
    let codes = plan(of(256), by(Score::Codes)).expect_err("refused");
    said(codes, "gather/bounds=8", 256, "64, 96 and 128");
    let codes = Bounds::<f16>::scored(&device(), of(256), support, Score::Codes).expect_err("refused");
    said(codes, "gather/bounds=8", 256, "64, 96 and 128");
    let each = |head_dim| plan(of(head_dim), by(Score::Bounds)).expect("a plan").with_ranks(Ranks::Each);
    assert_eq!(each(96).expect("a plan").ranks(), Ranks::Each);
    said(each(256).expect_err("refused"), "gather/ranks=each", 256, "64, 96 and 128");
    for head_dim in [96, 256] {
        let staging = Staging::<f16>::new(&device(), of(head_dim), support, 8).expect_err("refused");
        said(staging, "gather/staging", head_dim, "64 and 128");
        let audit = Auditor::<f16>::new(&device(), of(head_dim), support, 0.5).expect_err("refused");
        said(audit, "gather/audit", head_dim, "64 and 128");
        let wide = StepProblem { q_heads: 18, ..of(head_dim) };
        let error = plan(wide, by(Score::Bounds)).expect_err("refused");
        let part =
            format!("of head_dim {head_dim} for up to eight query heads a list, not 9; take list=query");
        assert!(error.to_string().contains(&part), "{error}");
        assert!(kv::Error::from(error).is_refusal());
        plan(wide, Ranking { list: List::QueryHead, ..by(Score::Bounds) }).expect("a list each");
    }
}

/// Handles of another problem change nothing.
#[test]
fn buffers_of_another_problem_are_refused() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let mut bounds = Bounds::<f16>::new(&device, PROBLEM, Support::ASSURED).expect("bounds");
    let words = |count: usize| Buffer::<u32>::zeroed(&device, count).expect("a buffer");
    let keys = Buffer::<f16>::zeroed(&device, 25 * 2 * 16 * 64).expect("a buffer");
    let (table, short, one) = (words(25), words(24), words(1));
    let handles = FoldHandles {
        keys: keys.global(),
        table: short.global(),
        positions: one.global(),
        lengths: one.global(),
    };
    // SAFETY: refused.
    let error = unsafe { bounds.fold_on(&stream, (0, 1), false, handles) }.expect_err("refused");
    assert!(error.to_string().contains("the block table has 24 elements, this problem needs 25"), "{error}");
    let handles =
        FoldHandles { keys: keys.global_range(1..).expect("part"), table: table.global(), ..handles };
    // SAFETY: refused.
    let error = unsafe { bounds.fold_on(&stream, (0, 1), true, handles) }.expect_err("refused");
    assert!(error.to_string().contains("the buffer of keys"), "{error}");
}

/// Some of them are run by `check::small`, all by `ferrokv check --orders 0 --golden`.
#[test]
fn small_cases_have_every_kernel() {
    let cases = (SYSTEM.cases)(Coverage::Small);
    assert_eq!(not_covered(&cases, (SYSTEM.kernels)()), Vec::<&str>::new());
}

pub(super) const GEOMETRY: Geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };

fn cache(capacity: usize, support: Support, kernels: bool) -> GatherCache {
    cache_of("gather", capacity, support, kernels)
}

pub(super) fn cache_of(text: &str, capacity: usize, support: Support, kernels: bool) -> GatherCache {
    let (device, selection) = (device(), selection(text));
    let opening = Opening {
        device: &device,
        geometry: GEOMETRY,
        rope: None,
        capacity: capacity.into(),
        selection: &selection,
    };
    let cache = GatherCache::new(&opening, support).expect("a cache");
    if kernels { cache.with_kernels() } else { cache }
}

/// Appends `tokens` tokens to both layers and attends: the bits of the outputs.
pub(super) fn chunk(cache: &mut (impl KvCache + ?Sized), tokens: usize) -> Vec<u32> {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let first = cache.tokens();
    let rows = |width: usize, kind: u64| {
        let number = |i: usize| crate::attention::dense::sample::normal(kind, (first * width + i) as u64);
        let rows: Vec<f16> = (0..tokens * width).map(|i| f16::from_f32(number(i))).collect();
        Buffer::from_slice(&device, &rows).expect("a buffer")
    };
    let positions: Vec<u32> = (first as u32..(first + tokens) as u32).collect();
    let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
    let mut bits = Vec::new();
    cache.begin(&stream, Chunk::of_one(tokens)).expect("begun");
    for layer in 0..GEOMETRY.layers {
        let kind = 10 * layer as u64;
        let width = GEOMETRY.kv_width();
        let (keys, values) = (rows(width, kind + 1), rows(width, kind + 2));
        let new = Rotated { positions: &positions, keys: &keys, values: &values };
        cache.append(&stream, layer, New::Rotated(new)).expect("appended");
        let queries = rows(GEOMETRY.query_width(), kind + 3);
        let mut output = Buffer::<f32>::zeroed(&device, queries.len()).expect("a buffer");
        cache.attend(&stream, layer, &queries, &mut output).expect("attended");
        bits.extend(output.to_vec().expect("read").iter().map(|x| x.to_bits()));
    }
    cache.commit();
    bits
}

/// Prompts and steps in turn, over edges of blocks: the bits of the kernels, and what was left out is told.
#[test]
fn a_cache_is_the_same_by_kernels_and_by_slices() {
    let support = Support { k: 1, block: 16, local: 1 };
    let (mut own, mut kernels) = (cache(120, support, false), cache(120, support, true));
    for tokens in [40, 1, 1, 20, 1, 1, 1, 30, 1, 1, 1] {
        let expected = chunk(&mut own, tokens);
        assert!(chunk(&mut kernels, tokens) == expected, "{tokens} tokens after {}", own.tokens() - tokens);
        let report = own.report().expect("a report");
        if tokens > 1 {
            assert!(report.heads.is_empty(), "a prompt is exact");
            continue;
        }
        assert_eq!(report.heads.len(), 8);
        // The first block, one distant one, and the last.
        let count = own.tokens();
        let left = count.div_ceil(16).saturating_sub(3) * 16;
        assert!(report.heads.iter().all(|head| head.skipped == left as u32 && head.bound.is_none()));
        // In 8 bits, with a scale.
        let of_blocks = |blocks: usize| 2 * blocks * 2 * (2 * 64 + 4);
        let bounds = of_blocks(count.div_ceil(16));
        // Neither the first block nor the last is ranked.
        let ranked = of_blocks(count.div_ceil(16).saturating_sub(2));
        let kept = if left > 0 { (count - left) * 1024 + ranked } else { count * 1024 };
        assert_eq!((own.bytes(), own.step_bytes()), ((count * 1024 + bounds) as u64, kept as u64));
    }
    assert_eq!(own.tokens(), 98);
    let stream = Stream::new(&device()).expect("a stream");
    assert!(own.begin(&stream, Chunk::of_one(23)).expect_err("full").to_string().contains("do not fit"));
}

/// Layers at the front that attend to everything have the bits of dense attention, keep no bounds, and say
/// that they skip nothing; the others are as without.
#[test]
fn dense_layers_attend_to_everything() {
    let support = Support { k: 1, block: 16, local: 1 };
    let mut mixed = cache_of("gather/dense=1", 120, support, false);
    let (mut own, mut kernels) = (cache(120, support, false), cache_of("gather/dense=1", 120, support, true));
    let mut dense = selection("dense").open(&device(), GEOMETRY, None, 120).expect("a cache");
    for tokens in [90, 1, 1, 1] {
        let [mixed_bits, own_bits] = [&mut mixed, &mut own].map(|cache| chunk(cache, tokens));
        assert!(chunk(&mut kernels, tokens) == mixed_bits);
        let dense_bits = chunk(&mut *dense, tokens);
        let (first, second) = mixed_bits.split_at(mixed_bits.len() / 2);
        assert!(first == &dense_bits[..first.len()] && second == &own_bits[first.len()..]);
        assert!(tokens > 1 || second != &dense_bits[first.len()..], "something is left out");
    }
    let skipped: Vec<u32> = mixed.report().expect("a report").heads.iter().map(|head| head.skipped).collect();
    assert_eq!(skipped, [0, 0, 0, 0, 48, 48, 48, 48]);
    // Of 93 tokens 45 in one layer; bounds of six blocks, of which four are ranked.
    assert_eq!(mixed.bytes(), 93 * 1024 + 6 * 2 * 132);
    assert_eq!(mixed.step_bytes(), (93 + 45) * 512 + 4 * 2 * 132);
}

/// A token past the room is left out of pool and bounds.
#[test]
fn a_cache_stays_inside_its_room() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let row = Buffer::from_slice(&device, &[f16::ONE; 256]).expect("a buffer");
    let positions = Buffer::from_slice(&device, &[1_000_000u32]).expect("a buffer");
    let mut output = Buffer::<f32>::zeroed(&device, 256).expect("a buffer");
    let mut cache = cache(16, Support::ASSURED, true);
    cache.begin(&stream, Chunk::Step).expect("begun");
    let new = Rotated { positions: &positions, keys: &row, values: &row };
    cache.append(&stream, 0, New::Rotated(new)).expect("appended");
    cache.attend(&stream, 0, &row, &mut output).expect("no access out of bounds");
}

pub(in crate::gather) fn given(batch: &Batch<f16>) -> Given<f16> {
    use crate::attention::{BlockTable, PagedPool};
    let (device, problem) = (device(), batch.problem.dense());
    let pool =
        PagedPool::from_slices(&device, problem.kv_heads, problem.head_dim, &batch.keys, &batch.values);
    let pool = pool.expect("a pool");
    let mut table = BlockTable::new(&device, problem.sequences, problem.max_blocks(), pool.blocks());
    let table_ref = table.as_mut().expect("a table");
    let mut blocks = Vec::new();
    for (sequence, row) in batch.table.chunks(problem.max_blocks() as usize).enumerate() {
        let length = batch.lengths[sequence];
        blocks.push(row[..length.div_ceil(16) as usize].to_vec());
        table_ref.set(sequence as u32, &blocks[sequence], length).expect("set");
    }
    Given {
        problem,
        lengths: batch.lengths.clone(),
        pools: vec![pool],
        table: table.expect("a table"),
        blocks,
        queries: vec![Buffer::from_slice(&device, &batch.queries).expect("a buffer")],
        seen: Vec::new(),
        device,
    }
}

/// A workload does a batch of different lengths in one go, with the bits of a plan, and says what it read.
#[test]
fn a_workload_is_the_plans_step() {
    let batch = batch::<f16>(PROBLEM, Input::Normal, &[400, 33, 250], 7);
    let selection = selection("gather/k=2/block=16/local=1");
    let input = AnyInput::F16(Arc::new(given(&batch)));
    let opening = Workloads { input, selection: &selection, originals: Originals::Device, layer: None };
    let mut workload = (selection.scheme().workload)(&opening).expect("a workload");
    let (expected, _) = step(&batch, Support::of(&selection), true);
    let outcome = workload.outcome().expect("read");
    assert!(outcome.output.iter().map(|x| x.to_bits()).eq(expected.output));
    assert!(outcome.lse.iter().map(|x| x.to_bits()).eq(expected.lse));
    let skipped: Vec<u32> = outcome.heads.iter().step_by(8).map(|head| head.skipped).collect();
    assert_eq!(skipped, [25 * 16 - 64, 0, 250 - 58]);
    assert_eq!(workload.stages(), ["score", "attend"]);
    // Bounds of 23 and of 14 distant blocks; tokens of 64, 33 and 58.
    let (bounds, tokens) = ((23 + 14) * (2 * 64 + 4) * 2, (64 + 33 + 58) * 4 * 64 * 2);
    assert_eq!(workload.read_bytes(), bounds + tokens);
    let facts = workload.facts().expect("facts");
    assert_eq!(facts[1].value, Figure::Bytes(bounds));
    let stream = Stream::new(&device()).expect("a stream");
    workload.enqueue(&stream, 0, 2).expect("again");
    assert_eq!(workload.outcome().expect("read"), outcome);
    // Ranked by one thread block the same.
    let one: Selection = "gather/k=2/block=16/local=1/ranks=one".parse().expect("a selection");
    let opening = Workloads { input: opening.input.clone(), selection: &one, ..opening };
    let mut one = (one.scheme().workload)(&opening).expect("a workload");
    assert_eq!(one.stages(), ["select", "attend"]);
    one.enqueue(&stream, 0, 2).expect("again");
    assert_eq!(one.outcome().expect("read"), outcome);
    // With an audit the same, and what was found of each head that skipped something.
    let selection: Selection = "gather/k=2/block=16/local=1/audit=1".parse().expect("a selection");
    let opening = Workloads { input: opening.input.clone(), selection: &selection, ..opening };
    let audited = (selection.scheme().workload)(&opening).expect("a workload");
    assert_eq!(audited.stages(), ["score", "attend", "audit"]);
    let found = audited.outcome().expect("read");
    assert!(found.output == outcome.output && found.lse == outcome.lse);
    assert!(found.heads.iter().all(|head| head.audit.is_some() == (head.skipped > 0)));
    assert!(format!("{:?}", audited.facts().expect("facts")[3]).contains("audit of 16 heads"));
    let staged: Selection = "gather/k=2/block=16/staging=3/audit=1".parse().expect("a selection");
    let opening = Workloads { selection: &staged, ..opening };
    let error = (staged.scheme().workload)(&opening).err().expect("refused").to_string();
    assert!(error.contains("leave audit or staging out"), "{error}");
}

/// Where nothing is left out each head is within the bound of dense attention; else nothing is promised.
#[test]
fn nothing_is_promised_of_what_is_left_out() {
    let options = Options { head_steps: 200, max_tokens: 150, long_tokens: 300, seed: 3 };
    let device = device();
    let prove = |text: &str| {
        let selection = selection(text);
        let trial = Trial { device: &device, selection: &selection, options, layers: &[] };
        let findings = by_workload(&trial, &mut |_| ()).expect("proven");
        assert_eq!(findings.violations, Vec::<String>::new());
        (findings.total.bounded, findings.total.head_steps)
    };
    let (bounded, all) = prove("gather");
    assert!(bounded == all && all >= 200, "{bounded} of {all}");
    let (bounded, all) = prove("gather/k=1/block=16/local=1");
    assert!(bounded > 0 && 2 * bounded < all, "{bounded} of {all}");
}
