//! Sequences whose originals are all in the slots: dense attention, until they have more than fit.

use super::*;
use ferrokv::host::attention::dense;
use ferrokv::host::certified::{Attended, CacheError, Certificate, Error, reasons};
use half::{bf16, f16};
use kernels_gpu::certified::policy::reason;

/// Slots for `blocks` of each of four sequences, and some to spare.
fn with_slots(geometry: Geometry, blocks: u32) -> Extents {
    let slots = 4 * blocks * geometry.kv_heads();
    Extents { key_slots: slots + 3, value_slots: slots + 1, ..extents(geometry) }
}

fn plan<E: CacheElement>(device: &Device, extents: Extents, tokens: u32) -> StepPlan<E> {
    StepPlan::<E>::new(device, problem(extents), &Policy::SOUND).unwrap().with_residents(tokens).unwrap()
}

fn attend<E: CacheElement>(
    cache: &mut TieredCache<E>,
    stream: &Stream,
    plan: &mut StepPlan<E>,
    seed: u64,
) -> Attended {
    let queries = Buffer::from_slice(stream.device(), &queries::<E>(plan.problem(), seed)).unwrap();
    let mut out = plan.allocate().unwrap();
    cache.attend(stream, plan, &queries, &mut out).unwrap();
    stream.synchronize().unwrap();
    out
}

fn bits(numbers: &Buffer<f32>) -> Vec<u32> {
    numbers.to_vec().unwrap().into_iter().map(f32::to_bits).collect()
}

fn is_resident(certificate: &Certificate) -> bool {
    certificate.reason() & reason::RESIDENT != 0
}

/// Sequences of every kind of length, appended and prefilled: the bits of dense attention over the originals.
fn over_slots<E: CacheElement>(geometry: Geometry) {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        // The slots hold all that sequences may have.
        let extents = with_slots(geometry, 12);
        let mut cache = TieredCache::<E>::new(device, extents).unwrap().with_kernels();
        cache.begin_residence(&stream).unwrap();
        assert_eq!(cache.resident_tokens(), 192);
        let mut plan = plan::<E>(device, extents, 192);
        let mut exact = dense::Plan::<E>::new(device, dense_problem(extents)).unwrap();
        for (seed, count) in [(1, 139), (3, 16), (5, 1)] {
            let sequence = cache.start_sequence().unwrap();
            prefill(&mut cache, &stream, sequence, count, seed);
            // Into a block that is begun.
            prefill(&mut cache, &stream, sequence, 21, seed + 20);
        }
        cache.start_sequence().unwrap();
        for index in 0..18 {
            let (keys, values) =
                (input(device, geometry, 4, 50 + index), input(device, geometry, 4, 80 + index));
            cache.append(&stream, &keys, &values).unwrap();
            let found = attend(&mut cache, &stream, &mut plan, 7 + index);
            let asked = Buffer::from_slice(device, &queries::<E>(plan.problem(), 7 + index)).unwrap();
            let mut expected = exact.allocate().unwrap();
            let (output, lse) = (expected.output.global_mut(), expected.lse.global_mut());
            // SAFETY: buffers of the device that live to the end of the loop's turn, which waits for it.
            unsafe { cache.attend_exactly(&stream, &mut exact, asked.global(), output, lse) }.unwrap();
            stream.synchronize().unwrap();
            assert_eq!(bits(&found.output), bits(&expected.output), "step {index} on {device:?}");
            assert_eq!(bits(&found.lse), bits(&expected.lse), "step {index} on {device:?}");
            let certificates = found.certificates.to_vec().unwrap();
            assert!(certificates.iter().all(is_resident));
            assert!(certificates.iter().all(|c| c.e_val == 0.0 && c.e_round > 0.0));
        }
        cache.check(&stream).unwrap();
        assert!(cache.is_resident());
        assert_eq!(cache.traffic(&stream).unwrap()[1].bytes(extents.geometry.head_dim()), 0);
    }
}

fn dense_problem(extents: Extents) -> dense::Problem {
    let StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens } = problem(extents);
    dense::Problem { sequences, q_heads, kv_heads, head_dim, query_tokens: 1, max_tokens }
}

#[test]
fn what_is_resident_is_attended_to_exactly() {
    over_slots::<f16>(geometry());
    over_slots::<bf16>(Geometry::new(1, 128).unwrap());
}

