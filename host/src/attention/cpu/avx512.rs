//! [`Lanes`] in AVX-512 F, BW and VL. What is of eight lanes or bytes is [`Avx2`]'s.
//!
//! Elements stay as they are, and become floats and exponent words in registers, for several rows at once: a
//! tile of operands would be three times as large.

use super::lanes::{
    BOTH, Chunk, Floats, Lanes, NARROWEST, Order, Portable, Row, SCALE, Tile, UNSCALE, WIDEST, bits,
};
use super::x86::Avx2;
use crate::attention::Half;
use simt::math::{EXP2_COEFFICIENTS, EXP2_ROUNDER};
use std::arch::x86_64::*;

/// AVX-512 F, BW and VL, and what AVX2 has.
pub(crate) struct Avx512;

/// 32 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_256<T: bytemuck::Pod>(from: &[T]) -> __m256i {
    let bytes: &[u8] = &bytemuck::cast_slice(from)[..32];
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn load<T: bytemuck::Pod>(from: &[T]) -> __m512i {
    let bytes: &[u8] = &bytemuck::cast_slice(from)[..64];
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_floats(from: &Floats) -> __m512 {
    _mm512_castsi512_ps(load(from))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_floats(x: __m512, to: &mut Floats) {
    // SAFETY: sixteen floats.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_words(x: __m256i, to: &mut [u16; 16]) {
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), x) }
}

/// Sixteen elements as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn widen<E: Half>(x: __m256i) -> __m512 {
    if E::IS_F16 {
        _mm512_cvtph_ps(x)
    } else {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
    }
}

/// To f16, to nearest even.
#[inline]
#[target_feature(enable = "avx512f")]
fn round(x: __m512) -> __m256i {
    _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)
}

/// Exponent words of elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn words<E: Half>(x: __m512i) -> __m512i {
    let magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    let exponent =
        if E::IS_F16 { _mm512_srli_epi16::<10>(magnitude) } else { _mm512_srli_epi16::<7>(magnitude) };
    let exponent = _mm512_max_epi16(exponent, _mm512_set1_epi16(1));
    let some = _mm512_test_epi16_mask(magnitude, magnitude);
    _mm512_maskz_add_epi16(some, exponent, _mm512_set1_epi16(0x4000))
}

/// Whether all of the magnitudes, or the bits of several in each word, are of finite elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn below<E: Half>(largest: __m512i) -> bool {
    let format = bits::<E>();
    let limit = _mm512_set1_epi16((format.largest << format.fraction) as i16);
    _mm512_cmplt_epi16_mask(largest, limit) == u32::MAX
}

/// Magnitudes, the larger ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn larger(largest: __m512i, x: __m512i) -> __m512i {
    _mm512_max_epi16(largest, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)))
}

/// Rows to columns: sixteen rows of sixteen dwords.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let low = |i: usize| _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    let high = |i: usize| _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    // Of four rows, in each 128 bits: columns 0, 1, 2 and 3 of its four.
    let four = |i: usize| {
        let (a, b, c, d) = (low(2 * i), low(2 * i + 1), high(2 * i), high(2 * i + 1));
        [
            _mm512_unpacklo_epi64(a, b),
            _mm512_unpackhi_epi64(a, b),
            _mm512_unpacklo_epi64(c, d),
            _mm512_unpackhi_epi64(c, d),
        ]
    };
    let fours = [four(0), four(1), four(2), four(3)];
    let mut columns = [_mm512_setzero_si512(); 16];
    for i in 0..4 {
        let [a, b, c, d] = [fours[0][i], fours[1][i], fours[2][i], fours[3][i]];
        // Quarters 0 and 2, and 1 and 3, of rows 0 to 7 and of rows 8 to 15.
        let even = [_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d)];
        let odd = [_mm512_shuffle_i32x4::<0b11_01_11_01>(a, b), _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d)];
        columns[i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even[0], even[1]);
        columns[8 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even[0], even[1]);
        columns[4 + i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd[0], odd[1]);
        columns[12 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd[0], odd[1]);
    }
    columns
}

