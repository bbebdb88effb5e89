//! Keys and values in the host's memory: the bits of a cache that has them on the device, and an LRU that is
//! one.

use super::super::staging::trace::{Counts, Lru};
use super::super::staging::{Fetching, StagedCache, Staging, Stepping};
use super::super::{Error, GatherCache};
use super::scheme::given;
use super::*;
use crate::kv::proof::{Options, Trial};
use crate::kv::workload::{AnyInput, Figure, Opening as Workloads, Originals, Workload};
use crate::kv::{
    self, Capacity, Chunk, Geometry, KvCache, New, Opening, Rotated, Scheme, Selection, Traffic,
};
use half::{bf16, f16};
use std::sync::Arc;

/// Steps over a batch that grows: outputs and log-sums are those of all keys and values on the device, by the
/// kernels and by slices, and hits and misses are those of an LRU.
fn check<E: GatherElement>(problem: StepProblem, lengths: &[u32], support: Support, slots: u32, steps: u32) {
    let mut all: Vec<_> = [false, true]
        .map(|slices| {
            let batch = batch::<E>(problem, Input::Normal, lengths, 11);
            Stepping::new(&device(), batch, support, slots, steps, slices).expect("before the first step")
        })
        .into();
    let rows = lengths.len() * problem.kv_heads as usize;
    let slots = all[0].staging.slots() as usize;
    let mut lru: Vec<Lru> = (0..rows).map(|_| Lru::new(slots)).collect();
    let mut misses_of_later = 0;
    for step in 0..steps {
        let mut outputs = Vec::new();
        for stepping in &mut all {
            stepping.step(step).expect("a step");
            let bits = |buffer: &Buffer<f32>| -> Vec<u32> {
                buffer.to_vec().expect("read").iter().map(|x| x.to_bits()).collect()
            };
            let resident = stepping.resident().expect("attended");
            // A sequence without a token has no output that counts.
            let of_rows = |values: &[u32]| -> Vec<u32> {
                let row = values.len() / lengths.len();
                let there = (0..lengths.len()).filter(|s| lengths[*s] > 0);
                there.flat_map(|s| values[s * row..][..row].to_vec()).collect()
            };
            let own = [of_rows(&bits(&stepping.output)), of_rows(&bits(&stepping.lse))];
            assert!(own == resident.map(|values| of_rows(&values)), "step {step}, {support:?}");
            outputs.push(own);
        }
        assert!(outputs[0] == outputs[1], "the CPU's own path");
        let read = |buffer: &Buffer<u32>| buffer.to_vec().expect("read");
        let [kernels, own] = &all[..] else { unreachable!("two") };
        assert_eq!(read(kernels.fetching.table()), read(own.fetching.table()));
        assert_eq!(read(kernels.staging.directory()), read(own.staging.directory()));
        let bytes = |stepping: &Stepping<E>| {
            stepping.home.both().map(|elements| bytemuck::cast_slice::<E, u8>(elements).to_vec())
        };
        assert!(bytes(kernels) == bytes(own), "tokens that went home");
        let tally = kernels.staging.tally().to_vec().expect("read");
        assert_eq!(tally, own.staging.tally().to_vec().expect("read"));
        for (row, wanted) in kernels.far_lists().expect("lists").iter().enumerate() {
            let Counts { hits, misses } = lru[row].step(wanted);
            assert_eq!(tally[4 * row + 2..][..2], [hits, misses], "step {step}, row {row}");
            misses_of_later += if step > 0 { misses } else { 0 };
        }
    }
    // Else nothing was evicted, and nothing shown.
    let far = all[0].far_lists().expect("lists").iter().map(Vec::len).max().unwrap_or(0);
    assert!(misses_of_later > 0 || far == 0 || support.k == 0, "no misses: {support:?}, {slots} slots");
}

#[test]
fn staged_steps_have_the_bits_of_resident_ones() {
    let support = Support { k: 3, block: 16, local: 2 };
    // The least, more, and all that there can be.
    for slots in [4, 5, 9, 1000] {
        check::<f16>(PROBLEM, &[400, 33, 0, 250, 17], support, slots, 20);
    }
    let problem = StepProblem { head_dim: 128, q_heads: 7, kv_heads: 1, max_tokens: 1500, ..PROBLEM };
    check::<bf16>(problem, &[1500, 1151], Support { k: 2, block: 128, local: 1 }, 3, 6);
    // A list and a pool of more than a thread block has threads.
    let problem = StepProblem { q_heads: 2, kv_heads: 1, max_tokens: 6000, ..PROBLEM };
    check::<f16>(problem, &[6000], Support { k: 290, ..support }, 320, 3);
    // Of what is far the first block alone.
    check::<f16>(PROBLEM, &[400, 33], Support { k: 0, ..support }, 1, 3);
    // All is near.
    check::<f16>(PROBLEM, &[100, 31], Support { k: 1, block: 64, local: 50 }, 1, 3);
}

