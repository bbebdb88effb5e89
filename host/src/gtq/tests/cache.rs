//! Caches: chunks of any length, either path, rotated by themselves or not.

use super::{device, order};
use crate::attention::rope::{Pairing, frequencies};
use crate::gtq::cases::element;
use crate::gtq::plan::Books;
use crate::gtq::{Error, GtqCache, Order, Settings};
use crate::kv::{self, Capacity, Chunk, Geometry, KvCache, New, Opening, Raw, Rotated, Selection};
use crate::{Buffer, Device, Stream};
use half::f16;

pub(super) const GEOMETRY: Geometry = Geometry { layers: 2, q_heads: 6, kv_heads: 2, head_dim: 64 };

fn open(device: &Device, text: &str, geometry: Geometry) -> kv::Result<GtqCache> {
    let selection: Selection = text.parse()?;
    let capacity = Capacity { tokens: 64, sequences: 1 };
    let opening = Opening { device, geometry, rope: None, capacity, selection: &selection };
    let settings = Settings::of(&selection);
    if !settings.blocks {
        return GtqCache::new(&opening, settings);
    }
    let books = Books::new(geometry.head_dim as u32, settings)?;
    let layers = vec![order(&books, geometry.kv_heads as u32); geometry.layers];
    GtqCache::in_order(&opening, settings, &Order { layers })
}

/// Appends rows of `element` and attends, chunk by chunk: outputs of all tokens.
pub(super) fn told(cache: &mut GtqCache, stream: &Stream, chunks: &[usize]) -> Vec<u32> {
    let device = stream.device().clone();
    let mut told = Vec::new();
    for &count in chunks {
        let first = cache.tokens();
        let rows = |width: usize, kind: usize| {
            let row = move |token: usize, i: usize| element(12 * (token + 64 * kind) + 9, i);
            let all = (first..first + count).flat_map(|token| (0..width).map(move |i| row(token, i)));
            Buffer::from_slice(&device, &all.collect::<Vec<_>>()).expect("a buffer")
        };
        let positions = cache.held().positions(Chunk::of_one(count));
        let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
        cache.begin(stream, Chunk::of_one(count)).expect("begun");
        let (keys, values, queries) = (rows(128, 0), rows(128, 1), rows(384, 2));
        for layer in 0..2 {
            let mut output = Buffer::<f32>::zeroed(&device, count * 384).expect("a buffer");
            let new = Rotated { positions: &positions, keys: &keys, values: &values };
            cache.append(stream, layer, New::Rotated(new)).expect("appended");
            cache.attend(stream, layer, &queries, &mut output).expect("attended");
            if layer == 1 {
                told.extend(output.to_vec().expect("read").iter().map(|x| x.to_bits()));
            }
        }
        cache.commit();
    }
    told
}

/// However tokens are cut into chunks, and whichever path takes them; bytes are the accounting's.
#[test]
fn a_cache_holds_what_its_tokens_are() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let texts = ["gtq", "gtq/k=4/v=2", "gtq/k=2/v=4/norm=unbiased", "gtq-blocks", "gtq-blocks/k=2/v=4"];
    // All in the window, or nothing.
    let texts = texts.iter().flat_map(|text| [(*text).to_owned(), format!("{text}/recent=0/sink=0")]);
    for text in texts {
        let text = &text[..];
        let cache = || open(&device, text, GEOMETRY).expect("a cache");
        let mut one = cache();
        let expected = told(&mut one, &stream, &[1; 20]);
        assert_eq!(told(&mut cache(), &stream, &[20]), expected, "{text}: a prompt");
        assert_eq!(told(&mut cache(), &stream, &[3, 1, 15, 1]), expected, "{text}: chunks");
        assert_eq!(told(&mut cache().with_kernels(), &stream, &[7, 12, 1]), expected, "{text}: kernels");
        let (layout, window) = (one.books().layout, one.books().settings.window(4));
        let codes = u64::from(layout.token_bytes());
        let read = if window.slots == 0 { codes } else { u64::from(layout.slot().token_bytes()) };
        // The orders of two layers and heads besides.
        let orders = if text.starts_with("gtq-blocks") { 2 * 2 * 64 } else { 0 };
        let near = u64::from(window.slots * layout.slot().bytes());
        assert_eq!(one.bytes(), 2 * 2 * (20 * codes + near) + orders, "{text}");
        assert_eq!(one.step_bytes(), 2 * 2 * 20 * read, "{text}");
        let selection: Selection = text.parse().expect("a selection");
        let scheme = selection.scheme();
        assert_eq!((scheme.step_bytes)(&selection, 64, 20), (20 * read) as f64);
        one.check(&stream).expect("all is held");
    }
}