#[inline(never)]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn keys<E: Half, O: Order>(rows: &[u16], head_dim: usize, tile: &mut Tile) {
    let mut largest = _mm512_setzero_si512();
    for start in (0..head_dim).step_by(32) {
        let rows = std::array::from_fn(|token| load(&rows[token * head_dim + start..][..32]));
        for (i, pairs) in transpose(rows).into_iter().enumerate() {
            largest = larger(largest, pairs);
            let (chunk, step) = O::step_of(start + 2 * i);
            store_words(_mm512_cvtepi32_epi16(pairs), &mut tile.keys[chunk][step]);
            let odd = _mm512_srli_epi32::<16>(pairs);
            store_words(_mm512_cvtepi32_epi16(odd), &mut tile.keys[chunk][step + 1]);
        }
    }
    tile.finite = below::<E>(largest);
}

#[inline(never)]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn codes<O: Order>(rows: &[u8], head_dim: usize, tile: &mut Tile) {
    for start in (0..head_dim).step_by(64) {
        let rows = std::array::from_fn(|token| load(&rows[token * head_dim + start..][..64]));
        for (i, four) in transpose(rows).into_iter().enumerate() {
            let (chunk, step) = O::step_of(start + 4 * i);
            // Less 128: the highest bit is the sign.
            let four = _mm512_xor_si512(four, _mm512_set1_epi8(-128));
            let bytes = [
                _mm512_slli_epi32::<24>(four),
                _mm512_slli_epi32::<16>(four),
                _mm512_slli_epi32::<8>(four),
                four,
            ];
            for (byte, step) in bytes.into_iter().zip(step..) {
                let floats = _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(byte));
                store_words(round(floats), &mut tile.keys[chunk][step]);
            }
        }
    }
    tile.finite = true;
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn all_finite<E: Half>(rows: &[u16]) -> bool {
    let mut largest = _mm512_setzero_si512();
    for some in rows.as_chunks::<32>().0 {
        largest = larger(largest, load(some));
    }
    below::<E>(largest)
}

/// code · scale + zero of sixteen codes of four bits, low nibbles first.
#[inline]
#[target_feature(enable = "avx512f")]
fn restore(codes: [u8; 8], scale: f32, zero: f32) -> __m512 {
    let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    let halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    let codes = _mm512_castsi128_si512(_mm_cvtsi64_si128(i64::from_le_bytes(codes)));
    let codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(halves, codes), shifts);
    let codes = _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(15)));
    // The product is exact.
    _mm512_fmadd_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(zero))
}

/// [`Lanes::restore_groups`].
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn restore_groups(codes: &[[u8; 8]; 16], scales: &Floats, zeros: &Floats, out: &mut [[u16; 16]; 16]) {
    let nibble = _mm256_set1_epi8(15);
    for (i, four) in codes.as_chunks::<4>().0.iter().enumerate() {
        let bytes = load_256(four.as_flattened());
        let (low, high) =
            (_mm256_and_si256(bytes, nibble), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble));
        // Codes 0 to 15 of groups 0 and 2, and of groups 1 and 3.
        let (even, odd) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
        let groups = [
            _mm256_castsi256_si128(even),
            _mm256_castsi256_si128(odd),
            _mm256_extracti128_si256::<1>(even),
            _mm256_extracti128_si256::<1>(odd),
        ];
        for (group, codes) in (4 * i..).zip(groups) {
            let codes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
            let (scale, zero) = (_mm512_set1_ps(scales[group]), _mm512_set1_ps(zeros[group]));
            // The product is exact.
            store_words(round(_mm512_fmadd_ps(codes, scale, zero)), &mut out[group]);
        }
    }
}

