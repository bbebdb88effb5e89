//! Codebooks as attention fetches them: centroids of bytes where they are whole.

use super::Code;
use super::books::LARGEST_KEY;
use half::f16;

/// The largest step: −1152 of them are within f16.
const LARGEST_STEP: f16 = f16::from_bits(0x5300);
/// The largest value that has a multiple: beyond it a codebook in bytes would be cut.
pub(super) const LARGEST_VALUE: f32 = 127.0 * 56.0;

/// The step of values that are whole multiples, 127 at most, and of which the largest is about `largest`: of
/// seven significant bits, so that f16 holds 1152 of them.
pub(super) fn step_for(largest: f32) -> f16 {
    let least = largest / LARGEST_KEY;
    let mut bits = f16::from_f32(least).to_bits() & !0xf;
    while f16::from_bits(bits).to_f32() < least && bits < LARGEST_STEP.to_bits() {
        bits += 0x10;
    }
    f16::from_bits(bits.clamp(0x10, LARGEST_STEP.to_bits()))
}

/// Whether it is one.
pub(super) fn is_step(step: f16) -> bool {
    (0x10..=LARGEST_STEP.to_bits()).contains(&step.to_bits()) && step.to_bits() & 0xf == 0
}

/// The multiple of the step that is nearest to `x`.
pub(super) fn multiple(x: f32, step: f16) -> i32 {
    (x / step.to_f32()).round_ties_even().clamp(-LARGEST_KEY, LARGEST_KEY) as i32
}

/// That multiple, rounded to f16: what the kernel makes of its byte.
pub(super) fn of_multiple(multiple: i32, step: f16) -> f16 {
    f16::from_f32(multiple as f32 * step.to_f32())
}

/// Codebooks [heads, 2^b, d] as [`attend`](kernels_gpu::vecinfer::attend()) reads them
/// ([`Code::fetched_bytes`]); `steps` \[heads\] of whole values.
pub(super) fn fetched(code: Code, keys: bool, books: &[f16], steps: &[f16]) -> Vec<u8> {
    let one = code.book_elements() as usize;
    if keys && code.whole_keys() {
        return books.iter().map(|x| x.to_f32() as i8 as u8).collect();
    }
    if keys || !code.whole_values() {
        return bytemuck::cast_slice(books).to_vec();
    }
    let mut bytes = Vec::with_capacity(books.len() / one * code.fetched_bytes(keys) as usize);
    for (book, step) in books.chunks_exact(one).zip(steps) {
        bytes.extend(book.iter().map(|x| (multiple(x.to_f32(), *step) + 128) as u8));
        let offset = f16::from_f32(-1152.0 * step.to_f32());
        let halves = [*step, *step, offset, offset, f16::ZERO, f16::ZERO, f16::ZERO, f16::ZERO];
        bytes.extend_from_slice(bytemuck::cast_slice(&halves));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use simt::half2::fma_f16x2;

    /// Of every step and byte the kernel's instruction gives the multiple rounded once.
    #[test]
    fn bytes_are_multiples_of_steps() {
        let steps = (0..=u16::MAX).map(f16::from_bits).filter(|step| is_step(*step));
        let mut count = 0;
        for step in steps {
            let offset = f16::from_f32(-1152.0 * step.to_f32());
            assert_eq!(offset.to_f32(), -1152.0 * step.to_f32(), "{step} is exact");
            for byte in 1..=255u16 {
                let made =
                    fma_f16x2(u32::from(0x6400 | byte), step.to_bits().into(), offset.to_bits().into());
                let expected = of_multiple(i32::from(byte) - 128, step);
                assert_eq!(made as u16, expected.to_bits(), "{step} {byte}");
                assert_eq!(multiple(expected.to_f32(), step), i32::from(byte) - 128, "{step} {byte}");
            }
            count += 1;
        }
        assert_eq!(count, 0x530);
    }

    #[test]
    fn the_largest_is_within_its_steps() {
        for largest in [0.0, 1e-6, 0.003, 0.9, 1.0, 127.0, 3.3, 6000.0, 60_000.0] {
            let step = step_for(largest);
            assert!(is_step(step), "{largest}: {step}");
            if (0.01..7000.0).contains(&largest) {
                let most = largest / step.to_f32();
                assert!((124.0..=127.0).contains(&most), "{largest}: {most} steps");
            }
        }
    }
}
