//! What the host says of a tensor and of its boxes.

use super::MAX_RANK;
use crate::emu::MAX_SHARED_BYTES;
use crate::{Pod, Swizzle};
use core::mem::size_of;

/// An element of a tensor that copies know.
pub trait TileElement: Pod {
    /// The driver's number for it: a `CUtensorMapDataType`.
    #[doc(hidden)]
    const FORMAT: u32;
}

macro_rules! elements {
    ($($t:ty: $format:literal)*) => {$(
        impl TileElement for $t {
            const FORMAT: u32 = $format;
        }
    )*};
}
elements! { u8: 0 i8: 0 u16: 1 i16: 1 u32: 2 i32: 3 u64: 4 i64: 5 half::f16: 6 f32: 7 f64: 8 half::bf16: 9 }

/// A tensor in global memory, of one to five dimensions, and the boxes of it that copies move.
///
/// Dimensions are numbered from the innermost, 0, whose elements lie side by side.
///
/// ```
/// use simt::{Swizzle, TensorMapShape, half::f16};
///
/// // 1000 rows of 192 elements, of which a box is 64 by 64.
/// let shape = TensorMapShape::new::<f16, _>([192, 1000], [64, 64]).with_swizzle(Swizzle::B128);
/// assert_eq!((shape.tile_bytes(), shape.bytes()), (8192, 2 * 192 * 1000));
/// // Rows that begin 512 bytes after each other.
/// let apart = shape.with_strides(&[512]);
/// assert_eq!(apart.bytes(), 999 * 512 + 2 * 192);
/// assert_eq!(apart.check(4096, apart.bytes(), false), Ok(()));
/// let odd = shape.with_strides(&[500]).check(4096, apart.bytes(), false);
/// let refused = odd.unwrap_err().to_string();
/// assert!(refused.starts_with("stride 500 of dimension 1 of a tensor: it is in bytes, a multiple of 16"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapShape {
    pub(crate) format: u32,
    pub(crate) rank: usize,
    /// Of dimensions that there are not: extent and box 1, stride 0.
    pub(crate) extents: [u64; MAX_RANK],
    pub(crate) strides: [u64; MAX_RANK],
    pub(crate) tile: [u32; MAX_RANK],
    pub(crate) swizzle: Swizzle,
    /// How many strides were given that there is no dimension for, or are lacking.
    wrong_strides: Option<usize>,
}

fn widened<V: Copy, const RANK: usize>(values: [V; RANK], other: V) -> [V; MAX_RANK] {
    core::array::from_fn(|i| values.get(i).copied().unwrap_or(other))
}

impl TensorMapShape {
    /// A tensor of `extents` elements of `T` without gaps, and boxes of `tile` elements.
    pub fn new<T: TileElement, const RANK: usize>(extents: [u64; RANK], tile: [u32; RANK]) -> Self {
        const { super::check_rank(RANK) };
        let mut strides = [0; MAX_RANK];
        let mut stride = size_of::<T>() as u64;
        for (i, extent) in extents.iter().enumerate() {
            strides[i] = stride;
            stride = stride.saturating_mul(*extent);
        }
        TensorMapShape {
            format: T::FORMAT,
            rank: RANK,
            extents: widened(extents, 1),
            strides,
            tile: widened(tile, 1),
            swizzle: Swizzle::None,
            wrong_strides: None,
        }
    }

    /// What a map says of it. Of dimensions that there are not, extent and box are 1, the stride any.
    pub(crate) fn from_parts(
        format: u32,
        rank: usize,
        (extents, strides): ([u64; MAX_RANK], [u64; MAX_RANK]),
        tile: [u32; MAX_RANK],
        swizzle: Swizzle,
    ) -> Self {
        TensorMapShape { format, rank, extents, strides, tile, swizzle, wrong_strides: None }
    }

