//! The inner loops in AVX2 and AVX-512 VNNI: eight rows are the eight lanes of a register, from codes to
//! sums.

use super::Level;
use super::product::{ROWS, STRANDS, Strands, Sums, TOKENS, View};
use crate::model::linear::WeightKind;
use kernels_gpu::model::fixed::{Part, Record};
use std::arch::x86_64::*;
use std::hint::black_box;

/// Sums of a group's rows for `count` tokens from `first` on.
pub(super) fn sums(
    level: Level,
    view: View<'_>,
    group: usize,
    [first, count]: [usize; 2],
    strands: &mut Strands,
    sums: &mut Sums,
) {
    let tokens = [first, count];
    let (vnni, one) = (level == Level::Avx512, count == 1);
    // SAFETY: the machine has the level's instructions (`Level::checked`).
    unsafe {
        match (view.kind, vnni, one) {
            (WeightKind::Q8_0, true, true) => vnni::eight_bits::<1>(view, group, tokens, strands, sums),
            (WeightKind::Q8_0, true, false) => vnni::eight_bits::<TOKENS>(view, group, tokens, strands, sums),
            (WeightKind::Q8_0, false, true) => avx2::eight_bits::<1>(view, group, tokens, strands, sums),
            (WeightKind::Q8_0, false, false) => {
                avx2::eight_bits::<TOKENS>(view, group, tokens, strands, sums)
            }
            (WeightKind::Q4_1 | WeightKind::Q4_0, true, true) => {
                vnni::four_bits::<1>(view, group, tokens, strands, sums);
            }
            (WeightKind::Q4_1 | WeightKind::Q4_0, true, false) => {
                vnni::four_bits::<TOKENS>(view, group, tokens, strands, sums);
            }
            (WeightKind::Q4_1 | WeightKind::Q4_0, false, true) => {
                avx2::four_bits::<1>(view, group, tokens, strands, sums);
            }
            (WeightKind::Q4_1 | WeightKind::Q4_0, false, false) => {
                avx2::four_bits::<TOKENS>(view, group, tokens, strands, sums);
            }
            _ => {
                for i in 0..count {
                    floats(view, group, first + i, &mut strands[i], &mut sums[i]);
                }
            }
        }
    }
}

/// Word `at` of a part, in all lanes: from memory, which costs no more than a load.
#[inline]
#[target_feature(enable = "avx2")]
fn broadcast(part: &Part, at: usize) -> __m256i {
    let words: &[f32; 8] = bytemuck::cast_ref(part);
    _mm256_castps_si256(_mm256_broadcast_ss(&words[at]))
}

