//! Steps over codes: what is kept has the bits of `int8-int4`, whoever computes it.

use super::super::{TiledCache, TiledPlan};
use super::scheme::{GEOMETRY, chunk, given};
use super::*;
use crate::attention::BLOCK_TOKENS;
use crate::certified::{CertifiedCache, Policy};
use crate::kv::proof::{Options, Trial, by_workload};
use crate::kv::workload::{AnyInput, Opening as Workloads, Originals};
use crate::kv::{Capacity, Chunk, Geometry, KvCache, New, Opening, Rotated, Selection};
use half::f16;
use std::sync::Arc;

fn cache(geometry: Geometry, capacity: Capacity, text: &str, kernels: bool) -> TiledCache {
    let (device, selection): (_, Selection) = (device(), text.parse().expect("a selection"));
    let opening = Opening { device: &device, geometry, rope: None, capacity, selection: &selection };
    let cache = TiledCache::new(&opening, Support::of(&selection)).expect("a cache");
    if kernels { cache.with_kernels() } else { cache }
}

const NARROW: &str = "gather/tiles=int8-int4/k=1/block=16/local=1";

#[test]
fn what_there_is_for_originals_alone_is_refused() {
    let refused = |text: &str| text.parse::<Selection>().expect_err("refused").to_string();
    for option in ["staging=4", "audit=0.5", "score=mean", "list=query", "ranks=one", "dense=1"] {
        let name = option.split('=').next().expect("a name");
        let expected = format!("{name} does not go with tiles=int8-int4; leave {name} out, or tiles");
        assert!(refused(&format!("gather/tiles=int8-int4/{option}")).contains(&expected), "{option}");
    }
    for option in ["staging=4", "audit=0.5", "score=mean", "list=query", "ranks=one", "dense=1"] {
        let name = option.split('=').next().expect("a name");
        assert!(refused(&format!("gather:certified/tiles=int8-int4/{option}")).contains(name), "{option}");
    }
    assert!(refused("gather:quest/tiles=int8-int4").contains("add dense=0"));
    assert!(refused("gather/tiles=int8-int4/skip=0.1").contains("gather:certified"));
    assert!("gather:quest/tiles=int8-int4/dense=0".parse::<Selection>().is_ok());
    assert!(refused("gather/tiles=int8").contains("tiles is one of f16, int8-int4"));
    let bytes = |text: &str| {
        let selection: Selection = text.parse().expect("a selection");
        (selection.scheme().step_bytes)(&selection, 128, 100_000)
    };
    // Of a token that is kept originals have 512 bytes, and a tile 256.
    let kept = f64::from(Support::ASSURED.kept(100_000));
    let tile = bytes("int8-int4") / 100_000.0;
    assert_eq!(bytes("gather") - bytes("gather/tiles=int8-int4"), kept * (512.0 - tile));
}

/// Prompts and steps in turn, over edges of blocks: kernels and the CPU's own path have the same bits.
#[test]
fn a_cache_is_the_same_by_kernels_and_by_slices() {
    for text in [NARROW, "gather/tiles=int8-int4/k=1/block=32/local=2/bounds=16"] {
        let [mut own, mut kernels] = [false, true].map(|kernels| cache(GEOMETRY, 160.into(), text, kernels));
        for tokens in [40, 1, 1, 40, 1, 1, 1, 42, 1, 1, 1] {
            let before = own.tokens();
            let expected = chunk(&mut own, tokens);
            assert!(chunk(&mut kernels, tokens) == expected, "{text}: {tokens} tokens after {before}");
        }
    }
}

