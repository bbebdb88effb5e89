//! A hash that shows what was altered, the same on every machine.

/// FNV-1a, 64 bits, of some bytes, part by part: one that is altered shows.
pub(crate) fn hash<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u64 {
    parts.flatten().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
