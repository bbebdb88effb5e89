//! Tokens in 16 bits: those at the front and the most recent ones.

use super::cache::{GEOMETRY, told};
use super::{Input, NO_SHAPE, Problem, Sample, attend_alike, books, device, encode, layouts, settings};
use crate::gtq::cases::element;
use crate::gtq::encode::{turned, turned_parts};
use crate::gtq::encoder::{AppendHandles, Encoder, Places};
use crate::gtq::near::{self, Turned};
use crate::gtq::plan::{Books, Handles, Plan};
use crate::gtq::sample::order;
use crate::gtq::{GtqCache, HEAD_DIMS, Order, Settings, TileLayout};
use crate::kv::{self, Capacity, Chunk, KvCache, New, Opening, Rotated, Selection};
use crate::{Buffer, Stream};
use half::f16;
use kernels_gpu::gtq::write::squares;
use kernels_gpu::gtq::{EncodeShape, Side, SlotLayout};

/// Each number has bytes of its own, and together they are the slot.
#[test]
fn numbers_share_no_bytes() {
    for (head_dim, parted) in HEAD_DIMS.into_iter().flat_map(|dim| [(dim, false), (dim, true)]) {
        let layout = SlotLayout { head_dim, parted };
        let mut slot = vec![0u8; layout.bytes() as usize];
        let mut take = |at: u32, bytes: u32| (at..at + bytes).for_each(|byte| slot[byte as usize] += 1);
        for token in 0..16 {
            for d in 0..head_dim {
                take(layout.key(token, d), 1);
                take(layout.key(token, d) + layout.apart(), 1);
            }
            take(layout.value(token), 2 * head_dim);
            (0..layout.scales()).for_each(|part| take(layout.key_scale(token, part), 4));
            take(layout.value_scale(token), 4);
        }
        assert!(slot.iter().all(|times| *times == 1), "{layout:?}");
        assert_eq!(layout.token_bytes(), 4 * head_dim + if parted { 20 } else { 8 });
    }
}

/// What is kept is the row, a key's coordinates to half of 1/32512 of the largest, a value's to 2^−11 of
/// themselves.
#[test]
fn rows_are_kept_to_16_bits() {
    for layout in layouts() {
        let books = Books::new(layout.head_dim, settings(layout)).expect("books");
        let (dim, order) = (layout.head_dim as usize, order(&books, 1));
        let shape = EncodeShape {
            root: (dim as f64).sqrt() as f32,
            key_units: near::key_units(&books),
            value_unit: (1.0 / books.values.step) as f32,
            ..NO_SHAPE
        };
        let mut slot = vec![0x77u8; layout.slot().bytes() as usize];
        for row in (0..24).filter(|row| ![5, 6].contains(&(row % 12))) {
            let x: Vec<f16> = (0..dim).map(|d| element(row, d)).collect();
            let r = x.iter().map(|x| squares([x.to_f32(), 0.0, 0.0, 0.0])).sum::<f32>().sqrt();
            let of_key = if layout.parted { turned_parts(&x, &order) } else { turned(&x) };
            let of_value = turned(&x);
            for (side, h) in [(Side::Key, &of_key), (Side::Value, &of_value)] {
                let token = row as u32 % 16;
                near::write(&mut slot, layout.slot(), side, token, Some(Turned { h, r }), shape);
                let found = near::restored(&slot, &books, side, token, &order);
                let off = x.iter().zip(&found).map(|(x, y)| (x.to_f64() - y).powi(2)).sum::<f64>().sqrt();
                let most = match side {
                    // Of each part's coordinates.
                    Side::Key => 0.51 * 12.0 / 32512.0 * (dim as f64).sqrt(),
                    Side::Value => 1.01 / 2048.0,
                };
                assert!(off <= f64::from(r) * most, "{layout:?} {row} {side:?}: {off} of {r}");
            }
        }
        // Of one that cannot be stored nothing.
        for side in [Side::Key, Side::Value] {
            near::write(&mut slot, layout.slot(), side, 3, None, shape);
            assert!(near::restored(&slot, &books, side, 3, &order).iter().all(|x| *x == 0.0));
        }
    }
}

