//! Rows of a launch: where queries come from, and how outputs are turned back on their way out.

use super::decode::AttendShape;
use super::rotation::{butterfly, with_signs};
use crate::attention::PartialRow;
use glam::Vec4;
use simt::math::{canonical_nan, log2};
use simt::{GlobalMut, Shared, bits};

/// Where rows come from and go.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub shape: AttendShape,
    pub sequence: u32,
    pub head: u32,
}

impl Target {
    /// Which of all query heads row `own` of the KV head is.
    #[simt::device]
    pub fn row(self, own: u32) -> usize {
        let (token, in_group) = (bits::div_u32(own, self.shape.group), bits::rem_u32(own, self.shape.group));
        let heads = self.shape.kv_heads * self.shape.group;
        let row = (self.sequence * self.shape.query_tokens + token) * heads;
        (row + self.head * self.shape.group + in_group) as usize
    }

    /// Turns row `own` of the KV head back, row `r` of eight, and writes it: a warp's work. A row that sees
    /// no key is 0, its LSE −∞.
    #[simt::device]
    pub fn finish<const D: usize>(
        self,
        (finished, totals): (Shared<f32>, Shared<PartialRow>),
        output: GlobalMut<f32>,
        lse: GlobalMut<f32>,
        own: u32,
        r: u32,
        lane: u32,
    ) {
        let each = D as u32 / 32;
        let mut x = [0f32; 4];
        let from = r * D as u32 + lane * each;
        if D == 128 {
            x = finished.load_vector::<Vec4>(from).to_array();
        } else {
            let [a, b]: [f32; 2] = finished.load_vector(from);
            (x[0], x[1]) = (a, b);
        }
        let x = with_signs::<D>(butterfly::<D, 5>(x, lane), lane);
        let PartialRow { reference, sum } = totals.load(r);
        let at = self.row(own);
        let values = x.map(|x| restored(x, self.shape.value, sum));
        let to = at * D + (lane * each) as usize;
        if D == 128 {
            output.store_vector(to, Vec4::from_array(values));
        } else {
            output.store_vector(to, glam::Vec2::new(values[0], values[1]));
        }
        if lane == 0 {
            lse.store(at, log_sum(reference, sum));
        }
    }
}

/// An element of the output.
#[inline(always)]
pub fn restored(x: f32, value: f32, sum: f32) -> f32 {
    if sum == 0.0 { 0.0 } else { canonical_nan(x * value / sum) }
}

/// The natural log-sum-exp.
#[inline(always)]
pub fn log_sum(reference: f32, sum: f32) -> f32 {
    if sum == 0.0 {
        f32::NEG_INFINITY
    } else {
        canonical_nan((reference + log2(sum)) * core::f32::consts::LN_2)
    }
}
