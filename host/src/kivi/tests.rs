//! The emulator's bits against the CPU's own path, and both against the formulas in f64.

use super::cpu::Stored;
use super::sample::{Batch, Input};
use super::{Encode, Error, Handles, KiviCache, Plan, Setting, Side, Store, cpu, oracle};
use crate::attention::dense::bound;
use crate::attention::dense::sample::normal;
use crate::attention::oracle::Sequence;
use crate::kv::{Chunk, Geometry, KvCache, New, Opening, Rotated, Selection};
use crate::{Buffer, Device, Stream};
use half::f16;
use simt::emu::EmuOptions;

const BATCH: Batch = Batch {
    lengths: &[161, 70, 0, 32],
    kv_heads: 2,
    queries: 3,
    head_dim: 64,
    max_tokens: 170,
    setting: Setting { residual: 32, ..Setting::DEFAULT },
    input: Input::Normal,
    cuts: &[9, 1, 55],
};

fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

/// Batches over all bits, groups and inputs.
fn batches() -> Vec<Batch> {
    let mut batches = Vec::new();
    for (head_dim, group) in [(64, 32), (64, 64), (128, 32), (128, 128)] {
        for (i, (key_bits, value_bits)) in [(2, 2), (4, 4), (2, 4), (4, 2)].into_iter().enumerate() {
            let setting = Setting { key_bits, value_bits, group, residual: group * (i as u32 % 2) };
            for input in [Input::ALL[i], Input::Odd] {
                batches.push(Batch { head_dim, setting, input, ..BATCH });
            }
        }
    }
    // Four parts of the sequence: of codes alone, of codes and f16, of f16 alone.
    for key_bits in [2, 4] {
        let setting = Setting { key_bits, value_bits: key_bits, residual: 128, ..Setting::DEFAULT };
        let (lengths, cuts) = (&[900, 17], &[301]);
        batches.push(Batch { lengths, kv_heads: 1, max_tokens: 1024, setting, cuts, ..BATCH });
    }
    batches
}

#[test]
fn the_kernels_and_the_cpus_own_path_have_the_same_bits() {
    let device = device();
    for batch in batches() {
        let kernels = batch.run(&device, false).expect("by kernels");
        let slices = batch.run(&device, true).expect("on slices");
        // NaN in f16 are equal by their bits alone.
        let bits =
            |rows: &[Vec<f16>; 2]| rows.each_ref().map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        assert_eq!(bits(&kernels.recent), bits(&slices.recent), "{batch:?}");
        assert!(kernels.codes == slices.codes, "{batch:?}: codes");
        assert!(kernels.restored == slices.restored, "{batch:?}: restored");
        assert!(kernels.output == slices.output, "{batch:?}: output");
        assert_eq!((kernels.lengths, kernels.refused), (slices.lengths, slices.refused), "{batch:?}");
    }
}

/// A sequence's rows as they are stored, of whole groups all from codes.
fn stored(batch: &Batch, codes: &[u32], recent: [&[f16]; 2], length: usize) -> [Vec<f32>; 2] {
    let shape = batch.setting.shape(batch.problem());
    cpu::rows(Stored { shape, codes, recent }, length)
}

