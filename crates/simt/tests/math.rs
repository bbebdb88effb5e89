//! Special values, exact cases and integer conversions of `simt::math`.

use simt::math;

/// NaN of several kinds: quiet, signalling, negative, with a payload.
const NANS: [u32; 5] = [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xff80_1234, 0x7fff_ffff];

const TINY: f32 = f32::from_bits(1);

/// Numbers at which comparisons and roundings change their ways.
fn landmarks() -> Vec<f32> {
    let positive = [
        0.0,
        TINY,
        f32::from_bits(0x007f_ffff),
        f32::MIN_POSITIVE,
        0.25,
        0.499_999_97,
        0.5,
        0.500_000_06,
        0.75,
        1.0,
        1.5,
        2.5,
        3.5,
        126.5,
        127.0,
        127.5,
        8_388_607.0,
        8_388_607.5,
        8_388_608.0,
        16_777_215.0,
        2_147_483_520.0,
        2_147_483_648.0,
        1e30,
        f32::MAX,
        f32::INFINITY,
    ];
    let nans = NANS.into_iter().map(f32::from_bits);
    positive.into_iter().flat_map(|x| [x, -x]).chain(nans).collect()
}

/// Every `stride`-th bit pattern, and the landmarks.
fn floats(stride: usize) -> impl Iterator<Item = f32> {
    (0..=u32::MAX).step_by(stride).map(f32::from_bits).chain(landmarks())
}

/// Equal bits, or both NaN.
#[track_caller]
fn assert_same(got: f32, want: f32, what: impl Fn() -> String) {
    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
    assert!(same, "{}: got {got:e} ({:#010x}), not {want:e}", what(), got.to_bits());
}

/// 2^n by its definition, subnormal numbers included.
fn power_of_two(n: i32) -> f32 {
    2f64.powi(n) as f32
}

