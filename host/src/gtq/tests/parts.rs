//! Keys in parts: the codec against f64, the order of channels and its file.

use super::{NO_SHAPE, books, device, settings};
use crate::attention::StepProblem;
use crate::attention::inputs::{Batch, Input};
use crate::attention::rope::Pairing;
use crate::gtq::cases::element;
use crate::gtq::codebook::best_error;
use crate::gtq::plan::Books;
use crate::gtq::{BITS, HEAD_DIMS, Order, Rule, TileLayout, encode, rows, sample};
use crate::kv::calibration::{Artifact, Material};
use crate::kv::proof::by_workload::to_device;
use crate::kv::workload::{AnyInput, Fact, Opening, Originals};
use crate::kv::{self, Geometry, Rope, Selection};
use crate::tensor_file::{Dtype, Target};
use half::f16;
use kernels_gpu::gtq::parts::{PARTS, UNIT, norm, norm_byte};
use kernels_gpu::gtq::{EncodeShape, Side};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Every byte stands for itself, and what is between goes to the nearer one, of two to the even.
#[test]
fn a_norm_is_the_nearest_byte() {
    let value = |byte: u32| f64::from(norm(byte)) * f64::from(UNIT);
    for byte in 0..=255u32 {
        let n = value(byte);
        assert_eq!(norm_byte(n as f32), byte);
        let next = if byte < 255 { value(byte + 1) } else { 992.0 + 32.0 };
        let half = ((n + next) / 2.0) as f32;
        assert_eq!(norm_byte(half), byte + (byte & 1), "a tie at {byte}");
        // Of the smallest the product with a power of two rounds as well, at 2^-18 of them.
        assert_eq!(norm_byte(half * (1.0 - 2f32.powi(-16))), byte);
        assert_eq!(norm_byte(half * (1.0 + 2f32.powi(-16))), byte + 1);
    }
    for none in [f32::NAN, -f32::NAN, f32::from_bits(u32::MAX), f32::INFINITY, 1e30, 1009.0] {
        assert!(norm_byte(none) > 255, "{none}");
    }
    // From 1/32 on a byte is within 1/32 of the norm.
    for i in 0..4000 {
        let n = 0.03125 * 1.0026f32.powi(i);
        let off = f64::from(n) / value(norm_byte(n)) - 1.0;
        assert!(off.abs() <= 1.0 / 31.0, "{n}: {off}");
    }
}

fn parted(head_dim: u32, key_bits: u32) -> Books {
    let layout = TileLayout { head_dim, key_bits, value_bits: 2, parted: true };
    Books::new(head_dim, settings(layout)).expect("books")
}

/// What encoding a key gives: the key restored, its turned parts and n in f64, and its codes.
struct One {
    restored: Vec<f64>,
    turned: Vec<f64>,
    n: [f64; PARTS],
    codes: Vec<u8>,
}

fn one(x: &[f16], order: &[u8], books: &Books, rule: Rule) -> One {
    let (layout, dim) = (books.layout, x.len());
    let shape = EncodeShape {
        rule: rule as u32,
        key_bits: layout.key_bits,
        value_bits: layout.value_bits,
        root: (dim as f64).sqrt() as f32,
        ..NO_SHAPE
    };
    let of_parts = books.part_codebooks().expect("parts");
    let encoded = encode::encoded_parts(x, order, &of_parts, shape);
    let mut tile = vec![0u8; layout.bytes() as usize];
    rows::write(&mut tile, layout, Side::Key, 11, &encoded.codes, encoded.norms.expect("an n"));
    let wide: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
    One {
        restored: rows::restored(&tile, books, Side::Key, 11, order),
        turned: rows::turned(&wide, PARTS, order),
        n: rows::norms(&tile, layout, Side::Key, 11).map(|n| f64::from(n * UNIT)),
        codes: encoded.codes,
    }
}

