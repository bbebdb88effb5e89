//! Layout, encoding and attention, by the kernels on the emulator and by the CPU's own path, judged by
//! oracles.

use super::cases::{cases, element};
use super::codebook::Levels;
use super::encoder::{AppendHandles, Encoder, Places};
use super::oracle::{Judged, Token, judge};
use super::plan::Books;
use super::sample::{Input, Sample, order};
use super::{BITS, HEAD_DIMS, Rule, Settings, TileLayout, Window, encode, near, rows};
use crate::attention::BLOCK_TOKENS;
use crate::attention::dense::Problem;
use crate::check::{Case, Coverage, not_covered, run_cases};
use crate::kv;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::gtq::parts::{PARTS, UNIT};
use kernels_gpu::gtq::{EncodeShape, Positive, Side};
use simt::emu::EmuOptions;

mod cache;
mod parts;
mod window;

fn device() -> Device {
    Device::cpu(EmuOptions::default())
}

fn layouts() -> impl Iterator<Item = TileLayout> {
    HEAD_DIMS.into_iter().flat_map(|head_dim| {
        BITS.into_iter().flat_map(move |key_bits| {
            BITS.into_iter().flat_map(move |value_bits| {
                [false, true].map(|parted| TileLayout { head_dim, key_bits, value_bits, parted })
            })
        })
    })
}

/// Bits of each code of a row.
fn bits(layout: TileLayout, side: Side) -> Vec<u32> {
    let dim = layout.head_dim as usize;
    if side == Side::Value || !layout.parted {
        return vec![layout.bits(side); dim];
    }
    let of_parts = kernels_gpu::gtq::parts::bits(layout.key_bits);
    assert_eq!(of_parts.iter().sum::<u32>(), 4 * layout.key_bits);
    of_parts.iter().flat_map(|bits| vec![*bits; dim / PARTS]).collect()
}

fn settings(layout: TileLayout) -> Settings {
    let TileLayout { key_bits, value_bits, parted, .. } = layout;
    Settings { key_bits, value_bits, blocks: parted, ..Settings::DEFAULT.without_window() }
}