/// `exp2_nonpositive` of x − reference.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2(x: __m512, reference: f32) -> __m512 {
    const C: [f32; 6] = EXP2_COEFFICIENTS;
    let x = _mm512_sub_ps(x, _mm512_set1_ps(reference));
    // Of a NaN the second operand.
    let x = _mm512_max_ps(_mm512_set1_ps(-127.0), x);
    let rounder = _mm512_set1_ps(EXP2_ROUNDER);
    let t = _mm512_add_ps(x, rounder);
    let f = _mm512_sub_ps(x, _mm512_sub_ps(t, rounder));
    let scale = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(t)));
    let mut q = _mm512_fmadd_ps(f, _mm512_set1_ps(C[5]), _mm512_set1_ps(C[4]));
    q = _mm512_fmadd_ps(f, q, _mm512_set1_ps(C[3]));
    q = _mm512_fmadd_ps(f, q, _mm512_set1_ps(C[2]));
    q = _mm512_fmadd_ps(f, q, _mm512_set1_ps(C[1]));
    q = _mm512_fmadd_ps(f, q, _mm512_set1_ps(C[0]));
    _mm512_fmadd_ps(_mm512_mul_ps(f, scale), q, scale)
}

#[inline(never)]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn steps<E: Half, const R: usize>(rows: &[&Row; R], chunk: Chunk<'_>, c: &mut [&mut Floats; R]) -> [u32; R] {
    let zero = _mm512_setzero_si512();
    // Words of two steps, one beside the other.
    let beside = {
        let low =
            _mm512_cvtepu16_epi32(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        _mm512_or_si512(low, _mm512_slli_epi32::<16>(_mm512_add_epi32(low, _mm512_set1_epi32(32))))
    };
    let mut products = [zero; R];
    for j in 0..8 {
        let even = _mm512_castsi256_si512(load_256(chunk.step(2 * j)));
        let odd = _mm512_castsi256_si512(load_256(chunk.step(2 * j + 1)));
        let words = words::<E>(_mm512_permutex2var_epi16(even, beside, odd));
        for (products, row) in products.iter_mut().zip(rows) {
            let sums = _mm512_add_epi16(_mm512_set1_epi32(row.pairs[j] as i32), words);
            *products = _mm512_max_epu16(*products, sums);
        }
    }
    let mut alignments = [zero; R];
    let mut scales = [_mm512_setzero_ps(); R];
    let mut sums = [zero; R];
    let mut others = [0u16; R];
    for r in 0..R {
        let low = _mm512_and_si512(products[r], _mm512_set1_epi32(0xffff));
        let largest = _mm512_max_epi32(low, _mm512_srli_epi32::<16>(products[r]));
        let before = load(c[r]);
        let accumulator = _mm512_and_si512(_mm512_srli_epi32::<23>(before), _mm512_set1_epi32(0xff));
        let bias = _mm512_set1_epi32(bits::<E>().bias);
        alignments[r] = _mm512_max_epi32(_mm512_sub_epi32(largest, bias), accumulator);
        // Products of f16 have a wider alignment than that, or there are none.
        if !E::IS_F16 {
            let narrow = _mm512_cmplt_epi32_mask(alignments[r], _mm512_set1_epi32(NARROWEST));
            others[r] = narrow & _mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(BOTH - 1));
        }
        let scale = _mm512_sub_epi32(_mm512_set1_epi32(SCALE), alignments[r]);
        scales[r] = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(scale));
        sums[r] = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(before), scales[r]));
    }
    let owns = sums;
    let mut sums = [zero; R];
    for step in 0..16 {
        let b = widen::<E>(load_256(chunk.step(step)));
        for ((row, scale), sum) in rows.iter().zip(&scales).zip(&mut sums) {
            let product = _mm512_mul_ps(_mm512_set1_ps(row.floats[step]), b);
            *sum = _mm512_add_epi32(*sum, _mm512_cvttps_epi32(_mm512_mul_ps(product, *scale)));
        }
    }
    let mut lanes = [0u32; R];
    for r in 0..R {
        let (own, sum, alignment) = (owns[r], sums[r], alignments[r]);
        let narrow = _mm512_cmplt_epi32_mask(alignment, _mm512_set1_epi32(NARROWEST));
        let wide = _mm512_cmpgt_epi32_mask(alignment, _mm512_set1_epi32(WIDEST));
        let all = _mm512_add_epi32(sum, own);
        // Beyond 31 bits: the signs of both are not the sum's.
        let beyond = _mm512_and_si512(_mm512_xor_si512(sum, all), _mm512_xor_si512(own, all));
        let beyond = _mm512_cmplt_epi32_mask(beyond, zero);
        let others = others[r] | wide | (beyond & !narrow);
        let all = _mm512_cvt_roundepi32_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(all);
        let scale = _mm512_castps_si512(scales[r]);
        let unscale = _mm512_sub_epi32(_mm512_set1_epi32((SCALE - UNSCALE) << 23), scale);
        let after = _mm512_mul_ps(all, _mm512_castsi512_ps(unscale));
        // No product: the accumulator, but −0 becomes +0.
        let before = load_floats(c[r]);
        let after = _mm512_mask_add_ps(after, narrow, before, _mm512_setzero_ps());
        store_floats(_mm512_mask_mov_ps(after, others, before), c[r]);
        lanes[r] = u32::from(others);
    }
    lanes
}