/// Where nothing is left out a step has the bits of `int8-int4`, and prompts have them anyway.
#[test]
fn all_of_it_is_what_int8_int4_has() {
    let mut tiled = cache(GEOMETRY, 160.into(), "gather/tiles=int8-int4/block=16/k=99", false);
    let mut all = CertifiedCache::new(&device(), GEOMETRY, 160, Policy::BARE).expect("a cache");
    for tokens in [40, 1, 1, 60, 1, 1] {
        assert!(chunk(&mut tiled, tokens) == chunk(&mut all, tokens), "{tokens} tokens");
    }
    let report = tiled.report().expect("a report");
    assert!(report.heads.len() == 8 && report.heads.iter().all(|head| head.skipped == 0));
    // Bounds of seven blocks in 8 bits beside it.
    assert_eq!(tiled.bytes(), all.bytes() + 7 * 2 * 2 * (2 * 64 + 4));
}

/// A text of one KV head: rows of tokens as they are asked for.
struct Text {
    geometry: Geometry,
    kind: u64,
}

impl Text {
    /// Appends these tokens of the text, and attends with the query of the last one: the bits.
    fn add(&self, cache: &mut impl KvCache, tokens: &[usize]) -> Vec<u32> {
        let device = device();
        let stream = Stream::new(&device).expect("a stream");
        let first = cache.tokens() as u32;
        let rows = |width: usize, kind: u64| {
            let number = |token: &usize, i: usize| {
                crate::attention::dense::sample::normal(self.kind + kind, (token * width + i) as u64)
            };
            let rows: Vec<f16> =
                tokens.iter().flat_map(|t| (0..width).map(move |i| f16::from_f32(number(t, i)))).collect();
            Buffer::from_slice(&device, &rows).expect("a buffer")
        };
        let positions: Vec<u32> = (first..first + tokens.len() as u32).collect();
        let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
        let (keys, values) = (rows(self.geometry.kv_width(), 1), rows(self.geometry.kv_width(), 2));
        cache.begin(&stream, Chunk::of_one(tokens.len())).expect("begun");
        let new = Rotated { positions: &positions, keys: &keys, values: &values };
        cache.append(&stream, 0, New::Rotated(new)).expect("appended");
        let queries = rows(self.geometry.query_width(), 3);
        let mut output = Buffer::<f32>::zeroed(&device, queries.len()).expect("a buffer");
        cache.attend(&stream, 0, &queries, &mut output).expect("attended");
        cache.commit();
        output.to_vec().expect("read").iter().map(|x| x.to_bits()).collect()
    }
}

/// A step has the bits of `int8-int4` over the tokens of the blocks that it chose, and over no others.
#[test]
fn a_step_is_that_of_the_chosen_tokens_alone() {
    let geometry = Geometry { layers: 1, q_heads: 4, kv_heads: 1, head_dim: 64 };
    let text = Text { geometry, kind: 40 };
    let (block, most) = (16, 4);
    let mut tiled = cache(geometry, 400.into(), "gather/tiles=int8-int4/block=16/k=2/local=1", false);
    let mut token = 150;
    text.add(&mut tiled, &(0..token).collect::<Vec<_>>());
    let mut lists = Vec::new();
    for _ in 0..40 {
        let found = text.add(&mut tiled, &[token]);
        token += 1;
        let chosen = tiled.choice(0).0.select().chosen();
        let count = chosen.counts.to_vec().expect("read")[0] as usize;
        let list = chosen.list.to_vec().expect("read")[..count].to_vec();
        assert_eq!(count, most, "something is left out");
        let kept: Vec<usize> =
            list.iter().flat_map(|b| *b as usize * block..((*b as usize + 1) * block).min(token)).collect();
        let mut alone =
            CertifiedCache::new(&device(), geometry, most * block, Policy::BARE).expect("a cache");
        let (last, before) = kept.split_last().expect("tokens");
        text.add(&mut alone, before);
        assert!(text.add(&mut alone, &[*last]) == found, "{token} tokens, blocks {list:?}");
        lists.push(list[1..3].to_vec());
    }
    lists.dedup();
    assert!(lists.len() > 2, "queries choose: {lists:?}");
}