#[test]
fn the_emulator_accepts_small_cases_of_encoding() {
    let all = cases(Coverage::Small);
    assert_eq!(not_covered(&all, kernels_gpu::gtq::kernels()), Vec::<&str>::new());
    let encoding = |case: &Case| case.kernels().iter().all(|kernel| kernel.contains("encode"));
    let some: Vec<Case> = all.into_iter().filter(encoding).collect();
    let report = run_cases(&some, &device(), None, |_| {});
    let turned = report.cases.iter().filter(|case| case.kernels[0].contains("rope")).count();
    assert!(turned > 30, "{turned} cases that rotate");
    let bad: Vec<String> =
        report.cases.iter().filter(|case| !case.outcome.is_good()).map(|case| format!("{case:?}")).collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Every code and n has bits of its own, and together they are the tile.
#[test]
fn rows_share_no_bits() {
    for layout in layouts() {
        let dim = layout.head_dim as usize;
        let mut tile = vec![0u8; layout.bytes() as usize];
        let mut set = 0;
        for token in 0..BLOCK_TOKENS {
            for side in [Side::Key, Side::Value] {
                // The largest code is stored with all bits, from 4 bits on the smallest.
                let ones = |bits: u32| if bits >= 4 { 0 } else { (1 << bits) - 1 };
                let codes: Vec<u8> = bits(layout, side).into_iter().map(ones).collect();
                rows::write(&mut tile, layout, side, token, &codes, [0xff; 4]);
                let now: u32 = tile.iter().map(|byte| byte.count_ones()).sum();
                let of_row = dim as u32 * layout.bits(side) + 8 * layout.norm_bytes(side);
                assert_eq!(now - set, of_row, "{layout:?} {side:?} {token}");
                set = now;
            }
        }
        assert!(tile.iter().all(|byte| *byte == 0xff), "{layout:?}");
        let norms = if layout.parted { 6 } else { 4 };
        let codes = layout.head_dim * (layout.key_bits + layout.value_bits) / 8;
        assert_eq!(layout.token_bytes(), codes + norms);
    }
    // 3 and 3 bits at head_dim 128, where the paper has 157 bytes.
    let layout = TileLayout { head_dim: 128, key_bits: 3, value_bits: 3, parted: false };
    assert_eq!(layout.token_bytes(), 100);
    assert_eq!(TileLayout { parted: true, ..layout }.token_bytes(), 102);
}

#[test]
fn what_is_written_is_read() {
    for layout in layouts() {
        let mut tile = vec![0x5au8; layout.bytes() as usize];
        let all = |side: Side, token: u32| -> Vec<u8> {
            let bits = bits(layout, side).into_iter().enumerate();
            let code = |d: usize| kernels_gpu::mixed(token.into(), (d * 2 + side as usize) as u64);
            bits.map(|(d, bits)| (code(d) % (1 << bits)) as u8).collect()
        };
        let of_parts = |token: u32| [0, 1, 2, 3].map(|part| (37 * token + 61 * part) as u8);
        for token in (0..BLOCK_TOKENS).rev() {
            for side in [Side::Key, Side::Value] {
                let half = f16::from_f32(token as f32 + if side == Side::Key { 0.25 } else { 0.5 });
                let parted = layout.parted && side == Side::Key;
                let n = if parted { of_parts(token) } else { rows::half(half) };
                rows::write(&mut tile, layout, side, token, &all(side, token), n);
            }
        }
        for token in 0..BLOCK_TOKENS {
            for side in [Side::Key, Side::Value] {
                assert_eq!(rows::codes(&tile, layout, side, token), all(side, token), "{layout:?} {token}");
                let found = rows::norms(&tile, layout, side, token);
                if layout.parted && side == Side::Key {
                    let bits = |byte: u8| f16::from_bits(u16::from(byte) << 6).to_f32();
                    assert_eq!(found, of_parts(token).map(bits));
                } else {
                    assert_eq!(found[0].trunc(), token as f32);
                }
            }
        }
    }
}

/// Tiles, window, lengths and problems of a chunk for each of some sequences.
fn encode(books: &Books, kv_heads: u32, firsts: &[u32], tokens: u32, slices: bool) -> [Vec<u32>; 4] {
    let (device, head_dim) = (device(), books.layout.head_dim);
    let stream = Stream::new(&device).expect("a stream");
    let sequences = firsts.len() as u32;
    let problem =
        Problem { sequences, q_heads: kv_heads, kv_heads, head_dim, query_tokens: tokens, max_tokens: 64 };
    let positions: Vec<u32> = firsts.iter().flat_map(|first| (0..tokens).map(move |i| first + i)).collect();
    let table: Vec<u32> = (0..sequences * problem.max_blocks()).rev().collect();
    let rows = positions.len() * kv_heads as usize;
    let of = |shift: usize| -> Vec<f16> {
        (0..rows).flat_map(|row| (0..head_dim as usize).map(move |d| element(row + shift, d))).collect()
    };
    let (keys, values) = (of(0), of(5));
    let halves = |x: &[f16]| Buffer::from_slice(&device, x).expect("a buffer");
    let words = |x: &[u32]| Buffer::from_slice(&device, x).expect("a buffer");
    let (keys, values, positions) = (halves(&keys), halves(&values), words(&positions));
    let order = Buffer::from_slice(&device, &order(books, kv_heads)).expect("a buffer");
    let size = table.len() * (kv_heads * books.layout.bytes()) as usize / 4;
    let table = words(&table);
    let near = vec![0x0f0f_1234; books.window_words(problem)];
    let [mut tiles, mut near, mut lengths, mut problems] =
        [vec![0x0f0f_1234; size], near, vec![9; firsts.len()], vec![u32::MAX; 2]].map(|x| words(&x));
    let encoder = Encoder::new(&device, books.clone()).expect("an encoder");
    let handles = AppendHandles {
        new_keys: keys.global(),
        new_values: values.global(),
        places: Places {
            positions: positions.global(),
            table: table.global(),
            order: order.global(),
            lengths: lengths.global_mut(),
            tiles: tiles.global_mut(),
            near: near.global_mut(),
            problems: problems.global_mut(),
        },
    };
    // SAFETY: buffers of the emulator as the problem wants them.
    unsafe { encoder.run_on(&stream, problem, slices, handles) }.expect("encoded");
    [tiles, near, lengths, problems].map(|buffer| buffer.to_vec().expect("read"))
}

#[test]
fn both_paths_encode_alike() {
    for layout in layouts() {
        for rule in [Rule::None, Rule::Norm, Rule::Unbiased] {
            let TileLayout { head_dim, key_bits, value_bits, .. } = layout;
            if rule != Rule::None && (key_bits, value_bits) != (3, 2) {
                continue;
            }
            let window = Settings { sink: 16, recent: 16, ..settings(layout) };
            let books = Books::new(head_dim, Settings { rule, ..window }).expect("books");
            for (firsts, tokens) in [(&[0u32, 7, 30, kv::PARKED][..], 1), (&[3, 60], 12), (&[5, 9], 52)] {
                let [own, kernels] = [true, false].map(|slices| encode(&books, 2, firsts, tokens, slices));
                assert!(own == kernels, "{layout:?} {rule:?} {tokens}");
                // A parked sequence has no token, and one that ends past the table none there.
                assert_eq!(own[2][0], firsts[0] + tokens);
            }
        }
    }
}

/// What encoding a row alone needs no word of.
const NO_SHAPE: EncodeShape = EncodeShape {
    tokens: 1,
    kv_heads: 1,
    max_blocks: 1,
    key_bits: 0,
    value_bits: 0,
    rule: 0,
    root: 0.0,
    key_units: [0.0; PARTS],
    value_unit: 0.0,
    window: Window::NONE,
    keys: NO_LEVELS,
    values: NO_LEVELS,
};

const NO_LEVELS: Positive = Positive { thresholds: [0.0; 8], levels: [0.0; 8] };

fn books(dim: usize, bits: u32) -> Books {
    let settings = Settings { key_bits: bits, value_bits: bits, ..Settings::DEFAULT };
    Books::new(dim as u32, settings).expect("books")
}

/// What encoding one row gives.
fn one(x: &[f16], books: &Books, rule: Rule) -> (Vec<f64>, Vec<f64>, Vec<u8>) {
    let (dim, bits) = (x.len() as u32, books.layout.key_bits);
    let shape = EncodeShape {
        rule: rule as u32,
        key_bits: bits,
        value_bits: bits,
        root: f64::from(dim).sqrt() as f32,
        ..NO_SHAPE
    };
    let encoded = encode::encoded(x, &books.keys[0].codebook(), bits, shape);
    let mut tile = vec![0u8; books.layout.bytes() as usize];
    rows::write(&mut tile, books.layout, Side::Key, 5, &encoded.codes, encoded.norms.expect("an n"));
    let restored = rows::restored(&tile, books, Side::Key, 5, &[]);
    let h = rows::turned(&x.iter().map(|x| x.to_f64()).collect::<Vec<_>>(), 1, &[]);
    let levels = (0..1 << bits).map(|code| books.keys[0].level(code)).collect();
    (restored, [h, levels].concat(), encoded.codes)
}

/// Each code is that of the nearest level, of two that are as near the lower; the errors are what the levels
/// promise; each rule keeps what it says.
#[test]
fn codes_are_nearest_and_scales_what_they_say() {
    for dim in HEAD_DIMS.map(|dim| dim as usize) {
        for bits in BITS {
            let books = books(dim, bits);
            let expected = books.keys[0].error;
            let (mut errors, mut squares) = (0.0, 0.0);
            for row in 0..96 {
                let x: Vec<f16> = (0..dim).map(|d| element(12 * row + 10, d)).collect();
                let r = x.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>().sqrt();
                let (restored, numbers, codes) = one(&x, &books, Rule::None);
                let (h, levels) = numbers.split_at(dim);
                for (h, code) in h.iter().zip(&codes) {
                    let distance = |level: &f64| (h / r - level).abs();
                    let least = levels.iter().map(distance).fold(f64::INFINITY, f64::min);
                    // f32 sums of 128 f16: eight roundings of up to |h| <= 12 r.
                    let slack = 2.0 * 12.0 * 8.0 / f64::from(1 << 24);
                    assert!(distance(&levels[usize::from(*code)]) <= least + slack, "{dim} {bits} {row}");
                }
                errors += restored.iter().zip(&x).map(|(a, b)| (a - b.to_f64()).powi(2)).sum::<f64>();
                squares += r * r;
                let product = |y: &[f64]| y.iter().zip(&x).map(|(y, x)| y * x.to_f64()).sum::<f64>();
                let length = |y: &[f64]| y.iter().map(|y| y * y).sum::<f64>().sqrt();
                // n is rounded to f16.
                let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1.0 / 2048.0 + 1e-6;
                assert!(near(length(&one(&x, &books, Rule::Norm).0), r), "{dim} {bits} {row}");
                assert!(near(product(&one(&x, &books, Rule::Unbiased).0), r * r), "{dim} {bits} {row}");
            }
            // 96 rows of 64 elements and more: the mean is within a few per cent of its expectation.
            let found = errors / squares;
            assert!((found / expected - 1.0).abs() < 0.06, "{dim} {bits}: {found} for {expected}");
        }
    }
}

#[test]
fn a_tie_takes_the_lower_level() {
    // A row that is a column of the rotation has all coordinates but one at 0, which is a threshold.
    let x: Vec<f16> = (0..64).map(|d| f16::from_f32(rows::sign(d) as f32)).collect();
    for bits in BITS {
        let (.., codes) = one(&x, &books(64, bits), Rule::None);
        assert_eq!(codes[0], (1 << bits) - 1);
        assert!(codes[1..].iter().all(|code| *code == (1 << (bits - 1)) - 1), "{codes:?}");
    }
}

/// Batches of attention: around tiles, several parts, several query tokens, all groups.
fn batches() -> Vec<(Problem, Vec<u32>, Input)> {
    let of = |q_heads, kv_heads, query_tokens, max_tokens| Problem {
        sequences: 1,
        q_heads,
        kv_heads,
        head_dim: 64,
        query_tokens,
        max_tokens,
    };
    let mut batches = vec![
        (of(8, 2, 1, 160), vec![0, 1, 15, 16, 17, 130], Input::Normal),
        (of(3, 1, 5, 80), vec![80, 3, 0], Input::Normal),
        (of(11, 1, 1, 96), vec![90], Input::Sharp),
        (of(4, 1, 1, 1024), vec![1000, 30], Input::Sharp),
    ];
    batches.extend(Input::ALL.map(|input| (of(8, 1, 1, 320), vec![77, 320], input)));
    batches
}

#[test]
fn both_paths_attend_alike() {
    let device = device();
    for layout in layouts() {
        let TileLayout { head_dim, key_bits, value_bits, .. } = layout;
        let settings = settings(layout);
        let all = (key_bits, value_bits) == (3, 3);
        for (problem, lengths, input) in batches().into_iter().take(if all { 9 } else { 2 }) {
            let sample = Sample::new(settings, Problem { head_dim, ..problem }, &lengths, input);
            attend_alike(&device, &sample.expect("a sample"), &format!("{layout:?} {problem:?} {input:?}"));
        }
    }
}

fn attend_alike(device: &Device, sample: &Sample, what: &str) {
    let [own, kernels] = [true, false].map(|slices| sample.attend(device, slices, 0xff).expect("attended"));
    let same = |a: &[f32], b: &[f32]| a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()));
    assert!(same(&own.0, &kernels.0), "{what}: output");
    assert!(same(&own.1, &kernels.1), "{what}: log-sums");
}

