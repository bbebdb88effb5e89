//! What schemes say that their codes stand for, against the attention that they compute.

#[path = "common/artifact.rs"]
mod artifact;

use artifact::ready;
use half::f16;
use host::attention::oracle::Sequence;
use host::kv::calibration::Material;
use host::kv::restored::{Original, Restored, through};
use host::kv::{Chunk, Error, Geometry, KvCache, New, Rotated, Selection};
use host::{Buffer, Device, Stream};
use simt::emu::EmuOptions;

const GEOMETRY: Geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };
/// No multiple of a block, nor of the chunk that is appended at a time.
const TOKENS: usize = 523;

/// Schemes of codes alone, in several settings.
const CODES: [&str; 14] = [
    "int8",
    "int8-int4",
    "kivi",
    "kivi/k=4/v=2/group=64/residual=0",
    "kivi/k=4/residual=32",
    "gtq",
    "gtq/k=2/v=4/norm=unbiased",
    "gtq/recent=0/sink=0",
    "gtq-blocks",
    "gtq-blocks/k=4/v=2",
    "vecinfer",
    "vecinfer/recent=0",
    "vecinfer/recent=0/sink=0",
    "vecinfer/k=d2b8/v=d4b8/recent=64",
];

struct Setting {
    selection: Selection,
    stream: Stream,
    cache: Box<dyn KvCache>,
    material: Material,
}

fn setting(text: &str) -> Setting {
    let device = Device::cpu(EmuOptions::default());
    let selection = ready(text, GEOMETRY);
    let cache = selection.open(&device, GEOMETRY, None, TOKENS + 1).expect("a cache");
    let stream = Stream::new(&device).expect("a stream");
    Setting { selection, stream, cache, material: Material::made_up(GEOMETRY, TOKENS + 1, 11) }
}

/// The first tokens of a layer.
fn original(material: &Material, layer: usize, tokens: usize) -> Original<'_> {
    let (own, rows) = (&material.layers[layer], ..tokens * GEOMETRY.kv_width());
    Original { layer, keys: &own.keys[rows], values: &own.values[rows] }
}

/// A step's output is softmax attention over what the cache says it has, recent tokens as they were: so rows,
/// their space, and which of them are read from codes are right.
#[test]
fn attention_is_over_what_is_restored() {
    for text in CODES {
        let Setting { mut cache, stream, material, .. } = setting(text);
        let device = stream.device().clone();
        let width = GEOMETRY.kv_width();
        let layers = [1, 0].map(|layer| original(&material, layer, TOKENS));
        through(&mut *cache, &stream, &layers, |_| ()).expect(text);
        let positions = Buffer::from_slice(&device, &[TOKENS as u32]).expect("a position");
        cache.begin(&stream, Chunk::Step).expect("a step");
        for layer in 0..2 {
            let own = &material.layers[layer];
            let [keys, values] = [&own.keys, &own.values]
                .map(|rows| Buffer::from_slice(&device, &rows[TOKENS * width..]).expect("a row"));
            let new = Rotated { positions: &positions, keys: &keys, values: &values };
            cache.append(&stream, layer, New::Rotated(new)).expect("appended");
        }
        let query = &material.layers[1].queries[TOKENS * GEOMETRY.query_width()..];
        let queries = Buffer::from_slice(&device, query).expect("queries");
        let mut output = Buffer::zeroed(&device, GEOMETRY.query_width()).expect("room");
        cache.attend(&stream, 1, &queries, &mut output).expect("attention");
        cache.commit();
        let restored = cache.restored(&stream, 1, 0).expect("read").expect("of codes alone");
        let found = output.to_vec().expect("an output");

        let own = &material.layers[1];
        let row =
            |side: &host::kv::restored::Side, rows: &[f16], head: usize, token: usize, out: &mut [f64]| {
                let at = (token * GEOMETRY.kv_heads + head) * GEOMETRY.head_dim;
                for (i, out) in out.iter_mut().enumerate() {
                    let coded = (side.coded.front..side.coded.of(TOKENS + 1)).contains(&token);
                    *out = if coded { side.rows[at + i].into() } else { rows[at + i].to_f64() };
                }
            };
        let Geometry { q_heads, kv_heads, head_dim, .. } = GEOMETRY;
        let wide: Vec<f64> = query.iter().map(|x| x.to_f64()).collect();
        let expected = Sequence::decode(TOKENS + 1, q_heads, kv_heads, head_dim).attend(
            &wide,
            |head, token, out: &mut [f64]| row(&restored.keys, &own.keys, head, token, out),
            |head, token, out: &mut [f64]| row(&restored.values, &own.values, head, token, out),
        );
        let size = expected.output.iter().map(|x| x * x).sum::<f64>().sqrt();
        let error = found.iter().zip(&expected.output).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>();
        // Queries and weights in f16 and integers of 16 bits.
        assert!(error.sqrt() < 4e-3 * size, "{text}: {} of {size}", error.sqrt());
    }
}

/// Bytes of codes are those that the scheme says a step reads.
#[test]
fn bytes_are_those_of_the_scheme() {
    for text in CODES {
        let Setting { selection, mut cache, stream, material } = setting(text);
        let mut heard = 0;
        let layers = [0, 1].map(|layer| original(&material, layer, TOKENS));
        let restored = through(&mut *cache, &stream, &layers, |tokens| heard += tokens).expect(text);
        assert_eq!(heard, 2 * TOKENS);
        // Whole blocks, of which the schemes' formulas are.
        let length = 512;
        for Restored { keys, values } in restored {
            assert_eq!((keys.rows.len(), values.rows.len()), (TOKENS * 128, TOKENS * 128));
            let found = [keys, values].map(|side| side.bytes_at(length, GEOMETRY.head_dim));
            let expected = (selection.scheme().step_bytes)(&selection, 64, length as u64) / length as f64;
            assert!((found[0] + found[1] - expected).abs() < 1e-9, "{text}: {found:?} for {expected}");
        }
    }
}

#[test]
fn schemes_of_originals_are_refused_by_name() {
    let mut refused = 0;
    for scheme in host::schemes() {
        let Setting { mut cache, stream, material, .. } = setting(scheme.name);
        match through(&mut *cache, &stream, &[original(&material, 0, 1)], |_| ()) {
            Ok(restored) => {
                assert!(CODES.contains(&scheme.name), "{} is not among the schemes tested here", scheme.name);
                assert_eq!(restored[0].keys.rows.len(), 128);
            }
            Err(Error::NotRestored { scheme: name }) => {
                assert!(!CODES.contains(&scheme.name), "{name}");
                assert_eq!(name, scheme.name);
                refused += 1;
            }
            Err(error) => panic!("{}: {error}", scheme.name),
        }
    }
    assert!(refused >= 3, "dense, certified and gather at least");
}