/// Bounds and lists of several KV heads are those of the same keys in a pool, by prompts that begin in the
/// middle of a block and by steps.
#[test]
fn blocks_are_chosen_by_the_original_keys() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let geometry = Geometry { layers: 1, ..GEOMETRY };
    for (text, kernels) in
        [(NARROW, false), (NARROW, true), ("gather/tiles=int8-int4/k=1/local=1/block=32/bounds=16", false)]
    {
        let selection: Selection = text.parse().expect("a selection");
        let support = Support::of(&selection);
        let mut tiled = cache(geometry, 160.into(), text, kernels);
        let problem = tiled.choice(0).0.select().problem();
        let score = Ranking::fitting::<f16>(&selection, problem).score;
        let mut bounds = Bounds::<f16>::scored(&device, problem, support, score).expect("bounds");
        let ranking = Ranking { score, list: List::KvHead };
        let mut plan = Plan::<f16>::ranked(&device, problem, support, ranking).expect("a plan");
        let table = Buffer::from_slice(&device, &(0..10).collect::<Vec<u32>>()).expect("a table");
        let number =
            |kind: u64, i: usize| f16::from_f32(crate::attention::dense::sample::normal(7 + kind, i as u64));
        // Keys as a pool has them, [blocks, kv_heads, 16, head_dim].
        let (heads, dim) = (geometry.kv_heads, geometry.head_dim);
        let mut keys = vec![f16::ZERO; 160 * heads * dim];
        for (token, head, channel) in
            (0..160).flat_map(|t| (0..heads).flat_map(move |h| (0..dim).map(move |c| (t, h, c))))
        {
            let to = ((token / 16 * heads + head) * 16 + token % 16) * dim + channel;
            keys[to] = number(1, (token * heads + head) * dim + channel);
        }
        let keys = Buffer::from_slice(&device, &keys).expect("keys");
        let mut length = 0;
        for tokens in [41, 1, 1, 30, 1, 1, 45, 1, 1, 1] {
            let chunk = if tokens > 1 { Chunk::Prompt { sequence: 0, tokens } } else { Chunk::Step };
            append(&mut tiled, chunk, &[(7, length)], tokens);
            let first = Buffer::from_slice(&device, &[length as u32]).expect("a position");
            length += tokens;
            let lengths = Buffer::from_slice(&device, &[length as u32]).expect("a length");
            let (table, lengths) = (table.global(), lengths.global());
            let handles = FoldHandles { keys: keys.global(), table, positions: first.global(), lengths };
            // SAFETY: memory of the CPU, of these lengths.
            unsafe { bounds.fold_on(&stream, (0, tokens as u32), true, handles) }.expect("folded");
            let (found, of_cache) = tiled.choice(0);
            assert_eq!(of_cache.words().to_vec().expect("read"), bounds.words().to_vec().expect("read"));
            if tokens > 1 {
                continue;
            }
            let width = geometry.query_width();
            let queries: Vec<f16> = ((length - 1) * width..length * width).map(|i| number(3, i)).collect();
            let queries = Buffer::from_slice(&device, &queries).expect("queries");
            let mut output = Buffer::<f32>::zeroed(&device, width).expect("an output");
            let mut lse = Buffer::<f32>::zeroed(&device, geometry.q_heads).expect("log-sums");
            let handles = Handles {
                queries: queries.global(),
                keys: keys.global(),
                values: keys.global(),
                bounds: bounds.words().global(),
                table,
                lengths,
                output: output.global_mut(),
                lse: lse.global_mut(),
            };
            // SAFETY: as above.
            unsafe { plan.select_on(&stream, true, &handles) }.expect("chosen");
            let [found, expected] = [found.select(), &plan].map(|plan| {
                let chosen = plan.chosen();
                (chosen.list.to_vec().expect("read"), chosen.kept.to_vec().expect("read"))
            });
            assert_eq!(found, expected, "{text}, {length} tokens");
        }
    }
}

