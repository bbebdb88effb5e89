//! Random calls, on the cache and on plain vectors.

use super::*;
use ferrokv::host::certified::{CacheError, Error, reference};
use half::f16;
use proptest::prelude::*;

/// A call; numbers choose among the live sequences.
#[derive(Clone, Debug)]
enum Call {
    Start,
    Append { bad: Option<(u8, bool)> },
    Prefill { sequence: u8, count: u8, bad: bool },
    Reserve { sequence: u8, count: u8 },
    Fork { sequence: u8 },
    Free { sequence: u8 },
    Pause { sequence: u8, resume: bool },
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        2 => Just(Call::Start),
        6 => Just(Call::Append { bad: None }),
        1 => (any::<u8>(), any::<bool>()).prop_map(|bad| Call::Append { bad: Some(bad) }),
        4 => (any::<u8>(), 0u8..70, prop::bool::weighted(0.2))
            .prop_map(|(sequence, count, bad)| Call::Prefill { sequence, count, bad }),
        1 => (any::<u8>(), 0u8..40).prop_map(|(sequence, count)| Call::Reserve { sequence, count }),
        2 => any::<u8>().prop_map(|sequence| Call::Fork { sequence }),
        2 => any::<u8>().prop_map(|sequence| Call::Free { sequence }),
        1 => (any::<u8>(), any::<bool>()).prop_map(|(sequence, resume)| Call::Pause { sequence, resume }),
    ]
}

/// What a sequence should hold.
#[derive(Clone)]
struct Model {
    id: SequenceId,
    paused: bool,
    keys: Vec<f16>,
    values: Vec<f16>,
}

const BLOCKS: u32 = 14;
const MAX_TOKENS: u32 = 100;