    /// The same with so many bytes from one element to the next of each dimension but the innermost.
    #[must_use]
    pub fn with_strides(mut self, bytes: &[u64]) -> Self {
        self.wrong_strides = (bytes.len() + 1 != self.rank).then_some(bytes.len());
        for (stride, bytes) in self.strides[..self.rank].iter_mut().skip(1).zip(bytes) {
            *stride = *bytes;
        }
        self
    }

    /// The same with boxes that are swizzled in shared memory.
    #[must_use]
    pub fn with_swizzle(mut self, swizzle: Swizzle) -> Self {
        self.swizzle = swizzle;
        self
    }

    /// How many dimensions it has.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many elements it has in each dimension.
    pub fn extents(&self) -> &[u64] {
        &self.extents[..self.rank]
    }

    /// How many bytes lie from one element to the next in each dimension; the first is an element's size.
    pub fn strides(&self) -> &[u64] {
        &self.strides[..self.rank]
    }

    /// How many elements a box has in each dimension.
    pub fn tile(&self) -> &[u32] {
        &self.tile[..self.rank]
    }

    /// How boxes lie in shared memory.
    pub fn swizzle(&self) -> Swizzle {
        self.swizzle
    }

    /// The driver's number for the elements.
    #[doc(hidden)]
    pub fn format(&self) -> u32 {
        self.format
    }

    /// How many bytes a copy of one box brings: what an mbarrier is to expect.
    pub fn tile_bytes(&self) -> u32 {
        let elements =
            self.tile.iter().fold(1u64, |product, extent| product.saturating_mul((*extent).into()));
        elements.saturating_mul(self.strides[0]).try_into().unwrap_or(u32::MAX)
    }

    /// How many bytes of memory it takes, from its first to its last.
    pub fn bytes(&self) -> u64 {
        let last = self.extents().iter().zip(self.strides());
        let last = last.map(|(extent, stride)| extent.saturating_sub(1).saturating_mul(*stride));
        last.fold(self.strides[0], u64::saturating_add)
    }

    /// Whether a map can be made of it: of `bytes` bytes of memory from `address` on, to write by it if
    /// `writable`.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self, address: u64, bytes: u64, writable: bool) -> Result<(), TensorMapError> {
        if let Some(given) = self.wrong_strides {
            return Err(TensorMapError::Strides { given, rank: self.rank });
        }
        if !address.is_multiple_of(16) {
            return Err(TensorMapError::Address { address });
        }
        for dimension in 0..self.rank {
            let (extent, stride, tile) =
                (self.extents[dimension], self.strides[dimension], self.tile[dimension]);
            if extent == 0 || extent > 1 << 32 {
                return Err(TensorMapError::Extent { dimension, extent });
            }
            if dimension > 0 && (stride == 0 || !stride.is_multiple_of(16) || stride >= 1 << 40) {
                return Err(TensorMapError::Stride { dimension, bytes: stride });
            }
            if tile == 0 || tile > 256 {
                return Err(TensorMapError::Tile { dimension, extent: tile });
            }
        }
        let row = u64::from(self.tile[0]) * self.strides[0];
        if !row.is_multiple_of(16) {
            return Err(TensorMapError::Row { bytes: row });
        }
        if self.swizzle != Swizzle::None && row != u64::from(self.swizzle.row()) {
            return Err(TensorMapError::SwizzledRow { bytes: row, swizzle: self.swizzle });
        }
        if self.tile_bytes() > MAX_SHARED_BYTES {
            return Err(TensorMapError::TileTooLarge { bytes: self.tile_bytes() });
        }
        if self.bytes() > bytes {
            return Err(TensorMapError::Outside { needed: self.bytes(), bytes });
        }
        let row = self.extents[0] * self.strides[0];
        if writable && !row.is_multiple_of(16) {
            return Err(TensorMapError::Written { bytes: row });
        }
        if writable { self.check_apart() } else { Ok(()) }
    }

    /// No two elements share bytes.
    fn check_apart(&self) -> Result<(), TensorMapError> {
        let mut outer: Vec<usize> = (1..self.rank).filter(|dimension| self.extents[*dimension] > 1).collect();
        outer.sort_by_key(|dimension| self.strides[*dimension]);
        let mut inside = self.strides[0] * self.extents[0];
        for dimension in outer {
            let stride = self.strides[dimension];
            if stride < inside {
                return Err(TensorMapError::Overlaps { dimension, bytes: stride, inside });
            }
            inside = inside.saturating_add(stride.saturating_mul(self.extents[dimension] - 1));
        }
        Ok(())
    }
}