/// 32 bytes of codes from word `at` on.
#[inline]
#[target_feature(enable = "avx2")]
fn load_codes(words: &[u32], at: usize) -> __m256i {
    let words = &words[at..at + 8];
    // SAFETY: eight words are 32 bytes.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}

/// Eight 16-bit floats from element `at` on.
#[inline]
#[target_feature(enable = "avx2")]
fn load_halves(halves: &[u16], at: usize) -> __m128i {
    let halves = &halves[at..at + 8];
    // SAFETY: eight halves are 16 bytes.
    unsafe { _mm_loadu_si128(halves.as_ptr().cast()) }
}

/// d and m of the eight rows of a tile.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn four_bit_scales(kind: WeightKind, scales: &[u16], block: usize) -> [__m256; 2] {
    if kind == WeightKind::Q4_0 {
        let d = _mm256_cvtph_ps(load_halves(scales, block * ROWS));
        return [d, _mm256_mul_ps(_mm256_set1_ps(-8.0), d)];
    }
    let (low, high) = (load_halves(scales, 2 * block * ROWS), load_halves(scales, 2 * block * ROWS + 8));
    // Four pairs of (d, m) in each.
    let order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    let (low, high) = (_mm_shuffle_epi8(low, order), _mm_shuffle_epi8(high, order));
    [_mm256_cvtph_ps(_mm_unpacklo_epi64(low, high)), _mm256_cvtph_ps(_mm_unpackhi_epi64(low, high))]
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(register: __m256) -> [f32; ROWS] {
    let mut values = [0f32; ROWS];
    // SAFETY: eight floats are 32 bytes.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), register) };
    values
}

/// Eight floats.
#[inline]
#[target_feature(enable = "avx2")]
fn load(values: &[f32; ROWS]) -> __m256 {
    // SAFETY: eight floats are 32 bytes.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

/// What a token's strand holds before `block`: nothing before its first one.
#[inline]
#[target_feature(enable = "avx2")]
fn strand_before(strands: &[[f32; ROWS]; STRANDS], block: usize, count: usize) -> __m256 {
    if block < count { _mm256_setzero_ps() } else { load(&strands[block & (count - 1) & (STRANDS - 1)]) }
}

/// Keeps what the strand holds after `block`.
#[inline]
#[target_feature(enable = "avx2")]
fn keep_strand(strands: &mut [[f32; ROWS]; STRANDS], block: usize, count: usize, sum: __m256) {
    strands[block & (count - 1) & (STRANDS - 1)] = store(sum);
}

/// Strands of one token, added one after another.
#[inline]
#[target_feature(enable = "avx2")]
fn add_strands(strands: &[[f32; ROWS]; STRANDS], count: usize, blocks: usize) -> [f32; ROWS] {
    let mut total = load(&strands[0]);
    for strand in &strands[1..count.min(blocks)] {
        total = _mm256_add_ps(total, load(strand));
    }
    // A strand without a block is +0, which may still make a zero of another sign.
    if blocks < count {
        total = _mm256_add_ps(total, _mm256_setzero_ps());
    }
    store(total)
}

/// The tokens' records; where there are fewer tokens, the last one again.
#[inline(always)]
fn records<'a, const T: usize>(view: &'a View<'a>, first: usize, count: usize) -> [&'a [Record]; T] {
    std::array::from_fn(|i| view.token(first + i.min(count - 1)))
}

/// Parts of a record: four. For several tokens the compiler shall not know: it would unroll the loop, put all
/// loads first, and have no registers for what they loaded.
#[inline(always)]
fn parts<const T: usize>() -> usize {
    if T == 1 { 4 } else { black_box(4) }
}

/// Makes a module with the loops over integer codes for one instruction set: `$four` and `$eight` add
/// products to a token's three accumulators, `$close` makes 32-bit sums of those of four-bit codes.
macro_rules! integer_paths {
    ($name:ident, $features:literal, |$acc:ident, $codes:ident, $x:ident| $four:expr, |$closed:ident| $close:expr,
        |$acc8:ident, $codes8:ident, $x8:ident| $eight:expr) => {
        mod $name {
            use super::*;

            #[inline]
            #[target_feature(enable = $features)]
            fn four($acc: __m256i, $codes: __m256i, $x: __m256i) -> __m256i {
                $four
            }

            #[inline]
            #[target_feature(enable = $features)]
            fn close($closed: __m256i) -> __m256i {
                $close
            }

            #[inline]
            #[target_feature(enable = $features)]
            fn eight($acc8: __m256i, $codes8: __m256i, $x8: __m256i) -> __m256i {
                $eight
            }

            #[target_feature(enable = $features)]
            pub(super) fn four_bits<const T: usize>(
                view: View<'_>,
                group: usize,
                [first, count]: [usize; 2],
                strands: &mut Strands,
                sums: &mut Sums,
            ) {
                let (zero, low_bits) = (_mm256_setzero_si256(), _mm256_set1_epi8(15));
                let parts = parts::<T>();
                let records = records::<T>(&view, first, count);
                let scales = view.group_scales(group);
                let (tiles, _) = view.tiles(group).as_chunks::<32>();
                for (block, tile) in tiles.iter().enumerate() {
                    let mut dots = [[zero; 3]; T];
                    for j in 0..parts {
                        let codes = load_codes(tile, 8 * j);
                        let low = _mm256_and_si256(codes, low_bits);
                        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), low_bits);
                        for t in 0..T {
                            let part = &records[t][block][j];
                            for p in 0..3 {
                                let dot = four(dots[t][p], low, broadcast(part, 2 * p));
                                dots[t][p] = four(dot, high, broadcast(part, 2 * p + 1));
                            }
                        }
                    }
                    let [d, m] = four_bit_scales(view.kind, scales, block);
                    for t in 0..T {
                        let [a, b, c] = dots[t];
                        let upper = _mm256_add_epi32(
                            _mm256_slli_epi32::<14>(close(a)),
                            _mm256_slli_epi32::<7>(close(b)),
                        );
                        let dot = _mm256_cvtepi32_ps(_mm256_add_epi32(upper, close(c)));
                        let Part { step, sum, .. } = records[t][block][0];
                        let scaled = _mm256_mul_ps(d, _mm256_set1_ps(step));
                        let strand = strand_before(&strands[t], block, view.strands);
                        let strand = _mm256_fmadd_ps(scaled, dot, strand);
                        let strand = _mm256_fmadd_ps(m, _mm256_set1_ps(sum), strand);
                        keep_strand(&mut strands[t], block, view.strands, strand);
                    }
                }
                for t in 0..T {
                    sums[t] = add_strands(&strands[t], view.strands, view.blocks);
                }
            }

            #[target_feature(enable = $features)]
            pub(super) fn eight_bits<const T: usize>(
                view: View<'_>,
                group: usize,
                [first, count]: [usize; 2],
                strands: &mut Strands,
                sums: &mut Sums,
            ) {
                let zero = _mm256_setzero_si256();
                let parts = parts::<T>();
                let records = records::<T>(&view, first, count);
                let scales = view.group_scales(group);
                let (tiles, _) = view.tiles(group).as_chunks::<64>();
                for (block, tile) in tiles.iter().enumerate() {
                    let mut dots = [[zero; 3]; T];
                    for j in 0..parts {
                        for half in 0..2 {
                            let codes = load_codes(tile, 32 * half + 8 * j);
                            for t in 0..T {
                                let part = &records[t][block][j];
                                for p in 0..3 {
                                    dots[t][p] = eight(dots[t][p], codes, broadcast(part, 2 * p + half));
                                }
                            }
                        }
                    }
                    let d = _mm256_cvtph_ps(load_halves(scales, block * ROWS));
                    for t in 0..T {
                        let [a, b, c] = dots[t];
                        // Both are exact (`Codes::combine`), so the sum rounds once.
                        let rest = _mm256_add_epi32(_mm256_slli_epi32::<7>(b), c);
                        let high = _mm256_cvtepi32_ps(_mm256_add_epi32(a, _mm256_srai_epi32::<14>(rest)));
                        let low = _mm256_cvtepi32_ps(_mm256_and_si256(rest, _mm256_set1_epi32(16383)));
                        let dot = _mm256_fmadd_ps(high, _mm256_set1_ps(16384.0), low);
                        let scaled = _mm256_mul_ps(d, _mm256_set1_ps(records[t][block][0].step));
                        let strand = strand_before(&strands[t], block, view.strands);
                        keep_strand(
                            &mut strands[t],
                            block,
                            view.strands,
                            _mm256_fmadd_ps(scaled, dot, strand),
                        );
                    }
                }
                for t in 0..T {
                    sums[t] = add_strands(&strands[t], view.strands, view.blocks);
                }
            }
        }
    };
}

