//! Tensor types and their blocks.
//!
//! A quantized row is a sequence of blocks; a block holds consecutive values of one row and never spans two
//! rows. Numbers are little-endian, `d`, `m` and `dmin` are f16.
//!
//! | type | values | bytes | layout | value |
//! | --- | --- | --- | --- | --- |
//! | F32 | 1 | 4 | f32 | itself |
//! | F16 | 1 | 2 | f16 | itself |
//! | BF16 | 1 | 2 | bf16 | itself |
//! | Q8_0 | 32 | 34 | `d`, 32 × i8 | d·q |
//! | Q4_0 | 32 | 18 | `d`, 16 bytes of nibbles | d·(q − 8) |
//! | Q4_1 | 32 | 20 | `d`, `m`, 16 bytes of nibbles | d·q + m |
//! | Q5_0 | 32 | 22 | `d`, 4 bytes of fifth bits, 16 bytes of nibbles | d·(q − 16) |
//! | Q4_K | 256 | 144 | `d`, `dmin`, 12 bytes of 6-bit scales and minima, 128 of nibbles | d·s·q − dmin·m |
//! | Q6_K | 256 | 210 | 128 bytes of low nibbles, 64 of high pairs, 16 × i8 scales, `d` | d·s·(q − 32) |
//!
//! In a block of 32 the low nibble of byte j is value j and the high nibble value j + 16. The orders within
//! the blocks of 256 are in [`dequantize`](super::dequantize()).

use std::fmt;

/// How a tensor's values are stored: what this library reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorType {
    /// IEEE-754 single precision.
    F32,
    /// IEEE-754 half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// 8 bits and a scale for 32 values.
    Q8_0,
    /// 4 bits and a scale for 32 values.
    Q4_0,
    /// 4 bits, a scale and a minimum for 32 values.
    Q4_1,
    /// 5 bits and a scale for 32 values.
    Q5_0,
    /// 4 bits; eight scales and minima of 6 bits for 256 values.
    Q4K,
    /// 6 bits; sixteen scales of 8 bits for 256 values.
    Q6K,
}

/// Every type of the format by its number, read or not; what was given up has no row.
const NAMES: [(u32, &str); 34] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (30, "BF16"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl TensorType {
    /// All of them.
    pub const ALL: [TensorType; 9] = [
        TensorType::F32,
        TensorType::F16,
        TensorType::Bf16,
        TensorType::Q8_0,
        TensorType::Q4_0,
        TensorType::Q4_1,
        TensorType::Q5_0,
        TensorType::Q4K,
        TensorType::Q6K,
    ];

    /// The number in the file.
    pub const fn id(self) -> u32 {
        match self {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::Q4_0 => 2,
            TensorType::Q4_1 => 3,
            TensorType::Q5_0 => 6,
            TensorType::Q8_0 => 8,
            TensorType::Q4K => 12,
            TensorType::Q6K => 14,
            TensorType::Bf16 => 30,
        }
    }

    /// The type of that number, if it is one that is read.
    pub fn from_id(id: u32) -> Option<TensorType> {
        TensorType::ALL.into_iter().find(|tensor_type| tensor_type.id() == id)
    }

    /// The format's name of a type, read or not.
    pub fn name_of_id(id: u32) -> Option<&'static str> {
        NAMES.iter().find(|(number, _)| *number == id).map(|(_, name)| *name)
    }

    /// The format's name.
    pub fn name(self) -> &'static str {
        TensorType::name_of_id(self.id()).unwrap_or("?")
    }

    /// Values of a block.
    pub const fn block_values(self) -> usize {
        match self {
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => 1,
            TensorType::Q8_0 | TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q5_0 => 32,
            TensorType::Q4K | TensorType::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            TensorType::F32 => 4,
            TensorType::F16 | TensorType::Bf16 => 2,
            TensorType::Q8_0 => 2 + 32,
            TensorType::Q4_0 => 2 + 16,
            TensorType::Q4_1 => 2 + 2 + 16,
            TensorType::Q5_0 => 2 + 4 + 16,
            TensorType::Q4K => 2 + 2 + 12 + 128,
            TensorType::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Bytes of a row of `columns` values; `None` if they are no whole number of blocks, or too many to
    /// count.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        if !columns.is_multiple_of(self.block_values()) {
            return None;
        }
        (columns / self.block_values()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_names_and_sizes_agree() {
        for tensor_type in TensorType::ALL {
            assert_eq!(TensorType::from_id(tensor_type.id()), Some(tensor_type));
            assert_ne!(tensor_type.name(), "?");
            let block = tensor_type.block_values();
            assert_eq!(tensor_type.row_bytes(3 * block), Some(3 * tensor_type.block_bytes()));
            assert_eq!(tensor_type.row_bytes(block + 1).is_none(), block > 1);
        }
        assert_eq!(TensorType::Q4_1.to_string(), "Q4_1");
        assert_eq!((TensorType::from_id(10), TensorType::name_of_id(10)), (None, Some("Q2_K")));
        assert_eq!(TensorType::name_of_id(4), None);
        assert_eq!(TensorType::F32.row_bytes(usize::MAX), None);
    }
}