/// Every number of a whole group is as near as the derived bound says, and as near as exact codes to it; the
/// others are what they were.
#[test]
fn what_is_restored_is_as_near_as_derived() {
    let device = device();
    for batch in batches() {
        let found = batch.run(&device, true).expect("on slices");
        let [keys, values] = &found.recent;
        let length = batch.lengths[0] as usize;
        let rows = stored(&batch, &found.codes, [keys, values], length);
        let (dim, heads, group) =
            (batch.head_dim as usize, batch.kv_heads as usize, batch.setting.group as usize);
        let whole = length / group * group;
        for (kind, rows) in rows.iter().enumerate() {
            let bits = batch.setting.layout(batch.head_dim).bits([Side::Key, Side::Value][kind]);
            let given: Vec<f64> = batch
                .rows(kind, 0, 0..length as u32)
                .iter()
                .map(|x| f64::from(kernels_gpu::kivi::counted(*x)))
                .collect();
            let index = |token: usize, head: usize, channel: usize| (token * heads + head) * dim + channel;
            for head in 0..heads {
                for number in 0..whole * dim / group {
                    let place = |i: usize| match kind {
                        0 => index(number / dim * group + i, head, number % dim),
                        _ => index(number * group / dim, head, number * group % dim + i),
                    };
                    let x: Vec<f64> = (0..group).map(|i| given[place(i)]).collect();
                    let (_, scale) = oracle::exact(&x, bits);
                    for (i, exact) in oracle::quantized(&x, bits).into_iter().enumerate() {
                        let restored = f64::from(rows[place(i)]);
                        let bound = oracle::error(&x, bits, restored);
                        assert!((restored - x[i]).abs() <= bound, "{batch:?} {kind}: {restored} of {}", x[i]);
                        // The stored code is the nearest of those under the stored scale, so no further
                        // than the exact code under it, which is at most (2^b − 1)·σ from where the
                        // exact scale has it; x^ is rounded once, by u·|x^| + τ. The bound is s/2 and
                        // these, and σ/2, of which the quotient's rounding in f32 takes a part.
                        let worse = (restored - x[i]).abs() - (exact - x[i]).abs();
                        assert!(
                            worse <= bound - scale / 2.0,
                            "{batch:?} {kind}: {restored}, {exact} is exact"
                        );
                    }
                }
            }
            let rest = batch.rows(kind, 0, whole as u32..length as u32);
            let same = rest.iter().zip(&rows[whole * heads * dim..]);
            assert!(same.clone().all(|(a, b)| a.to_f32().to_bits() == b.to_bits() || a.is_nan()));
        }
    }
}

/// A step is within the bound of dense attention over what is stored.
#[test]
fn a_step_is_within_the_bound_of_attention_over_what_is_stored() {
    let device = device();
    for batch in batches().into_iter().filter(|batch| matches!(batch.input, Input::Normal | Input::Sharp)) {
        let found = batch.run(&device, true).expect("on slices");
        let (dim, heads) = (batch.head_dim as usize, batch.kv_heads as usize);
        let shape = batch.setting.shape(batch.problem());
        let length = batch.lengths[0];
        let coded = (shape.coded(length) * batch.setting.group) as usize;
        let [keys, values] = &found.recent;
        let restored = stored(&batch, &found.codes, [keys, values], length as usize);
        let rows = [0, 1].map(|kind| {
            let given = batch.rows(kind, 0, 0..length);
            let one = |(i, x): (usize, &f16)| {
                if i < coded * heads * dim { f64::from(restored[kind][i]) } else { x.to_f64() }
            };
            given.iter().enumerate().map(one).collect::<Vec<f64>>()
        });
        let row = |kind: usize| {
            let rows = &rows[kind];
            move |head: usize, token: usize, out: &mut [f64]| {
                out.copy_from_slice(&rows[(token * heads + head) * dim..][..dim]);
            }
        };
        let queries: Vec<f64> = batch.queries().iter().map(|x| x.to_f64()).collect();
        let q_heads = (batch.kv_heads * batch.queries) as usize;
        let sequence = Sequence::decode(length as usize, q_heads, heads, dim);
        let own = &queries[..q_heads * dim];
        let truth = sequence.attend(own, row(0), row(1));
        let bound = bound::of::<f16>(&sequence, shape.splits, own, row(0), row(1));
        for ((found, truth), bound) in found.output.iter().zip(&truth.output).zip(&bound.output) {
            let error = (f64::from(f32::from_bits(*found)) - truth).abs();
            assert!(error <= *bound, "{batch:?}: {error} of {bound}");
        }
    }
}

/// What is stored does not depend on how tokens came.
#[test]
fn chunks_leave_no_trace() {
    let device = device();
    for cuts in [&[] as &'static [u32], &[1, 1, 1, 29], &[32, 32], &[150], &[33; 4], &[100, 31]] {
        let [one, other] =
            [BATCH.cuts, cuts].map(|cuts| Batch { cuts, ..BATCH }.run(&device, false).expect("by kernels"));
        // The ring has older tokens too, which nobody reads, where chunks have left them.
        assert!(one.codes == other.codes && one.restored == other.restored, "{cuts:?}");
        assert_eq!((one.output, one.lengths), (other.output, other.lengths), "{cuts:?}");
    }
}