/// Sequences of different lengths, of which one is a fork of another and one begins later: each as if it were
/// alone.
#[test]
fn sequences_are_as_if_each_were_alone() {
    let geometry = Geometry { layers: 1, ..GEOMETRY };
    let stream = Stream::new(&device()).expect("a stream");
    let capacity = Capacity { tokens: 160, sequences: 3 };
    let prompt = |cache: &mut TiledCache, sequence: usize, kind: u64, tokens: usize| {
        append(cache, Chunk::Prompt { sequence, tokens }, &[(kind, 0)], tokens);
    };
    let mut together = cache(geometry, capacity, NARROW, false);
    prompt(&mut together, 0, 7, 100);
    assert_eq!(together.fork(&stream, 0).expect("a fork"), 1);
    assert_eq!(together.join(&stream).expect("a sequence"), 2);
    prompt(&mut together, 2, 50, 33);
    let mut own = [(7, 100), (7, 100), (50, 33)].map(|(kind, tokens)| {
        let mut alone = cache(geometry, Capacity { tokens: 160, sequences: 1 }, NARROW, false);
        prompt(&mut alone, 0, kind, tokens);
        alone
    });
    let mut lengths = [100, 100, 33];
    // The fork goes on with a text of its own.
    for step in 0..20 {
        let rows = [(7, lengths[0]), (900, lengths[1]), (50, lengths[2])];
        let found = append(&mut together, Chunk::Step, &rows, 1);
        let expected: Vec<u32> =
            own.iter_mut().zip(rows).flat_map(|(cache, row)| append(cache, Chunk::Step, &[row], 1)).collect();
        assert!(found == expected, "step {step}");
        lengths.iter_mut().for_each(|length| *length += 1);
    }
    together.leave(&stream, 1).expect("left");
    assert_eq!(together.report().expect("a report").heads.len(), 2 * geometry.q_heads);
}

/// Appends rows of texts, each from a token on, and attends: the bits.
fn append(cache: &mut TiledCache, chunk: Chunk, rows: &[(u64, usize)], tokens: usize) -> Vec<u32> {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let geometry = cache.geometry();
    let of = |width: usize, kind: u64| {
        let rows = rows.iter().flat_map(|(text, first)| {
            let all = *first * width..(*first + tokens) * width;
            all.map(move |i| f16::from_f32(crate::attention::dense::sample::normal(text + kind, i as u64)))
        });
        Buffer::from_slice(&device, &rows.collect::<Vec<_>>()).expect("a buffer")
    };
    let positions: Vec<u32> =
        rows.iter().flat_map(|(_, first)| *first as u32..(*first + tokens) as u32).collect();
    let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
    let (keys, values) = (of(geometry.kv_width(), 1), of(geometry.kv_width(), 2));
    cache.begin(&stream, chunk).expect("begun");
    cache
        .append(&stream, 0, New::Rotated(Rotated { positions: &positions, keys: &keys, values: &values }))
        .expect("appended");
    let queries = of(geometry.query_width(), 3);
    let mut output = Buffer::<f32>::zeroed(&device, queries.len()).expect("a buffer");
    cache.attend(&stream, 0, &queries, &mut output).expect("attended");
    cache.commit();
    output.to_vec().expect("read").iter().map(|x| x.to_bits()).collect()
}

