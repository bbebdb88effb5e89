//! Several sequences in one cache: what each gets does not depend on who is beside it.

use crate::artifact::ready;
use host::kv::{self, Capacity, KvCache, Selection};
use host::model::Model;
use host::model::config::Architecture;
use host::model::forward::{Error, Runner};
use host::model::kernels::Choice;
use host::model::synthetic::{self, Packing};
use host::{Buffer, Device, Stream};
use simt::emu::EmuOptions;

const CAPACITY: Capacity = Capacity { tokens: 64, sequences: 3 };
const DRAWN: Choice = Choice::Sampled { temperature: 2.0, top_p: 1.0, seed: 5 };
/// Tokens that each sequence is continued by.
const STEPS: usize = 20;

fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

fn tiny() -> Model {
    synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 11).expect("a model")
}

fn open(scheme: &str, model: &Model, device: &Device) -> Box<dyn KvCache> {
    let scheme = ready(scheme, (&model.config).into());
    scheme.open(device, (&model.config).into(), None, CAPACITY).expect("a cache")
}

/// The prompt of a sequence: lengths at, before and behind a block's end, and one token alone.
fn prompt(number: u32) -> Vec<u32> {
    let count = [17, 32, 15, 1, 40][number as usize];
    (0..count).map(|i| (i * i * 31 + i * 17 + number * 101 + 5) % 320).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// A sequence under way: its tokens, and the bits of the logits of each step.
#[derive(Clone, Debug, Default, PartialEq)]
struct Told {
    tokens: Vec<u32>,
    logits: Vec<Vec<u32>>,
}

/// Who comes when: sequences join at the first step that lets them in from these on, and leave after so many
/// steps of their own.
fn run(runner: &mut Runner, cache: &mut dyn KvCache, arrivals: &[(usize, u32)]) -> Vec<Told> {
    let mut told = vec![Told::default(); 5];
    let mut there: [Option<u32>; 3] = [None; 3];
    let mut waiting = arrivals.to_vec();
    let mut decoder = runner.batch(cache, DRAWN).expect("a batch");
    for step in 0.. {
        while let Some(&(from, number)) = waiting.first()
            && from <= step
            && decoder.has_room()
            && decoder.steps_to_join() == 0
        {
            waiting.remove(0);
            let (sequence, first) = decoder.join(&prompt(number), number).expect("joined");
            assert!(there[sequence].is_none(), "{sequence} is taken");
            there[sequence] = Some(number);
            told[number as usize].tokens.push(first);
        }
        if waiting.is_empty() && there == [None; 3] {
            break;
        }
        let chosen = decoder.step().expect("a step").to_vec();
        let logits = decoder.logits().expect("logits");
        for (sequence, slot) in there.iter_mut().enumerate() {
            let Some(number) = *slot else { continue };
            let told = &mut told[number as usize];
            told.tokens.push(chosen[sequence]);
            told.logits.push(bits(&logits[sequence * 320..][..320]));
            if told.logits.len() == STEPS {
                decoder.leave(sequence).expect("left");
                *slot = None;
            }
        }
    }
    told
}

fn schemes() -> impl Iterator<Item = &'static str> {
    host::schemes().map(|scheme| scheme.name).chain([
        "certified:strict",
        "gather/k=1/block=16/local=1",
        "gather/k=1/block=16/local=1/staging=2",
        "gather/k=1/block=16/local=1/tiles=int8-int4",
        "gather:certified/k=1/block=16/local=1/skip=0.2",
        "kivi/residual=0",
        "kivi/k=4/v=2/residual=32",
        "vecinfer/recent=16",
    ])
}

