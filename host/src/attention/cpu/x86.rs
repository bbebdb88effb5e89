//! [`Lanes`] in AVX2, FMA and F16C. It inlines into functions that have these instructions enabled.

use super::lanes::{
    Bits, Chunk, Floats, Lanes, NARROWEST, Order, Pairs, Portable, Row, SCALE, Tile, UNSCALE, WIDEST, bits,
};
use crate::attention::Half;
use simt::math::{EXP2_COEFFICIENTS, EXP2_ROUNDER, fma};
use std::arch::x86_64::*;

/// Eight dwords from `from`, which has as many.
#[inline]
#[target_feature(enable = "avx2")]
fn load<T: bytemuck::Pod>(from: &[T]) -> __m256i {
    let bytes: &[u8] = &bytemuck::cast_slice(from)[..32];
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_floats(from: &[f32]) -> __m256 {
    _mm256_castsi256_ps(load(from))
}

#[inline]
#[target_feature(enable = "avx2")]
fn store<T: bytemuck::Pod>(x: __m256i, to: &mut [T]) {
    let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(to)[..32];
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), x) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_floats(x: __m256, to: &mut [f32]) {
    store(_mm256_castps_si256(x), to);
}

/// As sixteen words.
#[inline]
#[target_feature(enable = "avx2")]
fn of(x: __m256i) -> [u16; 16] {
    let mut words = [0; 16];
    store(x, &mut words);
    words
}

/// Exponent words of sixteen elements; `largest` keeps their largest exponent fields.
#[inline]
#[target_feature(enable = "avx2")]
fn words(x: __m256i, format: Bits, largest: &mut __m256i) -> __m256i {
    let magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7fff));
    let exponent = _mm256_srl_epi16(magnitude, _mm_cvtsi32_si128(format.fraction as i32));
    *largest = _mm256_max_epi16(*largest, exponent);
    let word = _mm256_add_epi16(_mm256_max_epi16(exponent, _mm256_set1_epi16(1)), _mm256_set1_epi16(0x4000));
    _mm256_andnot_si256(_mm256_cmpeq_epi16(magnitude, _mm256_setzero_si256()), word)
}

/// Whether all exponent fields are below that of what is not finite.
#[inline]
#[target_feature(enable = "avx2")]
fn below(largest: __m256i, format: Bits) -> bool {
    let limit = _mm256_set1_epi16(format.largest as i16 - 1);
    _mm256_movemask_epi8(_mm256_cmpgt_epi16(largest, limit)) == 0
}

/// Sixteen elements as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen<E: Half>(x: __m256i) -> [__m256; 2] {
    let halves = [_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x)];
    if E::IS_F16 {
        halves.map(|half| _mm256_cvtph_ps(half))
    } else {
        halves.map(|half| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half))))
    }
}