/// Codes are nearest to the row over its stored n; the errors are those of the levels, in which a byte for n
/// hardly shows; each rule keeps what it says, to a byte.
#[test]
fn codes_are_nearest_to_what_is_stored() {
    for (head_dim, bits) in HEAD_DIMS.into_iter().flat_map(|dim| BITS.map(|bits| (dim, bits))) {
        let books = parted(head_dim, bits);
        let (dim, of_part) = (head_dim as usize, head_dim as usize / PARTS);
        let order = sample::order(&books, 1);
        let (mut errors, mut squares) = ([0.0; PARTS], [0.0; PARTS]);
        for row in 0..160 {
            let x: Vec<f16> = (0..dim).map(|d| element(12 * row + 10, d)).collect();
            let own = one(&x, &order, &books, Rule::None);
            let root = (of_part as f64).sqrt();
            for (d, (h, code)) in own.turned.iter().zip(&own.codes).enumerate() {
                let (levels, n) = (&books.keys[d / of_part], own.n[d / of_part]);
                let y = h / (n * root);
                let distance = |code: usize| (y - levels.level(code)).abs();
                let least = (0..1 << levels.bits).map(distance).fold(f64::INFINITY, f64::min);
                // f32 sums of 32 f16: five roundings of up to |h| <= 6 r, and the thresholds' products.
                assert!(distance(usize::from(*code)) <= least + 1e-5, "{head_dim} {bits} {row} {d}");
            }
            let kept = |y: &[f64], part: usize, of: &dyn Fn(f64, f64) -> f64| {
                let own = order[part * of_part..(part + 1) * of_part].iter().map(|c| usize::from(*c));
                own.map(|channel| of(y[channel], x[channel].to_f64())).sum::<f64>()
            };
            let by_rule = [Rule::Norm, Rule::Unbiased].map(|rule| one(&x, &order, &books, rule).restored);
            for part in 0..PARTS {
                errors[part] += kept(&own.restored, part, &|y, x| (y - x) * (y - x));
                let square = kept(&own.restored, part, &|_, x| x * x);
                squares[part] += square;
                // n is within 1/31.
                let near = |a: f64| (a - 1.0).abs() < 1.0 / 31.0 + 1e-6;
                let length = kept(&by_rule[0], part, &|y, _| y * y).sqrt();
                assert!(near(length / square.sqrt()), "{head_dim} {bits} {row} {part}");
                let product = kept(&by_rule[1], part, &|y, x| y * x);
                assert!(near(product / square), "{head_dim} {bits} {row} {part}");
            }
        }
        for (part, levels) in books.keys.iter().enumerate() {
            let (found, expected) = (errors[part] / squares[part], levels.error);
            // 160 rows of 16 elements and more: the mean is within a few per cent. A byte's rounding has the
            // mean square (1/16)²/12·0.54 = 0.00018, of which codes that are nearest to what is stored leave
            // little to 6 bits; of 1 bit nothing can make it good.
            let more = if levels.bits == 1 { 0.00018 } else { 0.00005 };
            let off = (found - more / 2.0) / expected - 1.0;
            let slack = 0.07 + more / expected;
            assert!(off.abs() < slack, "{head_dim} {bits} {part}: {found} for {expected}");
        }
    }
}

/// Levels of few dimensions: half-integers cost next to nothing up to 4 bits, and of 6 bits, whose levels lie
/// a few steps apart, up to a twentieth.
#[test]
fn levels_of_parts_are_nearly_the_best() {
    for dim in HEAD_DIMS.map(|dim| dim as usize / PARTS) {
        for levels in BITS.into_iter().flat_map(|bits| parted(4 * dim as u32, bits).keys) {
            assert_eq!((levels.dim, levels.integers.len()), (dim, 1 << levels.bits));
            let lost = levels.error / best_error(dim, levels.bits) - 1.0;
            let most = if levels.bits == 6 { 0.05 } else { 0.006 };
            assert!((-1e-9..most).contains(&lost), "{dim} {}: {lost}", levels.bits);
            assert!(levels.integers.is_sorted_by(|a, b| a < b));
        }
    }
    // Uniform books are as they were.
    assert_eq!(books(64, 3).keys.len(), 1);
}

const GEOMETRY: Geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };

fn rope(pairing: Pairing) -> Rope {
    Rope { pairing, rotary: 64, frequencies: vec![0.0; 32] }
}

/// Material in which block b of layer l and head h weighs 2^−((b + 5·l + 3·h) mod 32), keys alone or queries
/// alone by turns.
fn material(pairing: Pairing) -> Material {
    let mut material = Material::made_up(GEOMETRY, 40, 5);
    let pairs = crate::gtq::allocation::blocks(64, 64, pairing);
    for (layer, passed) in material.layers.iter_mut().enumerate() {
        let size =
            |head: usize, block: usize| 2f32.powf(-(((block + 5 * layer + 3 * head) % 32) as f32) / 2.0);
        for (rows, heads, group, odd) in [(&mut passed.keys, 2, 1, 0), (&mut passed.queries, 4, 2, 1)] {
            for (row, x) in rows.chunks_exact_mut(64).enumerate() {
                for (block, channels) in pairs.iter().enumerate() {
                    // A block's product is size², whichever of both has it.
                    let own = if block % 2 == odd { size(row % heads / group, block).powi(2) } else { 1.0 };
                    channels.iter().for_each(|channel| x[*channel] = f16::from_f32(own));
                }
            }
        }
    }
    material.rope = Some(rope(pairing));
    material
}

