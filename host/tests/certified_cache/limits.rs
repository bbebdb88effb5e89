//! Bytes to the byte, and what is refused.

use super::*;
use ferrokv::host::certified::{CacheError, Error, Layout, Memory};
use half::{bf16, f16};

fn cache_error<T: std::fmt::Debug>(result: Result<T, Error>) -> CacheError {
    match result.unwrap_err() {
        Error::Cache(error) => error,
        error => panic!("{error}"),
    }
}

#[test]
fn memory_is_what_the_format_says() {
    let device = &devices()[0];
    let heads = [(1, 64), (3, 96), (8, 128), (2, 256)];
    for ((kv_heads, head_dim), layout) in
        heads.into_iter().flat_map(|h| Layout::ALL.map(|layout| (h, layout)))
    {
        let geometry = Geometry::new(kv_heads, head_dim).unwrap().with_layout(layout);
        // Of a tile, for each channel.
        let bytes = if layout == Layout::Paper { 36 } else { 32 };
        let extents =
            Extents { geometry, blocks: 11, sequences: 40, max_tokens: 100, key_slots: 13, value_slots: 6 };
        let memory = TieredCache::<bf16>::new(device, extents).unwrap().memory();
        let (h, d) = (kv_heads as usize, head_dim as usize);
        let tile = 16 * d * 2;
        let expected = Memory {
            tiles: 11 * h * bytes * d,
            annotations: 11 * h * 48,
            scratch_keys: 13 * tile,
            scratch_values: 6 * tile,
            // A block a sequence, and 32 for prefill.
            fresh: 2 * (40 + 32) * h * tile,
            directory: 8 * (16 + 2 * (13 + 6)),
            // 100 tokens are 7 blocks.
            tables: 4 * 40 * 7 + 2 * 4 * 40,
            work: 16 * 40 + 8 * 4 + 2 * 8 * 5,
            host: 2 * 11 * h * tile,
        };
        assert_eq!(memory, expected);
        let Memory { tiles, annotations, scratch_keys, scratch_values, fresh, directory, tables, work, host } =
            memory;
        let gpu = tiles + annotations + scratch_keys + scratch_values + fresh + directory + tables + work;
        assert_eq!(memory.gpu(), gpu);
        assert_eq!(host, 11 * h * 64 * d);
    }
}

/// 288 bytes a token and KV head of 128 channels, and 256; for the annotations three more.
#[test]
fn a_token_takes_what_its_layout_says() {
    for (layout, bytes) in [(Layout::Compact, 256), (Layout::Paper, 288)] {
        let geometry = Geometry::new(8, 128).unwrap().with_layout(layout);
        let extents =
            Extents { geometry, blocks: 64, sequences: 1, max_tokens: 1024, key_slots: 0, value_slots: 0 };
        let memory = TieredCache::<f16>::new(&devices()[0], extents).unwrap().memory();
        assert_eq!([memory.tiles, memory.annotations], [1024 * 8 * bytes, 3 * 1024 * 8]);
    }
}

#[test]
fn a_plan_for_another_layout_is_named() {
    let device = &devices()[0];
    let stream = Stream::new(device).unwrap();
    let paper = geometry().with_layout(Layout::Paper);
    let mut cache = TieredCache::<f16>::new(device, extents(paper)).unwrap();
    let problem = problem(cache.extents());
    let asked = Buffer::from_slice(device, &queries::<f16>(problem, 1)).unwrap();
    let policy = Policy { renew: 0, ..policy() };
    let mut plan = StepPlan::<f16>::new(device, problem, &policy).unwrap();
    let mut out = plan.allocate().unwrap();
    let error = cache_error(cache.attend(&stream, &mut plan, &asked, &mut out));
    assert_eq!(error, CacheError::Layout { plan: Layout::Compact, cache: Layout::Paper });
    let mut plan = StepPlan::<f16>::with_layout(device, problem, &policy, Layout::Paper).unwrap();
    cache.attend(&stream, &mut plan, &asked, &mut out).unwrap();
}

