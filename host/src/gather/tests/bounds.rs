//! Bounds after every mix of chunks.

use super::*;
use half::{bf16, f16};
use kernels_gpu::gather::{Extremes, TILE_BLOCKS, summary_words, tile_words, word};

/// A stored bound of channel `c`: kind 0 is the largest, 1 the smallest.
fn stored<E: GatherElement>(
    words: &[u32],
    batch: &Batch<E>,
    block: u32,
    [sequence, head, index]: [usize; 3],
    [kind, c]: [u32; 2],
) -> E {
    let StepProblem { kv_heads, head_dim, max_tokens, .. } = batch.problem;
    let tiles = max_tokens.div_ceil(block).div_ceil(TILE_BLOCKS) as usize;
    let row = sequence * kv_heads as usize + head;
    let tile = (row * tiles + index / 16) * tile_words(head_dim) as usize;
    let pair = words[tile + word(kind, index as u32 % 16, c / 2) as usize];
    bytemuck::cast((pair >> (16 * (c % 2))) as u16)
}

/// Every bound of every block is the oracle's.
fn check<E: GatherElement>(batch: &Batch<E>, support: Support, words: &[u32]) {
    for (sequence, length) in batch.lengths.iter().enumerate() {
        for head in 0..batch.problem.kv_heads as usize {
            for index in 0..length.div_ceil(support.block) as usize {
                let expected = of_block(batch, support.block, sequence, head, index);
                for c in 0..batch.problem.head_dim {
                    for kind in 0..2 {
                        let at = [sequence, head, index];
                        let found = f64::from(stored(words, batch, support.block, at, [kind, c]).to_f32());
                        let expected = expected[kind as usize][c as usize];
                        assert_eq!(found, expected, "block {at:?} channel {c} kind {kind}");
                    }
                }
            }
        }
    }
}

/// Prompts in chunks of any length, single tokens between them, several sequences that are differently far:
/// always the largest and the smallest key, by the kernel and by the CPU's own path.
#[test]
fn bounds_are_exact_however_tokens_came() {
    fn of<E: GatherElement>(block: u32, head_dim: u32) {
        let support = Support { block, ..Support::ASSURED };
        let problem = StepProblem { head_dim, ..PROBLEM };
        let lengths = [400, 1, 129, 258];
        let batch = batch::<E>(problem, Input::Normal, &lengths, u64::from(block));
        let up_to = |tokens: u32| lengths.iter().map(|length| tokens.min(*length)).collect::<Vec<_>>();
        let mixed = [1, 17, 18, 19, 127, 128, 129, 130, 256, 257, 400].map(up_to).to_vec();
        let single: Vec<_> = (1..=400).map(up_to).collect();
        let expected = bounds(&batch, support, &[up_to(400)], false).words().to_vec().expect("read");
        check(&batch, support, &expected);
        for (cuts, slices) in [(&mixed, false), (&mixed, true), (&single, true)] {
            let found = bounds(&batch, support, cuts, slices).words().to_vec().expect("read");
            assert!(found == expected, "blocks of {block}, by slices: {slices}");
        }
    }
    for block in super::super::BLOCKS {
        of::<f16>(block, 64);
        of::<bf16>(block, 128);
    }
    of::<bf16>(32, 96);
    of::<f16>(64, 256);
}

/// A row of another sequence's bounds is started anew by its first token.
#[test]
fn a_sequence_may_start_again() {
    let support = Support { block: 32, ..Support::ASSURED };
    let long = batch::<f16>(PROBLEM, Input::Huge, &[400], 1);
    let fresh = batch::<f16>(PROBLEM, Input::Normal, &[40], 2);
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    for slices in [false, true] {
        let mut bounds = bounds(&long, support, std::slice::from_ref(&long.lengths), slices);
        let keys = Buffer::from_slice(&device, &fresh.keys).expect("a buffer");
        let table = Buffer::from_slice(&device, &fresh.table).expect("a buffer");
        let positions = Buffer::from_slice(&device, &[0u32]).expect("a buffer");
        let lengths = Buffer::from_slice(&device, &fresh.lengths).expect("a buffer");
        let handles = FoldHandles {
            keys: keys.global(),
            table: table.global(),
            positions: positions.global(),
            lengths: lengths.global(),
        };
        // SAFETY: buffers of the emulator, whose table is of this pool.
        unsafe { bounds.fold_on(&stream, (0, 40), slices, handles) }.expect("folded");
        check(&fresh, support, &bounds.words().to_vec().expect("read"));
    }
}

