//! References: errors against those of theory, bytes by hand, and what is refused.

use super::*;
use crate::Device;
use crate::gtq::codebook::best_error;
use crate::kv::calibration::Artifact;
use crate::tensor_file::{Dtype, Target};
use simt::emu::EmuOptions;
use std::path::{Path, PathBuf};

const GEOMETRY: Geometry = Geometry { layers: 1, q_heads: 4, kv_heads: 2, head_dim: 64 };

fn parse(text: &str) -> Result<Selection> {
    Selection::parse(text, REFERENCES.iter())
}

fn normal(count: usize, seed: u64) -> Vec<f16> {
    let mut random = crate::eval::Random::new(seed);
    let mut one =
        || (-2.0 * (1.0 - random.uniform()).ln()).sqrt() * (std::f64::consts::TAU * random.uniform()).cos();
    (0..count).map(|_| f16::from_f64(one())).collect()
}

fn uniform(count: usize, seed: u64) -> Vec<f16> {
    let mut random = crate::eval::Random::new(seed);
    (0..count).map(|_| f16::from_f64(random.uniform())).collect()
}

fn of(text: &str, geometry: Geometry, keys: &[f16], values: &[f16]) -> Result<Restored> {
    let (device, selection) = (Device::cpu(EmuOptions::default()), parse(text)?);
    let capacity = (keys.len() / geometry.kv_width()).into();
    let opening = Opening { device: &device, geometry, rope: None, capacity, selection: &selection };
    let mut heard = 0;
    let mut done = restored(&opening, &[Original { layer: 0, keys, values }], |tokens| heard += tokens)?;
    assert_eq!((done.len(), heard), (1, keys.len() / geometry.kv_width()));
    Ok(done.remove(0))
}

/// Σ (x − x^)² over Σ x².
fn relative(exact: &[f16], found: &[f32]) -> f64 {
    let errors = exact.iter().zip(found).map(|(x, found)| (x.to_f64() - f64::from(*found)).powi(2));
    errors.sum::<f64>() / exact.iter().map(|x| x.to_f64().powi(2)).sum::<f64>()
}

/// A calibration capture of one layer, in a file that goes when the test has ended.
fn capture(name: &str, geometry: Geometry, keys: &[f16], queries: &[f16]) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ferrokv-references-{}-{name}", std::process::id()));
    let Geometry { layers, q_heads, kv_heads, head_dim } = geometry;
    let mut artifact = Artifact::default();
    for (name, rows, heads) in [("layer.00.key", keys, kv_heads), ("layer.00.query", queries, q_heads)] {
        artifact.add(name, Dtype::F16, &[rows.len() / (heads * head_dim), heads, head_dim], rows);
    }
    for (what, value) in [("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)] {
        artifact.say(what, value);
    }
    artifact.write(Target::new(&path, true, None).expect("a folder")).expect("written");
    path
}

/// Of n uniform numbers the least and the largest are themselves codes; what lies between is uniform over
/// steps of range/(2^b − 1), with an error of a twelfth of its square. E range² = n(n − 1)/((n + 1)(n + 2)).
#[test]
fn kivis_error_is_that_of_uniform_steps() {
    let (keys, values) = (uniform(4096 * 128, 1), uniform(4096 * 128, 2));
    for (text, bits, group) in
        [("kivi-paper/k=4", 4u32, 32.0), ("kivi-paper/k=3/group=64/residual=64", 3, 64.0)]
    {
        let restored = of(text, GEOMETRY, &keys, &values).expect(text);
        let range = group * (group - 1.0) / ((group + 1.0) * (group + 2.0));
        let step = range / f64::from((1u32 << bits) - 1).powi(2);
        let expected = (1.0 - 2.0 / group) * step / 12.0 / (1.0 / 3.0);
        for (rows, side) in [(&keys, &restored.keys), (&values, &restored.values)] {
            let found = relative(rows, &side.rows);
            assert!((found / expected - 1.0).abs() < 0.02, "{text}: {found} for {expected}");
        }
    }
}

