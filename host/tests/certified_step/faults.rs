//! Stored data that change after they were written: what the canary and the exploration find, how often, and
//! what they leave alone.

use super::*;
use ferrokv::host::certified::{Annotation, BLOCK_TOKENS, Geometry, TileLayout, reference};
use ferrokv::host::dense::sample::random;
use ferrokv::kernels_gpu::certified::auditing::drawn;
use ferrokv::kernels_gpu::certified::policy::reason;

const TOKENS: usize = BLOCK_TOKENS as usize;

/// Nothing is promoted, and every block is looked at with this probability.
const fn exploring(exploration: f32) -> Policy {
    Policy { canary: 1e-6, exploration, renew: 0, ..Policy::CODES }
}

/// The same ahead of each step of one pass.
const fn exploring_carried(exploration: f32) -> Policy {
    // There has to be a list, though nothing gets into it.
    Policy { renew: 1, max_keys: 1, ..exploring(exploration) }
}

/// What is turned over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    KeyCode,
    KeyScale,
    KeyZero,
    ValueCode,
    ValueScale,
    ValueZero,
}

const PLACES: [Place; 6] =
    [Place::KeyCode, Place::KeyScale, Place::KeyZero, Place::ValueCode, Place::ValueScale, Place::ValueZero];

/// One bit of a tile.
#[derive(Clone, Copy, Debug)]
struct Fault {
    place: Place,
    /// Which full block of the first sequence, and which KV head.
    block: usize,
    head: usize,
    /// Byte of the tile, and the bit.
    byte: usize,
    bit: u8,
}

impl Fault {
    fn new(layout: TileLayout, blocks: usize, heads: usize, seed: u64) -> Fault {
        let dice = |i: u64, below: usize| (random(seed, i) >> 20) as usize % below;
        let place = PLACES[dice(0, PLACES.len())];
        let (token, channel) = (dice(1, TOKENS) as u32, dice(2, layout.head_dim as usize) as u32);
        let group = channel / 16;
        let high = dice(3, 2);
        let of_key = dice(3, layout.kind.metadata_bytes() as usize);
        let byte = match place {
            Place::KeyCode => layout.key_code(token, channel) as usize,
            Place::KeyScale => layout.key_scale(channel) as usize + of_key,
            Place::KeyZero => layout.key_zero(channel) as usize + of_key,
            Place::ValueCode => layout.value_code(token, channel) as usize,
            Place::ValueScale => layout.value_scale(token, group) as usize + high,
            Place::ValueZero => layout.value_zero(token, group) as usize + high,
        };
        Fault { place, block: dice(4, blocks), head: dice(5, heads), byte, bit: dice(6, 8) as u8 }
    }

    fn of_keys(&self) -> bool {
        matches!(self.place, Place::KeyCode | Place::KeyScale | Place::KeyZero)
    }
}

/// Whether a block differs from its originals by more than its annotation allows; `None` where that is a
/// matter of rounding, or nothing is a number.
fn differs(
    batch: &Batch<f16>,
    tile: &[u8],
    annotation: Annotation,
    layout: TileLayout,
    fault: &Fault,
) -> Option<bool> {
    let dim = layout.head_dim as usize;
    let at = batch.row(0, fault.head, fault.block * TOKENS);
    let (keys, values) = (&batch.keys[at..at + TOKENS * dim], &batch.values[at..at + TOKENS * dim]);
    let tile = reference::Tile::new(layout, tile).unwrap();
    let number = |(t, c): (usize, usize)| tile.key(t, c).is_finite() && tile.value(t, c).is_finite();
    if !(0..TOKENS).flat_map(|t| (0..dim).map(move |c| (t, c))).all(number) {
        return None;
    }
    let measured = reference::measure(tile, keys, values);
    let mut verdict = Some(false);
    let mut ask = |size: f64, allowed: f64| {
        // Rounding of scores is allowed for, and η noted as bf16, rounded up.
        if size > allowed * 1.01 + 1e-5 {
            verdict = verdict.map(|_| true);
        } else if size > allowed * (1.0 + 1e-6) && verdict == Some(false) {
            verdict = None;
        }
    };
    ask(measured.eta, f64::from(annotation.eta));
    let group = (batch.problem.q_heads / batch.problem.kv_heads) as usize;
    for g in 0..group {
        let query: Vec<f64> =
            batch.query(0, fault.head * group + g).iter().map(|q| f64::from(q.to_f32())).collect();
        let root = (dim as f64).sqrt();
        let norm = query.iter().map(|q| q * q).sum::<f64>().sqrt();
        // A code rounded by chance may be a whole step off.
        let boxed = (0..dim).map(|c| query[c].abs() * tile.key_scale(c)).sum::<f64>();
        let delta = (boxed * f64::from(annotation.reach)).min(norm * f64::from(annotation.eps)) / root;
        for t in 0..TOKENS {
            let off = |c: usize| query[c] * (f64::from(keys[t * dim + c].to_f32()) - tile.key(t, c));
            ask((0..dim).map(off).sum::<f64>().abs() / root, delta);
        }
    }
    verdict
}