/// Why there can be no map of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorMapError {
    /// The tensor does not begin at a multiple of 16.
    #[error("a tensor at {address:#x}: it begins at a multiple of 16 bytes; begin at another element")]
    Address {
        /// Where it begins.
        address: u64,
    },
    /// A wrong number of strides.
    #[error("{given} strides of a tensor of {rank} dimensions: it has one for each but the innermost")]
    Strides {
        /// How many there are.
        given: usize,
        /// How many dimensions.
        rank: usize,
    },
    /// A dimension has no elements, or too many.
    #[error("extent {extent} of dimension {dimension} of a tensor: 1 to 2^32 elements are allowed; split it")]
    Extent {
        /// Which dimension.
        dimension: usize,
        /// How many elements.
        extent: u64,
    },
    /// A stride that copies do not take.
    #[error(
        "stride {bytes} of dimension {dimension} of a tensor: it is in bytes, a multiple of 16 from 16 to below \
         2^40; pad what lies inside"
    )]
    Stride {
        /// Which dimension.
        dimension: usize,
        /// The stride.
        bytes: u64,
    },
    /// A box has no elements in a dimension, or too many.
    #[error("a box of {extent} elements in dimension {dimension}: 1 to 256 are allowed; copy several boxes")]
    Tile {
        /// Which dimension.
        dimension: usize,
        /// How many elements.
        extent: u32,
    },
    /// The innermost row of a box is no whole number of 16 bytes.
    #[error("a box with rows of {bytes} bytes: a multiple of 16 is needed; make it wider")]
    Row {
        /// Bytes of the row.
        bytes: u64,
    },
    /// The innermost row of a box is not what the swizzle exchanges within.
    #[error(
        "a box with rows of {bytes} bytes and swizzle {swizzle:?}, whose rows have {}; take another swizzle or box",
        swizzle.row()
    )]
    SwizzledRow {
        /// Bytes of the row.
        bytes: u64,
        /// The swizzle.
        swizzle: Swizzle,
    },
    /// No block has room for a box.
    #[error(
        "a box of {bytes} bytes: a block has {MAX_SHARED_BYTES} of shared memory at the most; make it smaller"
    )]
    TileTooLarge {
        /// Bytes of the box.
        bytes: u32,
    },
    /// The tensor is larger than its memory.
    #[error("a tensor of {needed} bytes in memory of {bytes}: make the extents or the strides smaller")]
    Outside {
        /// Bytes of the tensor.
        needed: u64,
        /// Bytes that there are.
        bytes: u64,
    },
    /// The rows of a tensor to write to end within 16 bytes, which copies write as a whole.
    #[error(
        "a tensor to write to with rows of {bytes} bytes: copies write 16 bytes as a whole, those behind the row's end \
         too; make the innermost extent a multiple of 16 bytes, or the map one to read by"
    )]
    Written {
        /// Bytes of a row.
        bytes: u64,
    },
    /// Elements of a tensor to write to lie on each other.
    #[error(
        "stride {bytes} of dimension {dimension} of a tensor to write to, inside of which {inside} bytes lie: its \
         elements would overlap; make the stride larger, or the map one to read by"
    )]
    Overlaps {
        /// Which dimension.
        dimension: usize,
        /// The stride.
        bytes: u64,
        /// Bytes of what lies inside.
        inside: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn refused(shape: TensorMapShape) -> TensorMapError {
        shape.check(0, u64::MAX, false).expect_err("it breaks a rule")
    }

    #[test]
    fn every_rule_is_held_to_at_its_edges() {
        let fine = |shape: TensorMapShape| assert_eq!(shape.check(0, u64::MAX, false), Ok(()), "{shape:?}");
        let of = TensorMapShape::new::<f16, 2>;
        fine(of([64, 3], [64, 256]));
        fine(TensorMapShape::new::<u8, _>([1 << 32], [256]));
        fine(TensorMapShape::new::<u64, _>([2, 2, 2, 2, 2], [2, 1, 1, 1, 256]));
        fine(of([64, 1 << 20], [8, 1]).with_strides(&[(1 << 40) - 16]));
        assert_eq!(of([64, 3], [8, 1]).check(8, 4096, false), Err(TensorMapError::Address { address: 8 }));
        assert_eq!(
            refused(of([64, 3], [8, 1]).with_strides(&[])),
            TensorMapError::Strides { given: 0, rank: 2 }
        );
        assert_eq!(refused(of([64, 0], [8, 1])), TensorMapError::Extent { dimension: 1, extent: 0 });
        let extent = (1 << 32) + 1;
        assert_eq!(refused(of([64, extent], [8, 1])), TensorMapError::Extent { dimension: 1, extent });
        for bytes in [0, 8, 1 << 40] {
            let error = refused(of([64, 3], [8, 1]).with_strides(&[bytes]));
            assert_eq!(error, TensorMapError::Stride { dimension: 1, bytes });
        }
        assert_eq!(refused(of([60, 3], [8, 1])), TensorMapError::Stride { dimension: 1, bytes: 120 });
        assert_eq!(refused(of([64, 3], [264, 1])), TensorMapError::Tile { dimension: 0, extent: 264 });
        assert_eq!(refused(of([64, 3], [8, 0])), TensorMapError::Tile { dimension: 1, extent: 0 });
        assert_eq!(refused(of([64, 3], [12, 1])), TensorMapError::Row { bytes: 24 });
        for (swizzle, bytes) in [(Swizzle::B32, 64), (Swizzle::B64, 128), (Swizzle::B128, 64)] {
            let error = refused(of([64, 3], [bytes / 2, 1]).with_swizzle(swizzle));
            assert_eq!(error, TensorMapError::SwizzledRow { bytes: bytes.into(), swizzle });
        }
        let bytes = 2 * 256 * 256 * 2;
        assert_eq!(
            refused(TensorMapShape::new::<f16, _>([512, 512, 2], [256, 256, 2])),
            TensorMapError::TileTooLarge { bytes }
        );
        let (needed, bytes) = (384, 383);
        assert_eq!(
            of([64, 3], [8, 1]).check(0, bytes, false),
            Err(TensorMapError::Outside { needed, bytes })
        );
        assert_eq!(of([64, 3], [8, 1]).check(0, needed, true), Ok(()));
    }

    #[test]
    fn what_is_written_must_not_overlap() {
        let check = |strides: &[u64; 2]| {
            TensorMapShape::new::<f16, _>([64, 4, 5], [8, 1, 1]).with_strides(strides).check(0, 1 << 20, true)
        };
        // In either order, and with gaps.
        for fine in [[128, 512], [640, 128], [1024, 208]] {
            assert_eq!(check(&fine), Ok(()), "{fine:?}");
        }
        for (strides, dimension, bytes, inside) in
            [([112, 512], 1, 112, 128), ([128, 496], 2, 496, 512), ([624, 128], 1, 624, 640)]
        {
            assert_eq!(check(&strides), Err(TensorMapError::Overlaps { dimension, bytes, inside }));
        }
    }

    #[test]
    fn errors_are_one_line() {
        let errors = [
            TensorMapError::Address { address: 8 },
            TensorMapError::SwizzledRow { bytes: 64, swizzle: Swizzle::B128 },
            TensorMapError::TileTooLarge { bytes: 1 << 20 },
            TensorMapError::Overlaps { dimension: 1, bytes: 112, inside: 128 },
        ];
        for error in errors {
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
        }
    }
}