/// Rows to columns: eight rows of eight dwords.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(r: [__m256i; 8]) -> [__m256i; 8] {
    let low = |i: usize| _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    let high = |i: usize| _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    // Columns 0 and 4, 1 and 5, 2 and 6, 3 and 7 of four rows each.
    let four = |i: usize| {
        let (a, b, c, d) = (low(2 * i), low(2 * i + 1), high(2 * i), high(2 * i + 1));
        [
            _mm256_unpacklo_epi64(a, b),
            _mm256_unpackhi_epi64(a, b),
            _mm256_unpacklo_epi64(c, d),
            _mm256_unpackhi_epi64(c, d),
        ]
    };
    let (top, bottom) = (four(0), four(1));
    std::array::from_fn(|i| {
        if i < 4 {
            _mm256_permute2x128_si256::<0x20>(top[i], bottom[i])
        } else {
            _mm256_permute2x128_si256::<0x31>(top[i - 4], bottom[i - 4])
        }
    })
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn keys<E: Half, O: Order>(rows: &[u16], head_dim: usize, tile: &mut Tile) {
    let format = bits::<E>();
    let mut largest = _mm256_setzero_si256();
    for first in [0, 8] {
        for start in (0..head_dim).step_by(16) {
            let columns =
                transpose(std::array::from_fn(|i| load(&rows[(first + i) * head_dim + start..][..16])));
            for (i, pairs) in columns.into_iter().enumerate() {
                let (chunk, step) = O::step_of(start + 2 * i);
                store(words(pairs, format, &mut largest), &mut tile.pairs[chunk][step / 2][first..first + 8]);
                let even = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
                let odd = _mm256_srli_epi32::<16>(pairs);
                // Within 128 bits; then across.
                let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(even, odd));
                let [even, odd]: [[u16; 8]; 2] = bytemuck::cast(of(packed));
                tile.keys[chunk][step][first..first + 8].copy_from_slice(&even);
                tile.keys[chunk][step + 1][first..first + 8].copy_from_slice(&odd);
                let [even, odd] = widen::<E>(packed);
                store_floats(even, &mut tile.floats[chunk][step][first..first + 8]);
                store_floats(odd, &mut tile.floats[chunk][step + 1][first..first + 8]);
            }
        }
    }
    tile.finite = below(largest, format);
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn values<E: Half>(rows: &[u16], head_dim: usize, tile: &mut Tile) {
    let format = bits::<E>();
    let mut largest = _mm256_setzero_si256();
    for pair in 0..8 {
        let (even, odd) = rows[2 * pair * head_dim..][..2 * head_dim].split_at(head_dim);
        for chunk in 0..head_dim / 16 {
            let (a, b) = (load(&even[16 * chunk..][..16]), load(&odd[16 * chunk..][..16]));
            for (token, x) in [(2 * pair, a), (2 * pair + 1, b)] {
                let [low, high] = widen::<E>(x);
                store_floats(low, &mut tile.floats[chunk][token][..8]);
                store_floats(high, &mut tile.floats[chunk][token][8..]);
            }
            let (a, b) = (words(a, format, &mut largest), words(b, format, &mut largest));
            // Within 128 bits; then across.
            let (low, high) = (_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
            store(_mm256_permute2x128_si256::<0x20>(low, high), &mut tile.pairs[chunk][pair][..8]);
            store(_mm256_permute2x128_si256::<0x31>(low, high), &mut tile.pairs[chunk][pair][8..]);
        }
    }
    tile.finite = below(largest, format);
}

/// Eight lanes of a row of [`Lanes::steps`], from lane `first` on.
#[inline]
#[target_feature(enable = "avx2")]
fn step_8(
    row: &Row,
    floats: &[Floats; 16],
    pairs: &[Pairs; 8],
    bias: i32,
    c: &mut [f32],
    first: usize,
) -> u32 {
    let zero = _mm256_setzero_si256();
    let mut products = zero;
    for (a, b) in row.pairs.iter().zip(pairs) {
        let sums = _mm256_add_epi16(_mm256_set1_epi32(*a as i32), load(&b[first..first + 8]));
        products = _mm256_max_epu16(products, sums);
    }
    let low = _mm256_and_si256(products, _mm256_set1_epi32(0xffff));
    let products = _mm256_max_epi32(low, _mm256_srli_epi32::<16>(products));
    let before = load_floats(c);
    let accumulator =
        _mm256_and_si256(_mm256_srli_epi32::<23>(_mm256_castps_si256(before)), _mm256_set1_epi32(0xff));
    let alignment = _mm256_max_epi32(_mm256_sub_epi32(products, _mm256_set1_epi32(bias)), accumulator);
    let narrow = _mm256_cmpgt_epi32(_mm256_set1_epi32(NARROWEST), alignment);
    let wide = _mm256_cmpgt_epi32(alignment, _mm256_set1_epi32(WIDEST));
    let some = _mm256_cmpgt_epi32(products, _mm256_set1_epi32(0x7fff));
    let others = _mm256_or_si256(wide, _mm256_and_si256(narrow, some));
    let scale =
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_sub_epi32(_mm256_set1_epi32(SCALE), alignment)));
    let mut sums = zero;
    for (a, b) in row.floats.iter().zip(floats) {
        let product = _mm256_mul_ps(_mm256_set1_ps(*a), load_floats(&b[first..first + 8]));
        sums = _mm256_add_epi32(sums, _mm256_cvttps_epi32(_mm256_mul_ps(product, scale)));
    }
    let own = _mm256_cvttps_epi32(_mm256_mul_ps(before, scale));
    let mask = _mm256_set1_pd(f64::from_bits(!((1 << 29) - 1)));
    let half = |a: __m128i, b: __m128i| {
        let sum = _mm256_add_pd(_mm256_cvtepi32_pd(a), _mm256_cvtepi32_pd(b));
        _mm256_cvtpd_ps(_mm256_and_pd(sum, mask))
    };
    let after = _mm256_set_m128(
        half(_mm256_extracti128_si256::<1>(sums), _mm256_extracti128_si256::<1>(own)),
        half(_mm256_castsi256_si128(sums), _mm256_castsi256_si128(own)),
    );
    let unscale =
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_sub_epi32(alignment, _mm256_set1_epi32(UNSCALE))));
    let after = _mm256_mul_ps(after, unscale);
    // No product: the accumulator, but −0 becomes +0.
    let kept = _mm256_add_ps(before, _mm256_setzero_ps());
    let after = _mm256_blendv_ps(after, kept, _mm256_castsi256_ps(narrow));
    store_floats(_mm256_blendv_ps(after, before, _mm256_castsi256_ps(others)), c);
    _mm256_movemask_ps(_mm256_castsi256_ps(others)) as u32
}