/// Every device with every layout.
fn everywhere() -> impl Iterator<Item = (&'static Device, Layout)> {
    devices().iter().flat_map(|device| Layout::ALL.map(|layout| (device, layout)))
}

fn alarmed(returned: &Returned, heads: usize) -> bool {
    let layer = |c: &ferrokv::host::certified::Certificate| Rung::of(c.rung()) == Rung::Layer;
    let first = &returned.certificates[..heads];
    assert!(first.iter().all(|c| layer(c) == layer(&first[0])), "all heads of a sequence or none");
    assert!(!returned.certificates[heads..].iter().any(layer), "no other sequence");
    layer(&first[0])
}

/// Successes within 4.5 standard deviations of what `n` tries of probability `p` give.
fn plausible(successes: u64, n: u64, p: f64) -> bool {
    let (mean, deviation) = (n as f64 * p, (n as f64 * p * (1.0 - p)).sqrt());
    (successes as f64 - mean).abs() <= 4.5 * deviation + 1e-9
}

/// A flipped bit that moves a score by more than Δ, or a value by more than η, is found at once where the
/// block is promoted, and with the policy's probability a step where it is not; no other is ever reported.
#[test]
fn faults_are_found_as_often_as_they_should_be() {
    const RATE: f32 = 0.25;
    const STEPS: u64 = 6;
    const FAULTS: u64 = 150;
    let sequences = [(Input::Normal, 200), (Input::Sharp, 70)];
    let (heads, head_dim) = (2, 64);
    let batch = Batch::<f16>::new(problem(2, 4, heads, head_dim, 208), &sequences, 17, 3);
    let geometry = Geometry::new(heads, head_dim).unwrap();
    for (device, layout) in everywhere() {
        let mut trial = loaded_in(device, &batch, layout);
        let layout = geometry.with_layout(layout).layout();
        let (tiles, annotations) = trial.quantized().unwrap();
        let (dense, _) = trial.dense().unwrap();
        let watched = Policy { canary: 1e-6, ..ALL };
        let mut plans = [watched, exploring(RATE)].map(|policy| trial.plan(&policy).unwrap());
        let mut out = plans[0].allocate().unwrap();
        let [mut detectable, mut found, mut hidden, mut by_keys] = [0u64; 4];
        for seed in 0..FAULTS {
            let fault = Fault::new(layout, 200 / TOKENS, heads as usize, seed);
            let pair = batch.row(0, fault.head, fault.block * TOKENS) / layout.elements() as usize;
            let first = pair * layout.bytes as usize;
            let mut tile = tiles[first..first + layout.bytes as usize].to_vec();
            tile[fault.byte] ^= 1 << fault.bit;
            let expected = differs(&batch, &tile, annotations[pair], layout, &fault);
            trial.flip(first + fault.byte, 1 << fault.bit).unwrap();
            // A number that became none is found by the certificate itself, which a step of quantized blocks
            // shows.
            if let Some(expected) = expected {
                let returned = trial.step(&mut plans[0], &mut out).unwrap();
                assert_eq!(alarmed(&returned, 8), expected, "{fault:?}");
                if expected {
                    detectable += 1;
                    by_keys += u64::from(fault.of_keys());
                    let group = fault.head * 4..fault.head * 4 + 4;
                    for (row, certificate) in returned.certificates[..8].iter().enumerate() {
                        let canary = certificate.reason() & reason::CANARY;
                        assert!(canary == 0 || group.contains(&row), "{fault:?}");
                        let at = row * head_dim as usize..(row + 1) * head_dim as usize;
                        assert_eq!(returned.output[at.clone()], dense[at], "{fault:?}");
                    }
                    let wanted = if fault.of_keys() { reason::KEY_CANARY } else { reason::VALUE_CANARY };
                    let named = group.clone().any(|row| returned.certificates[row].reason() & wanted != 0);
                    assert!(named, "{fault:?}");
                } else {
                    hidden += 1;
                }
                for _ in 0..STEPS {
                    let alarm = alarmed(&trial.step(&mut plans[1], &mut out).unwrap(), 8);
                    assert!(expected || !alarm, "{fault:?}");
                    found += u64::from(alarm);
                }
            }
            trial.flip(first + fault.byte, 1 << fault.bit).unwrap();
        }
        println!(
            "{detectable} faults to find, {by_keys} of them in keys; {found} alarms in {STEPS} steps each; {hidden} below Δ or η"
        );
        assert!(by_keys > 10 && detectable > by_keys + 10 && hidden > 10);
        assert!(plausible(found, detectable * STEPS, f64::from(RATE)), "{found} of {}", detectable * STEPS);
        // And mended, nothing is left of it.
        assert!(!alarmed(&trial.step(&mut plans[0], &mut out).unwrap(), 8));
    }
}

