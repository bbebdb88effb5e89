//! What is written: codes, and what bounds their errors.

use super::*;
use half::{bf16, f16};
use kernels_gpu::gather::sketch::{Annotation, code_words, place, sketch_words, tiles_of};
use simt::emu::EmuOptions;

/// Every key is as near its sketch as the annotation says, by channel and by norm.
fn check<E: SketchElement>(batch: &Batch<E>, bits: u32, words: &[u32]) {
    let StepProblem { kv_heads, head_dim, max_tokens, .. } = batch.problem;
    let (dim, heads, tiles) = (head_dim as usize, kv_heads as usize, tiles_of(max_tokens) as usize);
    let size = sketch_words(head_dim, bits) as usize;
    let metadata = code_words(head_dim, bits) as usize;
    let largest = f64::from((1u32 << bits) - 1);
    for (sequence, length) in batch.lengths.iter().enumerate() {
        for token in 0..*length as usize {
            for head in 0..heads {
                let tile = (sequence * heads + head) * tiles + token / 32;
                let tile = &words[tile * size..][..size];
                let number = |part: usize, c: usize| {
                    let bits = (tile[metadata + part * dim / 2 + c / 2] >> (16 * (c % 2))) as u16;
                    f64::from(f16::from_bits(bits).to_f32())
                };
                let annotation: Annotation = bytemuck::cast_slice(&tile[metadata + dim..])[0];
                let (mut key, mut value) = (vec![0.0; dim], vec![0.0; dim]);
                read(batch, &batch.keys, sequence, head, token, &mut key);
                read(batch, &batch.values, sequence, head, token, &mut value);
                let (mut error, mut size_of, mut norm) = ([0f64; 2], [0f64; 2], 0f64);
                for (c, (k, v)) in key.iter().zip(&value).enumerate() {
                    let (word, bit) = place(bits, token as u32 % 32, c as u32);
                    let code = f64::from(tile[word as usize] >> bit & ((1 << bits) - 1));
                    let (scale, zero) = (number(0, c), number(1, c));
                    let off = k - (code * scale + zero);
                    assert!(off.abs() <= scale * (0.5 + 1.0 / 8192.0), "{k}: {code}·{scale} + {zero}");
                    error[0] += off * off;
                    size_of = [size_of[0] + zero * zero, size_of[1] + scale * scale];
                    norm += v * v;
                }
                assert!(error[0].sqrt() <= annotation.eps.into());
                assert!(norm.sqrt() <= annotation.nu[token % 32 / 16].into());
                assert!(size_of[0].sqrt() + largest * size_of[1].sqrt() <= annotation.zeta.into());
            }
        }
    }
}

/// Prompts in chunks of any length, single tokens between them: the same sketches at the end, by the kernel
/// and by the CPU's own path, and within their bounds.
#[test]
fn sketches_bound_their_errors_however_tokens_came() {
    fn of<E: SketchElement>(bits: u32, head_dim: u32, input: Input) {
        let budget = Budget { bits, ..BUDGET };
        let lengths = [200, 1, 129, 58];
        let batch = batch::<E>(StepProblem { head_dim, ..PROBLEM }, input, &lengths, u64::from(bits));
        let up_to = |tokens: u32| lengths.iter().map(|length| tokens.min(*length)).collect::<Vec<_>>();
        let expected = sketches(&batch, budget, &[up_to(200)], false).words().to_vec().expect("read");
        check(&batch, bits, &expected);
        let mixed = [1, 17, 18, 19, 127, 128, 129, 130, 200].map(up_to).to_vec();
        for slices in [false, true] {
            let found = sketches(&batch, budget, &mixed, slices).words().to_vec().expect("read");
            assert!(found == expected, "{bits} bits, by slices: {slices}");
        }
    }
    for input in [Input::Normal, Input::Wide, Input::Constant, Input::Outlier] {
        of::<f16>(4, 64, input);
        of::<f16>(8, 128, input);
        of::<bf16>(4, 128, input);
        of::<bf16>(8, 64, input);
    }
}

/// A key that is no number, or that f16 cannot cover, makes a bound that bounds nothing, by both paths alike.
#[test]
fn hostile_keys_have_infinite_bounds() {
    for hostile in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3.0e38] {
        let mut batch = batch::<bf16>(PROBLEM, Input::Normal, &[40], 3);
        let at = batch.row(0, 1, 20);
        batch.keys[at + 5] = bf16::from_f32(hostile);
        let [own, kernel] = [true, false]
            .map(|slices| sketches(&batch, BUDGET, &[vec![40]], slices).words().to_vec().expect("read"));
        // The first of 13 tiles of KV head 1.
        let tile = |words: &[u32]| words[13 * 324..][..324].to_vec();
        for words in [&own, &kernel] {
            let annotation: Annotation = bytemuck::cast_slice(&tile(words)[320..])[0];
            assert!(annotation.eps == f32::INFINITY, "{hostile}: {annotation:?}");
        }
        assert!(own == kernel, "{hostile}");
    }
}

/// A copy to another sequence is of the tiles that have tokens, of each KV head, and of nothing else. It is
/// captured here and run later, by a device that knows what was freed meanwhile: no wait, no memory between.
#[test]
fn a_copy_is_of_the_tiles_that_have_tokens() {
    let device = Device::cpu(EmuOptions { memory_check: true, ..EmuOptions::default() });
    let stream = Stream::new(&device).expect("a stream");
    let (heads, tiles) = (2, 13);
    for (bits, tokens) in [(4, 0), (4, 1), (4, 32), (4, 33), (8, 65), (8, 399), (4, 400)] {
        let budget = Budget { bits, ..BUDGET };
        let batch = batch::<f16>(PROBLEM, Input::Normal, &[400; 3], 5);
        let mut own = sketches_on(&device, &batch, budget, std::slice::from_ref(&batch.lengths), true);
        let before = own.words().to_vec().expect("read");
        let mut copied = None;
        let captured = stream.capture(|stream| {
            copied = Some(own.copy(stream, 2, 0, tokens));
            Ok(())
        });
        let (graph, ()) = captured.expect("captured");
        copied.expect("called").expect("copied");
        let run = graph.instantiate().expect("a graph");
        assert!(own.words().to_vec().expect("read") == before, "a capture runs nothing");
        // SAFETY: the sketches are there.
        unsafe { run.launch(&stream) }.expect("run");
        let size = sketch_words(64, bits) as usize;
        assert_eq!(before.len(), 3 * heads * tiles * size);
        let of = |words: &[u32], [sequence, head, tile]: [usize; 3]| {
            words[((sequence * heads + head) * tiles + tile) * size..][..size].to_vec()
        };
        let after = own.words().to_vec().expect("read");
        for (head, tile) in (0..heads).flat_map(|head| (0..tiles).map(move |tile| (head, tile))) {
            let source = if tile < tokens.div_ceil(32) { 2 } else { 0 };
            assert!(of(&after, [0, head, tile]) == of(&before, [source, head, tile]), "{tokens}: {tile}");
            assert!(of(&before, [0, head, tile]) != of(&before, [2, head, tile]), "nothing to see");
        }
        assert!(after[heads * tiles * size..] == before[heads * tiles * size..], "another sequence");
        for (from, to, tokens) in [(3, 0, 1), (0, 3, 1), (0, 1, 417)] {
            let refused = own.copy(&stream, from, to, tokens).expect_err("not there");
            assert!(matches!(refused, crate::gather::Error::Length { .. }), "{refused}");
        }
    }
}