/// Sixteen elements of f32, to nearest even.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn round_f16(x: &Floats) -> [u16; 16] {
    let half = |x: &[f32]| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load_floats(x));
    let mut out = [0u16; 16];
    store(_mm256_set_m128i(half(&x[8..]), half(&x[..8])), &mut out);
    out
}

/// Eight bytes less 128.
#[inline]
#[target_feature(enable = "avx2")]
fn signed_8(x: &[u8]) -> __m256 {
    let bytes: [u8; 8] = [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]];
    let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)));
    _mm256_cvtepi32_ps(_mm256_sub_epi32(wide, _mm256_set1_epi32(128)))
}

/// Eight codes of four bits times `scale`, plus `zero`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn restore_8(codes: u32, scale: f32, zero: f32) -> __m256 {
    let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    let codes = _mm256_srlv_epi32(_mm256_set1_epi32(codes as i32), shifts);
    let codes = _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)));
    // The product is exact.
    _mm256_fmadd_ps(codes, _mm256_set1_ps(scale), _mm256_set1_ps(zero))
}

/// A bit for each NaN of eight floats.
#[inline]
#[target_feature(enable = "avx2")]
fn nan(x: &[f32]) -> i32 {
    let x = load_floats(x);
    _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

/// `exp2_nonpositive` of x − reference.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp2_8(x: &[f32], reference: f32) -> __m256 {
    const C: [f32; 6] = EXP2_COEFFICIENTS;
    let x = _mm256_sub_ps(load_floats(x), _mm256_set1_ps(reference));
    // Of a NaN the second operand.
    let x = _mm256_max_ps(_mm256_set1_ps(-127.0), x);
    let rounder = _mm256_set1_ps(EXP2_ROUNDER);
    let t = _mm256_add_ps(x, rounder);
    let f = _mm256_sub_ps(x, _mm256_sub_ps(t, rounder));
    let scale = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(t)));
    let mut q = _mm256_fmadd_ps(f, _mm256_set1_ps(C[5]), _mm256_set1_ps(C[4]));
    q = _mm256_fmadd_ps(f, q, _mm256_set1_ps(C[3]));
    q = _mm256_fmadd_ps(f, q, _mm256_set1_ps(C[2]));
    q = _mm256_fmadd_ps(f, q, _mm256_set1_ps(C[1]));
    q = _mm256_fmadd_ps(f, q, _mm256_set1_ps(C[0]));
    _mm256_fmadd_ps(_mm256_mul_ps(f, scale), q, scale)
}

/// [`Lanes::add_scaled`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_scaled(to: &mut [f32], x: &[f32], weight: f32) {
    let len = to.len().min(x.len());
    let (to, rest) = to[..len].as_chunks_mut::<8>();
    let (x, x_rest) = x[..len].as_chunks::<8>();
    for (to, x) in to.iter_mut().zip(x) {
        let sum = _mm256_fmadd_ps(load_floats(x), _mm256_set1_ps(weight), load_floats(&*to));
        store_floats(sum, to);
    }
    for (to, x) in rest.iter_mut().zip(x_rest) {
        *to = fma(*x, weight, *to);
    }
}