/// The row's tokens as the oracle wants them.
fn tokens(sample: &Sample, sequence: usize, head: usize, visible: usize) -> Vec<Token> {
    let (layout, keys) = (sample.books.layout, &sample.books.keys);
    let unit = if layout.parted { f64::from(UNIT) } else { 1.0 };
    (0..visible)
        .map(|token| {
            let place = token as u32 % BLOCK_TOKENS;
            let [key, value] =
                [Side::Key, Side::Value].map(|side| sample.restored(side, sequence, head, token));
            if let Some(slot) = sample.slot(sequence, head, token) {
                let sizes = near::sizes(slot, &sample.books, place, sample.order_of(head));
                let mut bits = vec![0; key.len()];
                let scale = near::read_value(slot, layout.slot(), place, &mut bits).into();
                return Token { key, value, sizes, scale };
            }
            let tile = sample.tile(sequence, head, token);
            let codes = rows::codes(tile, layout, Side::Key, place);
            let n = rows::norms(tile, layout, Side::Key, place).map(|n| f64::from(n) * unit);
            let of_part = codes.len() / keys.len();
            let size = |(codes, (levels, n)): (&[u8], (&Levels, f64))| {
                n * codes.iter().map(|code| levels.level(usize::from(*code)).abs()).sum::<f64>()
            };
            Token {
                key,
                value,
                sizes: codes.chunks_exact(of_part).zip(keys.iter().zip(n)).map(size).collect(),
                scale: rows::norms(tile, layout, Side::Value, place)[0].into(),
            }
        })
        .collect()
}

