//! Blocks to f32: one plain function a type, with the products and sums of the format's definition, each
//! rounded once to f32 and never fused.

use super::TensorType;
use half::{bf16, f16};

/// Restores whole blocks: `values.len()` values from `bytes`.
///
/// # Panics
/// If `values` is no whole number of blocks or `bytes` is not their size: [`TensorType::row_bytes`] tells it.
pub fn dequantize(tensor_type: TensorType, bytes: &[u8], values: &mut [f32]) {
    assert_eq!(
        Some(bytes.len()),
        tensor_type.row_bytes(values.len()),
        "bytes of {tensor_type} for {} values",
        values.len()
    );
    let blocks = bytes
        .chunks_exact(tensor_type.block_bytes())
        .zip(values.chunks_exact_mut(tensor_type.block_values()));
    let restore: fn(&[u8], &mut [f32]) = match tensor_type {
        TensorType::F32 => |bytes, y| y[0] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        TensorType::F16 => |bytes, y| y[0] = f16_at(bytes, 0),
        TensorType::Bf16 => |bytes, y| y[0] = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        TensorType::Q8_0 => q8_0,
        TensorType::Q4_0 => q4_0,
        TensorType::Q4_1 => q4_1,
        TensorType::Q5_0 => q5_0,
        TensorType::Q4K => q4_k,
        TensorType::Q6K => q6_k,
    };
    for (block, y) in blocks {
        restore(block, y);
    }
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn q8_0(block: &[u8], y: &mut [f32]) {
    let d = f16_at(block, 0);
    for (y, &q) in y.iter_mut().zip(&block[2..]) {
        *y = f32::from(q as i8) * d;
    }
}

fn q4_0(block: &[u8], y: &mut [f32]) {
    let d = f16_at(block, 0);
    for (j, &byte) in block[2..].iter().enumerate() {
        y[j] = (f32::from(byte & 15) - 8.0) * d;
        y[j + 16] = (f32::from(byte >> 4) - 8.0) * d;
    }
}

fn q4_1(block: &[u8], y: &mut [f32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    for (j, &byte) in block[4..].iter().enumerate() {
        y[j] = f32::from(byte & 15) * d + m;
        y[j + 16] = f32::from(byte >> 4) * d + m;
    }
}

/// The fifth bit of value i is bit i of the word after the scale.
fn q5_0(block: &[u8], y: &mut [f32]) {
    let d = f16_at(block, 0);
    let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    let value = |nibble: u8, i: usize| {
        let q = u32::from(nibble) | (fifth >> i & 1) << 4;
        (q as f32 - 16.0) * d
    };
    for (j, &byte) in block[6..].iter().enumerate() {
        y[j] = value(byte & 15, j);
        y[j + 16] = value(byte >> 4, j + 16);
    }
}

/// Eight groups of 32 values. Groups 2i and 2i + 1 are the low and the high nibbles of the i-th 32 bytes.
fn q4_k(block: &[u8], y: &mut [f32]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    let (packed, nibbles) = (&block[4..16], &block[16..]);
    for (group, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(packed, group);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let bytes = &nibbles[group / 2 * 32..][..32];
        for (y, byte) in y.iter_mut().zip(bytes) {
            let q = if group.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
            *y = scale * f32::from(q) - min;
        }
    }
}

/// Group 0 to 3: the low six bits of bytes 0 to 3 (scale) and 4 to 7 (minimum). Group 4 to 7: the nibbles of
/// bytes 8 to 11, with the two bits left over in the first eight bytes on top.
fn scale_and_min(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let low = packed[group + 4];
    (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
}

/// Two halves of 128 values, each with 64 low bytes, 32 high bytes and 8 scales. Value 32·k + l of a half
/// takes a nibble of low byte 32·(k mod 2) + l (the high one for k ≥ 2), bits 2k and 2k + 1 of high byte l,
/// and scale 2·k + l/16.
fn q6_k(block: &[u8], y: &mut [f32]) {
    let d = f16_at(block, 208);
    for (half, y) in y.chunks_exact_mut(128).enumerate() {
        let low = &block[64 * half..][..64];
        let high = &block[128 + 32 * half..][..32];
        let scales = &block[192 + 8 * half..][..8];
        for (i, y) in y.iter_mut().enumerate() {
            let (k, l) = (i / 32, i % 32);
            let byte = low[k % 2 * 32 + l];
            let nibble = if k < 2 { byte & 15 } else { byte >> 4 };
            let q = nibble | (high[l] >> (2 * k) & 3) << 4;
            let scale = scales[2 * k + l / 16] as i8;
            *y = d * f32::from(scale) * (f32::from(q) - 32.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restore(tensor_type: TensorType, bytes: &[u8]) -> Vec<f32> {
        let mut values = vec![f32::NAN; bytes.len() / tensor_type.block_bytes() * tensor_type.block_values()];
        dequantize(tensor_type, bytes, &mut values);
        values
    }

    fn half(x: f32) -> [u8; 2] {
        f16::from_f32(x).to_le_bytes()
    }

    #[test]
    fn plain_types_are_copied() {
        assert_eq!(restore(TensorType::F32, &(-1.5f32).to_le_bytes()), [-1.5]);
        assert_eq!(restore(TensorType::F16, &[half(0.25), half(-3.0)].concat()), [0.25, -3.0]);
        assert_eq!(restore(TensorType::Bf16, &bf16::from_f32(7.0).to_le_bytes()), [7.0]);
    }

    #[test]
    fn blocks_of_32_by_hand() {
        let codes: Vec<u8> = (0..32).map(|i| (i as i8 - 16) as u8).collect();
        let q8 = restore(TensorType::Q8_0, &[&half(0.5)[..], &codes].concat());
        assert_eq!(q8, (0..32).map(|i| (i as f32 - 16.0) * 0.5).collect::<Vec<_>>());

        // Low nibble j mod 16, high nibble 15 - j mod 16.
        let nibbles: Vec<u8> = (0..16).map(|j| j | (15 - j) << 4).collect();
        let q = |i: usize| if i < 16 { i as f32 } else { (31 - i) as f32 };
        let expect = |value: &dyn Fn(usize) -> f32| (0..32).map(value).collect::<Vec<f32>>();
        let q4_0 = restore(TensorType::Q4_0, &[&half(2.0)[..], &nibbles].concat());
        assert_eq!(q4_0, expect(&|i| 2.0 * (q(i) - 8.0)));
        let q4_1 = restore(TensorType::Q4_1, &[&half(2.0)[..], &half(-1.0), &nibbles].concat());
        assert_eq!(q4_1, expect(&|i| 2.0 * q(i) - 1.0));
        // Fifth bits of values 1 and 20.
        let fifth = (1u32 << 1 | 1 << 20).to_le_bytes();
        let q5_0 = restore(TensorType::Q5_0, &[&half(1.0)[..], &fifth, &nibbles].concat());
        assert_eq!(q5_0, expect(&|i| q(i) - if i == 1 || i == 20 { 0.0 } else { 16.0 }));
    }

    #[test]
    fn q4_k_by_hand() {
        let mut block = [0u8; 144];
        block[0..2].copy_from_slice(&half(0.5));
        block[2..4].copy_from_slice(&half(0.25));
        // Group 1: scale 3, minimum 5. Group 6: scale 0b10_1001 = 41, minimum 0b01_0110 = 22.
        block[4 + 1] = 3;
        block[4 + 5] = 5;
        block[4 + 10] = 0b0110_1001;
        block[4 + 2] = 0b10 << 6;
        block[4 + 6] = 0b01 << 6;
        block[16] = 0x70; // first 32 bytes: group 1 in the high nibbles
        block[16 + 96 + 31] = 0x09; // last 32 bytes: group 6 in the low nibbles
        let y = restore(TensorType::Q4K, &block);
        assert_eq!(y[32], 0.5 * 3.0 * 7.0 - 0.25 * 5.0);
        assert_eq!(y[33], -0.25 * 5.0);
        assert_eq!(y[192 + 31], 0.5 * 41.0 * 9.0 - 0.25 * 22.0);
        assert_eq!(y[192], -0.25 * 22.0);
        assert!(y[..32].iter().chain(&y[64..192]).chain(&y[224..]).all(|&y| y == 0.0));
    }

    #[test]
    fn q6_k_by_hand() {
        let mut block = [0u8; 210];
        block[208..210].copy_from_slice(&half(0.5));
        // Second half, k = 3, l = 17: value 128 + 96 + 17, low byte 32 + 17, scale 7.
        block[64 + 49] = 0xb0;
        block[128 + 32 + 17] = 0b1000_0000;
        block[192 + 8 + 7] = -3i8 as u8;
        let y = restore(TensorType::Q6K, &block);
        assert_eq!(y[128 + 96 + 17], 0.5 * -3.0 * (f32::from(0b10_1011u8) - 32.0));
        assert_eq!(y[128 + 96 + 16], 0.5 * -3.0 * -32.0);
        assert!(y[..128 + 96 + 16].iter().all(|&y| y == 0.0));
    }

    #[test]
    #[should_panic(expected = "bytes of Q8_0 for 32 values")]
    fn a_length_that_does_not_fit_is_refused() {
        dequantize(TensorType::Q8_0, &[0; 33], &mut [0.0; 32]);
    }
}