#[test]
fn extents_that_make_no_cache_are_named() {
    let device = &devices()[0];
    let good = extents(geometry());
    for bad in [
        Extents { blocks: 0, ..good },
        Extents { sequences: 0, ..good },
        Extents { max_tokens: 0, ..good },
        Extents { blocks: u32::MAX, ..good },
        Extents { key_slots: u32::MAX, ..good },
        Extents { sequences: u32::MAX, ..good },
        Extents { max_tokens: u32::MAX, ..good },
    ] {
        let error = cache_error(TieredCache::<f16>::new(device, bad));
        assert!(matches!(error, CacheError::Extents { extents, .. } if extents == bad), "{error}");
    }
    assert!(Geometry::new(2, 80).unwrap_err().to_string().contains("64, 96, 128 or 256"));
}

#[test]
fn what_does_not_fit_leaves_the_cache_as_it_was() {
    let device = &devices()[0];
    let stream = Stream::new(device).unwrap();
    let small = Extents { blocks: 5, sequences: 2, ..extents(geometry()) };
    let mut cache = TieredCache::<f16>::new(device, small).unwrap();
    let [first, second] = [cache.start_sequence().unwrap(), cache.start_sequence().unwrap()];
    assert_eq!(cache_error(cache.start_sequence()), CacheError::NoSequence { sequences: 2 });
    prefill(&mut cache, &stream, first, 33, 1);
    let before = cache.read(&stream, first).unwrap();
    let many = input::<f16>(device, geometry(), 40, 9);
    let exhausted = CacheError::PoolExhausted { wanted: 3, free: 2, blocks: 5 };
    assert_eq!(cache_error(cache.prefill(&stream, second, &many, &many)), exhausted);
    assert_eq!(cache_error(cache.reserve(&stream, second, 40)), exhausted);
    let too_long = CacheError::TooLong { sequence: 0, tokens: 193, most: 192 };
    assert_eq!(cache_error(cache.reserve(&stream, first, 160)), too_long);
    // One more block each would do, and one is left after this.
    cache.reserve(&stream, second, 17).unwrap();
    assert_eq!(cache.free_blocks(), 0);
    assert_eq!(
        cache_error(cache.reserve_all(&stream, 33)),
        CacheError::PoolExhausted { wanted: 2 + 1, free: 0, blocks: 5 }
    );
    let none = CacheError::PoolExhausted { wanted: 1, free: 0, blocks: 5 };
    assert_eq!(cache_error(cache.fork(&stream, first)), none);
    assert_eq!(cache.read(&stream, first).unwrap(), before);
    cache.free(&stream, second).unwrap();
    assert_eq!(cache.free_blocks(), 2);
    let fork = cache.fork(&stream, first).unwrap();
    assert_eq!((fork.row(), cache.free_blocks()), (1, 1));
    assert_eq!(cache.read(&stream, fork).unwrap(), before);
    assert_eq!(cache_error(cache.fork(&stream, first)), CacheError::NoSequence { sequences: 2 });
    cache.free(&stream, fork).unwrap();
    assert_eq!(cache.free_blocks(), 2);
    assert_eq!(cache_error(cache.length(&stream, second)), CacheError::UnknownSequence { sequence: 1 });
    // The row has another owner, the old name stays dead.
    cache.start_sequence().unwrap();
    assert_eq!(cache_error(cache.free(&stream, second)), CacheError::UnknownSequence { sequence: 1 });
}

