//! Every kernel of Ferrokv, and the arithmetic that host and device share.
//!
//! One system is one folder; the folder of the same name in `host` plans and launches its kernels.
//!
//! | folder | system |
//! |---|---|
//! | [`attention`] | what the attention kernels have in common |
//! | [`certified`] | attention over INT8 keys and INT4 values with a certificate |
//! | [`dense`] | exact decode attention over f16 and bf16 caches: baseline and fallback |
//! | [`echo`] | f16 with fewer bits: the guide's example of a system |
//! | [`gather`] | attention to a constant number of keys: bounds, and the choice of blocks |
//! | [`gtq`] | keys and values as codes of 2, 3 or 4 bits of their rotated rows |
//! | [`int8`] | per-channel INT8 quantization of a KV cache |
//! | [`kivi`] | keys by channel and values by token as uniform codes of 2 or 4 bits |
//! | [`model`] | a transformer's forward pass but for attention: quantized products, norms, rotations |
//! | [`probe`] | kernels that show what each primitive does: emulator and GPU are compared by them |
//! | [`vecinfer`] | vector-quantized keys and values, attended to from their codes |
//! | [`roofline`] | kernels that only move bytes: what the others are measured against |

pub mod attention;
pub mod certified;
pub mod dense;
pub mod echo;
mod element;
pub mod gather;
pub mod gtq;
pub mod int8;
pub mod kivi;
pub mod model;
pub mod probe;
pub mod roofline;
pub mod vecinfer;

pub use element::Element;
pub use simt::random::{mix, mixed};

#[cfg(test)]
mod tests {
    /// The profile asks for it: a release build without it would hide a kernel's overflow from the emulator.
    #[test]
    #[should_panic(expected = "attempt to add with overflow")]
    fn overflow_is_checked_in_every_build() {
        let sum = std::hint::black_box(u32::MAX) + std::hint::black_box(1);
        std::hint::black_box(sum);
    }
}