/// A function and its name.
type Named = (&'static str, fn(f32) -> f32);

#[test]
fn nan_comes_out_as_the_one_nan() {
    let functions: [Named; 7] = [
        ("exp2", math::exp2),
        ("exp2_nonpositive", math::exp2_nonpositive),
        ("log2", math::log2),
        ("sin", math::sin),
        ("cos", math::cos),
        ("canonical_nan", math::canonical_nan),
        ("clamp", |x| math::clamp(x, -1.0, 1.0)),
    ];
    for (name, function) in functions {
        for bits in NANS {
            let got = function(f32::from_bits(bits)).to_bits();
            assert_eq!(got, math::NAN_BITS, "{name} of the NaN {bits:#010x} gives {got:#010x}");
        }
    }
    for x in [f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(math::sin(x).to_bits(), math::NAN_BITS);
        assert_eq!(math::cos(x).to_bits(), math::NAN_BITS);
    }
    for x in [-TINY, -1.0, f32::MIN, f32::NEG_INFINITY] {
        assert_eq!(math::log2(x).to_bits(), math::NAN_BITS, "log2({x:e})");
        assert!(math::rsqrt(x).is_nan(), "rsqrt({x:e})");
    }
    assert!(math::rsqrt(f32::NAN).is_nan());
}

#[test]
fn exp2_is_exact_for_integers_and_defined_at_the_ends() {
    for n in -200..=200 {
        assert_same(math::exp2(n as f32), power_of_two(n), || format!("exp2({n})"));
    }
    let cases = [
        (0.0, 1.0),
        (-0.0, 1.0),
        (TINY, 1.0),
        (-TINY, 1.0),
        (f32::INFINITY, f32::INFINITY),
        (f32::MAX, f32::INFINITY),
        (f32::NEG_INFINITY, 0.0),
        (f32::MIN, 0.0),
        // Just above half of the smallest number, and just below the overflow.
        (-149.999_98, TINY),
        (127.999_99, 2f64.powf(f64::from(127.999_99_f32)) as f32),
    ];
    for (x, want) in cases {
        assert_same(math::exp2(x), want, || format!("exp2({x:e})"));
    }
}

#[test]
fn exp2_nonpositive_is_exact_for_integers_and_zero_below_its_range() {
    for n in -126..=127 {
        assert_same(math::exp2_nonpositive(n as f32), power_of_two(n), || format!("exp2_nonpositive({n})"));
    }
    let below = (-126.5f32).to_bits();
    let lowest = math::exp2_nonpositive(f32::from_bits(below - 1));
    assert!(lowest > 0.0 && lowest < f32::MIN_POSITIVE, "a subnormal result, not {lowest:e}");
    let infinity = f32::NEG_INFINITY.to_bits();
    for bits in (below..infinity).step_by(9973).chain([below, infinity]) {
        let x = f32::from_bits(bits);
        assert_same(math::exp2_nonpositive(x), 0.0, || format!("exp2_nonpositive({x:e})"));
    }
    for bits in ((-0.0f32).to_bits()..=infinity).step_by(1009) {
        let x = f32::from_bits(bits);
        let got = math::exp2_nonpositive(x);
        assert!(got <= 1.0 && got.is_sign_positive(), "exp2_nonpositive({x:e}) = {got:e}");
    }
}

#[test]
fn log2_is_exact_for_powers_of_two_and_defined_at_the_ends() {
    for n in -149..=127 {
        assert_same(math::log2(power_of_two(n)), n as f32, || format!("log2(2^{n})"));
    }
    for (x, want) in [
        (0.0, f32::NEG_INFINITY),
        (-0.0, f32::NEG_INFINITY),
        (f32::INFINITY, f32::INFINITY),
        (f32::MAX, 128.0),
    ] {
        assert_same(math::log2(x), want, || format!("log2({x:e})"));
    }
}

#[test]
fn sine_and_cosine_of_small_numbers() {
    for x in [0.0, TINY, f32::from_bits(0x007f_ffff), f32::MIN_POSITIVE, 1e-20, 1e-5] {
        for x in [x, -x] {
            assert_same(math::sin(x), x, || format!("sin({x:e})"));
            assert_same(math::cos(x), 1.0, || format!("cos({x:e})"));
        }
    }
}

#[test]
fn sine_and_cosine_have_their_symmetries_and_one_reduction() {
    for x in floats(65_521).filter(|x| x.is_finite()) {
        let (sine, cosine) = math::sin_cos(x);
        assert_same(math::sin(x), sine, || format!("sin({x:e}) against sin_cos"));
        assert_same(math::cos(x), cosine, || format!("cos({x:e}) against sin_cos"));
        assert_same(math::sin(-x), -sine, || format!("sin(-{x:e})"));
        assert_same(math::cos(-x), cosine, || format!("cos(-{x:e})"));
    }
}

/// Around every power of two, where the argument reduction changes its window or its method.
#[test]
fn sine_and_cosine_around_powers_of_two() {
    for exponent in 90..255u32 {
        for offset in -64..64i32 {
            let x = f32::from_bits((exponent << 23).wrapping_add_signed(offset));
            let (sine, cosine) = math::sin_cos(x);
            for (name, got, want) in [("sin", sine, f64::from(x).sin()), ("cos", cosine, f64::from(x).cos())]
            {
                // A relative 2^-24 is half an ULP at the worst place of a binade.
                let off = (f64::from(got) - want).abs() / want.abs();
                assert!(off < 1.01 * 2f64.powi(-24), "{name}({x:e}) = {got:e}, not {want:e}");
            }
        }
    }
}

#[test]
fn rsqrt_at_the_ends() {
    let cases = [
        (0.0, f32::INFINITY),
        (-0.0, f32::NEG_INFINITY),
        (f32::INFINITY, 0.0),
        (1.0, 1.0),
        (4.0, 0.5),
        (power_of_two(-148), power_of_two(74)),
        (power_of_two(126), power_of_two(-63)),
    ];
    for (x, want) in cases {
        assert_same(math::rsqrt(x), want, || format!("rsqrt({x:e})"));
    }
}

#[test]
fn minimum_and_maximum_follow_ieee_754_2019() {
    let nan = f32::from_bits(math::NAN_BITS);
    let larger = |a: f32, b: f32| if a.total_cmp(&b).is_gt() { a } else { b };
    let smaller = |a: f32, b: f32| if a.total_cmp(&b).is_lt() { a } else { b };
    for a in landmarks() {
        for b in landmarks() {
            // The order of the zeros is that of `total_cmp`; NaN is settled before it.
            let (max, min, maximum, minimum) = match (a.is_nan(), b.is_nan()) {
                (true, true) => (nan, nan, nan, nan),
                (true, false) => (b, b, nan, nan),
                (false, true) => (a, a, nan, nan),
                (false, false) => (larger(a, b), smaller(a, b), larger(a, b), smaller(a, b)),
            };
            let cases = [
                ("max", math::max(a, b), max),
                ("min", math::min(a, b), min),
                ("maximum", math::maximum(a, b), maximum),
                ("minimum", math::minimum(a, b), minimum),
            ];
            for (name, got, want) in cases {
                let (g, w) = (got.to_bits(), want.to_bits());
                assert_eq!(g, w, "{name}({a:e}, {b:e}) = {got:e} ({g:#010x}), not {want:e} ({w:#010x})");
            }
        }
    }
}

#[test]
fn clamp_holds_its_limits() {
    for x in floats(1_000_003) {
        assert_same(math::clamp(x, -127.0, 127.0), x.clamp(-127.0, 127.0), || format!("clamp({x:e})"));
    }
    assert_same(math::clamp(-0.0, 0.0, 1.0), 0.0, || "clamp(-0, 0, 1)".into());
    assert_same(math::clamp(5.0, 2.0, 1.0), 1.0, || "crossed limits".into());
}

#[test]
fn abs_clears_the_sign() {
    for x in floats(1_000_003) {
        assert_same(math::abs(x), x.abs(), || format!("abs({x:e})"));
        assert!(math::abs(x).is_sign_positive());
    }
}

#[test]
fn roundings_to_floats_are_those_of_the_standard_library() {
    for x in floats(4099) {
        assert_same(math::round_ties_even(x), x.round_ties_even(), || format!("round_ties_even({x:e})"));
        assert_same(math::floor(x), x.floor(), || format!("floor({x:e})"));
    }
}

#[test]
fn conversions_to_integers_saturate() {
    let bound = |x: f64| x.clamp(f64::from(i32::MIN), f64::from(i32::MAX)) as i32;
    for x in floats(4099) {
        let wide = f64::from(x);
        let cases = [
            ("to_i32_nearest_even", math::to_i32_nearest_even(x), wide.round_ties_even()),
            ("to_i32_floor", math::to_i32_floor(x), wide.floor()),
            ("to_i32_trunc", math::to_i32_trunc(x), wide.trunc()),
        ];
        for (name, got, want) in cases {
            assert_eq!(got, if x.is_nan() { 0 } else { bound(want) }, "{name}({x:e})");
        }
    }
}

#[test]
fn the_rounding_addition_rounds_to_the_nearest_even_integer() {
    let limit = 4_194_304.0f32;
    let halves = (0..=8_388_608u32).step_by(7).map(|k| k as f32 * 0.5);
    for x in halves.chain(floats(1021).filter(|x| x.abs() <= limit)).chain([limit]) {
        for x in [x, -x] {
            assert_eq!(math::nearest_even_i32(x), f64::from(x).round_ties_even() as i32, "of {x:e}");
        }
    }
}

#[test]
fn multiply_add_rounds_once() {
    // (1 + h)^2 - (1 + 2h) = h^2, which a rounded product would lose.
    let h = power_of_two(-13);
    assert_same(math::fma(1.0 + h, 1.0 + h, -(1.0 + 2.0 * h)), h * h, || "fma".into());
    let h = 2f64.powi(-30);
    assert_eq!(math::fma_f64(1.0 + h, 1.0 + h, -(1.0 + 2.0 * h)), h * h);
}

#[test]
fn square_roots_are_the_nearest_floats() {
    for x in floats(65_521).filter(|x| *x > 0.0 && x.is_finite()) {
        // In f64 the root of an f32 rounds to f32 as the exact one does.
        assert_same(math::sqrt(x), f64::from(x).sqrt() as f32, || format!("sqrt({x:e})"));
    }
    assert_eq!(math::sqrt_f64(2.0).to_bits(), 0x3ff6_a09e_667f_3bcd);
    assert!(math::sqrt(-1.0).is_nan() && math::sqrt_f64(-1.0).is_nan());
}

#[test]
fn canonical_nan_holds_behind_every_operation() {
    use std::hint::black_box;
    for bits in [0xffff_ff80u32, 0x7fc0_0001, 0xffc0_0000, 0x7f80_0001] {
        let nan = black_box(f32::from_bits(bits));
        let results = [
            math::canonical_nan(nan),
            math::canonical_nan(math::sqrt(nan)),
            math::canonical_nan(math::sqrt(black_box(-1.0))),
            math::canonical_nan(nan + 1.0),
            math::canonical_nan(nan * 2.0),
            math::canonical_nan(1.0 / nan),
            math::canonical_nan(math::fma(nan, nan, nan)),
            math::canonical_nan(math::rsqrt(nan)),
            math::canonical_nan(-nan),
        ];
        assert!(results.iter().all(|x| x.to_bits() == math::NAN_BITS), "{bits:#x}: {results:?}");
    }
}