#[test]
fn buffers_and_plans_of_another_size_are_named() {
    let device = &devices()[0];
    let stream = Stream::new(device).unwrap();
    let mut cache = TieredCache::<f16>::new(device, extents(geometry())).unwrap();
    let sequence = cache.start_sequence().unwrap();
    let (three, four) = (input::<f16>(device, geometry(), 3, 1), input::<f16>(device, geometry(), 4, 1));
    assert!(matches!(
        cache_error(cache.append(&stream, &four, &three)),
        CacheError::Length { got: 384, what: "the buffer of values", .. }
    ));
    assert!(matches!(
        cache_error(cache.prefill(&stream, sequence, &four, &three)),
        CacheError::Length { .. }
    ));
    let odd = Buffer::<f16>::zeroed(device, 130).unwrap();
    assert!(matches!(cache_error(cache.prefill(&stream, sequence, &odd, &odd)), CacheError::Length { .. }));
    let empty = Buffer::<f16>::zeroed(device, 0).unwrap();
    cache.prefill(&stream, sequence, &empty, &empty).unwrap();

    let problem = problem(cache.extents());
    let asked = Buffer::from_slice(device, &queries::<f16>(problem, 1)).unwrap();
    for wrong in [
        StepProblem { kv_heads: 1, ..problem },
        StepProblem { head_dim: 128, ..problem },
        StepProblem { max_tokens: 160, ..problem },
        StepProblem { sequences: 5, ..problem },
    ] {
        let mut plan = StepPlan::<f16>::new(device, wrong, &policy()).unwrap();
        let mut out = plan.allocate().unwrap();
        let error = cache_error(cache.attend(&stream, &mut plan, &asked, &mut out));
        assert!(matches!(error, CacheError::Plan { .. }), "{error}");
    }
    // A batch of the rows that are used is enough.
    let few = StepProblem { sequences: 1, ..problem };
    let mut plan = StepPlan::<f16>::new(device, few, &policy()).unwrap();
    let mut out = plan.allocate().unwrap();
    let error = cache_error(cache.attend(&stream, &mut plan, &asked, &mut out));
    assert!(matches!(error, CacheError::Length { what: "the buffer of queries", .. }), "{error}");
    step(&mut cache, &stream, &mut plan, 1);
}

#[test]
fn a_replay_stops_at_the_room_that_was_reserved() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let mut cache = TieredCache::<f16>::new(device, extents(geometry())).unwrap();
        let sequence = cache.start_sequence().unwrap();
        let keys = input::<f16>(device, geometry(), 4, 1);
        let captured = stream.capture(|stream| Ok(cache.append(stream, &keys, &keys)));
        assert_eq!(cache_error(captured.unwrap().1), CacheError::NotReserved { sequence: 0 });
        cache.reserve(&stream, sequence, 20).unwrap();
        let (graph, appended) = stream.capture(|stream| Ok(cache.append(stream, &keys, &keys))).unwrap();
        appended.unwrap();
        let exec = graph.instantiate().unwrap();
        let replay = |count: u32| {
            for _ in 0..count {
                // SAFETY: cache and keys live to the end of the test.
                unsafe { exec.launch(&stream) }.unwrap();
            }
        };
        // Two blocks: room for 32.
        replay(40);
        assert_eq!(
            cache_error(cache.check(&stream)),
            CacheError::Full { sequence: 0, tokens: 32, stopped: 1 }
        );
        assert_eq!(cache.length(&stream, sequence).unwrap(), 32);
        // Room without another capture.
        cache.reserve(&stream, sequence, 3).unwrap();
        replay(3);
        cache.check(&stream).unwrap();
        assert_eq!(cache.length(&stream, sequence).unwrap(), 35);
        // The host has not seen the replays, and asks.
        cache.append(&stream, &keys, &keys).unwrap();
        assert_eq!(cache.length(&stream, sequence).unwrap(), 36);
    }
}

/// Two sequences that run out in one replay are both noted, and the lower one is named.
#[test]
fn sequences_that_run_out_together_are_both_stopped() {
    for device in devices().iter().chain(&[Device::cpu(EmuOptions::race_checked())]) {
        let stream = Stream::new(device).unwrap();
        let mut cache = TieredCache::<f16>::new(device, extents(geometry())).unwrap();
        let sequences = [cache.start_sequence().unwrap(), cache.start_sequence().unwrap()];
        for sequence in sequences {
            cache.reserve(&stream, sequence, 3).unwrap();
        }
        let keys = input::<f16>(device, geometry(), 4, 1);
        let (graph, appended) = stream.capture(|stream| Ok(cache.append(stream, &keys, &keys))).unwrap();
        appended.unwrap();
        let exec = graph.instantiate().unwrap();
        for _ in 0..17 {
            // SAFETY: cache and keys live to the end of the test.
            unsafe { exec.launch(&stream) }.unwrap();
        }
        let full = CacheError::Full { sequence: 0, tokens: 16, stopped: 2 };
        assert_eq!(cache_error(cache.check(&stream)), full);
        for sequence in sequences {
            assert_eq!(cache.length(&stream, sequence).unwrap(), 16);
        }
    }
}

