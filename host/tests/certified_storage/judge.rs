//! What a tile and its annotation must fulfil, in f64 and by the layout alone.

use ferrokv::host::certified::reference::{Tile, measure, round_to_f16};
use ferrokv::host::certified::{Annotation, CertifiedElement, Layout, Rounding, TileLayout};
use ferrokv::kernels_gpu::certified::quantizer::{KEY_BOUND, KEY_BOUND_BY_CHANCE, LEAST_WIDE_SCALE};

/// Judges one block of one KV head, whose elements are all finite and within f16's range.
pub fn block<T: CertifiedElement>(
    keys: &[T],
    values: &[T],
    layout: TileLayout,
    rounding: Rounding,
    bytes: &[u8],
    annotation: Annotation,
) {
    let by_chance = rounding != Rounding::Nearest;
    let tile = Tile::new(layout, bytes).unwrap();
    let d = layout.head_dim as usize;
    for c in 0..d {
        let column: Vec<f64> = (0..16).map(|t| keys[t * d + c].to_f32() as f64).collect();
        channel(&column, c, tile, layout.kind, by_chance);
    }
    for t in 0..16 {
        for (g, v) in values[t * d..][..d].chunks_exact(16).enumerate() {
            let v: Vec<f64> = v.iter().map(|v| v.to_f32() as f64).collect();
            group(&v, t, 16 * g, tile, by_chance);
        }
    }

    let real = measure(tile, keys, values);
    // Tight: to 2^-14, and what the descriptions of the bounds allow besides (roundings of a key's error,
    // underflow).
    let bounds = |name: &str, bound: f32, exact: f64, besides: f64| {
        let (bound, most) = (bound as f64, exact * (1.0 + 2f64.powi(-14)) + besides);
        assert!(exact <= bound, "{name}: {bound:e} does not bound {exact:e}");
        assert!(bound <= most, "{name}: {bound:e} is too far above {exact:e}");
    };
    let underflow = 2f64.powi(-69);
    bounds("eta", annotation.eta, real.eta, underflow);
    bounds("nu", annotation.nu, real.nu, underflow);
    bounds("eps", annotation.eps, real.eps, real.scale * 2f64.powi(-15) + underflow);
    bounds("zeta", annotation.zeta, real.zeta, 200.0 * underflow);
    let most = if by_chance { KEY_BOUND_BY_CHANCE } else { KEY_BOUND };
    assert!(f64::from(annotation.reach) >= most && f64::from(annotation.reach) < most * 1.003);
    // A token's size bounds its value, and is no coarser than a 255th of the largest.
    let size =
        |t: usize| f64::from(annotation.sizes[t / 4] >> (t % 4 * 8) & 0xff) * f64::from(annotation.unit());
    for t in 0..16 {
        let exact = (0..d).map(|c| f64::from(values[t * d + c].to_f32()).powi(2)).sum::<f64>().sqrt();
        let coarse = f64::from(annotation.nu) / 255.0;
        bounds("size", size(t) as f32, exact, coarse * 1.0001 + underflow);
    }
    if !by_chance {
        assert_eq!([annotation.spread, annotation.step], [f32::INFINITY; 2]);
        return;
    }
    let halves = |t: usize, c: usize| half_distance(values[t * d + c].to_f32().into(), t, c, tile);
    let largest = |of: &dyn Fn(usize) -> f64| (0..16).map(of).fold(0.0, f64::max);
    let spread = largest(&|t| (0..d).map(|c| halves(t, c).powi(2)).sum::<f64>().sqrt() / size(t));
    let step = largest(&|t| (0..d).map(|c| halves(t, c)).fold(0.0, f64::max) / size(t));
    if spread.is_finite() {
        // What underflows is over a size, too.
        let least = underflow / (0..16).map(size).fold(f64::INFINITY, f64::min);
        bounds("spread", annotation.spread, spread, least);
        bounds("step", annotation.step, step, least);
    } else {
        assert_eq!([annotation.spread, annotation.step], [f32::INFINITY; 2]);
    }
}