#[test]
fn blocks_are_ranked_by_what_they_weigh() {
    for pairing in [Pairing::Interleaved, Pairing::HalfSplit] {
        let order = Order::of(&material(pairing)).expect("an order");
        let pairs = crate::gtq::allocation::blocks(64, 64, pairing);
        for (layer, own) in order.layers.iter().enumerate() {
            for (head, channels) in own.chunks_exact(64).enumerate() {
                let first = (64 - 5 * layer - 3 * head) % 32;
                let expected: Vec<u8> =
                    (0..32).flat_map(|i| pairs[(first + i) % 32]).map(|channel| channel as u8).collect();
                assert_eq!(channels, expected, "{pairing:?} {layer} {head}");
            }
        }
    }
    let geometry = Geometry { head_dim: 96, ..GEOMETRY };
    let error = Order::of(&Material::made_up(geometry, 3, 1)).expect_err("no kernel").to_string();
    assert!(error.contains("head_dim 96"), "{error}");
}

fn calibrated(material: &Material) -> Artifact {
    let selection = Selection::for_calibration("gtq-blocks", crate::schemes()).expect("a calibrator");
    selection.calibrate(material, &|_, _| ControlFlow::Continue(())).expect("an artifact")
}

/// A file of its own for each name and process.
fn written(name: &str, artifact: &Artifact) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ferrokv-gtq-{}-{name}", std::process::id()));
    artifact.write(Target::new(&path, true, None).expect("a folder")).expect("written");
    path
}

fn open(path: &Path, geometry: Geometry, rope: Option<&Rope>) -> kv::Result<()> {
    let selection: Selection = format!("gtq-blocks/k=2/order={}", path.display()).parse()?;
    selection.open(&device(), geometry, rope, 32).map(drop)
}

#[test]
fn a_file_is_read_as_it_was_made_and_the_same_each_time() {
    let material = material(Pairing::HalfSplit);
    let artifact = calibrated(&material);
    assert_eq!(artifact, calibrated(&material));
    assert_eq!(artifact.bytes(), 2 * 2 * 64);
    let path = written("made", &artifact);
    let mut file = crate::tensor_file::TensorFile::open(&path).expect("a file");
    let expected = Order::of(&material).expect("an order");
    for (layer, own) in expected.layers.iter().enumerate() {
        let name = format!("layer.{layer:02}.order");
        assert_eq!(&file.read::<u8>(&name, Dtype::U8).expect("read"), own);
    }
    open(&path, GEOMETRY, Some(&rope(Pairing::HalfSplit))).expect("opened");
    // Where keys come turned, and nobody says how.
    open(&path, GEOMETRY, None).expect("opened");
    std::fs::remove_file(path).expect("removed");
}

#[test]
fn a_file_for_something_else_is_refused() {
    let artifact = calibrated(&material(Pairing::HalfSplit));
    let path = written("other", &artifact);
    let refused =
        |geometry, rope: Option<&Rope>| open(&path, geometry, rope).expect_err("refused").to_string();
    for (geometry, what) in [
        (Geometry { layers: 3, ..GEOMETRY }, "layers 2"),
        (Geometry { kv_heads: 1, ..GEOMETRY }, "kv_heads 2"),
        (Geometry { head_dim: 128, ..GEOMETRY }, "head_dim 64"),
    ] {
        let error = refused(geometry, None);
        assert!(error.contains(what) && error.contains("this model"), "{error}");
    }
    let pairs = refused(GEOMETRY, Some(&rope(Pairing::Interleaved)));
    assert!(pairs.contains("half-split over 64") && pairs.contains("interleaved over 64"), "{pairs}");
    let fewer = refused(GEOMETRY, Some(&Rope { rotary: 32, ..rope(Pairing::HalfSplit) }));
    assert!(fewer.contains("half-split over 32"), "{fewer}");
    // Of no model: only where there is none.
    let made_up = written("made-up", &calibrated(&Material::made_up(GEOMETRY, 4, 3)));
    open(&made_up, GEOMETRY, None).expect("opened");
    let error = open(&made_up, GEOMETRY, Some(&rope(Pairing::Interleaved))).expect_err("refused");
    assert!(error.to_string().contains("neighbours, of no model"), "{error}");
    // None at all, and one for another scheme.
    let none: Selection = "gtq-blocks".parse().expect("a selection");
    let none = none.open(&device(), GEOMETRY, None, 32).map(drop).expect_err("no file").to_string();
    assert!(none.contains("gtq-blocks/order=FILE") && none.contains("--scheme gtq-blocks"), "{none}");
    let mut foreign = artifact.clone();
    foreign.say("scheme", "vecinfer");
    let foreign = open(&written("other", &foreign), GEOMETRY, None).expect_err("refused").to_string();
    assert!(foreign.contains("is for vecinfer"), "{foreign}");
    for path in [path, made_up] {
        std::fs::remove_file(path).expect("removed");
    }
}

