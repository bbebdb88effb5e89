//! What the machine's vector units can do: which of the SIMD paths run.

use std::sync::OnceLock;

/// A set of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Any machine.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// That, with AVX-512 F, BW, VL and VNNI.
    Avx512,
}

impl Level {
    /// All that this machine has, the best last.
    pub fn available() -> &'static [Level] {
        static AVAILABLE: OnceLock<Vec<Level>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "nothing is added there"))]
            let mut levels = vec![Level::Portable];
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                levels.push(Level::Avx2);
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
                {
                    levels.push(Level::Avx512);
                }
            }
            levels
        })
    }

    /// The best that this machine has.
    pub fn best() -> Level {
        Level::available().last().copied().unwrap_or(Level::Portable)
    }

    /// Itself where the machine has it, else the best below.
    pub(crate) fn checked(self) -> Level {
        Level::available().iter().copied().rfind(|level| *level <= self).unwrap_or(Level::Portable)
    }
}