/// AVX2, FMA and F16C.
pub(crate) struct Avx2;

impl Lanes for Avx2 {
    #[inline(always)]
    fn widen<E: Half>(x: &[u16; 16], out: &mut Floats) {
        // SAFETY: the machine has the instructions, by the trait's contract.
        unsafe {
            let [low, high] = widen::<E>(load(x));
            store_floats(low, &mut out[..8]);
            store_floats(high, &mut out[8..]);
        }
    }

    #[inline(always)]
    fn pairs<E: Half>(x: &[u16; 16], out: &mut [u32; 8]) -> bool {
        let format = bits::<E>();
        // SAFETY: as above.
        unsafe {
            let mut largest = _mm256_setzero_si256();
            // Sixteen words are eight pairs.
            store(words(load(x), format, &mut largest), out);
            below(largest, format)
        }
    }

    #[inline(always)]
    fn round<E: Half>(x: &Floats) -> [u16; 16] {
        // SAFETY: as above.
        unsafe {
            if E::IS_F16 && nan(&x[..8]) | nan(&x[8..]) == 0 {
                return round_f16(x);
            }
        }
        Portable::round::<E>(x)
    }

    #[inline(always)]
    fn exp2(x: &Floats, reference: f32) -> Floats {
        let mut out = [0.0; 16];
        // SAFETY: as above.
        unsafe {
            store_floats(exp2_8(&x[..8], reference), &mut out[..8]);
            store_floats(exp2_8(&x[8..], reference), &mut out[8..]);
        }
        out
    }

    #[inline(always)]
    fn add_scaled(to: &mut [f32], x: &[f32], weight: f32) {
        // SAFETY: as above.
        unsafe { add_scaled(to, x, weight) }
    }

    #[inline(always)]
    fn round_f16(x: &Floats) -> [u16; 16] {
        // SAFETY: as above.
        unsafe { round_f16(x) }
    }

    #[inline(always)]
    fn signed(x: &[u8; 16]) -> Floats {
        let mut out = [0.0; 16];
        let (low, high) = x.split_at(8);
        // SAFETY: as above.
        unsafe {
            store_floats(signed_8(low), &mut out[..8]);
            store_floats(signed_8(high), &mut out[8..]);
        }
        out
    }

    #[inline(always)]
    fn restore(codes: [u8; 8], scale: f32, zero: f32) -> Floats {
        let mut out = [0.0; 16];
        let codes = u64::from_le_bytes(codes);
        // SAFETY: as above.
        unsafe {
            store_floats(restore_8(codes as u32, scale, zero), &mut out[..8]);
            store_floats(restore_8((codes >> 32) as u32, scale, zero), &mut out[8..]);
        }
        out
    }

    #[inline(always)]
    fn prefetch(memory: &[u16]) {
        // 64 bytes, a line of a cache.
        for line in memory.chunks(32) {
            // SAFETY: a hint about memory that is there.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
        }
    }

    #[inline(always)]
    fn keys<E: Half, O: Order>(rows: &[u16], head_dim: usize, tile: &mut Tile) {
        // SAFETY: as above.
        unsafe { keys::<E, O>(rows, head_dim, tile) }
    }

    #[inline(always)]
    fn values<E: Half>(rows: &[u16], head_dim: usize, tile: &mut Tile) {
        // SAFETY: as above.
        unsafe { values::<E>(rows, head_dim, tile) }
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

/// [`Lanes::steps`].
#[inline]
#[target_feature(enable = "avx2")]
fn steps<E: Half, const R: usize>(rows: &[&Row; R], chunk: Chunk<'_>, c: &mut [&mut Floats; R]) -> [u32; R] {
    let (floats, pairs) = (&chunk.tile.floats[chunk.index], &chunk.tile.pairs[chunk.index]);
    let bias = bits::<E>().bias;
    let mut lanes = [0; R];
    for (lanes, (row, c)) in lanes.iter_mut().zip(rows.iter().zip(c)) {
        let (low, high) = c.split_at_mut(8);
        *lanes = step_8(row, floats, pairs, bias, low, 0) | step_8(row, floats, pairs, bias, high, 8) << 8;
    }
    lanes
}