/// Empty caches by each way that there is: the CPU's own path, and the kernels on every device.
fn caches<E: CacheElement>() -> impl Iterator<Item = (&'static Device, TieredCache<E>)> {
    let cache = |device| TieredCache::<E>::new(device, extents(geometry())).unwrap();
    let kernels = devices().iter().map(move |device| (device, cache(device).with_kernels()));
    std::iter::once((&devices()[0], cache(&devices()[0]))).chain(kernels)
}

/// A token appended is where a prompt's token would be, keys with keys and values with values.
fn appended<E: CacheElement + std::fmt::Debug + PartialEq>() {
    for (device, mut cache) in caches::<E>() {
        let stream = Stream::new(device).unwrap();
        let sequence = cache.start_sequence().unwrap();
        let mut all = [Vec::new(), Vec::new()];
        for index in 0..18 {
            // A row for each sequence that there may be; the first one is this sequence's.
            let rows = [0, 100].map(|seed| tokens::<E>(geometry(), 4, seed + index));
            let [keys, values] = rows.each_ref().map(|rows| Buffer::from_slice(device, rows).unwrap());
            cache.append(&stream, &keys, &values).unwrap();
            for (all, rows) in all.iter_mut().zip(&rows) {
                all.extend_from_slice(&rows[..128]);
            }
        }
        cache.check(&stream).unwrap();
        assert_eq!(cache.read(&stream, sequence).unwrap(), all);
    }
}

#[test]
fn keys_that_are_appended_are_read_as_keys_f16() {
    appended::<f16>();
}

#[test]
fn keys_that_are_appended_are_read_as_keys_bf16() {
    appended::<bf16>();
}

/// A number that f16 has no room for, in any element of a row.
#[test]
fn a_refused_token_names_its_place_and_stops_its_sequence_alone() {
    for (what, head, channel) in
        [("value", 1, 9), ("value", 1, 63), ("value", 0, 0), ("key", 1, 63), ("key", 0, 0)]
    {
        for (device, cache) in caches() {
            refused_token(device, cache, what, head, channel);
        }
    }
}

fn refused_token(device: &Device, mut cache: TieredCache<bf16>, what: &'static str, head: u32, channel: u32) {
    let stream = Stream::new(device).unwrap();
    let [first, second] = [cache.start_sequence().unwrap(), cache.start_sequence().unwrap()];
    prefill(&mut cache, &stream, second, 15, 1);
    let good = tokens::<bf16>(geometry(), 4, 3);
    let upload = |rows: &[bf16]| Buffer::from_slice(device, rows).unwrap();
    // Finite, and more than f16 has: 65,536.
    let mut large = good.clone();
    large[128 + 64 * head as usize + channel as usize] = bf16::from_f32(65536.0);
    let (keys, values) = if what == "key" { (&large, &good) } else { (&good, &large) };
    cache.append(&stream, &upload(keys), &upload(values)).unwrap();
    // It waits; the other one goes on.
    cache.append(&stream, &upload(&good), &upload(&good)).unwrap();
    let error = cache_error(cache.check(&stream));
    let CacheError::Refused { at, problem, stopped: 1 } = error.clone() else { panic!("{error}") };
    assert_eq!((at.what, at.sequence, at.token, at.kv_head, at.channel), (what, 1, 15, head, channel));
    assert!(problem.contains("beyond f16"), "{error}");
    assert_eq!(cache.length(&stream, first).unwrap(), 2);
    assert_eq!(cache.length(&stream, second).unwrap(), 15);
    cache.append(&stream, &upload(&good), &upload(&good)).unwrap();
    cache.check(&stream).unwrap();
    assert_eq!(cache.length(&stream, second).unwrap(), 16);
    // The largest that f16 has is taken, and quantized.
    let largest = vec![bf16::from_f32(65280.0); 40 * 128];
    cache.prefill(&stream, first, &upload(&largest), &upload(&largest)).unwrap();
    cache.check(&stream).unwrap();
}