#[test]
fn what_it_does_not_take_is_said() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    for (text, part) in [
        ("gtq/k=5", "k is a whole number from 2 to 4"),
        ("gtq/v=1", "v is a whole number from 2 to 4"),
        ("gtq/norm=max", "norm is one of none, norm, unbiased"),
    ] {
        assert!(text.parse::<Selection>().expect_err(text).to_string().contains(part), "{text}");
    }
    let geometry = Geometry { head_dim: 96, ..GEOMETRY };
    let error = open(&device, "gtq", geometry).expect_err("no kernel");
    assert!(error.is_refusal() && error.to_string().contains("head_dim 96"), "{error}");
    let none = Books::new(64, Settings { key_bits: 5, ..Settings::DEFAULT }).expect_err("no kernel");
    assert!(matches!(none, Error::Bits { what: "keys", bits: 5 }), "{none}");

    for kernels in [false, true] {
        let mut cache = open(&device, "gtq", GEOMETRY).expect("a cache");
        if kernels {
            cache = cache.with_kernels();
        }
        let mut row = vec![f16::ONE; 128];
        let good = Buffer::from_slice(&device, &row).expect("a buffer");
        row[70] = f16::INFINITY;
        let bad = Buffer::from_slice(&device, &row).expect("a buffer");
        let positions = Buffer::from_slice(&device, &[0u32]).expect("a buffer");
        cache.begin(&stream, Chunk::of_one(1)).expect("begun");
        let new = Rotated { positions: &positions, keys: &good, values: &bad };
        cache.append(&stream, 1, New::Rotated(new)).expect("appended");
        let error = cache.check(&stream).expect_err("refused").to_string();
        assert!(error.contains("layer 1, KV head 1: the value of token 0"), "{error}");
    }
}

/// Tokens as a product gives them, chunk by chunk: outputs and rotated queries, tiles and windows. With
/// `ahead` a launch of its own rotates them.
fn told_raw(
    cache: &mut GtqCache,
    stream: &Stream,
    (pairing, rotary): (Pairing, u32),
    chunks: &[usize],
    ahead: bool,
) -> Vec<Vec<u32>> {
    let device = stream.device().clone();
    let zeros = |n: usize| Buffer::<f16>::zeroed(&device, n).expect("a buffer");
    let geometry = cache.held().geometry;
    let (width, kv_width) = (geometry.query_width(), geometry.kv_width());
    // One more, which is not read where nothing turns.
    let turns = Buffer::from_slice(&device, &frequencies(10_000.0, rotary as usize + 2)).expect("a buffer");
    let mut told = Vec::new();
    for &count in chunks {
        let first = cache.tokens();
        let row = move |token: usize, i: usize| element(12 * token + 9, i).to_f32() * 1.1;
        let all = (first..first + count).flat_map(|t| (0..width + 2 * kv_width).map(move |i| row(t, i)));
        let qkv = Buffer::from_slice(&device, &all.collect::<Vec<_>>()).expect("a buffer");
        let positions = cache.held().positions(Chunk::of_one(count));
        let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
        cache.begin(stream, Chunk::of_one(count)).expect("begun");
        for layer in 0..geometry.layers {
            let (mut queries, mut keys, mut values) =
                (zeros(count * width), zeros(count * kv_width), zeros(count * kv_width));
            let raw = Raw {
                qkv: &qkv,
                positions: &positions,
                frequencies: &turns,
                pairing,
                rotary,
                queries: &mut queries,
                keys: &mut keys,
                values: &mut values,
            };
            let new = if ahead {
                New::Rotated(raw.rotate(stream, geometry, count).expect("turned"))
            } else {
                New::Raw(raw)
            };
            cache.append(stream, layer, new).expect("appended");
            let mut output = Buffer::<f32>::zeroed(&device, count * width).expect("a buffer");
            cache.attend(stream, layer, &queries, &mut output).expect("attended");
            told.push(output.to_vec().expect("read").iter().map(|x| x.to_bits()).collect());
            told.push(queries.to_vec().expect("read").iter().map(|x| x.to_bits().into()).collect());
        }
        cache.commit();
    }
    cache.check(stream).expect("all is held");
    for layer in 0..geometry.layers {
        told.extend([cache.tiles(layer), cache.near(layer)].map(|words| words.to_vec().expect("read")));
    }
    told
}

/// Rotating and encoding in one launch has the bits of the two, whatever turns.
#[test]
fn a_cache_rotates_as_a_launch_of_its_own_does() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    // 15 query heads and 5 KV heads leave warps and threads over.
    let odd = Geometry { layers: 1, q_heads: 15, kv_heads: 5, head_dim: 128 };
    for (text, geometry) in [
        ("gtq", GEOMETRY),
        ("gtq-blocks/k=2", GEOMETRY),
        ("gtq/k=4/v=2/recent=0/sink=0/norm=norm", odd),
        ("gtq-blocks/v=4", odd),
    ] {
        for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
            for rotary in [0, 22, 64] {
                let cache = || open(&device, text, geometry).expect("a cache").with_kernels();
                let of = |ahead| told_raw(&mut cache(), &stream, (pairing, rotary), &[18, 1], ahead);
                let (expected, found) = (of(true), of(false));
                assert!(found == expected, "{text}, {geometry:?}, {pairing:?}, {rotary} channels turn");
                assert!(expected[0].iter().any(|bits| *bits != 0), "{text}: outputs of zeros");
            }
        }
    }
}