/// Alone in a cache of three, or beside others that come and go: the same tokens and the same logits, by the
/// CPU's own path and by captured kernels.
#[test]
fn a_sequence_has_the_same_bits_whoever_is_beside_it() {
    let (device, model) = (device(), tiny());
    for scheme in schemes() {
        let mut runner = Runner::new(&model, &device).expect("a runner");
        let alone: Vec<Told> = (0..5)
            .map(|number| {
                let told = run(&mut runner, &mut *open(scheme, &model, &device), &[(0, number)]);
                told[number as usize].clone()
            })
            .collect();
        assert!(alone.iter().all(|told| told.logits.len() == STEPS), "{scheme}");
        let arrivals = [(0, 2), (0, 0), (3, 1), (9, 4), (10, 3)];
        let beside = run(&mut runner, &mut *open(scheme, &model, &device), &arrivals);
        for (number, (beside, alone)) in beside.iter().zip(&alone).enumerate() {
            assert_eq!(beside.tokens, alone.tokens, "{scheme}: {number}");
            assert!(beside == alone, "{scheme}: {number}");
        }
        // In chunks of the same length, on which what int8 makes of a prompt depends.
        let mut kernels = Runner::of_kernels(&model, &device, runner.chunk()).expect("a runner");
        let captured = run(&mut kernels, &mut *open(scheme, &model, &device), &arrivals[1..4]);
        for number in [0, 1, 4] {
            assert!(captured[number] == alone[number], "{scheme}, by kernels: {number}");
        }
    }
}

/// A fork goes on as the sequence that it comes from would, neither disturbs the other, and what both have is
/// there as long as one of them: behind a prompt of whole blocks, and in the middle of a text.
#[test]
fn a_fork_goes_its_own_way() {
    let (device, model) = (device(), tiny());
    for scheme in schemes() {
        for mut runner in [
            Runner::new(&model, &device).expect("a runner"),
            Runner::of_kernels(&model, &device, 16).expect("a runner"),
        ] {
            let mut cache = open(scheme, &model, &device);
            let period = cache.period();
            let mut decoder = runner.batch(&mut *cache, DRAWN).expect("a batch");
            let (source, first) = decoder.join(&prompt(1), 1).expect("joined");
            let mut expected = vec![first];
            expected.extend((0..28).map(|_| decoder.step().expect("a step")[source]));
            drop(decoder);

            for before in [0, period] {
                let mut cache = open(scheme, &model, &device);
                let mut decoder = runner.batch(&mut *cache, DRAWN).expect("a batch");
                let (source, again) = decoder.join(&prompt(1), 1).expect("joined");
                let mut own = vec![again];
                own.extend((0..before).map(|_| decoder.step().expect("a step")[source]));
                assert_eq!(own, expected[..before + 1], "{scheme}");
                let twin = decoder.fork(source, own[before], 1).expect("forked");
                let other = decoder.fork(source, own[before] ^ 1, 9).expect("forked");
                let full = decoder.fork(source, 7, 9);
                assert!(matches!(full, Err(Error::Cache(kv::Error::NoRoom { sequences: 3 }))));
                let mut told = [Vec::new(), Vec::new(), Vec::new()];
                for _ in 0..4 {
                    let chosen = decoder.step().expect("a step");
                    told.iter_mut().zip(chosen).for_each(|(told, token)| told.push(*token));
                }
                let rest = &expected[before + 1..];
                assert_eq!(told[source], rest[..4], "{scheme}, after {before}");
                assert_eq!(told[twin], rest[..4], "{scheme}, after {before}: the fork");
                assert_ne!(told[other], rest[..4], "{scheme}, after {before}: another token");
                // What they share stays with the one that stays.
                decoder.leave(source).expect("left");
                decoder.leave(other).expect("left");
                while told[twin].len() < rest.len() {
                    if decoder.steps_to_join() == 0 && decoder.cache().held().sequences[source].is_none() {
                        let (newcomer, _) = decoder.join(&prompt(0), 0).expect("joined");
                        assert_ne!(newcomer, twin);
                    }
                    told[twin].push(decoder.step().expect("a step")[twin]);
                }
                assert_eq!(told[twin], rest, "{scheme}, after {before}: without the others");
            }
        }
    }
}