#[test]
fn a_file_that_was_cut_or_altered_is_refused() {
    let artifact = calibrated(&material(Pairing::HalfSplit));
    let path = written("whole", &artifact);
    let whole = std::fs::read(&path).expect("read");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("written");
        open(&path, GEOMETRY, None).expect_err("refused").to_string()
    };
    let cut = refused(&whole[..whole.len() - 10]);
    assert!(cut.contains("cut off"), "{cut}");
    let last = whole.len() - 1;
    let altered = |at: usize, byte: u8| {
        let mut altered = whole.clone();
        altered[at] = byte;
        altered
    };
    let twice = refused(&altered(last, whole[last - 1]));
    assert!(twice.contains("layer 1, KV head 1: channel") && twice.contains("twice"), "{twice}");
    let beyond = refused(&altered(last, 64));
    assert!(beyond.contains("channel 64 which there is not"), "{beyond}");
    let mut swapped = whole.clone();
    swapped.swap(last, last - 1);
    let swapped = refused(&swapped);
    assert!(swapped.contains("hash") && swapped.contains("ferrokv calibrate"), "{swapped}");
    std::fs::remove_file(path).expect("removed");
}

/// A workload without a file makes the order of its own input, and says so.
#[test]
fn a_workload_needs_no_file() {
    let (q_heads, kv_heads, head_dim, max_tokens) = (4, 2, 64, 40);
    let problem = StepProblem { sequences: 2, q_heads, kv_heads, head_dim, max_tokens };
    let batch = Batch::<f16>::new(problem, &[(Input::Normal, 40), (Input::Normal, 21)], 3, 3);
    let input = Arc::new(to_device(&device(), &batch).expect("an input"));
    let run = |text: &str| {
        let selection: Selection = text.parse().expect("a selection");
        let input = AnyInput::F16(input.clone());
        let opening = Opening { input, selection: &selection, originals: Originals::Device, layer: None };
        let workload = (selection.scheme().workload)(&opening).expect("a workload");
        // All of it is in the window.
        assert_eq!(workload.read_bytes(), 2 * 61 * (4 * 64 + 20));
        let said = workload.facts().expect("facts");
        (workload.outcome().expect("an outcome").output, said)
    };
    let (of_itself, said) = run("gtq-blocks");
    assert_eq!(said, [Fact::text("order of channels", "made from this input itself")]);
    let order = Order::of(&input.material([1, 4096]).expect("material")).expect("an order");
    let mut artifact = order.artifact(input.geometry(), None);
    for (name, value) in [("layers", 1), ("kv_heads", 2), ("head_dim", 64)] {
        artifact.say(name, value);
    }
    let path = written("workload", &artifact);
    let (from_file, said) = run(&format!("gtq-blocks/order={}", path.display()));
    assert_eq!(said, [Fact::text("order of channels", "from the file")]);
    assert_eq!(of_itself, from_file);
    std::fs::remove_file(path).expect("removed");
}

/// Each block has the part that its channels are in, and a part as many blocks as any other.
#[test]
fn a_chart_shows_the_order() {
    let geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };
    let material = Material::made_up(geometry, 40, 5);
    let order = Order::of(&material).expect("an order");
    let rope = Rope { frequencies: Vec::new(), pairing: Pairing::HalfSplit, rotary: 64 };
    for rope in [None, Some(&rope)] {
        let chart = order.chart(geometry, rope);
        assert_eq!((chart.rows.len(), chart.classes.len()), (4, PARTS));
        assert_eq!(chart.names, [(0, "0".to_owned()), (2, "1".to_owned())]);
        assert!(chart.classes[0].contains("6 bits of 3 on average, 4 bits of 2"), "{}", chart.classes[0]);
        for (row, shown) in chart.rows.iter().enumerate() {
            let own = &order.layers[row / 2][row % 2 * 64..][..64];
            for (block, part) in shown.iter().enumerate() {
                let channel = if rope.is_some() { block } else { 2 * block };
                assert_eq!(usize::from(own[usize::from(*part) * 16..][..16].contains(&(channel as u8))), 1);
            }
            let of_part = |part: u8| shown.iter().filter(|own| **own == part).count();
            assert_eq!(shown.len(), 32);
            assert!(rope.is_some() || (0..4).all(|part| of_part(part) == 8), "{shown:?}");
        }
    }
}