impl Lanes for Avx512 {
    const SEVERAL: bool = true;

    #[inline(always)]
    fn widen<E: Half>(x: &[u16; 16], out: &mut Floats) {
        // SAFETY: the machine has the instructions, by the trait's contract.
        unsafe { store_floats(widen::<E>(load_256(x)), out) }
    }

    #[inline(always)]
    fn pairs<E: Half>(x: &[u16; 16], out: &mut [u32; 8]) -> bool {
        Avx2::pairs::<E>(x, out)
    }

    #[inline(always)]
    fn round<E: Half>(x: &Floats) -> [u16; 16] {
        // SAFETY: as above.
        unsafe {
            let floats = load_floats(x);
            if E::IS_F16 && _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(floats, floats) == 0 {
                return Self::round_f16(x);
            }
        }
        Portable::round::<E>(x)
    }

    #[inline(always)]
    fn exp2(x: &Floats, reference: f32) -> Floats {
        let mut out = [0.0; 16];
        // SAFETY: as above.
        unsafe { store_floats(exp2(load_floats(x), reference), &mut out) }
        out
    }

    #[inline(always)]
    fn add_scaled(to: &mut [f32], x: &[f32], weight: f32) {
        Avx2::add_scaled(to, x, weight);
    }

    #[inline(always)]
    fn round_f16(x: &Floats) -> [u16; 16] {
        let mut out = [0; 16];
        // SAFETY: as above.
        unsafe { store_words(round(load_floats(x)), &mut out) }
        out
    }

    #[inline(always)]
    fn signed(x: &[u8; 16]) -> Floats {
        Avx2::signed(x)
    }

    #[inline(always)]
    fn restore(codes: [u8; 8], scale: f32, zero: f32) -> Floats {
        let mut out = [0.0; 16];
        // SAFETY: as above.
        unsafe { store_floats(restore(codes, scale, zero), &mut out) }
        out
    }

    #[inline(always)]
    fn restore_groups(codes: &[[u8; 8]; 16], scales: &Floats, zeros: &Floats, out: &mut [[u16; 16]; 16]) {
        // SAFETY: as above.
        unsafe { restore_groups(codes, scales, zeros, out) }
    }

    #[inline(always)]
    fn prefetch(memory: &[u16]) {
        Avx2::prefetch(memory);
    }

    #[inline(always)]
    fn keys<E: Half, O: Order>(rows: &[u16], head_dim: usize, tile: &mut Tile) {
        // SAFETY: as above.
        unsafe { keys::<E, O>(rows, head_dim, tile) }
    }

    #[inline(always)]
    fn codes<O: Order>(rows: &[u8], head_dim: usize, _memory: &mut [u16], tile: &mut Tile) {
        // SAFETY: as above.
        unsafe { codes::<O>(rows, head_dim, tile) }
    }

    #[inline(always)]
    fn values<E: Half>(rows: &[u16], _head_dim: usize, tile: &mut Tile) {
        // SAFETY: as above.
        tile.finite = unsafe { all_finite::<E>(rows) };
    }

    #[inline(always)]
    fn steps<E: Half, const R: usize>(
        rows: [&Row; R],
        chunk: Chunk<'_>,
        c: &mut [&mut Floats; R],
    ) -> [u32; R] {
        // SAFETY: as above.
        unsafe { steps::<E, R>(&rows, chunk, c) }
    }
}