/// A captured step has the bits of one that is not: it launches the kernels, and waits for nothing.
#[test]
fn a_step_can_be_captured() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let geometry = Geometry { layers: 1, ..GEOMETRY };
    let [mut captured, mut plain] =
        [(); 2].map(|()| cache(geometry, Capacity { tokens: 160, sequences: 1 }, NARROW, false));
    for cache in [&mut captured, &mut plain] {
        append(cache, Chunk::of_one(70), &[(7, 0)], 70);
    }
    let rows = |width: usize, kind: u64, token: usize| -> Vec<f16> {
        (token * width..(token + 1) * width)
            .map(|i| f16::from_f32(crate::attention::dense::sample::normal(7 + kind, i as u64)))
            .collect()
    };
    let mut buffers = [(geometry.kv_width(), 1), (geometry.kv_width(), 2), (geometry.query_width(), 3)]
        .map(|(width, _)| Buffer::<f16>::zeroed(&device, width).expect("a buffer"));
    let mut positions = Buffer::<u32>::zeroed(&device, 1).expect("a buffer");
    let mut output = Buffer::<f32>::zeroed(&device, geometry.query_width()).expect("a buffer");
    captured.begin(&stream, Chunk::Step).expect("begun");
    let (graph, ()) = stream
        .capture(|stream| {
            let [keys, values, queries] = &buffers;
            let new = Rotated { positions: &positions, keys, values };
            captured.append(stream, 0, New::Rotated(new)).expect("appended");
            captured.attend(stream, 0, queries, &mut output).expect("attended");
            Ok::<_, crate::Error>(())
        })
        .expect("captured");
    let graph = graph.instantiate().expect("a graph");
    captured.commit();
    for token in 70..90 {
        for (buffer, (width, kind)) in buffers.iter_mut().zip([
            (geometry.kv_width(), 1),
            (geometry.kv_width(), 2),
            (geometry.query_width(), 3),
        ]) {
            buffer.write(0, &rows(width, kind, token)).expect("written");
        }
        positions.write(0, &[token as u32]).expect("written");
        // SAFETY: everything that was captured is there.
        unsafe { graph.launch(&stream) }.expect("launched");
        let found: Vec<u32> = output.to_vec().expect("read").iter().map(|x| x.to_bits()).collect();
        assert!(found == append(&mut plain, Chunk::Step, &[(7, token)], 1), "token {token}");
    }
}

/// A workload does a batch of different lengths in one go; of what is kept each head is within its bound.
#[test]
fn a_workload_keeps_its_word() {
    let batch = batch::<f16>(PROBLEM, Input::Normal, &[400, 33, 250], 7);
    let selection: Selection = "gather/tiles=int8-int4/k=2/block=16/local=1".parse().expect("a selection");
    let input = AnyInput::F16(Arc::new(given(&batch)));
    let opening = Workloads { input, selection: &selection, originals: Originals::Device, layer: None };
    let mut workload = (selection.scheme().workload)(&opening).expect("a workload");
    assert_eq!(workload.stages(), TiledPlan::<f16>::STAGES);
    let outcome = workload.outcome().expect("read");
    let skipped: Vec<u32> = outcome.heads.iter().step_by(8).map(|head| head.skipped).collect();
    assert_eq!(skipped, [25 * 16 - 64, 0, 250 - 58]);
    // Bounds of 23 and of 14 distant blocks; tiles of 4, 2 and 3, and tokens of 0, 1 and 10.
    let tile = crate::certified::TileLayout::new(64, crate::certified::Layout::Compact).bytes as u64;
    let (bounds, tokens) = ((23 + 14) * (2 * 64 + 4) * 2, (4 + 2 + 3) * 2 * tile + 11 * 4 * 64 * 2);
    assert_eq!(workload.read_bytes(), bounds + tokens);
    let stream = Stream::new(&device()).expect("a stream");
    workload.enqueue(&stream, 0, 2).expect("again");
    assert_eq!(workload.outcome().expect("read"), outcome);

    let options = Options { head_steps: 200, max_tokens: 150, long_tokens: 300, seed: 3 };
    let device = device();
    let prove = |text: &str| {
        let selection: Selection = text.parse().expect("a selection");
        let trial = Trial { device: &device, selection: &selection, options, layers: &[] };
        let findings = by_workload(&trial, &mut |_| ()).expect("proven");
        assert_eq!(findings.violations, Vec::<String>::new());
        (findings.total.bounded, findings.total.head_steps)
    };
    let (bounded, all) = prove("gather/tiles=int8-int4");
    assert!(bounded == all && all >= 200, "{bounded} of {all}");
    let (bounded, all) = prove(NARROW);
    assert!(bounded > 0 && 2 * bounded < all, "{bounded} of {all}");
    const { assert!(BLOCK_TOKENS == 16) };
}