/// Steps of one pass, whose lists are renewed in every one: the same faults, a promoted block's in the second
/// step, when a list has it. Then the whole sequence stays with its originals, mended or not, and no other
/// does.
#[test]
fn steps_of_one_pass_find_them_ahead() {
    const RATE: f32 = 0.25;
    let (heads, head_dim) = (2, 64);
    for device in devices() {
        let [mut detectable, mut found, mut by_keys] = [0u64; 3];
        // What is drawn follows from a sequence's length.
        for length in 177..207 {
            let sequences = [(Input::Normal, length), (Input::Sharp, 70)];
            let batch = Batch::<f16>::new(problem(2, 4, heads, head_dim, 208), &sequences, 17, 3);
            let layout = Geometry::new(heads, head_dim).unwrap().layout();
            let mut trial = loaded(device, &batch);
            let (tiles, annotations) = trial.quantized().unwrap();
            let (dense, _) = trial.dense().unwrap();
            let watched = Policy { canary: 1e-6, renew: 1, ..ALL };
            let mut out = trial.plan(&watched).unwrap().allocate().unwrap();
            for seed in 0..5 {
                let fault = Fault::new(layout, 176 / TOKENS, heads as usize, 1000 * u64::from(length) + seed);
                let pair = batch.row(0, fault.head, fault.block * TOKENS) / layout.elements() as usize;
                let first = pair * layout.bytes as usize;
                let mut tile = tiles[first..first + layout.bytes as usize].to_vec();
                tile[fault.byte] ^= 1 << fault.bit;
                let Some(expected) = differs(&batch, &tile, annotations[pair], layout, &fault) else {
                    continue;
                };
                let flip = |trial: &mut Trial<f16>| trial.flip(first + fault.byte, 1 << fault.bit).unwrap();
                flip(&mut trial);
                let mut plan = trial.plan(&watched).unwrap();
                let mut step = |trial: &mut Trial<f16>| trial.step(&mut plan, &mut out).unwrap();
                assert!(!alarmed(&step(&mut trial), 8), "no list yet: {fault:?}");
                let returned = step(&mut trial);
                assert_eq!(alarmed(&returned, 8), expected, "{fault:?}");
                let mut explorer = trial.plan(&exploring_carried(RATE)).unwrap();
                let explored = trial.step(&mut explorer, &mut out).unwrap();
                assert!(expected || !alarmed(&explored, 8), "{fault:?}");
                flip(&mut trial);
                if !expected {
                    continue;
                }
                detectable += 1;
                by_keys += u64::from(fault.of_keys());
                found += u64::from(alarmed(&explored, 8));
                let after = trial.step(&mut plan, &mut out).unwrap();
                let wanted = if fault.of_keys() { reason::KEY_CANARY } else { reason::VALUE_CANARY };
                for returned in [&returned, &after] {
                    assert!(alarmed(returned, 8), "{fault:?}");
                    assert_eq!(returned.output[..8 * 64], dense[..8 * 64], "{fault:?}");
                    for certificate in &returned.certificates[..8] {
                        assert!(
                            certificate.reason() & (wanted | reason::EARLIER) == wanted | reason::EARLIER
                        );
                        assert!(certificate.bound().is_finite() && certificate.norm == 0.0, "{fault:?}");
                    }
                }
            }
        }
        println!("{detectable} faults to find, {by_keys} of them in keys; {found} alarms in a step each");
        assert!(by_keys > 10 && detectable > by_keys + 10);
        assert!(plausible(found, detectable, f64::from(RATE)), "{found} of {detectable}");
    }
}

