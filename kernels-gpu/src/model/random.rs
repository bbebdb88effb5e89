//! Random numbers by counting: Philox 4×32 with ten rounds (Salmon and others, *Parallel random numbers: as
//! easy as 1, 2, 3*, 2011). A number depends on key and counter alone, so that a step can be drawn again,
//! anywhere.

/// Four random words for a counter and a key.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    let mut round = 0;
    while round < 10 {
        let (p, q) = (0xd251_1f53u64 * c[0] as u64, 0xcd9e_8d57u64 * c[2] as u64);
        c = [(q >> 32) as u32 ^ c[1] ^ k[0], q as u32, (p >> 32) as u32 ^ c[3] ^ k[1], p as u32];
        k = [k[0].wrapping_add(0x9e37_79b9), k[1].wrapping_add(0xbb67_ae85)];
        round += 1;
    }
    c
}

/// 64 random bits of a draw: `seed` is the key, `position` and the sequence's `number` the counter.
#[inline(always)]
pub fn draw(seed: u64, position: u32, number: u32) -> u64 {
    let words = philox([position, number, 0, 0], [seed as u32, (seed >> 32) as u32]);
    words[0] as u64 | (words[1] as u64) << 32
}