/// A copy to another sequence is of the tiles that have tokens, of each KV head, and of nothing else; it can
/// be captured.
#[test]
fn a_copy_is_of_the_tiles_that_have_tokens() {
    let support = Support { block: 16, ..Support::ASSURED };
    let batch = batch::<f16>(PROBLEM, Input::Normal, &[400; 3], 5);
    let stream = Stream::new(&device()).expect("a stream");
    let (heads, tiles) = (2, 2);
    for score in [Score::Bounds, Score::Codes, Score::Mean] {
        for tokens in [0, 1, 256, 257, 400] {
            let mut own = scored(&batch, support, score, std::slice::from_ref(&batch.lengths), true);
            let before = own.words().to_vec().expect("read");
            let mut copied = None;
            let captured = stream.capture(|stream| {
                copied = Some(own.copy(stream, 2, 0, tokens));
                Ok(())
            });
            let (graph, ()) = captured.expect("captured");
            copied.expect("called").expect("copied");
            // SAFETY: the bounds are there.
            unsafe { graph.instantiate().expect("a graph").launch(&stream) }.expect("run");
            let size = summary_words(score.summary(), 64) as usize;
            assert_eq!(before.len(), 3 * heads * tiles * size);
            let of = |words: &[u32], [sequence, head, tile]: [usize; 3]| {
                words[((sequence * heads + head) * tiles + tile) * size..][..size].to_vec()
            };
            let after = own.words().to_vec().expect("read");
            for (head, tile) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let source = if tile < tokens.div_ceil(256) { 2 } else { 0 };
                assert!(of(&after, [0, head, tile]) == of(&before, [source, head, tile]), "{tokens}: {tile}");
                assert!(of(&before, [0, head, tile]) != of(&before, [2, head, tile]), "nothing to see");
            }
            assert!(after[heads * tiles * size..] == before[heads * tiles * size..], "another sequence");
            for (from, to, tokens) in [(3, 0, 1), (0, 3, 1), (0, 1, 513)] {
                let refused = own.copy(&stream, from, to, tokens).expect_err("not there");
                assert!(matches!(refused, super::super::Error::Length { .. }), "{refused}");
            }
        }
    }
}

/// −0 is less than +0, an infinity is a number, and one NaN of any bits makes both bounds the one NaN.
#[test]
fn zeros_infinities_and_what_is_no_number() {
    fn of<E: GatherElement>(one: u16, infinity: u16) {
        let bounds = |keys: &[u16]| {
            let mut extremes = Extremes::NONE;
            keys.iter().for_each(|x| extremes.take::<E>((*x).into(), (*x).into()));
            extremes.words().map(|pair| pair as u16)
        };
        const MINUS: u16 = 0x8000;
        assert_eq!(bounds(&[0, MINUS]), [0, MINUS]);
        assert_eq!(bounds(&[MINUS, 0]), [0, MINUS]);
        assert_eq!(bounds(&[MINUS]), [MINUS, MINUS]);
        assert_eq!(bounds(&[one, MINUS | one, 1, MINUS | 1]), [one, MINUS | one]);
        assert_eq!(bounds(&[one, infinity]), [infinity, one]);
        assert_eq!(bounds(&[MINUS | infinity, MINUS | one]), [MINUS | one, MINUS | infinity]);
        for nan in [infinity + 1, MINUS | (infinity + 1), 0x7fff, 0xffff] {
            assert_eq!(bounds(&[one, nan, MINUS | infinity]), [0x7fff; 2]);
            assert_eq!(bounds(&[nan]), [0x7fff; 2]);
        }
        // What is stored can be taken in again.
        let mut extremes = Extremes::NONE;
        extremes.take::<E>(0x7fff, 0x7fff);
        extremes.take::<E>(one.into(), one.into());
        assert_eq!(extremes.words().map(|pair| pair as u16), [0x7fff; 2]);
    }
    of::<f16>(0x3c00, 0x7c00);
    of::<bf16>(0x3f80, 0x7f80);
}

/// Each channel of each block has a place of its own in its tile.
#[test]
fn places_are_a_permutation() {
    for head_dim in super::super::HEAD_DIMS {
        let mut places: Vec<u32> = (0..2)
            .flat_map(|kind| (0..16).map(move |block| (kind, block)))
            .flat_map(|(kind, block)| (0..head_dim / 2).map(move |pair| word(kind, block, pair)))
            .collect();
        places.sort_unstable();
        assert!(places.iter().copied().eq(0..tile_words(head_dim)));
    }
}