/// Tokens of one KV head, with a key and a value of `at` that are eight times as large as others.
fn with_large(geometry: Geometry, count: usize, at: usize, seed: u64) -> [Vec<f16>; 2] {
    [seed, seed + 1000].map(|seed| {
        let mut rows = tokens::<f16>(geometry, count, seed);
        let dim = geometry.head_dim() as usize;
        rows[at * dim..(at + 1) * dim].iter_mut().for_each(|x| *x = f16::from_f32(8.0 * x.to_f32()));
        rows
    })
}

/// The certificates of rows that are left to the dense rung, wherever the largest key and value are, the
/// block that is not full among it: more blocks than threads, and two groups of query heads.
#[test]
fn certificates_are_those_of_the_dense_rung() {
    let count = 150 * 16 + 5;
    let geometry = Geometry::new(1, 64).unwrap().with_rounding(Rounding::Stochastic { seed: 3 });
    let tokens = 151 * 16;
    let none =
        Extents { geometry, blocks: 151, sequences: 1, max_tokens: tokens, key_slots: 0, value_slots: 0 };
    let kept = Extents { key_slots: 151, value_slots: 151, ..none };
    let problem = StepProblem { sequences: 1, q_heads: 12, kv_heads: 1, head_dim: 64, max_tokens: tokens };
    // All heads are over budget: in the third step no quantized block is read.
    let over = Policy { error_budget: 0.0, renew: 4, ..Policy::UNWATCHED };
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        // In every warp, in its first turn and in its second, and in the last block.
        for at in [3, 33 * 16, 70 * 16 + 1, 127 * 16 + 15, 128 * 16, 149 * 16, count - 1] {
            let [keys, values] = with_large(geometry, count, at, at as u64)
                .map(|rows| Buffer::from_slice(device, &rows).unwrap());
            let run = |extents: Extents, policy: &Policy, steps: usize| {
                let mut cache = TieredCache::<f16>::new(device, extents).unwrap().with_kernels();
                if extents.key_slots > 0 {
                    cache.begin_residence(&stream).unwrap();
                }
                let sequence = cache.start_sequence().unwrap();
                cache.prefill(&stream, sequence, &keys, &values).unwrap();
                let plan = StepPlan::<f16>::new(device, problem, policy).unwrap();
                let mut plan = plan.with_residents(cache.resident_tokens()).unwrap();
                let last = (0..steps).map(|_| attend(&mut cache, &stream, &mut plan, 9)).last().unwrap();
                let read = plan.originals_read(&[count as u32]).unwrap();
                assert_eq!((read.exact_rows, read.dense_rows), (2, 2));
                (bits(&last.output), last.certificates.to_vec().unwrap())
            };
            let (expected, of_rung) = run(none, &over, 3);
            let (found, certificates) = run(kept, &Policy::SOUND, 1);
            assert_eq!(found, expected, "token {at}");
            for (own, other) in certificates.iter().zip(&of_rung) {
                assert_eq!((own.reason(), other.reason()), (reason::RESIDENT, reason::EARLIER));
                let why = other.rung_and_reason;
                assert_eq!(Certificate { rung_and_reason: why, ..*own }, *other, "token {at}");
            }
        }
    }
}

/// An append, a prefill or a fork ends it, and what follows has the bits of a cache that never was resident:
/// with all that the slots have found there.
#[test]
fn it_ends_where_a_sequence_does_not_fit_any_more() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        for ends in 0..3 {
            let extents = with_slots(geometry(), 3);
            let run = |resident: bool| {
                let mut cache = TieredCache::<f16>::new(device, extents).unwrap().with_kernels();
                if resident {
                    cache.begin_residence(&stream).unwrap();
                }
                let mut plan = plan::<f16>(device, extents, cache.resident_tokens());
                let (first, second) = (cache.start_sequence().unwrap(), cache.start_sequence().unwrap());
                prefill(&mut cache, &stream, first, 47, 1);
                prefill(&mut cache, &stream, second, 20, 3);
                let append = |cache: &mut TieredCache<f16>, index: u64| {
                    let (keys, values) = (
                        input(device, extents.geometry, 4, 50 + index),
                        input(device, extents.geometry, 4, 80 + index),
                    );
                    cache.append(&stream, &keys, &values).unwrap();
                };
                append(&mut cache, 0);
                if resident {
                    let found = attend(&mut cache, &stream, &mut plan, 1).certificates.to_vec().unwrap();
                    assert!(found[..12].iter().all(is_resident) && cache.is_resident());
                }
                match ends {
                    0 => append(&mut cache, 1),
                    1 => prefill(&mut cache, &stream, second, 28, 9),
                    _ => drop(cache.fork(&stream, first).unwrap()),
                }
                assert!(!cache.is_resident());
                let steps = [2, 2, 3].map(|seed| {
                    let out = attend(&mut cache, &stream, &mut plan, seed);
                    let certificates = out.certificates.to_vec().unwrap();
                    assert!(!certificates.iter().any(is_resident));
                    (
                        bits(&out.output),
                        bits(&out.lse),
                        bytemuck::cast_slice::<_, u32>(&certificates).to_vec(),
                    )
                });
                cache.check(&stream).unwrap();
                (steps, cache.traffic(&stream).unwrap()[1])
            };
            let ((found, after), (expected, never)) = (run(true), run(false));
            assert!(found == expected, "ended by {ends} on {device:?}");
            // Of its first step the other has to fetch what this one had.
            assert_eq!(after.key_hits + after.key_misses, never.key_hits + never.key_misses);
            assert!(
                after.key_misses < never.key_misses && after.value_misses < never.value_misses,
                "{after:?} {never:?}"
            );
        }
    }
}

