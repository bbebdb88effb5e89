//! Blocks that proptest makes up, and the roundings that everything stands on.

use super::{ROUNDINGS, agree, judge, reference};
use ferrokv::host::certified::{CertifiedElement, Geometry, Layout};
use ferrokv::kernels_gpu::certified::quantizer::{f16_at_or_above, f16_at_or_below, restore_values, twice};
use half::{bf16, f16};
use proptest::prelude::*;

/// A finite f16 of any exponent.
fn finite() -> impl Strategy<Value = f16> {
    (0u16..0x7c00, any::<bool>()).prop_map(|(bits, sign)| f16::from_bits(bits | (sign as u16) << 15))
}

/// What one column of 16 numbers may look like.
fn column() -> impl Strategy<Value = Vec<f16>> {
    let uniform = |scale: f32| prop::collection::vec((-scale..scale).prop_map(f16::from_f32), 16);
    prop_oneof![
        4 => uniform(1.0),
        1 => uniform(1000.0),
        2 => prop::collection::vec(finite(), 16),
        2 => finite().prop_map(|x| vec![x; 16]),
        // A few neighbours of some number.
        3 => (0u16..0x7b00, any::<bool>(), prop::collection::vec(0u16..256, 16)).prop_map(|(bits, sign, steps)| {
            steps.into_iter().map(|step| f16::from_bits((bits + step) | (sign as u16) << 15)).collect()
        }),
        // Two numbers, again and again.
        1 => (finite(), finite(), any::<u16>()).prop_map(|(a, b, mask)| {
            (0..16).map(|i| if mask >> i & 1 == 1 { a } else { b }).collect()
        }),
        // Zeros of both signs and subnormals.
        1 => prop::collection::vec(prop_oneof![Just(0x8000u16), Just(0), 0u16..0x400, 0x8000u16..0x8400], 16)
            .prop_map(|bits| bits.into_iter().map(f16::from_bits).collect()),
        // The ends of the range.
        1 => prop::collection::vec(prop_oneof![Just(0x7bffu16), Just(0xfbff), 0x7a00u16..0x7c00, 0xfa00u16..0xfc00], 16)
            .prop_map(|bits| bits.into_iter().map(f16::from_bits).collect()),
    ]
}

/// 16 tokens of 64 channels, key channel by channel and value group by value group.
fn block() -> impl Strategy<Value = (Vec<f16>, Vec<f16>)> {
    let columns = || prop::collection::vec(column(), 64);
    (columns(), columns()).prop_map(|(keys, values)| {
        let keys = (0..16 * 64).map(|i| keys[i % 64][i / 64]).collect();
        (keys, values.concat())
    })
}

/// As bf16; what would round past f16 goes to the last bf16 inside.
fn to_bf16(x: &[f16]) -> Vec<bf16> {
    x.iter().map(|x| bf16::from_f32(x.to_f32().clamp(-65280.0, 65280.0))).collect()
}

/// By a power of two, down to where bf16 has numbers and f16 has none.
fn scaled(x: &[bf16], exponent: i32) -> Vec<bf16> {
    x.iter().map(|x| bf16::from_f64(x.to_f64() * 2f64.powi(exponent))).collect()
}

fn judged<T: CertifiedElement>(keys: &[T], values: &[T]) {
    for layout in Layout::ALL {
        let layout = Geometry::new(1, 64).unwrap().with_layout(layout).layout();
        for rounding in ROUNDINGS {
            let (tile, annotation) = reference::quantize(keys, values, layout, rounding, [2, 1]);
            judge::block(keys, values, layout, rounding, &tile, annotation);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_block_is_within_its_bounds((keys, values) in block(), exponent in -140i32..0) {
        judged(&keys, &values);
        let (keys, values) = (to_bf16(&keys), to_bf16(&values));
        judged(&keys, &values);
        judged(&scaled(&keys, exponent), &scaled(&values, exponent));
    }

    #[test]
    fn rounding_up_and_down_ends_at_the_next_f16(bits in any::<u32>()) {
        let x = f32::from_bits(bits);
        prop_assume!(x.is_finite());
        let down = f16_at_or_below(x).to_f32();
        prop_assert!(down <= x);
        // No other f16 lies between: the one above in value has the bits beside, away from zero or towards
        // it.
        let bits = f16_at_or_below(x).to_bits();
        let above = match bits { 0x8000 => 1, _ if bits & 0x8000 != 0 => bits - 1, _ => bits + 1 };
        prop_assert!(f16::from_bits(above).to_f32() > x || x > 65504.0);
        let size = x.abs();
        let up = f16_at_or_above(size);
        prop_assert!(up.to_f32() >= size);
        prop_assert!(up.to_bits() == 0 || f16::from_bits(up.to_bits() - 1).to_f32() < size);
    }

    #[test]
    fn restoring_a_value_rounds_once(code in 0u32..16, scale in 0u16..0x7c00, zero in finite()) {
        let scale = f16::from_bits(scale);
        let exact = code as f64 * scale.to_f64() + zero.to_f64();
        let pair = restore_values([code as f32, code as f32], twice(scale), twice(zero));
        prop_assert_eq!(pair >> 16, pair & 0xffff);
        prop_assert_eq!(f16::from_bits(pair as u16).to_f64(), reference::round_to_f16(exact));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn the_kernel_makes_the_same_of_every_block((keys, values) in block()) {
        for rounding in ROUNDINGS {
            let geometry = Geometry::new(1, 64).unwrap().with_rounding(rounding);
            agree(geometry, &keys, &values, true);
            agree(geometry, &to_bf16(&keys), &to_bf16(&values), true);
        }
    }
}
