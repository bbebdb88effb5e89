//! What must not change a bit.

use super::*;
use ferrokv::kernels_gpu::certified::parts::{part_count, weighing_blocks};

const SEQUENCES: [(Input, u32); 5] = [
    (Input::Normal, 0),
    (Input::Sharp, 9),
    (Input::Normal, 200),
    (Input::Outlier, 97),
    (Input::Diffuse, 256),
];

fn bits(returned: &Returned) -> Vec<u32> {
    let floats = returned.output.iter().chain(&returned.lse).map(|x| x.to_bits());
    floats.chain(bytemuck::cast_slice::<_, u32>(&returned.certificates).iter().copied()).collect()
}

/// Whether blocks come from the originals or from a scratch that holds all, some or none of them, for the
/// first time or again.
#[test]
fn the_scratch_does_not_show() {
    for policy in [Policy { per_group: false, ..CHOOSING }, ALL] {
        let batch = Batch::<f16>::new(problem(SEQUENCES.len(), 7, 2, 64, 256), &SEQUENCES, 6, 2);
        for device in devices() {
            let mut trial = loaded(device, &batch);
            let without = bits(&step(&mut trial, &policy));
            for (keys, values) in [(1, 1), (7, 0), (0, 13), (1000, 1000)] {
                trial.set_scratch(keys, values).unwrap();
                let mut plan = trial.plan(&policy).unwrap();
                let mut out = plan.allocate().unwrap();
                for time in 0..2 {
                    let returned = bits(&trial.step(&mut plan, &mut out).unwrap());
                    assert!(returned == without, "{keys} and {values} slots, time {time}");
                }
            }
        }
    }
}

/// Where in the pool a block lies.
#[test]
fn the_order_of_the_pool_does_not_show() {
    let problem = problem(SEQUENCES.len(), 4, 2, 128, 256);
    for device in devices() {
        let run = |order| {
            let batch = Batch::<bf16>::new(problem, &SEQUENCES, 6, order);
            bits(&step(&mut loaded(device, &batch), &CHOOSING))
        };
        let first = run(1);
        assert!(run(2) == first && run(3) == first);
    }
}

/// What a plan has run before, and that it runs again.
#[test]
fn the_past_does_not_show() {
    let problem = problem(SEQUENCES.len(), 4, 2, 64, 256);
    let batch = Batch::<f16>::new(problem, &SEQUENCES, 6, 1);
    let mut reversed = SEQUENCES;
    reversed.reverse();
    let other = Batch::<f16>::new(problem, &reversed, 7, 3);
    for device in devices() {
        let mut trial = Trial::new(device, problem, batch.blocks()).unwrap().with_rounding(CHANCE);
        let mut plan = trial.plan(&Policy::STRICT).unwrap();
        let mut out = plan.allocate().unwrap();
        let mut run = |batch: &Batch<f16>| {
            trial.load(batch).unwrap();
            trial.ask(batch).unwrap();
            bits(&trial.step(&mut plan, &mut out).unwrap())
        };
        let first = run(&batch);
        assert!(run(&other) != first);
        assert!(run(&batch) == first && run(&batch) == first);
    }
}

/// The emulator looking for races, and the GPU: the same bits.
#[test]
fn no_races_and_one_result() {
    let sequences = [(Input::Normal, 5), (Input::Sharp, 48), (Input::Normal, 83)];
    let batch = Batch::<f16>::new(problem(3, 9, 1, 64, 144), &sequences, 6, 2);
    let race_checked = Device::cpu(EmuOptions::race_checked());
    for renew in [0, 2] {
        let policy = Policy { error_budget: 0.2, renew, ..CHOOSING };
        let run = |device: &Device, slots: u32| {
            let mut trial = loaded(device, &batch);
            if slots > 0 {
                trial.set_scratch(slots, slots).unwrap();
            }
            let mut plan = trial.plan(&policy).unwrap();
            let mut out = plan.allocate().unwrap();
            // With a list that is carried, one without it, one with a new one and one with an old one.
            let steps = if renew > 0 { 3 } else { 1 };
            (0..steps).flat_map(|_| bits(&trial.step(&mut plan, &mut out).unwrap())).collect::<Vec<_>>()
        };
        let first = run(&race_checked, 0);
        assert!(run(&race_checked, 3) == first);
        for device in devices() {
            assert!(run(device, 0) == first);
        }
    }
}

/// The same where the lists of a sequence are chosen in parts: by a thread block each, or by one for both,
/// with entries for more than one warp.
#[test]
fn parts_race_with_nothing() {
    let race_checked = Device::cpu(EmuOptions::race_checked());
    let mut many = vec![(Input::Normal, 0); 86];
    many[3] = (Input::Normal, 1100);
    for (sequences, max_tokens, policy) in [(&[(Input::Normal, 200)][..], 528, CHOOSING), (&many, 1104, ALL)]
    {
        let batch = Batch::<f16>::new(problem(sequences.len(), 2, 1, 64, max_tokens), sequences, 6, 2);
        let (rows, blocks) = (batch.problem.sequences, max_tokens / 16);
        assert_eq!(part_count(rows, blocks), 2);
        assert_eq!(weighing_blocks(2 * rows, 2), if rows == 1 { 2 } else { 1 });
        let first = bits(&step(&mut loaded(&race_checked, &batch), &policy));
        for device in devices() {
            assert!(bits(&step(&mut loaded(device, &batch), &policy)) == first);
        }
    }
}