#[test]
fn kivi_keeps_what_has_not_come_to_its_turn() {
    let (keys, values) = (normal(100 * 128, 1), normal(100 * 128, 2));
    let Restored { keys: of_keys, values: of_values } =
        of("kivi-paper/k=2/residual=64", GEOMETRY, &keys, &values).expect("kivi-paper");
    // Keys by the 64, of values all but the last 64.
    assert_eq!((of_keys.coded.of(100), of_values.coded.of(100)), (64, 36));
    assert_eq!((of_keys.coded.of(63), of_values.coded.of(63)), (0, 0));
    let same = |from: usize| (from * 128..12800).all(|at| of_keys.rows[at] == keys[at].to_f32());
    assert!(same(64) && !same(63));
    // A group of equal numbers has no range.
    let flat = vec![f16::from_f32(0.3); 64 * 128];
    let restored = of("kivi-paper", GEOMETRY, &flat, &flat).expect("kivi-paper");
    assert_eq!(relative(&flat, &restored.keys.rows) + relative(&flat, &restored.values.rows), 0.0);
}

/// Numbers from 0 to 1, then up to 4: the second group is cut off where the first ended, the third has its
/// range.
#[test]
fn without_a_residual_the_range_is_that_of_the_group_before() {
    let mut keys = uniform(96 * 128, 3);
    for x in &mut keys[32 * 128..] {
        *x = f16::from_f32(x.to_f32() * 4.0);
    }
    let restored = of("kivi-scale/k=8/v=3", GEOMETRY, &keys, &keys).expect("it").keys;
    assert_eq!(restored.coded, Coded::ALL);
    let most = |group: usize| {
        let own = &restored.rows[group * 32 * 128..(group + 1) * 32 * 128];
        own.iter().copied().fold(0f32, f32::max)
    };
    assert!(most(0) <= 1.001 && most(1) <= 1.001 && most(2) > 3.9, "{} {} {}", most(0), most(1), most(2));
    let of_group = |group: usize| {
        let own = group * 32 * 128..(group + 1) * 32 * 128;
        relative(&keys[own.clone()], &restored.rows[own])
    };
    assert!(of_group(0) < 1e-4 && of_group(1) > 0.3, "{} {}", of_group(0), of_group(1));
}

/// Blocks of equal energy get equal bits: one group, with the error that its levels have on normal numbers.
#[test]
fn block_gtqs_error_is_that_of_its_levels() {
    let (keys, queries) = (normal(2048 * 128, 4), vec![f16::ONE; 8 * 256]);
    // In the calibration all blocks have the same energy.
    let path = capture("equal", GEOMETRY, &vec![f16::ONE; 8 * 128], &queries);
    for bits in [2u32, 3, 4] {
        let text = format!("block-gtq/k={bits}/from={}", path.display());
        let restored = of(&text, GEOMETRY, &keys, &keys).expect("equal bits");
        assert_eq!(restored.keys.bytes, f64::from(8 * bits + 2));
        // On the sphere in 64 dimensions levels of the normal distribution are a little off.
        let best = best_error(64, bits);
        for side in [&restored.keys, &restored.values] {
            let found = relative(&keys, &side.rows);
            assert!((0.99..1.06).contains(&(found / best)), "{bits}: {found}, at best {best}");
        }
    }
    // Block 0 of KV head 0 has most of the queries' energy: it gets more bits and a group of its own.
    let mut uneven = vec![f16::from_f32(0.5); 8 * 256];
    uneven.iter_mut().step_by(64).for_each(|x| *x = f16::from_f32(64.0));
    let path = capture("uneven", GEOMETRY, &vec![f16::from_f32(0.5); 8 * 128], &uneven);
    let text = format!("block-gtq/from={}", path.display());
    let restored = of(&text, GEOMETRY, &keys, &keys).expect("uneven bits");
    let of_channels = |wanted: fn(usize) -> bool| {
        let pick = |at: &usize| wanted(at % 64);
        let exact: Vec<f16> = (0..keys.len()).filter(pick).map(|at| keys[at]).collect();
        let found: Vec<f32> = (0..keys.len()).filter(pick).map(|at| restored.keys.rows[at]).collect();
        relative(&exact, &found)
    };
    let (first, others) = (of_channels(|channel| channel < 2), of_channels(|channel| channel >= 2));
    assert!(first < others / 20.0, "{first} {others}");
    assert!(restored.keys.bytes > 18.0, "{}: a norm for each group", restored.keys.bytes);
}