/// The first row that is no number is named.
#[test]
fn what_is_no_number_is_reported() {
    let race_checked = Device::cpu(EmuOptions::race_checked());
    for (input, device) in
        [(Input::Hostile, device()), (Input::Void, race_checked.clone()), (Input::VoidEnd, race_checked)]
    {
        let batch = Batch { input, ..BATCH };
        let found = batch.run(&device, false).expect("by kernels");
        for (kind, found) in found.refused.into_iter().enumerate() {
            let first = (0..4).flat_map(|sequence| {
                let rows = batch.rows(kind, sequence, 0..batch.lengths[sequence]);
                let bad = rows.chunks_exact(64).position(|row| row.iter().any(|x| !x.is_finite()));
                bad.map(|row| row as u32)
            });
            assert_eq!(Some(found), first.min(), "{input:?}");
        }
    }
}

#[test]
fn settings_that_no_kernel_takes_are_refused_by_name() {
    let of = |setting: Setting| setting.checked().expect_err("refused").to_string();
    let default = Setting::DEFAULT;
    assert!(of(Setting { key_bits: 3, ..default }).contains("keys of 3 bits"));
    assert!(of(Setting { value_bits: 8, ..default }).contains("values of 8 bits"));
    assert!(of(Setting { group: 48, residual: 48, ..default }).contains("groups of 48"));
    assert!(of(Setting { residual: 40, ..default }).contains("a residual of 40 tokens"));
    let batch = Batch { setting: Setting { group: 128, ..default }, ..BATCH };
    let error = super::setting::checked(batch.problem(), batch.setting).expect_err("a head of 64");
    assert!(matches!(error, Error::Group { group: 128, head_dim: 64 }), "{error}");
    let batch = Batch { head_dim: 96, ..BATCH };
    let error = super::setting::checked(batch.problem(), batch.setting).expect_err("a head of 96");
    assert!(matches!(error, Error::HeadDim { head_dim: 96 }), "{error}");
}