fn run(calls: Vec<Call>) {
    let geometry = super::geometry();
    let device = &devices()[0];
    let stream = Stream::new(device).unwrap();
    let extents = Extents {
        geometry,
        blocks: BLOCKS,
        sequences: 3,
        max_tokens: MAX_TOKENS,
        key_slots: 2,
        value_slots: 3,
    };
    let mut cache = TieredCache::<f16>::new(device, extents).unwrap();
    let elements = 128;
    let mut models: Vec<Model> = Vec::new();
    for (nth, call) in calls.into_iter().enumerate() {
        let seed = 10 * nth as u64;
        let at = |sequence: u8, models: &[Model]| sequence as usize % models.len().max(1);
        match call {
            Call::Start => match cache.start_sequence() {
                Ok(id) => models.push(Model { id, paused: false, keys: Vec::new(), values: Vec::new() }),
                Err(Error::Cache(CacheError::NoSequence { sequences: 3 })) => assert_eq!(models.len(), 3),
                Err(error) => panic!("{error}"),
            },
            Call::Append { bad } => {
                let mut keys = tokens::<f16>(geometry, 3, seed);
                let mut values = tokens::<f16>(geometry, 3, seed + 1);
                let mut refused = None;
                if let (Some((sequence, in_key)), false) = (bad, models.is_empty()) {
                    let row = models[at(sequence, &models)].id.row();
                    let target = if in_key { &mut keys } else { &mut values };
                    target[row as usize * elements + 77] = f16::NAN;
                    refused = Some(row);
                }
                let (key_buffer, value_buffer) = (
                    Buffer::from_slice(device, &keys).unwrap(),
                    Buffer::from_slice(device, &values).unwrap(),
                );
                match cache.append(&stream, &key_buffer, &value_buffer) {
                    Ok(()) => {
                        let mut stopped = false;
                        for model in models.iter_mut().filter(|model| !model.paused) {
                            let row = model.id.row() as usize;
                            if refused == Some(row as u32) {
                                stopped = true;
                                continue;
                            }
                            model.keys.extend(&keys[row * elements..(row + 1) * elements]);
                            model.values.extend(&values[row * elements..(row + 1) * elements]);
                        }
                        match cache.check(&stream) {
                            Ok(()) => assert!(!stopped),
                            Err(Error::Cache(CacheError::Refused { at, stopped: 1, .. })) => {
                                assert!(stopped);
                                let model =
                                    models.iter().find(|model| Some(model.id.row()) == refused).unwrap();
                                assert_eq!(at.token as usize, model.keys.len() / elements);
                                assert_eq!((at.kv_head, at.channel), (1, 13));
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                    Err(error) => full(&error, &cache),
                }
            }
            Call::Prefill { sequence, count, bad } if !models.is_empty() => {
                let chosen = at(sequence, &models);
                let model = &mut models[chosen];
                let mut keys = tokens::<f16>(geometry, count as usize, seed);
                let values = tokens::<f16>(geometry, count as usize, seed + 1);
                let bad = bad && count > 0;
                if bad {
                    keys[count as usize / 2 * elements + 3] = f16::INFINITY;
                }
                let (key_buffer, value_buffer) = (
                    Buffer::from_slice(device, &keys).unwrap(),
                    Buffer::from_slice(device, &values).unwrap(),
                );
                match cache.prefill(&stream, model.id, &key_buffer, &value_buffer) {
                    Ok(()) => {
                        assert!(!bad);
                        model.keys.extend(keys);
                        model.values.extend(values);
                    }
                    Err(Error::Cache(CacheError::Refused { at, stopped: 0, .. })) => {
                        assert!(bad);
                        assert_eq!(at.token as usize, model.keys.len() / elements + count as usize / 2);
                    }
                    Err(error) => full(&error, &cache),
                }
            }
            Call::Reserve { sequence, count } if !models.is_empty() => {
                if let Err(error) = cache.reserve(&stream, models[at(sequence, &models)].id, count.into()) {
                    full(&error, &cache);
                }
            }
            Call::Fork { sequence } if !models.is_empty() => {
                let source = models[at(sequence, &models)].clone();
                match cache.fork(&stream, source.id) {
                    Ok(id) => models.push(Model { id, paused: false, ..source }),
                    Err(Error::Cache(CacheError::NoSequence { .. })) => assert_eq!(models.len(), 3),
                    Err(error) => full(&error, &cache),
                }
            }
            Call::Free { sequence } if !models.is_empty() => {
                let model = models.swap_remove(at(sequence, &models));
                cache.free(&stream, model.id).unwrap();
                let again = cache.free(&stream, model.id);
                assert!(matches!(again, Err(Error::Cache(CacheError::UnknownSequence { .. }))));
            }
            Call::Pause { sequence, resume } if !models.is_empty() => {
                let chosen = at(sequence, &models);
                let model = &mut models[chosen];
                model.paused = !resume;
                match resume {
                    true => cache.resume(&stream, model.id).unwrap(),
                    false => cache.pause(&stream, model.id).unwrap(),
                }
            }
            _ => {}
        }
        assert!(cache.free_blocks() as u32 <= BLOCKS);
        compare(&cache, &stream, &models);
    }
    // What nobody holds is free: every block comes back, in whatever way it was shared.
    for model in models.drain(..) {
        cache.free(&stream, model.id).unwrap();
    }
    assert_eq!(cache.free_blocks() as u32, BLOCKS);
}

/// The errors of a cache that has no room.
fn full(error: &Error, cache: &TieredCache<f16>) {
    match error {
        Error::Cache(CacheError::PoolExhausted { wanted, free, blocks: BLOCKS }) => {
            assert!(wanted > free && *free == cache.free_blocks());
        }
        Error::Cache(CacheError::TooLong { tokens, most: MAX_TOKENS, .. }) => {
            assert!(*tokens > u64::from(MAX_TOKENS))
        }
        error => panic!("{error}"),
    }
}

/// Originals as they came, tiles as the serial reference makes them.
fn compare(cache: &TieredCache<f16>, stream: &Stream, models: &[Model]) {
    let geometry = cache.geometry();
    let (dim, elements) = (geometry.head_dim() as usize, 128);
    for model in models {
        let tokens = model.keys.len() / elements;
        assert_eq!(cache.length(stream, model.id).unwrap() as usize, tokens);
        let [keys, values] = cache.read(stream, model.id).unwrap();
        assert!(keys == model.keys && values == model.values);
        for (block, (tiles, annotations)) in
            cache.quantized(stream, model.id).unwrap().into_iter().enumerate()
        {
            for head in 0..geometry.kv_heads() as usize {
                let rows = |all: &[f16]| -> Vec<f16> {
                    (0..16)
                        .flat_map(|t| {
                            let at = (block * 16 + t) * elements + head * dim;
                            all[at..at + dim].to_vec()
                        })
                        .collect()
                };
                let (keys, values) = (rows(&model.keys), rows(&model.values));
                let place = [block as u32, head as u32];
                let expected =
                    reference::quantize(&keys, &values, geometry.layout(), geometry.rounding(), place);
                let bytes = geometry.layout().bytes as usize;
                assert!(tiles[head * bytes..(head + 1) * bytes] == expected.0);
                assert_eq!(annotations[head], expected.1);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn the_cache_is_vectors(calls in prop::collection::vec(call(), 1..40)) {
        run(calls);
    }
}