/// Windows that hold all, some, the front or the end alone.
#[test]
fn both_paths_attend_alike_with_a_window() {
    let device = device();
    let of = |q_heads, kv_heads, query_tokens, max_tokens| Problem {
        sequences: 1,
        q_heads,
        kv_heads,
        head_dim: 64,
        query_tokens,
        max_tokens,
    };
    let windows = [[16, 32], [0, 16], [16, 0], [16, 1 << 16]];
    for (number, layout) in layouts().enumerate() {
        let all = (layout.key_bits, layout.value_bits) == (3, 3);
        for (i, [sink, recent]) in windows.into_iter().enumerate() {
            if !all && i != number % 4 {
                continue;
            }
            let settings = Settings { sink, recent, ..settings(layout) };
            let mut batches = vec![(of(8, 2, 1, 160), vec![0, 1, 16, 17, 130], Input::Normal)];
            if all {
                batches.push((of(3, 1, 5, 80), vec![80, 3, 0], Input::Wide));
                batches.push((of(4, 1, 1, 1024), vec![1000, 30], Input::Sharp));
                batches.push((of(11, 1, 1, 96), vec![90], Input::Hostile));
            }
            for (problem, lengths, input) in batches {
                let problem = Problem { head_dim: layout.head_dim, ..problem };
                let sample = Sample::new(settings, problem, &lengths, input).expect("a sample");
                attend_alike(&device, &sample, &format!("{layout:?} {sink} {recent} {problem:?} {input:?}"));
            }
        }
    }
}

/// A chunk leaves in the window what its tokens would have left one by one.
#[test]
fn a_chunk_keeps_what_its_tokens_do() {
    for (head_dim, parted) in HEAD_DIMS.into_iter().flat_map(|dim| [(dim, false), (dim, true)]) {
        let layout = TileLayout { head_dim, key_bits: 3, value_bits: 3, parted };
        let window = Settings { sink: 16, recent: 16, ..settings(layout) };
        let books = Books::new(head_dim, window).expect("books");
        let [_, whole, ..] = encode(&books, 1, &[0], 50, true);
        let [_, other, ..] = encode(&books, 1, &[0], 50, false);
        assert!(whole == other);
        // Tokens 0 to 15, and of the ring those of tiles 2 and 3, the last of which has two.
        let slot = layout.slot();
        let bytes: &[u8] = bytemuck::cast_slice(&whole);
        let own = order(&books, 1);
        for (token, of_slot) in
            (0..16).map(|t| (t, 0)).chain((32..48).map(|t| (t, 2))).chain([(48, 1), (49, 1)])
        {
            let from = of_slot * slot.bytes() as usize;
            let found = near::restored(
                &bytes[from..from + slot.bytes() as usize],
                &books,
                Side::Value,
                token as u32 % 16,
                &own,
            );
            let x: Vec<f64> = (0..head_dim as usize).map(|d| element(token + 5, d).to_f64()).collect();
            if x.iter().all(|x| x.is_finite()) {
                let off = x.iter().zip(&found).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
                assert!(off <= x.iter().map(|x| x * x).sum::<f64>() / 4e6, "{layout:?} {token}");
            }
        }
    }
}