/// What was found is kept with the list, by row: a fork takes it along, and a sequence that begins has none
/// of it.
#[test]
fn an_alarm_goes_with_the_list() {
    let sequences = [(Input::Normal, 100), (Input::Sharp, 50), (Input::Diffuse, 70)];
    let batch = Batch::<f16>::new(problem(3, 4, 1, 64, 112), &sequences, 5, 3);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        let layout = Geometry::new(1, 64).unwrap().layout();
        let first = batch.row(0, 0, 2 * TOKENS) / layout.elements() as usize * layout.bytes as usize;
        let byte = first + layout.key_code(3, 7) as usize;
        let mut plan = trial.plan(&exploring_carried(1.0)).unwrap();
        let mut out = plan.allocate().unwrap();
        let mut layers = |trial: &mut Trial<f16>, plan: &mut _| {
            let returned = trial.step(plan, &mut out).unwrap();
            [0, 1, 2].map(|i| Rung::of(returned.certificates[4 * i].rung()) == Rung::Layer)
        };
        assert_eq!(layers(&mut trial, &mut plan), [false; 3]);
        trial.flip(byte, 0x80).unwrap();
        assert_eq!(layers(&mut trial, &mut plan), [true, false, false]);
        trial.flip(byte, 0x80).unwrap();
        let mut list = plan.carried(0).unwrap();
        plan.swap_carried(&mut list).unwrap();
        list.copy(trial.stream(), (0, 2), 3).unwrap();
        list.forget(trial.stream(), 0, 3).unwrap();
        plan.swap_carried(&mut list).unwrap();
        assert_eq!(layers(&mut trial, &mut plan), [false, false, true]);
    }
}

/// Where every block is looked at, what is not found is within the certificate: any bit of tiles and
/// annotations may change.
#[test]
fn what_is_not_found_is_within_the_certificate() {
    let sequences = [(Input::Normal, 100), (Input::Sharp, 50)];
    let head_dim = 64;
    let batch = Batch::<f16>::new(problem(2, 4, 1, head_dim, 112), &sequences, 5, 3);
    let truth = exact(&batch);
    let geometry = Geometry::new(1, head_dim).unwrap();
    for (device, layout) in everywhere() {
        let mut trial = loaded_in(device, &batch, layout);
        let layout = geometry.with_layout(layout).layout();
        let (_, annotations) = trial.quantized().unwrap();
        // Steps of one pass have kernels for one layout.
        let policies = [exploring(1.0), exploring_carried(1.0)];
        let policies = &policies[..if layout.kind == Layout::Compact { 2 } else { 1 }];
        let mut out = trial.plan(&exploring(1.0)).unwrap().allocate().unwrap();
        let mut counts = [0u32; 3];
        for (policy, seed) in policies.iter().flat_map(|policy| (0..240u64).map(move |seed| (policy, seed))) {
            // A list remembers what was found.
            let mut plan = trial.plan(policy).unwrap();
            let fault = Fault::new(layout, 100 / TOKENS, 1, seed);
            let pair = batch.row(0, 0, fault.block * TOKENS) / layout.elements() as usize;
            let at = pair * layout.bytes as usize + fault.byte;
            let of_annotation = seed % 4 == 0;
            if of_annotation {
                let mut words: [u32; 12] = bytemuck::cast(annotations[pair]);
                // η, ν or ε: ζ is about rounding alone, and what follows is about what is likely.
                words[seed as usize / 4 % 3] ^= 1 << (random(seed, 9) % 32);
                trial.annotate(pair, bytemuck::cast(words)).unwrap();
            } else {
                trial.flip(at, 1 << fault.bit).unwrap();
            }
            let returned = trial.step(&mut plan, &mut out).unwrap();
            for (row, certificate) in returned.certificates[..4].iter().enumerate() {
                let rung = Rung::of(certificate.rung());
                let error = truth[row].error(&returned.output[row * 64..][..64]);
                let bound = f64::from(certificate.bound());
                // ε_guard, and once more the rounding of exact scores.
                let slack = 1e-5 * truth[row].largest_value;
                let unknown = bound.is_nan() || bound == f64::INFINITY;
                assert!(unknown || error <= bound + slack, "{fault:?} {rung}: {error:e} above {bound:e}");
                counts[match rung {
                    Rung::Layer => 0,
                    Rung::Dense => 1,
                    _ => 2,
                }] += 1;
            }
            if of_annotation {
                trial.annotate(pair, annotations[pair]).unwrap();
            } else {
                trial.flip(at, 1 << fault.bit).unwrap();
            }
        }
        println!("heads: {} on rung 4, {} on rung 3, {} on others", counts[0], counts[1], counts[2]);
        assert!(counts[0] > 100 && counts[2] > 100, "{counts:?}");
    }
}

