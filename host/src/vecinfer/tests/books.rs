//! Codebooks that calibration makes: of whole keys and values, of a layer or of each KV head.

use super::super::calibrate::{Transform, make};
use super::super::{Books, Code, LayerBooks};
use crate::attention::dense::sample::normal;
use crate::kv::Geometry;
use crate::kv::calibration::{Material, Passed};
use half::f16;

const HEADS: usize = 2;
const DIM: usize = 64;
const CODE: Code = Code { d: 4, bits: 10 };

/// Values of the second KV head are a hundred times those of the first.
fn made(by_head: bool) -> LayerBooks {
    with_values_of(by_head, 100.0).expect("codebooks").layers.remove(0)
}

/// Values of the second KV head are `most` times those of the first.
fn with_values_of(by_head: bool, most: f32) -> crate::kv::Result<Books> {
    with_rows(by_head, rows(1, 3.0), rows(2, most))
}

fn rows(kind: u64, second: f32) -> Vec<f16> {
    let of = |i: usize| normal(kind, i as u64) * if i / DIM % HEADS == 1 { second } else { 1.0 };
    (0..512 * HEADS * DIM).map(|i| f16::from_f32(of(i))).collect()
}

fn with_rows(by_head: bool, keys: Vec<f16>, values: Vec<f16>) -> crate::kv::Result<Books> {
    let passed = Passed { keys, values, queries: Vec::new() };
    let geometry = Geometry { layers: 1, q_heads: HEADS, kv_heads: HEADS, head_dim: DIM };
    let material = Material { geometry, rope: None, layers: vec![passed], fronts: Vec::new() };
    let transform = Transform { by_head, ..Transform::DEFAULT };
    make(&material, [CODE, CODE], transform, &|| Ok(()))
}

#[test]
fn values_that_bytes_cannot_hold_are_refused() {
    let said = with_values_of(false, 10_000.0).expect_err("beyond 127 of the largest step").to_string();
    assert!(said.contains("the values of layer 0") && said.contains("hold up to 7112"), "{said}");
    assert!(said.contains("d2b8, d4b8 or d8b8"), "{said}");
}

/// A key is within f16, and less its channel's mean it is not.
#[test]
fn keys_that_leave_f16_are_refused_by_name() {
    let mut keys = rows(1, 1.0);
    let channel = |token: usize| (token * HEADS + 1) * DIM + 5;
    (0..512).for_each(|token| keys[channel(token)] = f16::from_f32(60_000.0));
    keys[channel(77)] = f16::from_f32(-60_000.0);
    let said = with_rows(false, keys, rows(2, 1.0)).expect_err("beyond f16").to_string();
    assert!(said.contains("token 77, KV head 1, layer 0"), "{said}");
}

#[test]
fn each_head_has_codebooks_and_steps_of_its_own() {
    let one = CODE.book_elements() as usize;
    let (layer, heads) = (made(false), made(true));
    assert_eq!([layer.keys.len(), layer.values.len(), layer.steps.len()], [one, one, 1]);
    assert_eq!([heads.keys.len(), heads.values.len(), heads.steps.len()], [2 * one, 2 * one, 2]);
    let ratio = heads.steps[1].to_f32() / heads.steps[0].to_f32();
    assert!((50.0..200.0).contains(&ratio), "{:?}", heads.steps);
    for books in [layer, heads] {
        books.check(HEADS, DIM, [CODE; 2]).expect("what calibration makes is in order");
    }
}

#[test]
fn what_is_no_multiple_of_its_step_is_refused() {
    let sound = made(true);
    let refused = |change: &dyn Fn(&mut LayerBooks)| {
        let mut books = sound.clone();
        change(&mut books);
        books.check(HEADS, DIM, [CODE; 2]).expect_err("not in order")
    };
    let between = refused(&|books| {
        let step = books.steps[1].to_f32();
        books.values[CODE.book_elements() as usize + 5] = f16::from_f32(2.5 * step);
    });
    assert!(between.contains("element 5") && between.contains("multiples"), "{between}");
    let far = refused(&|books| books.values[7] = f16::from_f32(128.0 * books.steps[0].to_f32()));
    assert!(far.contains("element 7"), "{far}");
    for steps in [vec![], vec![sound.steps[0]], vec![f16::ONE, f16::from_bits(0x3c01)], vec![f16::NAN; 2]] {
        let said = refused(&|books| books.steps = steps.clone());
        assert!(said.contains("no steps of 2 codebooks"), "{said}");
    }
    let keys = refused(&|books| books.keys[3] = f16::from_f32(0.5));
    assert!(keys.contains("whole numbers up to 127"), "{keys}");
}