/// Of random tokens, the first of which has a key twenty times as long as the others and half of the weight,
/// attention is nearer to what it is of the rows themselves when the front is in the window, and the nearer
/// the more is.
#[test]
fn a_long_first_token_is_worth_its_place() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let (dim, length) = (64usize, 200usize);
    let row = |kind: usize, token: usize, d: usize| {
        let long = if token == 0 && kind == 0 { 20.0 } else { 1.0 };
        f16::from_f32(long * crate::attention::dense::sample::normal(kind as u64, (token * dim + d) as u64))
    };
    let all = |kind| (0..length).flat_map(|t| (0..dim).map(move |d| row(kind, t, d))).collect::<Vec<f16>>();
    let (keys, values) = (all(0), all(1));
    // Queries that see something of the first key, each of a part of its channels.
    let queries: Vec<f16> = (0..8 * dim)
        .map(|i| f16::from_f32(if i % 8 == i / dim { 1.0 } else { 0.3 }) * row(0, 0, i % dim))
        .collect();
    let queries: Vec<f16> = queries.iter().map(|x| f16::from_f32(x.to_f32() / 234.0)).collect();
    let wide = |x: &[f16]| x.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
    let (wide_keys, wide_values) = (wide(&keys), wide(&values));
    let expected: Vec<f64> = wide(&queries)
        .chunks_exact(dim)
        .flat_map(|q| {
            let logit = |k: &[f64]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt();
            let logits: Vec<f64> = wide_keys.chunks_exact(dim).map(logit).collect();
            let (weights, _) = crate::attention::oracle::softmax(&logits);
            let mut output = vec![0.0; dim];
            for (weight, value) in weights.iter().zip(wide_values.chunks_exact(dim)) {
                output.iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
            }
            output
        })
        .collect();
    for blocks in [false, true] {
        let error = |sink: u32, recent: u32| {
            let settings = Settings { sink, recent, blocks, ..Settings::DEFAULT };
            let books = Books::new(dim as u32, settings).expect("books");
            let problem = Problem {
                sequences: 1,
                q_heads: 8,
                kv_heads: 1,
                head_dim: dim as u32,
                query_tokens: length as u32,
                max_tokens: length as u32,
            };
            let halves = |x: &[f16]| Buffer::from_slice(&device, x).expect("a buffer");
            let words = |x: Vec<u32>| Buffer::from_slice(&device, &x).expect("a buffer");
            let (keys, values, asked) = (halves(&keys), halves(&values), halves(&queries));
            let positions = words((0..length as u32).collect());
            let table = words((0..problem.max_blocks()).collect());
            let order = Buffer::from_slice(&device, &order(&books, 1)).expect("a buffer");
            let mut tiles = words(vec![0; (problem.max_blocks() * books.layout.bytes() / 4) as usize]);
            let mut near = words(vec![0; books.window_words(problem)]);
            let (mut lengths, mut problems) = (words(vec![0]), words(vec![u32::MAX; 2]));
            let handles = AppendHandles {
                new_keys: keys.global(),
                new_values: values.global(),
                places: Places {
                    positions: positions.global(),
                    table: table.global(),
                    order: order.global(),
                    lengths: lengths.global_mut(),
                    tiles: tiles.global_mut(),
                    near: near.global_mut(),
                    problems: problems.global_mut(),
                },
            };
            let encoder = Encoder::new(&device, books.clone()).expect("an encoder");
            // SAFETY: buffers of the emulator as the problem wants them.
            unsafe { encoder.run_on(&stream, problem, true, handles) }.expect("encoded");
            let step = Problem { query_tokens: 1, ..problem };
            let mut plan = Plan::new(&device, step, books).expect("a plan");
            let mut output = Buffer::<f32>::zeroed(&device, 8 * dim).expect("a buffer");
            let mut lse = Buffer::<f32>::zeroed(&device, 8).expect("a buffer");
            let handles = Handles {
                queries: asked.global(),
                tiles: tiles.global(),
                near: near.global(),
                table: table.global(),
                order: order.global(),
                lengths: lengths.global(),
                output: output.global_mut(),
                lse: lse.global_mut(),
            };
            // SAFETY: as above.
            unsafe { plan.run_on(&stream, true, handles) }.expect("attended");
            let found = output.to_vec().expect("read");
            let off = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>();
            (off / expected.iter().map(|x| x * x).sum::<f64>()).sqrt()
        };
        let (none, front, both, all) = (error(0, 0), error(16, 0), error(16, 128), error(16, 256));
        assert!(front < 0.7 * none, "{blocks}: {front} of {none}");
        assert!(both < front && all < 0.002, "{blocks}: {both} of {front}; {all}");
    }
}

fn open(text: &str, capacity: Capacity) -> kv::Result<GtqCache> {
    let device = device();
    let selection: Selection = text.parse()?;
    let opening =
        Opening { device: &device, geometry: GEOMETRY, rope: None, capacity, selection: &selection };
    let settings = Settings::of(&selection);
    if !settings.blocks {
        return GtqCache::new(&opening, settings);
    }
    let layers = vec![order(&Books::new(64, settings)?, 2); 2];
    GtqCache::in_order(&opening, settings, &Order { layers })
}

/// A step of all sequences: the outputs of the last layer.
fn step(cache: &mut GtqCache, stream: &Stream) -> Vec<u32> {
    let device = stream.device().clone();
    let positions = cache.held().positions(Chunk::Step);
    let rows = |width: usize, kind: usize| {
        let of = |row: usize| 12 * (positions[row] as usize % 64 + 64 * kind) + 9 + row % 2;
        let all = (0..positions.len()).flat_map(|row| (0..width).map(move |i| element(of(row), i)));
        Buffer::from_slice(&device, &all.collect::<Vec<_>>()).expect("a buffer")
    };
    let (keys, values, queries) = (rows(128, 0), rows(128, 1), rows(384, 2));
    let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
    cache.begin(stream, Chunk::Step).expect("begun");
    let mut output = Buffer::<f32>::zeroed(&device, queries.len()).expect("a buffer");
    for layer in 0..2 {
        let new = Rotated { positions: &positions, keys: &keys, values: &values };
        cache.append(stream, layer, New::Rotated(new)).expect("appended");
        cache.attend(stream, layer, &queries, &mut output).expect("attended");
    }
    cache.commit();
    output.to_vec().expect("read").iter().map(|x| x.to_bits()).collect()
}