/// Several numbers of one step that are not taken, in more than one row and by more than one thread of a row:
/// the first key is named, or where there is none among them the first value, and both rows wait.
#[test]
fn of_several_refused_numbers_the_first_is_named() {
    let checked = Device::cpu(EmuOptions::race_checked());
    let good = tokens::<bf16>(geometry(), 4, 3);
    let mut bad = good.clone();
    for at in [5, 64 + 40, 128 + 3] {
        bad[at] = bf16::INFINITY;
    }
    for device in devices().iter().chain([&checked]) {
        for (what, keys, values) in [("value", &good, &bad), ("key", &bad, &good), ("key", &bad, &bad)] {
            let mut cache = TieredCache::<bf16>::new(device, extents(geometry())).unwrap().with_kernels();
            let stream = Stream::new(device).unwrap();
            let sequences = [cache.start_sequence().unwrap(), cache.start_sequence().unwrap()];
            let [keys, values] = [keys, values].map(|rows| Buffer::from_slice(device, rows).unwrap());
            cache.append(&stream, &keys, &values).unwrap();
            let error = cache_error(cache.check(&stream));
            let CacheError::Refused { at, stopped: 2, .. } = error.clone() else { panic!("{error}") };
            assert_eq!((at.what, at.sequence, at.token, at.kv_head, at.channel), (what, 0, 0, 0, 5));
            assert!(sequences.iter().all(|sequence| cache.length(&stream, *sequence).unwrap() == 0));
        }
    }
}

/// Of a prompt, too, it is said whether a key or a value is no number, and nothing of it is taken.
fn refused_prompt<E: CacheElement>(nan: E) {
    for (device, mut cache) in caches::<E>() {
        let stream = Stream::new(device).unwrap();
        let sequence = cache.start_sequence().unwrap();
        let good = tokens::<E>(geometry(), 20, 3);
        let mut bad = good.clone();
        bad[17 * 128 + 64 + 9] = nan;
        let [good, bad] = [good, bad].map(|rows| Buffer::from_slice(device, &rows).unwrap());
        for (what, keys, values) in [("key", &bad, &good), ("value", &good, &bad)] {
            let error = cache_error(cache.prefill(&stream, sequence, keys, values));
            let CacheError::Refused { at, stopped: 0, .. } = error.clone() else { panic!("{error}") };
            assert_eq!((at.what, at.sequence, at.token, at.kv_head, at.channel), (what, 0, 17, 1, 9));
            assert_eq!(cache.length(&stream, sequence).unwrap(), 0);
        }
        cache.prefill(&stream, sequence, &good, &good).unwrap();
        assert_eq!(cache.length(&stream, sequence).unwrap(), 20);
    }
}

/// Of a prompt with several such numbers the first key is named, whichever thread reports first.
fn refused_numbers<E: CacheElement>(nan: E) {
    static CHECKED: OnceLock<Device> = OnceLock::new();
    let checked = CHECKED.get_or_init(|| Device::cpu(EmuOptions::race_checked()));
    let cache = TieredCache::<E>::new(checked, extents(geometry())).unwrap().with_kernels();
    for (device, mut cache) in caches::<E>().chain([(checked, cache)]) {
        let stream = Stream::new(device).unwrap();
        let sequence = cache.start_sequence().unwrap();
        let mut rows = tokens::<E>(geometry(), 20, 3);
        for at in [3 * 128 + 7, 3 * 128 + 9, 11 * 128 + 70] {
            rows[at] = nan;
        }
        let rows = Buffer::from_slice(device, &rows).unwrap();
        let error = cache_error(cache.prefill(&stream, sequence, &rows, &rows));
        let CacheError::Refused { at, .. } = error.clone() else { panic!("{error}") };
        assert_eq!((at.what, at.token, at.kv_head, at.channel), ("key", 3, 0, 7));
    }
}

#[test]
fn of_several_refused_numbers_of_a_prompt_the_first_is_named() {
    refused_numbers(f16::NAN);
    refused_numbers(bf16::NAN);
}

#[test]
fn a_refused_prompt_names_its_place_f16() {
    refused_prompt(f16::NAN);
}

#[test]
fn a_refused_prompt_names_its_place_bf16() {
    refused_prompt(bf16::NAN);
}