integer_paths!(
    avx2,
    "avx2,fma,f16c",
    |acc, codes, x| _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, x)),
    |sums| _mm256_madd_epi16(sums, _mm256_set1_epi16(1)),
    // |codes| is at most 128 and x at most 127: two products fit 16 bits.
    |acc, codes, x| {
        let products = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
        _mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1)))
    }
);
integer_paths!(
    vnni,
    "avx2,fma,f16c,avx512f,avx512vl,avx512vnni",
    |acc, codes, x| _mm256_dpbusd_epi32(acc, codes, x),
    |sums| sums,
    |acc, codes, x| _mm256_dpbusd_epi32(acc, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
);

/// Eight rows of float weights for one token.
#[target_feature(enable = "avx2,fma,f16c")]
fn floats(
    view: View<'_>,
    group: usize,
    token: usize,
    strands: &mut [[f32; ROWS]; STRANDS],
    sums: &mut [f32; ROWS],
) {
    let tiles = view.tiles(group);
    let halves: &[u16] = bytemuck::cast_slice(tiles);
    let fixed = &view.fixed[token * view.blocks * 32..][..view.blocks * 32];
    let records = view.token(token);
    for (block, x) in fixed.chunks_exact(32).enumerate() {
        let mut chains = [_mm256_setzero_ps(); 8];
        for (k, x) in x.iter().enumerate() {
            let at = (block * 32 + k) * ROWS;
            let weights = match view.kind {
                WeightKind::F32 => _mm256_castsi256_ps(load_codes(tiles, at)),
                WeightKind::Bf16 => {
                    let wide = _mm256_cvtepu16_epi32(load_halves(halves, at));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                }
                _ => _mm256_cvtph_ps(load_halves(halves, at)),
            };
            chains[k % 8] = _mm256_fmadd_ps(weights, _mm256_set1_ps(*x), chains[k % 8]);
        }
        let c = chains;
        let even = _mm256_add_ps(_mm256_add_ps(c[0], c[4]), _mm256_add_ps(c[2], c[6]));
        let odd = _mm256_add_ps(_mm256_add_ps(c[1], c[5]), _mm256_add_ps(c[3], c[7]));
        let step = _mm256_set1_ps(records[block][0].step);
        let strand = strand_before(strands, block, view.strands);
        keep_strand(strands, block, view.strands, _mm256_fmadd_ps(step, _mm256_add_ps(even, odd), strand));
    }
    *sums = add_strands(strands, view.strands, view.blocks);
}