const GEOMETRY: Geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };

fn opened<C>(
    text: &str,
    capacity: impl Into<Capacity>,
    open: impl Fn(&Opening<'_>, Support) -> kv::Result<C>,
) -> kv::Result<C> {
    let (device, selection): (_, Selection) = (device(), text.parse().expect("a selection"));
    let opening = Opening {
        device: &device,
        geometry: GEOMETRY,
        rope: None,
        capacity: capacity.into(),
        selection: &selection,
    };
    open(&opening, Support::of(&selection))
}

fn number(kind: u64, i: usize) -> f16 {
    f16::from_f32(crate::attention::dense::sample::normal(kind, i as u64))
}

/// A chunk in both layers: the bits of the outputs of the sequences that are there. `kinds` says whose
/// numbers a sequence has.
fn chunk(cache: &mut dyn KvCache, chunk: Chunk, kinds: &[u64]) -> Vec<u32> {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let held: Vec<Option<usize>> = cache.held().sequences.to_vec();
    // Of each row its sequence, and the token's place.
    let rows: Vec<(usize, Option<usize>)> = match chunk {
        Chunk::Prompt { sequence, tokens } => {
            (0..tokens).map(|token| (sequence, held[sequence].map(|first| first + token))).collect()
        }
        Chunk::Step => held.iter().copied().enumerate().collect(),
    };
    let positions: Vec<u32> =
        rows.iter().map(|(_, place)| place.map_or(kv::PARKED, |place| place as u32)).collect();
    let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
    let mut bits = Vec::new();
    cache.begin(&stream, chunk).expect("begun");
    for layer in 0..GEOMETRY.layers {
        let values = |width: usize, kind: u64| {
            let row = |(sequence, place): &(usize, Option<usize>)| {
                let kind = 1000 * kinds[*sequence] + 10 * layer as u64 + kind;
                let first = place.unwrap_or(0) * width;
                (first..first + width).map(|i| number(kind, i)).collect::<Vec<_>>()
            };
            Buffer::from_slice(&device, &rows.iter().flat_map(row).collect::<Vec<_>>()).expect("a buffer")
        };
        let (keys, new_values) = (values(GEOMETRY.kv_width(), 1), values(GEOMETRY.kv_width(), 2));
        let new = Rotated { positions: &positions, keys: &keys, values: &new_values };
        cache.append(&stream, layer, New::Rotated(new)).expect("appended");
        let queries = values(GEOMETRY.query_width(), 3);
        let mut output = Buffer::<f32>::zeroed(&device, queries.len()).expect("a buffer");
        cache.attend(&stream, layer, &queries, &mut output).expect("attended");
        let output = output.to_vec().expect("read");
        for ((_, place), row) in rows.iter().zip(output.chunks(GEOMETRY.query_width())) {
            if place.is_some() {
                bits.extend(row.iter().map(|x| x.to_bits()));
            }
        }
    }
    cache.commit();
    bits
}

/// Prompts and long generation with a pool of the least size, by kernels and by slices: the bits of a cache
/// that has all on the device. Bytes are what is held, and the bus has carried what the counters say.
#[test]
fn a_staged_cache_has_the_bits_of_a_resident_one() {
    let text = "gather/k=2/block=16/local=2/staging=3";
    let capacity = 330;
    let staged = |kernels: bool| {
        let open = |opening: &Opening<'_>, support| StagedCache::new(opening, support, 3);
        let cache = opened(text, capacity, open).expect("a cache");
        if kernels { cache.with_kernels() } else { cache }
    };
    let mut resident = opened(text, capacity, GatherCache::new).expect("a cache");
    let (mut own, mut kernels) = (staged(false), staged(true));
    let stream = Stream::new(&device()).expect("a stream");
    let mut chunks = vec![100, 40, 1, 1, 20, 1, 7];
    chunks.extend([1; 130]);
    for tokens in chunks {
        let of = Chunk::of_one(tokens);
        let expected = chunk(&mut resident, of, &[1]);
        let before = own.tokens();
        assert!(chunk(&mut own, of, &[1]) == expected, "{tokens} tokens after {before}, slices");
        // The emulator takes its time.
        if before < 190 {
            assert!(chunk(&mut kernels, of, &[1]) == expected, "{tokens} tokens after {before}, kernels");
            assert_eq!(own.traffic(&stream).expect("read"), kernels.traffic(&stream).expect("read"));
        }
        assert_eq!(own.report().expect("a report"), resident.report().expect("a report"));
        assert_eq!(own.step_bytes(), resident.step_bytes());
        assert_eq!(own.host_bytes(), (own.tokens() * 1024) as u64);
    }
    let traffic = own.traffic(&stream).expect("read").expect("counted");
    // Keys and values of a tile of 64 channels are 2 KiB each; a step wants three far blocks, some of which
    // stay.
    assert_eq!(traffic.read_bytes, traffic.read * 2048);
    let steps = 133;
    assert_eq!(traffic.found + traffic.read, 2 * 2 * 3 * steps * 2);
    assert!(traffic.read > 2 * 2 * 3 * 2 && traffic.found > 2 * 2 * steps * 2, "{traffic:?}");
    // Staging: two near and three far blocks of 16 tokens, directories of 21 blocks and 3 slots; a layer of
    // 330 tokens for prompts; bounds.
    let (pool, directory) = (2 * 2 * 5 * 16 * 256, 2 * 2 * 4 * (21 + 2 * 3));
    let (prompt, bounds) = (21 * 16 * 512, 2 * 2 * own.tokens().div_ceil(16) * (2 * 64 + 4));
    assert_eq!(own.bytes(), (pool + directory + prompt + bounds) as u64);
    assert!(own.begin(&stream, Chunk::of_one(33)).expect_err("full").to_string().contains("do not fit"));
}

/// Sequences join, fork, and leave; another takes the place of one that left.
#[test]
fn staged_sequences_come_and_go() {
    let capacity = Capacity { tokens: 200, sequences: 3 };
    let text = "gather/k=1/block=32/local=1/staging=2";
    let open = |opening: &Opening<'_>, support| StagedCache::new(opening, support, 2);
    for kernels in [false, true] {
        let staged = opened(text, capacity, open).expect("a cache");
        let mut staged = if kernels { staged.with_kernels() } else { staged };
        let mut resident = opened(text, capacity, GatherCache::new).expect("a cache");
        let stream = Stream::new(&device()).expect("a stream");
        let mut kinds = [1, 0, 0];
        let same = |of: Chunk, kinds: &[u64], staged: &mut StagedCache, resident: &mut GatherCache| {
            assert!(chunk(staged, of, kinds) == chunk(resident, of, kinds), "{of:?} {:?}", staged.held());
        };
        same(Chunk::Prompt { sequence: 0, tokens: 101 }, &kinds, &mut staged, &mut resident);
        (0..2).for_each(|_| same(Chunk::Step, &kinds, &mut staged, &mut resident));
        // In the middle of a block of 16 tokens.
        let forks = [staged.fork(&stream, 0).expect("forked"), resident.fork(&stream, 0).expect("forked")];
        assert_eq!(forks, [1, 1]);
        kinds[1] = 2;
        (0..12).for_each(|_| same(Chunk::Step, &kinds, &mut staged, &mut resident));
        assert_eq!(
            [staged.join(&stream), resident.join(&stream)].map(|joined| joined.expect("room")),
            [2, 2]
        );
        kinds[2] = 3;
        same(Chunk::Prompt { sequence: 2, tokens: 150 }, &kinds, &mut staged, &mut resident);
        (0..3).for_each(|_| same(Chunk::Step, &kinds, &mut staged, &mut resident));
        staged.leave(&stream, 0).expect("there");
        resident.leave(&stream, 0).expect("there");
        (0..2).for_each(|_| same(Chunk::Step, &kinds, &mut staged, &mut resident));
        assert_eq!(
            [staged.join(&stream), resident.join(&stream)].map(|joined| joined.expect("room")),
            [0, 0]
        );
        kinds[0] = 4;
        same(Chunk::Prompt { sequence: 0, tokens: 90 }, &kinds, &mut staged, &mut resident);
        same(Chunk::Prompt { sequence: 0, tokens: 43 }, &kinds, &mut staged, &mut resident);
        (0..3).for_each(|_| same(Chunk::Step, &kinds, &mut staged, &mut resident));
        assert!(staged.leave(&stream, 7).is_err());
    }
}

/// A step that was captured goes on by replays, evictions included.
#[test]
fn a_captured_step_fetches() {
    let text = "gather/k=1/block=16/local=1/staging=2";
    let (device, geometry) = (device(), GEOMETRY);
    let stream = Stream::new(&device).expect("a stream");
    let open = |opening: &Opening<'_>, support| StagedCache::new(opening, support, 2);
    let (mut staged, mut resident) =
        (opened(text, 160, open).expect("a cache"), opened(text, 160, GatherCache::new).expect("a cache"));
    for cache in [&mut staged as &mut dyn KvCache, &mut resident] {
        chunk(cache, Chunk::Prompt { sequence: 0, tokens: 100 }, &[1]);
    }
    let mut positions = Buffer::<u32>::zeroed(&device, 1).expect("a buffer");
    let rows = |width: usize| Buffer::<f16>::zeroed(&device, width).expect("a buffer");
    let (mut keys, mut values) = (rows(geometry.kv_width()), rows(geometry.kv_width()));
    let mut queries = rows(geometry.query_width());
    let mut outputs = [0; 2].map(|_| Buffer::<f32>::zeroed(&device, geometry.query_width()).expect("made"));
    let caches = [&mut staged as &mut dyn KvCache, &mut resident];
    let mut graphs = Vec::new();
    let mut begun = Vec::new();
    for (cache, output) in caches.into_iter().zip(&mut outputs) {
        cache.begin(&stream, Chunk::Step).expect("begun");
        let (graph, ()) = stream
            .capture(|stream| {
                let new = Rotated { positions: &positions, keys: &keys, values: &values };
                cache.append(stream, 0, New::Rotated(new)).expect("appended");
                cache.attend(stream, 0, &queries, output).expect("attended");
                Ok(())
            })
            .expect("captured");
        graphs.push(graph.instantiate().expect("a graph"));
        begun.push(cache);
    }
    for step in 0..50 {
        positions.write(0, &[100 + step]).expect("written");
        let fresh = |kind: u64, width: usize| -> Vec<f16> {
            (0..width).map(|i| number(kind, step as usize * width + i)).collect()
        };
        keys.write(0, &fresh(21, geometry.kv_width())).expect("written");
        values.write(0, &fresh(22, geometry.kv_width())).expect("written");
        queries.write(0, &fresh(23, geometry.query_width())).expect("written");
        for (graph, cache) in graphs.iter().zip(&mut begun) {
            if step > 0 {
                cache.begin(&stream, Chunk::Step).expect("begun");
            }
            // SAFETY: all that was captured is still there.
            unsafe { graph.launch(&stream) }.expect("run");
            cache.commit();
        }
        let [own, expected] = outputs.each_ref().map(|output| output.to_vec().expect("read"));
        assert!(own.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits())), "step {step}");
    }
    drop(begun);
    let Traffic { found, read, .. } = staged.traffic(&stream).expect("read").expect("counted");
    assert!(found > 0 && read > 2 * 2 * 2, "{found} tiles found, {read} read");
}

