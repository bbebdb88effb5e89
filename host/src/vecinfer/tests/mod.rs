//! One property over oracle, the CPU's own path and the emulator.

mod books;
mod nearest;
mod restored;
mod turning;

use super::Books;
use super::cases::{Ran, STEP, Step, made_up, ran, settings, steps_of};
use super::oracle;
use super::{Code, HEAD_DIMS, Setting, VecInferCache};
use crate::attention::BLOCK_TOKENS;
use crate::attention::dense::sample::normal;
use crate::check::Coverage;
use crate::kv::{Chunk, Geometry, KvCache, New, Opening, Rotated, Selection};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::vecinfer::Kind;
use simt::emu::EmuOptions;

const TILE: usize = BLOCK_TOKENS as usize;

fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

fn run(step: Step, setting: Setting, head_dim: u32, slices: bool) -> Ran {
    ran(&device(), step, setting, head_dim, slices).expect("a run")
}

fn wide(row: &[f16]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

impl Ran {
    /// Key, or value, of a token as it came.
    fn original(&self, kind: usize, sequence: usize, token: usize, head: usize) -> Vec<f64> {
        let problem = self.batch.problem;
        let (heads, dim) = (problem.kv_heads as usize, problem.head_dim as usize);
        let width = self.batch.table.len() / self.batch.lengths.len();
        let block = self.batch.table[sequence * width + token / TILE] as usize;
        let from = ((block * heads + head) * TILE + token % TILE) * dim;
        wide(&[&self.batch.keys, &self.batch.values][kind][from..from + dim])
    }

    /// As it is stored, and read by a step.
    fn stored(&self, kind: usize, sequence: usize, token: usize, head: usize) -> Vec<f64> {
        let (shape, problem) = (self.store.shape(), self.batch.problem);
        let (heads, dim) = (problem.kv_heads as usize, problem.head_dim as usize);
        let row = sequence * heads + head;
        let tile = token / TILE;
        if !shape.window.is_coded(tile as u32, self.batch.lengths[sequence]) {
            let slot = row * shape.window.slots as usize + shape.window.slot(tile as u32) as usize;
            let from = (slot * TILE + token % TILE) * dim;
            let mut out = vec![f16::ZERO; dim];
            self.store.recent()[kind].read(from, &mut out).expect("read");
            return wide(&out);
        }
        let (code, tile) = self.tile(kind, sequence, tile, head);
        let kind_of = [Kind::Key, Kind::Value][kind];
        let book = self.book(kind, head);
        oracle::decoded(code, kind_of, problem.head_dim, &tile, (token % TILE) as u32, &book)
    }

    /// The codes of a tile.
    fn tile(&self, kind: usize, sequence: usize, tile: usize, head: usize) -> (Code, Vec<u8>) {
        let (setting, shape, problem) = (self.store.setting(), self.store.shape(), self.batch.problem);
        let row = sequence * problem.kv_heads as usize + head;
        let code = [setting.keys, setting.values][kind];
        let bytes = setting.tile_bytes(problem.head_dim) as usize;
        let own = code.tile_bytes(problem.head_dim) as usize;
        let mut out = vec![0; own];
        let from = (row * shape.tiles as usize + tile) * bytes + if kind == 0 { 0 } else { bytes - own };
        self.store.codes().read(from, &mut out).expect("read");
        (code, out)
    }

    fn book(&self, kind: usize, head: usize) -> Vec<f64> {
        let code = self.books.codes[kind];
        let layer = &self.books.layers[0];
        let book = [&layer.keys, &layer.values][kind];
        let one = code.book_elements() as usize;
        wide(&book[if book.len() == one { 0 } else { head * one }..][..one])
    }
}

/// Codes, windows, restored tokens, turned queries, output: the same bits by the kernels and on slices.
#[test]
fn slices_have_the_bits_of_the_kernels() {
    for head_dim in HEAD_DIMS {
        for [keys, values] in settings(head_dim) {
            for step in steps_of(head_dim, [keys, values], Coverage::Quick) {
                let setting = Setting { keys, values, recent: step.recent, sink: step.sink };
                let [kernels, slices] = [false, true]
                    .map(|slices| run(step, setting, head_dim, slices).outputs().expect("outputs"));
                for (kernels, slices) in kernels.iter().zip(&slices) {
                    assert!(
                        kernels.bytes() == slices.bytes(),
                        "{head_dim} {setting:?} {step:?}: {}",
                        kernels.name()
                    );
                }
            }
        }
    }
}

/// Each code is that of a nearest centroid of what is stored in f16, and of the first of equal ones.
#[test]
fn codes_are_those_of_the_nearest_centroids() {
    for head_dim in HEAD_DIMS {
        for [keys, values] in settings(head_dim) {
            let step = Step { lengths: &[64, 37], by_head: true, recent: 0, sink: 0, ..STEP };
            // A window that holds all: what is stored in f16 beside what is stored in codes.
            let none = Setting { keys, values, recent: 0, sink: 0 };
            let all = Setting { recent: 160, ..none };
            let whole = run(Step { recent: 160, ..step }, all, head_dim, true);
            let coded = run(step, none, head_dim, true);
            for (sequence, length) in [(0, 64), (1, 32)] {
                for kind in 0..2 {
                    for head in 0..2 {
                        let (code, book) = ([keys, values][kind], coded.book(kind, head));
                        let d = code.d as usize;
                        for token in 0..length {
                            let exact = whole.stored(kind, sequence, token, head);
                            let found = coded.stored(kind, sequence, token, head);
                            for (x, found) in exact.chunks(d).zip(found.chunks(d)) {
                                let near = oracle::nearest(x, &book);
                                let is = |n: &u32| book[*n as usize * d..][..d] == *found;
                                assert!(near.iter().any(is), "{code:?}: {x:?} to {found:?}");
                            }
                            // The second half of a codebook is the first again.
                            let kind_of = [Kind::Key, Kind::Value][kind];
                            let (_, tile) = coded.tile(kind, sequence, token / TILE, head);
                            let number = |part| {
                                let place = code.place(kind_of, (token % TILE) as u32, part);
                                code.read(head_dim, &tile, place)
                            };
                            let half = code.centroids() / 2;
                            assert!((0..code.parts(head_dim)).all(|part| number(part) < half));
                        }
                    }
                }
            }
        }
    }
}

/// What is stored in f16 is the transformation, and it keeps products of queries and keys but for a constant.
#[test]
fn the_transformation_keeps_products() {
    for (head_dim, hadamard) in [(64, true), (96, true), (128, true), (128, false), (256, true)] {
        let setting = Setting { recent: 160, ..Setting::DEFAULT };
        let step = Step { lengths: &[40], hadamard, recent: 160, ..STEP };
        let ran = run(step, setting, head_dim, true);
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let dim = head_dim as usize;
        let turned = ran.turned.to_vec().expect("read");
        for q_head in 0..8 {
            let head = q_head / 4;
            let query = wide(&ran.batch.queries[q_head * dim..][..dim]);
            let exact = oracle::transformed(&query, &ran.books.layers[0], head, false, hadamard);
            let rounded = wide(&turned[q_head * dim..][..dim]);
            let far: Vec<f64> = rounded.iter().zip(&exact).map(|(a, b)| a - b).collect();
            assert!(norm(&far) <= oracle::transform_error(norm(&exact), dim), "query {q_head}");
            let mean: Vec<f64> = ran.books.layers[0].transform[head * 5 * dim..][..dim]
                .iter()
                .map(|x| f64::from(*x))
                .collect();
            for token in 0..40 {
                let key = ran.original(0, 0, token, head);
                let own = oracle::transformed(&key, &ran.books.layers[0], head, true, hadamard);
                // λ and 1/λ are rounded to f32, and f64 adds little.
                let expected = dot(&query, &key) - dot(&query, &mean);
                let far = (dot(&exact, &own) - expected).abs();
                assert!(far <= 1e-6 * norm(&exact) * norm(&own), "{far} of {expected}");
                let stored = ran.stored(0, 0, token, head);
                let far: Vec<f64> = stored.iter().zip(&own).map(|(a, b)| a - b).collect();
                assert!(norm(&far) <= oracle::transform_error(norm(&own), dim), "key {token}");
                assert_eq!(ran.stored(1, 0, token, head), ran.original(1, 0, token, head));
            }
        }
    }
}

/// A step's output is attention over what is stored.
#[test]
fn a_step_is_attention_over_what_is_stored() {
    for head_dim in HEAD_DIMS {
        for [keys, values] in settings(head_dim) {
            for step in [
                STEP,
                Step { lengths: &[159, 111], group: 11, by_head: true, recent: 0, ..STEP },
                Step { lengths: &[900, 530], max_tokens: 900, recent: 128, ..STEP },
            ] {
                let ran =
                    run(step, Setting { keys, values, recent: step.recent, sink: step.sink }, head_dim, true);
                let dim = head_dim as usize;
                let output = ran.output.to_vec().expect("read");
                let turned = ran.turned.to_vec().expect("read");
                let (heads, group) = (step.kv_heads as usize, step.group as usize);
                // Rows of a KV head, which have its keys and values in common.
                for (pair, output) in output.chunks_exact(group * dim).enumerate() {
                    let (sequence, head) = (pair / heads, pair % heads);
                    let length = step.lengths[sequence] as usize;
                    let [stored_keys, stored_values] = [0, 1].map(|kind| -> Vec<Vec<f64>> {
                        (0..length).map(|token| ran.stored(kind, sequence, token, head)).collect()
                    });
                    for (row, output) in (pair * group..).zip(output.chunks_exact(dim)) {
                        // `the_transformation_keeps_products` holds it against the formula.
                        let query = wide(&turned[row * dim..][..dim]);
                        let steps = length.div_ceil(TILE);
                        let (exact, bound) =
                            oracle::attend(&query, &stored_keys, &stored_values, steps, keys.whole_keys());
                        for (found, exact) in output.iter().zip(exact) {
                            let far = (f64::from(*found) - exact).abs();
                            assert!(far <= bound, "row {row}: {found} for {exact}, {bound} is allowed");
                        }
                    }
                }
            }
        }
    }
}

/// Scores so large that their neighbours in f32 are octaves apart have weights that f16 holds.
#[test]
fn loud_scores_have_finite_outputs() {
    for group in [2, 8] {
        for recent in [0, 160] {
            for head_dim in HEAD_DIMS {
                for [keys, values] in settings(head_dim) {
                    let step =
                        Step { lengths: &[150, 70], group, recent, hadamard: false, loud: true, ..STEP };
                    let [kernels, slices] = [false, true].map(|slices| {
                        let ran = run(step, Setting { keys, values, recent, sink: 16 }, head_dim, slices);
                        ran.output.to_vec().expect("read")
                    });
                    assert!(kernels.iter().all(|x| x.is_finite()), "{head_dim} {keys:?} {group} {recent}");
                    assert!(kernels.iter().zip(&slices).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    }
}

/// A prompt in chunks of every cut, then steps: a cache has the same bits by the kernels and by slices.
#[test]
fn a_cache_is_the_same_by_kernels_and_by_slices() {
    HEAD_DIMS.into_iter().for_each(a_cache_of_heads_of);
}

fn a_cache_of_heads_of(head_dim: u32) {
    let geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: head_dim as usize };
    let (q_width, kv_width) = (geometry.query_width(), geometry.kv_width());
    let (device, selection) = (device(), "vecinfer/recent=32".parse::<Selection>().expect("a scheme"));
    let stream = Stream::new(&device).expect("a stream");
    let setting = Setting::of(&selection);
    let made = made_up([setting.keys, setting.values], 2, head_dim, STEP);
    let books = Books { layers: vec![made.layers[0].clone(); 2], ..made };
    let opening =
        Opening { device: &device, geometry, rope: None, capacity: 160.into(), selection: &selection };
    let open = || VecInferCache::new(&opening, setting, &books).expect("a cache");
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
                let (keys, values) = (rows(kv_width, kind + 1), rows(kv_width, kind + 2));
                let new = Rotated { positions: &positions, keys: &keys, values: &values };
                cache.append(&stream, layer, New::Rotated(new)).expect("appended");
                let mut output = Buffer::<f32>::zeroed(&device, tokens * q_width).expect("a buffer");
                cache.attend(&stream, layer, &rows(q_width, kind + 3), &mut output).expect("attended");
                outputs.extend(output.to_vec().expect("read").iter().map(|x| x.to_bits()));
            }
            cache.commit();
            outputs
        });
        assert!(outputs[0] == outputs[1], "{head_dim}: {tokens} tokens to {}", caches[0].tokens());
        // Nothing that is attended to is nothing.
        assert!(outputs[0].iter().any(|bits| *bits != 0));
    }
    assert_eq!(caches[0].bytes(), caches[1].bytes());
}

/// A kernel looks for the first tokens' tiles among a warp's first ones; more of them are refused.
#[test]
fn more_first_tokens_than_a_kernel_looks_for_are_refused() {
    let of = |head_dim, sink| {
        super::plan::kernel_info(head_dim, Setting { sink, ..Setting::DEFAULT }, 1)
            .map(|kernels| kernels.len())
    };
    assert!(of(256, 64).is_ok() && of(128, 128).is_ok());
    let said = of(256, 80).expect_err("five tiles, and four warps").to_string();
    assert!(said.contains("up to 64 tokens") && said.contains("not 80"), "{said}");
}
