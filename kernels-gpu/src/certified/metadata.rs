//! What the two layouts differ in: the type of a key channel's scale and zero.

use super::layout::Layout;
use super::quantizer::{key_channel, wide_key_channel};
use super::query::Query;
use super::tile::Tile;
use crate::Element;
use glam::{UVec2, UVec4, Vec4};
use half::f16;
use simt::{Pod, Shared};

/// The type of scales and zeros of keys: f16, compact, or f32, as in the paper.
pub trait KeyMetadata: Pod {
    /// Whose it is.
    const LAYOUT: Layout;
    /// c_D is (D/16 + this) · 1.25 · 2^−21: docs/certificate.md, (5).
    const ROUNDING: f32;
    /// a_D is this · D · 2^−26.
    const ABSOLUTE: f32;
    /// σ and z of a channel whose keys lie between `low` and `high`; `over` is their
    /// [`overhang`](super::quantizer::overhang).
    fn channel(low: f32, high: f32, over: f32) -> (Self, Self);
    /// As f32, exactly.
    fn to_f32(self) -> f32;
    /// Eight of them in a tile, from byte `at` on, a multiple of their size.
    fn load_eight(tile: Shared<u8>, at: u32) -> [f32; 8];
    /// [`Tile::products`].
    fn products<const D: usize>(tile: Tile<Self, D>, query: &Query, lane: u32) -> ([[f32; 2]; 2], f32);
}

impl KeyMetadata for f16 {
    const LAYOUT: Layout = Layout::Compact;
    const ROUNDING: f32 = 1.0;
    const ABSOLUTE: f32 = 257.0;

    #[inline(always)]
    fn channel(low: f32, high: f32, over: f32) -> (f16, f16) {
        key_channel(low, high, over)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        Element::to_f32(self)
    }

    #[simt::device]
    fn load_eight(tile: Shared<u8>, at: u32) -> [f32; 8] {
        let vector = tile.load_vector::<UVec4>(at);
        let (a, b) = (f16::widen(UVec2::new(vector.x, vector.y)), f16::widen(UVec2::new(vector.z, vector.w)));
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
    }

    #[simt::device]
    fn products<const D: usize>(tile: Tile<f16, D>, query: &Query, lane: u32) -> ([[f32; 2]; 2], f32) {
        tile.narrow_products(query, lane)
    }
}

impl KeyMetadata for f32 {
    const LAYOUT: Layout = Layout::Paper;
    const ROUNDING: f32 = 1.5;
    const ABSOLUTE: f32 = 385.0;

    #[inline(always)]
    fn channel(low: f32, high: f32, over: f32) -> (f32, f32) {
        wide_key_channel(low, high, over)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[simt::device]
    fn load_eight(tile: Shared<u8>, at: u32) -> [f32; 8] {
        let [a, b] = [at, at + 16].map(|at| tile.load_vector::<Vec4>(at));
        [a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w]
    }

    #[simt::device]
    fn products<const D: usize>(tile: Tile<f32, D>, query: &Query, lane: u32) -> ([[f32; 2]; 2], f32) {
        tile.wide_products(query, lane)
    }
}