/// Prompts, steps and forks, by both paths: a token's row does not depend on how those before it came, and of
/// a chunk that is longer than the window only the last rows see what steps see.
#[test]
fn a_cache_keeps_the_window_through_chunks_and_forks() {
    let stream = Stream::new(&device()).expect("a stream");
    for text in
        ["gtq/sink=16/recent=16", "gtq-blocks/recent=1/sink=0", "gtq/recent=0", "gtq/k=2/v=2/recent=17"]
    {
        let one = Capacity { tokens: 64, sequences: 1 };
        let cache = || open(text, one).expect("a cache");
        let by_steps = told(&mut cache(), &stream, &[1; 60]);
        let last = &by_steps[59 * 384..];
        for chunks in [&[60][..], &[3, 40, 17], &[50, 9, 1]] {
            let own = told(&mut cache(), &stream, chunks);
            assert!(own.ends_with(last), "{text} {chunks:?}");
            let kernels = told(&mut cache().with_kernels(), &stream, chunks);
            assert!(own == kernels, "{text} {chunks:?}: kernels");
        }

        let two = Capacity { tokens: 64, sequences: 2 };
        let mut found = [false, true].map(|kernels| {
            let mut cache = open(text, two).expect("a cache");
            if kernels {
                cache = cache.with_kernels();
            }
            let mut all = told(&mut cache, &stream, &[40]);
            let fork = cache.fork(&stream, 0).expect("forked");
            // Both have the same tokens, the second's next ones are others.
            for _ in 0..9 {
                all.extend(step(&mut cache, &stream));
            }
            let settings = cache.books().settings;
            let of_head = 2 * settings.step_bytes(64, 49);
            assert_eq!(cache.step_bytes(), 2 * 2 * of_head, "{text}");
            let window = 2 * 2 * 2 * settings.window(4).slots * cache.books().layout.slot().bytes();
            let orders = if settings.blocks { 2 * 2 * 64 } else { 0 };
            let codes = 2 * 2 * 2 * 49 * cache.books().layout.token_bytes();
            assert_eq!(cache.bytes(), u64::from(codes + window + orders), "{text}");
            cache.leave(&stream, fork).expect("left");
            all.extend(step(&mut cache, &stream));
            // Another one in its place finds nothing of it.
            let joined = cache.join(&stream).expect("joined");
            assert_eq!(joined, fork);
            all.extend(step(&mut cache, &stream));
            all
        });
        let [own, kernels] = &mut found;
        assert!(own == kernels, "{text}: forks");
    }
}

/// A fork goes on as its source would have.
#[test]
fn a_fork_has_the_window_of_its_source() {
    let stream = Stream::new(&device()).expect("a stream");
    let two = Capacity { tokens: 64, sequences: 2 };
    let mut cache = open("gtq/recent=16", two).expect("a cache");
    told(&mut cache, &stream, &[45]);
    assert_eq!(cache.fork(&stream, 0).expect("forked"), 1);
    let (near, words) = (cache.near(1).to_vec().expect("read"), cache.near(1).len() / 2);
    assert!(near[..words] == near[words..] && near[..words].iter().any(|word| *word != 0));
}

#[test]
fn options_of_the_window_are_told_and_checked() {
    for (text, part) in
        [("gtq/sink=3", "sink is one of 0, 16"), ("gtq-blocks/recent=70000", "from 0 to 65536")]
    {
        assert!(text.parse::<Selection>().expect_err(text).to_string().contains(part), "{text}");
    }
    let bytes = |text: &str, tokens: u64| {
        let selection: Selection = text.parse().expect("a selection");
        (selection.scheme().step_bytes)(&selection, 128, tokens)
    };
    // 3 and 3 bits at head_dim 128 are 100 bytes, 16 bits 520, in parts 532.
    assert_eq!(bytes("gtq", 4096), (100 * (4096 - 16 - 128) + 520 * 144) as f64);
    assert_eq!(bytes("gtq", 4101), (100 * (4096 - 16 - 128) + 520 * 149) as f64);
    assert_eq!(bytes("gtq/sink=0/recent=0", 4101), 410_100.0);
    assert_eq!(bytes("gtq/recent=0", 4101), (100 * 4085 + 520 * 16) as f64);
    assert_eq!(bytes("gtq", 100), 52_000.0);
    assert_eq!(bytes("gtq-blocks", 100), 53_200.0);
    // A window that is larger than the device can hold is refused with the rest.
    assert_eq!(Settings::DEFAULT.window(3).slots, 5);
    assert_eq!(books(64, 3).settings.window(1 << 20), kernels_gpu::attention::Window { sink: 1, slots: 10 });
}