/// What was begun is forgotten when a sequence comes or goes.
#[test]
fn a_chunk_ends_where_sequences_change() {
    let (device, model) = (device(), tiny());
    let stream = Stream::new(&device).expect("a stream");
    for scheme in schemes() {
        let mut cache = open(scheme, &model, &device);
        let row = Buffer::<half::f16>::zeroed(&device, 1024).expect("a buffer");
        let positions = Buffer::<u32>::zeroed(&device, 8).expect("a buffer");
        let mut forgotten = |change: fn(&mut dyn KvCache, &Stream)| {
            cache.begin(&stream, kv::Chunk::Step).expect("begun");
            change(&mut *cache, &stream);
            let held = cache.held().sequences.to_vec();
            let new = kv::Rotated { positions: &positions, keys: &row, values: &row };
            let error = cache.append(&stream, 0, kv::New::Rotated(new)).expect_err("nothing was begun");
            assert!(matches!(error, kv::Error::Order { .. }), "{scheme}: {error}");
            cache.commit();
            assert_eq!(cache.held().sequences, held, "{scheme}");
        };
        forgotten(|cache, stream| assert_eq!(cache.join(stream).expect("joined"), 1));
        forgotten(|cache, stream| assert_eq!(cache.fork(stream, 1).expect("forked"), 2));
        forgotten(|cache, stream| cache.leave(stream, 1).expect("left"));
    }
}

#[test]
fn what_cannot_join_changes_nothing() {
    let (device, model) = (device(), tiny());
    let stream = Stream::new(&device).expect("a stream");
    for scheme in schemes() {
        let mut cache = open(scheme, &model, &device);
        assert_eq!(cache.held().sequences, [Some(0), None, None], "{scheme}");
        assert_eq!((cache.join(&stream).expect("one"), cache.join(&stream).expect("two")), (1, 2));
        assert!(matches!(cache.join(&stream), Err(kv::Error::NoRoom { sequences: 3 })));
        assert!(matches!(cache.fork(&stream, 0), Err(kv::Error::NoRoom { .. })));
        cache.leave(&stream, 1).expect("left");
        for gone in [1, 3] {
            let none = cache.leave(&stream, gone).expect_err("nobody is there");
            assert!(matches!(none, kv::Error::NoSequence { sequences: 3, .. }), "{none}");
            assert!(matches!(cache.fork(&stream, gone), Err(kv::Error::NoSequence { .. })));
            let chunk = kv::Chunk::Prompt { sequence: gone, tokens: 2 };
            assert!(matches!(cache.begin(&stream, chunk), Err(kv::Error::NoSequence { .. })));
        }
        assert_eq!(cache.held().sequences, [Some(0), None, Some(0)], "{scheme}");
        assert_eq!(cache.join(&stream).expect("the lowest that is free"), 1);
    }
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let mut cache = open("dense", &model, &device);
    let mut decoder = runner.batch(&mut *cache, Choice::Greedy).expect("a batch");
    assert!(matches!(decoder.join(&[1; 65], 0), Err(Error::Cache(kv::Error::Full { capacity: 64, .. }))));
    assert!(matches!(decoder.join(&[], 0), Err(Error::NoTokens)));
    assert!(decoder.join(&[320], 0).is_err());
    assert_eq!(decoder.cache().held().sequences, [None; 3]);
    // A step of nobody.
    decoder.step().expect("nothing to do");
    drop(decoder);
    let mut small = Runner::of_kernels(&model, &device, 2).expect("a runner");
    let mut cache = open("dense", &model, &device);
    let error = small.batch(&mut *cache, Choice::Greedy).err().expect("too many rows");
    assert!(matches!(error, Error::Sequences { sequences: 3, most: 2 }), "{error}");
    let none = Capacity { tokens: 8, sequences: 0 };
    let selection: Selection = "dense".parse().expect("a scheme");
    assert!(selection.open(&device, (&model.config).into(), None, none).is_err());
}