/// Faults in all blocks of a sequence: one alarm. Promoted blocks are other warps' each, and there is no race
/// on the word that they are told in; of drawn ones a warp has 32.
#[test]
fn faults_in_several_blocks_are_told_at_once() {
    static CHECKED: OnceLock<Device> = OnceLock::new();
    let checked = CHECKED.get_or_init(|| Device::cpu(EmuOptions::race_checked()));
    let batch =
        Batch::<f16>::new(problem(2, 4, 1, 64, 112), &[(Input::Normal, 100), (Input::Sharp, 50)], 5, 3);
    for (device, layout) in everywhere().chain(Layout::ALL.map(|layout| (checked, layout))) {
        let mut trial = loaded_in(device, &batch, layout);
        let layout = Geometry::new(1, 64).unwrap().with_layout(layout).layout();
        for block in 0..100 / TOKENS {
            let pair = batch.row(0, 0, block * TOKENS) / layout.elements() as usize;
            let at = pair * layout.bytes as usize + layout.key_code(3, 7) as usize;
            trial.flip(at, 0x80).unwrap();
        }
        let watched = Policy { canary: 1e-6, ..ALL };
        for policy in [exploring(1.0), watched, exploring_carried(1.0), Policy { renew: 1, ..watched }] {
            if layout.kind != Layout::Compact && policy.renew > 0 {
                continue;
            }
            let mut plan = trial.plan(&policy).unwrap();
            let mut out = plan.allocate().unwrap();
            // A list has its blocks from the second step on.
            let steps = if policy.renew > 0 && policy.exploration == 0.0 { 2 } else { 1 };
            let last = (0..steps).map(|_| trial.step(&mut plan, &mut out).unwrap()).last().unwrap();
            assert!(alarmed(&last, 4), "{policy:?}");
        }
    }
}

/// Blocks are drawn as often as asked, whatever step, row and block, and no two rows or steps draw alike.
#[test]
fn draws_are_independent() {
    let draw = 1u64 << 30;
    let mut total = 0;
    let mut by_block = [0u64; 512];
    let mut both = 0;
    for (step, row) in (0..64).flat_map(|step| (0..8).map(move |row| (step, row))) {
        for (block, count) in by_block.iter_mut().enumerate() {
            let hit = drawn(draw, step, row, block as u32);
            *count += u64::from(hit);
            total += u64::from(hit);
            both += u64::from(hit && drawn(draw, step + 1, row, block as u32));
            both += u64::from(hit && drawn(draw, step, row + 1, block as u32));
        }
    }
    assert!(plausible(total, 64 * 8 * 512, 0.25), "{total}");
    assert!(by_block.iter().all(|count| plausible(*count, 512, 0.25)), "{by_block:?}");
    assert!(plausible(both, 2 * 64 * 8 * 512, 1.0 / 16.0), "{both}");
    assert!((0..4096).all(|block| drawn(1 << 32, 3, 1, block) && !drawn(0, 3, 1, block)));
}