#[test]
fn attention_is_the_formulas() {
    let device = device();
    let mut used = 0.0f64;
    for layout in layouts() {
        let head_dim = layout.head_dim;
        let all = (layout.key_bits, layout.value_bits) == (3, 3);
        let windows = [[0, 0], [16, 32], [0, 1 << 16]];
        let tried = if all { &windows[..] } else { &windows[..2] };
        let of_windows = |batch: (Problem, Vec<u32>, Input)| tried.iter().map(move |of| (batch.clone(), *of));
        for ((problem, lengths, input), [sink, recent]) in batches().into_iter().flat_map(of_windows) {
            let settings = Settings { sink, recent, ..settings(layout) };
            // All bits have been without a window, with one some of the batches will do.
            if input == Input::Hostile || recent > 0 && !all && lengths.len() < 3 {
                continue;
            }
            let problem = Problem { head_dim, ..problem };
            let sample = Sample::new(settings, problem, &lengths, input).expect("a sample");
            let (output, lse) = sample.attend(&device, true, 0xff).expect("attended");
            let splits =
                super::Plan::new(&device, sample.problem, sample.books.clone()).expect("a plan").splits();
            let (dim, heads) = (head_dim as usize, problem.q_heads as usize);
            // Rows behind one another have a KV head's tokens in common.
            let mut last = None;
            for row in 0..sample.problem.query_rows() {
                let (sequence, q_head) = (row / heads / problem.query_tokens as usize, row % heads);
                let query_token = row / heads % problem.query_tokens as usize;
                let length = lengths[sequence] as usize;
                let visible = (length + query_token + 1).saturating_sub(problem.query_tokens as usize);
                let query: Vec<f64> = sample.queries[row * dim..][..dim].iter().map(|x| x.to_f64()).collect();
                if query.iter().any(|x| !x.is_finite()) {
                    continue;
                }
                let head = q_head / problem.group() as usize;
                let of = (sequence, head, visible);
                let (_, tokens) = match last.take().filter(|(known, _)| *known == of) {
                    Some(known) => last.insert(known),
                    None => last.insert((of, tokens(&sample, sequence, head, visible))),
                };
                let Judged { output: expected, lse: expected_lse, bound, lse_bound } =
                    judge(&query, sample.order_of(head), tokens, splits);
                let found = &output[row * dim..][..dim];
                let error =
                    found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>();
                assert!(error.sqrt() <= bound, "{layout:?} {input:?} {row}: {} over {bound}", error.sqrt());
                if bound < 1e30 && bound > 1e-30 {
                    used = used.max(error.sqrt() / bound);
                }
                if visible == 0 {
                    assert_eq!(lse[row], f32::NEG_INFINITY);
                    continue;
                }
                let off = (f64::from(lse[row]) - expected_lse).abs();
                assert!(off <= lse_bound, "{layout:?} {input:?} {row}: {off} over {lse_bound}");
            }
        }
    }
    // A bound that nothing comes near proves little.
    assert!(used > 0.01, "{used}");
}