/// What would be read or written beyond what is there is refused, by name and with the way out.
#[test]
fn what_a_store_has_no_room_for_is_refused_by_name() {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let (problem, setting) = (BATCH.problem(), BATCH.setting);
    let mut store = Store::new(&device, problem, setting).expect("a store");
    let rows = Buffer::<f16>::zeroed(&device, 4096).expect("a buffer");
    let positions = Buffer::<u32>::zeroed(&device, 8).expect("a buffer");
    let mut lengths = Buffer::<u32>::zeroed(&device, 8).expect("a buffer");
    let mut encode = |sequence: u32, counts: [u32; 2]| {
        let count = (counts[0] * counts[1]) as usize;
        let new = Encode {
            sequence,
            counts,
            keys: rows.global_range(..count * 128).expect("a part"),
            values: rows.global_range(..count * 128).expect("a part"),
            positions: positions.global_range(..count).expect("a part"),
            lengths: lengths.global_range_mut(..counts[0] as usize).expect("a part"),
        };
        [false, true].map(|slices| {
            // SAFETY: buffers of the CPU that outlive the calls, as long as the counts say.
            unsafe { store.encode_on(&stream, slices, new) }
        })
    };
    for counts in [[1, 0], [0, 1]] {
        let errors = encode(0, counts);
        assert!(errors.iter().all(|found| matches!(found, Err(Error::NoTokens { .. }))), "{errors:?}");
    }
    for (sequence, count) in [(3, 2), (4, 1), (0, 5), (u32::MAX, 1)] {
        for found in encode(sequence, [count, 1]) {
            let error = found.expect_err("a store of four").to_string();
            assert!(error.contains(&format!("{count} sequences from {sequence} on")), "{error}");
            assert!(error.contains("a store of 4"), "{error}");
        }
    }
    assert!(encode(3, [1, 1]).iter().all(|found| found.is_ok()));
    let error = store.copy(&stream, 0, 1, 171).expect_err("room for 170").to_string();
    assert!(error.contains("171 tokens") && error.contains("the 170 that"), "{error}");
    let found = [store.copy(&stream, 0, 4, 1), store.copy(&stream, 4, 0, 1)];
    assert!(found.iter().all(|found| matches!(found, Err(Error::NoSequence { first: 4, .. }))), "{found:?}");
    store.copy(&stream, 3, 0, 170).expect("copied");
    // The plan's buffers are right, the store is another's: of one problem, with other codes.
    let other = Setting { key_bits: 4, ..setting };
    let mut plan = Plan::new(&device, problem, other).expect("a plan");
    let mut output = Buffer::<f32>::zeroed(&device, 4 * 6 * 64).expect("a buffer");
    let handles = Handles {
        queries: rows.global_range(..output.len()).expect("a part"),
        lengths: positions.global_range(..4).expect("a part"),
        output: output.global_mut(),
    };
    // SAFETY: as above.
    let error =
        unsafe { plan.run_on(&stream, true, &store, handles) }.expect_err("another store").to_string();
    let both = ["170 tokens", "k=2/v=2/group=32/residual=32, the plan of", "k=4/v=2/group=32/residual=32"];
    assert!(both.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn bytes_are_what_the_bits_say() {
    let of = |bits, group, dim, tokens| {
        let setting = Setting { key_bits: bits, value_bits: bits, group, residual: 128 };
        setting.step_bytes(dim, tokens)
    };
    assert_eq!(of(2, 32, 128, 1024), 896.0 * 96.0 + 128.0 * 512.0);
    assert_eq!(of(4, 32, 128, 1024), 896.0 * 160.0 + 128.0 * 512.0);
    assert_eq!(of(2, 128, 128, 1024), 896.0 * 72.0 + 128.0 * 512.0);
    // 31 tokens more are not yet a group.
    assert_eq!(of(2, 32, 64, 1055), 896.0 * 48.0 + 159.0 * 256.0);
    assert_eq!(of(2, 32, 64, 100), 100.0 * 256.0);
}

/// A prompt in chunks of every cut, then steps: a cache has the same bits by the kernels and by slices. The
/// chunk of 17 finds 112 tokens, two groups of which it reads from codes.
#[test]
fn a_cache_is_the_same_by_kernels_and_by_slices() {
    let geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };
    let (device, selection) = (device(), "kivi/residual=32".parse::<Selection>().expect("a scheme"));
    let stream = Stream::new(&device).expect("a stream");
    let setting = Setting { residual: 32, ..Setting::DEFAULT };
    let opening =
        Opening { device: &device, geometry, rope: None, capacity: 160.into(), selection: &selection };
    let open = || KiviCache::new(&opening, setting).expect("a cache");
    let mut caches = [open(), open().with_kernels()];
    for tokens in [40, 1, 1, 70, 17, 1, 1] {
        let chunk = Chunk::of_one(tokens);
        let positions = caches[0].held().positions(chunk);
        let rows = |width: usize, kind: u64| -> Buffer<f16> {
            let first = u64::from(positions[0]) * width as u64;
            let of = |i: usize| f16::from_f32(normal(kind, first + i as u64));
            let rows: Vec<f16> = (0..tokens * width).map(of).collect();
            Buffer::from_slice(&device, &rows).expect("a buffer")
        };
        let positions = Buffer::from_slice(&device, &positions).expect("a buffer");
        let outputs = caches.each_mut().map(|cache| {
            let mut outputs = Vec::new();
            cache.begin(&stream, chunk).expect("begun");
            for layer in 0..geometry.layers {
                let kind = 10 * layer as u64;
                let (keys, values) = (rows(128, kind + 1), rows(128, kind + 2));
                let new = Rotated { positions: &positions, keys: &keys, values: &values };
                cache.append(&stream, layer, New::Rotated(new)).expect("appended");
                let mut output = Buffer::<f32>::zeroed(&device, tokens * 256).expect("a buffer");
                cache.attend(&stream, layer, &rows(256, kind + 3), &mut output).expect("attended");
                outputs.extend(output.to_vec().expect("read").iter().map(|x| x.to_bits()));
            }
            cache.commit();
            outputs
        });
        assert!(outputs[0] == outputs[1], "{tokens} tokens to {}", caches[0].tokens());
        // Nothing that is attended to is nothing.
        assert!(outputs[0].iter().any(|bits| *bits != 0));
    }
    assert_eq!(caches[0].bytes(), caches[1].bytes());
}
