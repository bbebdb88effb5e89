//! Steps: what is near changes no bit, nor does a graph.

use super::*;
use ferrokv::host::certified::{Certificate, Traffic};
use half::{bf16, f16};

/// Grows two sequences over many steps; the bits of every step.
fn grow<E: CacheElement>(device: &Device, extents: Extents) -> (Vec<Vec<u32>>, Vec<Traffic>) {
    let stream = Stream::new(device).unwrap();
    let mut cache = TieredCache::<E>::new(device, extents).unwrap();
    let (first, second) = (cache.start_sequence().unwrap(), cache.start_sequence().unwrap());
    prefill(&mut cache, &stream, first, 139, 1);
    prefill(&mut cache, &stream, second, 70, 3);
    let third = cache.fork(&stream, first).unwrap();
    let mut plan = StepPlan::<E>::new(device, problem(extents), &policy()).unwrap();
    let (mut bits, mut traffic) = (Vec::new(), Vec::new());
    for index in 0..12 {
        let (keys, values) =
            (input(device, extents.geometry, 4, 50 + index), input(device, extents.geometry, 4, 80 + index));
        cache.append(&stream, &keys, &values).unwrap();
        if index == 6 {
            // Its blocks go to another sequence, and what the scratch has of them must not stay.
            cache.free(&stream, second).unwrap();
            let next = cache.start_sequence().unwrap();
            prefill(&mut cache, &stream, next, 75, 5);
        }
        if index == 9 {
            cache.free(&stream, third).unwrap();
        }
        bits.push(step(&mut cache, &stream, &mut plan, 7 + index / 3));
        traffic.push(cache.traffic(&stream).unwrap()[0]);
    }
    cache.check(&stream).unwrap();
    (bits, traffic)
}

fn any_scratch<E: CacheElement>(geometry: Geometry) {
    for device in devices() {
        let none = extents(geometry);
        let (expected, missed) = grow::<E>(device, none);
        assert!(missed.iter().all(|t| t.key_hits + t.value_hits == 0));
        assert!(missed.iter().any(|t| t.key_misses > 0) && missed.iter().any(|t| t.value_misses > 0));
        for (key_slots, value_slots) in [(0, 1), (3, 2), (80, 80)] {
            let (bits, traffic) = grow::<E>(device, Extents { key_slots, value_slots, ..none });
            assert!(bits == expected, "with {key_slots} and {value_slots} slots on {device:?}");
            for (traffic, missed) in traffic.iter().zip(&missed) {
                assert_eq!(traffic.key_hits + traffic.key_misses, missed.key_misses);
                assert_eq!(traffic.value_hits + traffic.value_misses, missed.value_misses);
            }
            if key_slots >= 80 {
                assert!(traffic.iter().any(|t| t.key_hits > 0) && traffic.iter().any(|t| t.value_hits > 0));
            }
        }
    }
}

#[test]
fn any_scratch_gives_the_same_bits() {
    any_scratch::<f16>(geometry());
    any_scratch::<bf16>(Geometry::new(1, 128).unwrap());
}

#[test]
fn a_step_again_finds_everything_it_has_read() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        // A slot for each pair.
        let extents = Extents { key_slots: 80, value_slots: 80, ..extents(geometry()) };
        let mut cache = TieredCache::<f16>::new(device, extents).unwrap();
        let sequence = cache.start_sequence().unwrap();
        prefill(&mut cache, &stream, sequence, 150, 1);
        let mut plan = StepPlan::<f16>::new(device, problem(extents), &policy()).unwrap();
        step(&mut cache, &stream, &mut plan, 3);
        let [cold, _] = cache.traffic(&stream).unwrap();
        assert!(cold.key_misses > 0 && cold.value_misses > 0 && cold.key_hits + cold.value_hits == 0);
        assert_eq!(cold.bytes(64), (cold.key_misses + cold.value_misses) * 16 * 64 * 2);
        step(&mut cache, &stream, &mut plan, 3);
        let [warm, all] = cache.traffic(&stream).unwrap();
        assert_eq!((warm.key_hits, warm.value_hits), (cold.key_misses, cold.value_misses));
        assert_eq!(warm.bytes(64), 0);
        assert_eq!((all.key_hits, all.key_misses), (warm.key_hits, cold.key_misses));
    }
}

/// Steps after appends, by themselves or in a graph: bits of each step, then what the cache holds.
fn decode(device: &Device, count: u64, in_graph: bool) -> (Vec<Vec<u32>>, Vec<[Vec<f16>; 2]>) {
    let extents = Extents { key_slots: 7, value_slots: 5, ..extents(geometry()) };
    let stream = Stream::new(device).unwrap();
    let mut cache = TieredCache::<f16>::new(device, extents).unwrap();
    let sequences = [cache.start_sequence().unwrap(), cache.start_sequence().unwrap()];
    prefill(&mut cache, &stream, sequences[0], 126, 1);
    prefill(&mut cache, &stream, sequences[1], 13, 3);
    let mut plan = StepPlan::<f16>::new(device, problem(extents), &policy()).unwrap();
    let size = input::<f16>(device, extents.geometry, 4, 0).len();
    let (mut keys, mut values) = (Buffer::new(device, size).unwrap(), Buffer::new(device, size).unwrap());
    let mut asked = Buffer::from_slice(device, &queries::<f16>(plan.problem(), 0)).unwrap();
    let mut out = plan.allocate().unwrap();
    cache.reserve_all(&stream, count as u32).unwrap();
    let exec = in_graph.then(|| {
        let (graph, ()) = stream
            .capture(|stream| {
                cache.append(stream, &keys, &values).unwrap();
                cache.attend(stream, &mut plan, &asked, &mut out).unwrap();
                Ok(())
            })
            .unwrap();
        graph.instantiate().unwrap()
    });
    let mut bits = Vec::new();
    for index in 0..count {
        keys.write(0, &tokens::<f16>(extents.geometry, 4, 100 + index)).unwrap();
        values.write(0, &tokens::<f16>(extents.geometry, 4, 200 + index)).unwrap();
        asked.write(0, &queries::<f16>(plan.problem(), 300 + index / 4)).unwrap();
        match &exec {
            // SAFETY: everything that was captured lives to the end of this function, and is written between
            // replays only.
            Some(exec) => unsafe { exec.launch(&stream) }.unwrap(),
            None => {
                cache.append(&stream, &keys, &values).unwrap();
                cache.attend(&stream, &mut plan, &asked, &mut out).unwrap();
            }
        }
        stream.synchronize().unwrap();
        bits.push(out.output.to_vec().unwrap().into_iter().map(f32::to_bits).collect());
        let certificates: Vec<Certificate> = out.certificates.to_vec().unwrap();
        bits.push(bytemuck::cast_slice::<Certificate, u32>(&certificates).to_vec());
    }
    cache.check(&stream).unwrap();
    (bits, sequences.map(|sequence| cache.read(&stream, sequence).unwrap()).to_vec())
}

#[test]
fn a_graph_replayed_gives_the_bits_of_single_steps() {
    for device in devices() {
        assert_eq!(decode(device, 40, true), decode(device, 40, false));
    }
}

#[test]
fn single_steps_race_with_nothing() {
    let device = Device::cpu(EmuOptions::race_checked());
    assert_eq!(decode(&device, 4, false), decode(&devices()[0], 4, false));
}