/// A graph's appends stop where the slots end; nothing is read beyond them.
#[test]
fn a_graph_cannot_outgrow_the_slots() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let extents = with_slots(geometry(), 2);
        let mut cache = TieredCache::<f16>::new(device, extents).unwrap().with_kernels();
        cache.begin_residence(&stream).unwrap();
        let mut plan = plan::<f16>(device, extents, 32);
        let sequence = cache.start_sequence().unwrap();
        prefill(&mut cache, &stream, sequence, 29, 1);
        cache.reserve(&stream, sequence, 20).unwrap();
        let (keys, values) = (input(device, geometry(), 4, 50), input(device, geometry(), 4, 80));
        let asked = Buffer::from_slice(device, &queries::<f16>(plan.problem(), 0)).unwrap();
        let mut out = plan.allocate().unwrap();
        let (graph, ()) = stream
            .capture(|stream| {
                cache.append(stream, &keys, &values).unwrap();
                cache.attend(stream, &mut plan, &asked, &mut out).unwrap();
                Ok(())
            })
            .unwrap();
        let graph = graph.instantiate().unwrap();
        for _ in 0..5 {
            // SAFETY: everything that was captured lives to the end of this function.
            unsafe { graph.launch(&stream) }.unwrap();
        }
        stream.synchronize().unwrap();
        assert_eq!(cache.length(&stream, sequence).unwrap(), 32);
        let refused = cache.check(&stream).expect_err("no room in the slots");
        assert!(matches!(refused, Error::Cache(CacheError::Full { tokens: 32, .. })), "{refused}");
        // The host's append knows what to do.
        cache.append(&stream, &keys, &values).unwrap();
        assert!(!cache.is_resident());
        assert_eq!(cache.length(&stream, sequence).unwrap(), 33);
    }
}

#[test]
fn what_cannot_be_resident_is_refused_when_asked() {
    let device = &devices()[0];
    let stream = Stream::new(device).unwrap();
    let none = extents(geometry());
    let mut cache = TieredCache::<f16>::new(device, none).unwrap().with_kernels();
    let refused = cache.begin_residence(&stream).expect_err("no slots").to_string();
    assert!(refused.contains("slots for 0"), "{refused}");
    let mut cache = TieredCache::<f16>::new(device, with_slots(geometry(), 2)).unwrap().with_kernels();
    let sequence = cache.start_sequence().unwrap();
    prefill(&mut cache, &stream, sequence, 3, 1);
    let refused = cache.begin_residence(&stream).expect_err("a token").to_string();
    assert!(refused.contains("3 tokens") && refused.contains("begin with empty ones"), "{refused}");
    cache.free(&stream, sequence).unwrap();
    cache.begin_residence(&stream).unwrap();
    // A plan without residents, or for others.
    for tokens in [0, 16] {
        let mut plan = plan::<f16>(device, cache.extents(), tokens);
        let queries = Buffer::from_slice(device, &queries::<f16>(plan.problem(), 1)).unwrap();
        let mut out = plan.allocate().unwrap();
        let refused = cache.attend(&stream, &mut plan, &queries, &mut out).expect_err("another plan");
        assert!(matches!(refused, Error::Cache(CacheError::Plan { cache: 32, .. })), "{refused}");
    }
    let choosing = StepPlan::<f16>::new(device, problem(none), &Policy::CHOOSING).unwrap();
    assert!(choosing.with_residents(32).err().expect("no list").to_string().contains("renew is 0"));
    // The CPU's own path has no use for it.
    let mut own = TieredCache::<f16>::new(device, with_slots(geometry(), 2)).unwrap();
    own.begin_residence(&stream).unwrap();
    assert!(!own.is_resident());
    assert_eq!(reasons(reason::RESIDENT).len(), 1);
}
