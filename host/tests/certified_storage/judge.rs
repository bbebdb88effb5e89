//! What a tile and its annotation must fulfil, in f64 and by the layout alone.

use ferrokv::host::certified::reference::{Tile, measure};
use ferrokv::host::certified::{Annotation, CertifiedElement, Layout, TileLayout};
use ferrokv::kernels_gpu::certified::quantizer::{KEY_BOUND, LEAST_WIDE_SCALE};

/// Judges one block of one KV head, whose elements are all finite and within f16's range.
pub fn block<T: CertifiedElement>(
    keys: &[T],
    values: &[T],
    layout: TileLayout,
    bytes: &[u8],
    annotation: Annotation,
) {
    let tile = Tile::new(layout, bytes).unwrap();
    let d = layout.head_dim as usize;
    for c in 0..d {
        let column: Vec<f64> = (0..16).map(|t| keys[t * d + c].to_f32() as f64).collect();
        channel(&column, c, tile, layout.kind);
    }
    for t in 0..16 {
        for (g, v) in values[t * d..][..d].chunks_exact(16).enumerate() {
            let v: Vec<f64> = v.iter().map(|v| v.to_f32() as f64).collect();
            group(&v, t, 16 * g, tile);
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
}

fn range(x: &[f64]) -> (f64, f64) {
    x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(*x), high.max(*x)))
}

/// The keys of a channel: within half a step, of steps no coarser than they must be.
fn channel(keys: &[f64], c: usize, tile: Tile<'_>, layout: Layout) {
    let (scale, zero) = (tile.key_scale(c), tile.key_zero(c));
    assert!(scale.is_finite() && scale >= 0.0 && zero.is_finite());
    for (t, k) in keys.iter().enumerate() {
        let error = (k - tile.key(t, c)).abs();
        assert!(error <= KEY_BOUND * scale, "channel {c}: {k:e} is off by {error:e} with σ = {scale:e}");
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

/// The values of a group: within half a step and the rounding of what is restored.
fn group(values: &[f64], t: usize, c: usize, tile: Tile<'_>) {
    let (scale, zero) = (tile.value_scale(t, c).to_f64(), tile.value_zero(t, c).to_f64());
    let (low, high) = range(values);
    assert!(scale.is_finite() && scale >= 0.0 && zero.is_finite() && zero <= low);
    for (i, v) in values.iter().enumerate() {
        let restored = tile.value(t, c + i);
        let rounding = restored.abs() * 2f64.powi(-10) + 2f64.powi(-25);
        let error = (v - restored).abs();
        assert!(
            error <= scale * (0.5 + 2f64.powi(-16)) + rounding,
            "token {t}, channel {}: {v:e} is off by {error:e} with scale {scale:e}",
            c + i
        );
    }
    let most = (high - low + zero.abs() * 2f64.powi(-10)) / 15.0;
    assert!(scale <= most * (1.0 + 2f64.powi(-10)) + 2f64.powi(-23), "{scale:e} for {low:e}..{high:e}");
}