/// Half the distance of the two numbers between which a value was rounded: what the tile has, and what the
/// code on the value's other side stands for. Infinite if the value is not between them.
fn half_distance(v: f64, t: usize, c: usize, tile: Tile<'_>) -> f64 {
    let restored = tile.value(t, c);
    if restored == v {
        return 0.0;
    }
    let code = f64::from(tile.value_code(t, c)) + if v > restored { 1.0 } else { -1.0 };
    let other = round_to_f16(code * tile.value_scale(t, c).to_f64() + tile.value_zero(t, c).to_f64());
    let between = (0.0..=15.0).contains(&code) && (v - restored).abs() <= (other - restored).abs();
    if between { (other - restored).abs() / 2.0 } else { f64::INFINITY }
}

fn range(x: &[f64]) -> (f64, f64) {
    x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(*x), high.max(*x)))
}

/// The keys of a channel: within half a step, or one, of steps no coarser than they must be.
fn channel(keys: &[f64], c: usize, tile: Tile<'_>, layout: Layout, by_chance: bool) {
    let bound = if by_chance { KEY_BOUND_BY_CHANCE } else { KEY_BOUND };
    let (scale, zero) = (tile.key_scale(c), tile.key_zero(c));
    assert!(scale.is_finite() && scale >= 0.0 && zero.is_finite());
    for (t, k) in keys.iter().enumerate() {
        let error = (k - tile.key(t, c)).abs();
        assert!(error <= bound * scale, "channel {c}: {k:e} is off by {error:e} with σ = {scale:e}");
    }
    let (low, high) = range(keys);
    if layout == Layout::Paper {
        // As the paper has it, but for roundings to f32, and what σ is at least; a channel of one number is
        // exact.
        let paper = (high - low) / 255.0;
        let most = paper * (1.0 + 2f64.powi(-21)) + zero.abs() * 2f64.powi(-24) / 127.0;
        let least = if high > low { f64::from(LEAST_WIDE_SCALE) } else { 0.0 };
        assert!(
            scale >= paper * (1.0 - 2f64.powi(-22)) && scale <= most.max(least),
            "channel {c}: σ = {scale:e}"
        );
        return;
    }
    // z is off by half a step of f16, 2^-11 of it or 2^-25, and a 127.5th of that is what σ can take for it;
    // σ itself is rounded up twice, by 2^-10 of it or 2^-24.
    let fine = (high - low) / 255.0 + (zero.abs() * 2f64.powi(-11) + 2f64.powi(-25)) / 127.5;
    let most = (fine * (1.0 + 2f64.powi(-10)) + 2f64.powi(-24)) * (1.0 + 2f64.powi(-10)) + 2f64.powi(-24);
    assert!(scale <= most, "channel {c}: σ = {scale:e} for {low:e}..{high:e}, z = {zero:e}");
}

/// The values of a group: within half a step, or one, and the rounding of what is restored.
fn group(values: &[f64], t: usize, c: usize, tile: Tile<'_>, by_chance: bool) {
    let steps = if by_chance { 1.0 } else { 0.5 };
    let (scale, zero) = (tile.value_scale(t, c).to_f64(), tile.value_zero(t, c).to_f64());
    let (low, high) = range(values);
    assert!(scale.is_finite() && scale >= 0.0 && zero.is_finite() && zero <= low);
    for (i, v) in values.iter().enumerate() {
        let restored = tile.value(t, c + i);
        let rounding = restored.abs() * 2f64.powi(-10) + 2f64.powi(-25);
        let error = (v - restored).abs();
        assert!(
            error <= scale * (steps + 2f64.powi(-16)) + rounding,
            "token {t}, channel {}: {v:e} is off by {error:e} with scale {scale:e}",
            c + i
        );
    }
    let most = (high - low + zero.abs() * 2f64.powi(-10)) / 15.0;
    assert!(scale <= most * (1.0 + 2f64.powi(-10)) + 2f64.powi(-23), "{scale:e} for {low:e}..{high:e}");
}
