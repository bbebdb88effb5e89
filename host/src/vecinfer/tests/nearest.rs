//! Codes of large codebooks, whose chunks the tensor cores choose: those of scoring all centroids.

use super::super::{Books, Code, Encode, LayerBooks, Setting, Source, Store, Tables};
use super::device;
use crate::attention::StepProblem;
use crate::attention::dense::sample::normal;
use crate::{Buffer, Stream};
use half::f16;
use kernels_gpu::vecinfer::ROWS_OF_TRANSFORM;

const TOKENS: u32 = 37;
const DIM: usize = 64;

/// The codes of rows [tokens, 1, 64], keys and values, by the kernels or on slices; keys are not transformed.
fn codes(book: &[f16], code: Code, rows: &[f16], slices: bool) -> Vec<u8> {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let setting = Setting { keys: code, values: code, ..Setting::DEFAULT };
    let mut transform = vec![1.0; ROWS_OF_TRANSFORM as usize * DIM];
    transform[..DIM].fill(0.0);
    // No kernel and no search asks whether centroids are whole: what attention reads is not looked at.
    let layer = LayerBooks { transform, keys: book.to_vec(), values: book.to_vec(), steps: vec![f16::ONE] };
    let books = Books { hadamard: false, codes: [code; 2], layers: vec![layer] };
    let tables = Tables::new(&device, &books, 0).expect("tables");
    let (head_dim, max_tokens) = (DIM as u32, TOKENS + 3);
    let problem = StepProblem { sequences: 1, q_heads: 1, kv_heads: 1, head_dim, max_tokens };
    let mut store = Store::new(&device, problem, setting).expect("a store");
    let positions = Buffer::from_slice(&device, &(0..TOKENS).collect::<Vec<u32>>()).expect("a buffer");
    let rows = Buffer::from_slice(&device, rows).expect("a buffer");
    let mut lengths = Buffer::<u32>::zeroed(&device, 1).expect("a buffer");
    // A step's token, then a prompt's: some tiles have fewer sub-vectors than the block takes at a time.
    for (first, last) in [(0, 1), (1, TOKENS)] {
        let of = first as usize * DIM..last as usize * DIM;
        let encode = Encode {
            sequence: 0,
            counts: [1, last - first],
            source: Source::Rows,
            keys: rows.global_range(of.clone()).expect("rows"),
            values: rows.global_range(of).expect("rows"),
            positions: positions.global_range(first as usize..last as usize).expect("positions"),
            lengths: lengths.global_mut(),
            pool: None,
        };
        // SAFETY: host memory of this device, which is there until the stream was waited for.
        unsafe { store.encode_on(&stream, slices, &tables, encode) }.expect("encoded");
    }
    stream.synchronize().expect("done");
    store.codes().to_vec().expect("read")
}

fn rows(of: impl Fn(usize) -> f32) -> Vec<f16> {
    (0..TOKENS as usize * DIM).map(|i| f16::from_f32(of(i))).collect()
}

/// Codebooks on which a wrong bound, or a chunk too few, gives another code: centroids that are equal, or
/// differ by the last bit and lie in chunks far apart; sub-vectors half-way between two, where rounding
/// decides; one centroid beside which all others are small; subnormal numbers; the largest, and none.
#[test]
fn chunks_that_are_scored_have_the_nearest_centroid() {
    for number in [410, 412, 810, 812] {
        let code = Code::of(number);
        let (d, count) = (code.d as usize, code.centroids() as usize);
        let book = |of: &dyn Fn(usize, usize) -> f16| -> Vec<f16> {
            (0..count * d).map(|i| of(i / d, i % d)).collect()
        };
        let random = |c: usize, i: usize| normal(7, (c * d + i) as u64);
        let plain = book(&|c, i| f16::from_f32(random(c, i)));
        let half = count / 2;
        let twins = book(&|c, i| {
            let x = f16::from_f32(random(c % half, i));
            f16::from_bits(x.to_bits() ^ u16::from(c >= half && i == c % d))
        });
        let line = book(&|c, i| f16::from_f32(if i == 0 { (c % 64) as f32 } else { 0.0 }));
        let outlier = book(&|c, i| f16::from_f32(if c == 77 { 6000.0 } else { 1e-3 * random(c, i) }));
        let tiny = book(&|c, i| f16::from_bits((c * 31 + i * 7) as u16 % 600));
        let equal = book(&|_, _| f16::ONE);
        let middle = |book: &[f16]| {
            rows(|i| {
                let (part, channel) = (i / d, i % d);
                let of = |c: usize| book[c % count * d + channel].to_f32();
                0.5 * (of(part * 131) + of(part * 131 + half))
            })
        };
        let extremes = [f16::MAX, f16::MIN, f16::ZERO, f16::INFINITY, f16::NAN, f16::NEG_INFINITY, f16::ONE];
        let wild: Vec<f16> = (0..TOKENS as usize * DIM).map(|i| extremes[(i / 5 + i / 64) % 7]).collect();
        for (name, book, rows) in [
            ("plain", &plain, rows(|i| normal(8, i as u64))),
            ("half-way", &plain, middle(&plain)),
            ("twins", &twins, middle(&twins)),
            (
                "line",
                &line,
                rows(|i| if i % d == 0 { (i / d) as f32 % 64.0 + 0.5 } else { normal(9, i as u64) }),
            ),
            ("outlier", &outlier, rows(|i| 1e-3 * normal(8, i as u64))),
            ("tiny", &tiny, rows(|i| 1e-5 * normal(8, i as u64))),
            ("equal", &equal, rows(|i| normal(8, i as u64))),
            ("wild", &plain, wild),
        ] {
            let [kernels, slices] = [false, true].map(|slices| codes(book, code, &rows, slices));
            assert!(kernels == slices, "d{d}b{}: {name}", code.bits);
            assert!(name == "equal" || kernels.iter().any(|byte| *byte != 0), "{name} tells nothing");
        }
    }
}