#[test]
fn what_cannot_be_staged_is_said() {
    let open = |slots| move |opening: &Opening<'_>, support| StagedCache::new(opening, support, slots);
    let refused =
        |text: &str, slots: u32, tokens: usize| opened(text, tokens, open(slots)).expect_err("refused");
    let error = refused("gather/k=5/block=16/local=2", 5, 400);
    let words = "a staging pool of 5 blocks does not do: a step uses up to 6 besides the local ones, so give it \
                 6 to 65536";
    assert!(error.to_string().contains(words) && error.is_refusal(), "{error}");
    // No more than the sequences can have.
    assert!(opened("gather/k=5/block=16/local=2", 80, open(3)).is_ok());
    assert!(refused("gather/k=5/block=16/local=2", 2, 80).to_string().contains("give it 3 to"));
    assert!(matches!(
        Staging::<f16>::new(&device(), PROBLEM, Support { k: 1, block: 16, local: 1 }, 65537),
        Err(Error::Staging { slots: 65537, least: 2, most: 65536 })
    ));
    let parse = |text: &str| text.parse::<Selection>().expect_err("refused").to_string();
    assert!(parse("gather/staging=0").contains("staging is a whole number from 1 to 65536"));
    // More than any host has.
    let error = refused("gather/staging=33", 33, 1 << 31);
    assert!(error.is_refusal(), "{error}");
    // Steps of another problem.
    let support = Support { k: 1, block: 16, local: 1 };
    let mut fetching = Fetching::new(&device(), PROBLEM, support, 2).expect("a plan");
    let mut other = Staging::<f16>::new(&device(), PROBLEM, support, 3).expect("a pool");
    let plan = Plan::<f16>::new(&device(), PROBLEM, support).expect("a plan");
    let lengths = Buffer::<u32>::zeroed(&device(), 1).expect("a buffer");
    let stream = Stream::new(&device()).expect("a stream");
    let lengths = lengths.global();
    // SAFETY: refused.
    let error = unsafe { fetching.place_on(&stream, true, &mut other, plan.chosen(), lengths) };
    assert!(error.expect_err("refused").to_string().contains("the staging pool's directory has"));
}