#[test]
fn bytes_are_those_by_hand() {
    let rows = normal(64 * 128, 5);
    let bytes = |text: &str| {
        let Restored { keys, values } = of(text, GEOMETRY, &rows, &rows).expect(text);
        [keys.bytes, values.bytes]
    };
    // 64 codes of 2 bits, and of each channel 1/32 of two f16.
    assert_eq!(bytes("kivi-paper"), [16.0 + 8.0, 16.0 + 8.0]);
    assert_eq!(bytes("kivi-paper/k=4/v=2/group=64/residual=64"), [32.0 + 4.0, 16.0 + 4.0]);
    assert_eq!(bytes("kivi-scale/k=3/v=4"), [24.0 + 8.0, 32.0 + 2.0]);
    for text in ["kivi-paper/k=3/residual=32", "kivi-scale/k=3/v=2"] {
        let (selection, Restored { keys, values }) =
            (parse(text).expect(text), of(text, GEOMETRY, &rows, &rows).expect(text));
        for tokens in [64, 75] {
            let found = [&keys, &values].map(|side| side.bytes_at(tokens, 64));
            let expected = (selection.scheme().step_bytes)(&selection, 64, tokens as u64) / tokens as f64;
            assert!((found[0] + found[1] - expected).abs() < 1e-9, "{text} {tokens}: {found:?} {expected}");
        }
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let rows = normal(64 * 128, 5);
    let refused =
        |text: &str, geometry: Geometry| of(text, geometry, &rows, &rows).expect_err(text).to_string();
    assert!(
        refused("kivi-paper/group=48/residual=32", GEOMETRY)
            .contains("residual=32 is no multiple of its group of 48")
    );
    assert!(
        refused("kivi-paper/group=48/residual=48", GEOMETRY)
            .contains("groups of 48 channels do not divide head_dim 64")
    );
    assert!(refused("kivi-paper/k=9", GEOMETRY).contains("k is a whole number from 1 to 8"));
    assert!(refused("kiwi", GEOMETRY).contains("there is kivi-paper, kivi-scale, block-gtq"));
    assert!(refused("block-gtq", GEOMETRY).contains("ferrokv capture"));
    let path = capture("other", Geometry { head_dim: 32, ..GEOMETRY }, &rows, &rows);
    let text = format!("block-gtq/from={}", path.display());
    assert!(refused(&text, GEOMETRY).contains("is for head_dim 32, and the model has 64"));
    // The header says one thing and the tensor another.
    let path = capture("heads", GEOMETRY, &rows, &rows[..64 * 64]);
    let other = Geometry { q_heads: 2, ..GEOMETRY };
    let text = format!("block-gtq/from={}", path.display());
    let error = refused(&text, other);
    assert!(
        error.contains("layer.00.query of shape [16, 4, 64]") && error.contains("[tokens, 2, 64]"),
        "{error}"
    );
    let missing =
        refused(&format!("block-gtq/from={}", Path::new("nowhere.safetensors").display()), GEOMETRY);
    assert!(missing.contains("nowhere.safetensors"), "{missing}");
    let device = Device::cpu(EmuOptions::default());
    let opened = parse("kivi-paper").expect("kivi-paper").open(&device, GEOMETRY, None, 16);
    assert!(
        opened
            .err()
            .expect("no cache")
            .to_string()
            .contains("kivi-paper is a reference for `ferrokv diagnose`")
    );
}