/// What the checks read, by the plan's own count: everything where everything is drawn, nothing where nobody
/// asks, what is promoted in between.
#[test]
fn what_is_looked_at_is_counted() {
    let sequences = [(Input::Normal, 100), (Input::Sharp, 50)];
    let batch = Batch::<f16>::new(problem(2, 9, 2, 64, 112), &sequences, 5, 3);
    // Six and three blocks, two KV heads, two groups of up to eight query heads.
    let tiles = (6 + 3) * 4;
    let mut trial = loaded(&devices()[0], &batch);
    let mut count = |policy: Policy| {
        let mut plan = trial.plan(&policy).unwrap();
        let mut out = plan.allocate().unwrap();
        trial.step(&mut plan, &mut out).unwrap();
        let checked = plan.checked(&batch.lengths).unwrap();
        [checked.quantized_tiles, checked.key_tiles, checked.value_tiles]
    };
    assert_eq!(count(CHOOSING), [0; 3]);
    assert_eq!(count(exploring(1.0)), [tiles; 3]);
    assert_eq!(count(Policy { canary: 0.0, ..ALL }), [tiles; 3]);
    assert_eq!(count(Policy { ranking: 1, ..ALL }), [0, tiles, 0]);
    let some = count(exploring(0.5));
    assert!(some[0] > 0 && some[0] < tiles && some == [some[0]; 3], "{some:?}");
    // Steps of one pass: ahead of those that renew their lists, by the lists that there are then.
    assert_eq!(count(exploring_carried(1.0)), [tiles; 3]);
    let some = count(exploring_carried(0.5));
    assert!(some[0] > 0 && some[0] < tiles && some == [some[0]; 3], "{some:?}");
    let mut plan = trial.plan(&Policy { canary: 0.0, renew: 2, ..ALL }).unwrap();
    let mut out = plan.allocate().unwrap();
    for expected in [0, 0, tiles, 0, tiles] {
        trial.step(&mut plan, &mut out).unwrap();
        let checked = plan.checked(&batch.lengths).unwrap();
        assert_eq!([checked.quantized_tiles, checked.key_tiles, checked.value_tiles], [expected; 3]);
    }
}

/// Over sound data the canary and the exploration change no bit and raise no alarm, whatever they look at.
#[test]
fn looking_changes_nothing() {
    for (group, head_dim, layout) in [
        (4, 128, Layout::Compact),
        (9, 64, Layout::Compact),
        (1, 64, Layout::Compact),
        (3, 128, Layout::Paper),
    ] {
        let sequences: Vec<(Input, u32)> =
            Input::MADE.into_iter().enumerate().map(|(i, input)| (input, 60 + 17 * i as u32)).collect();
        let batch = Batch::<bf16>::new(problem(sequences.len(), group, 1, head_dim, 256), &sequences, 2, 2);
        for device in devices() {
            let mut trial = loaded_in(device, &batch, layout);
            let carried =
                [Policy { renew: 1, ..ALL }, Policy { error_budget: f32::INFINITY, ..Policy::SOUND }];
            let choosing = [CHOOSING, Policy { renew: 0, ..Policy::CODES }, ALL];
            let carried = &carried[..if layout == Layout::Compact { 2 } else { 0 }];
            for policy in choosing.iter().chain(carried) {
                let plain = step(&mut trial, policy);
                for exploration in [0.0, 0.3, 1.0] {
                    let watched = step(&mut trial, &Policy { canary: 1e-6, exploration, ..*policy });
                    let words = |returned: &Returned| {
                        let bits = returned.output.iter().chain(&returned.lse).map(|x| x.to_bits());
                        let judged: &[u32] = bytemuck::cast_slice(&returned.certificates);
                        bits.chain(judged.iter().copied()).collect::<Vec<u32>>()
                    };
                    assert!(words(&watched) == words(&plain), "group {group} exploration {exploration}");
                }
            }
        }
    }
}