/// A workload asks queries that follow each other, with the bits of one that has all on the device; what it
/// says of the bus is what an LRU of the lists makes of them.
#[test]
fn a_workload_fetches_what_its_trace_wants() {
    let batch = batch::<f16>(PROBLEM, Input::Normal, &[400, 33, 250], 7);
    let mut input = given(&batch);
    for step in 1..4 {
        let mut queries = batch.queries.clone();
        queries.rotate_left(step * 400 + 3);
        input.queries.push(Buffer::from_slice(&device(), &queries).expect("a buffer"));
    }
    let input = AnyInput::F16(Arc::new(input));
    let open = |text: &str| {
        let selection: Selection = text.parse().expect("a selection");
        let opening = Workloads {
            input: input.clone(),
            selection: &selection,
            originals: Originals::Device,
            layer: None,
        };
        (selection.scheme().workload)(&opening).expect("a workload")
    };
    let support = "gather/k=2/block=16/local=1";
    let (resident, least, all) =
        (open(support), open(&format!("{support}/staging=3")), open(&format!("{support}/staging=100")));
    let expected = resident.outcome().expect("read");
    let fact = |workload: &dyn Workload, name: &str| {
        let facts = workload.facts().expect("facts");
        facts.into_iter().find(|fact| fact.name == name).expect("there").value
    };
    let bytes = |workload: &dyn Workload, name: &str| match fact(workload, name) {
        Figure::Bytes(bytes) => bytes,
        other => panic!("{other:?}"),
    };
    let count = |workload: &dyn Workload, name: &str| match fact(workload, name) {
        Figure::Count(count) => count,
        other => panic!("{other:?}"),
    };
    for workload in [&least, &all] {
        let workload = &**workload;
        assert_eq!(workload.outcome().expect("read"), expected);
        assert_eq!(workload.stages(), ["select", "fetch", "attend"]);
        assert_eq!((workload.period(), workload.read_bytes()), (4, resident.read_bytes()));
        // Two KV heads; a sink and two distant blocks of two sequences, two blocks of one with three.
        let far = f64::from(2 * (3 + 3 + 2));
        let (found, fetched) = (count(workload, "blocks found"), count(workload, "blocks fetched"));
        assert_eq!(found + fetched, far);
        assert_eq!(bytes(workload, "from the host"), (fetched * 4096.0) as u64);
        assert_eq!(bytes(workload, "from the host, first step"), far as u64 * 4096);
    }
    assert!(count(&*least, "blocks fetched") > 0.0);
    assert_eq!(count(&*all, "blocks fetched"), 0.0);
    // The pool has 44 blocks in use and three of nobody.
    assert_eq!(least.memory().host, 2 * 2 * (44 + 3) * 16 * 2 * 64);
    let Some(Scheme { proof, .. }) = crate::schemes().find(|scheme| scheme.name == "gather") else {
        panic!("registered")
    };
    let selection = format!("{support}/staging=3").parse().expect("a selection");
    let options = Options { head_steps: 100, max_tokens: 150, long_tokens: 300, seed: 3 };
    let trial = Trial { device: &device(), selection: &selection, options, layers: &[] };
    let findings = proof(&trial, &mut |_| ()).expect("proven");
    assert!(findings.violations.is_empty() && findings.total.bounded > 0, "{:?}", findings.violations);
}
