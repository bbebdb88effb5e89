//! Integer instructions that a portable operator does not name.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

sides! {
    /// Sum of the four products of the signed bytes of `a` and `b`, plus `c`, modulo 2^32. Exact.
    /// PTX: `dp4a.s32.s32`.
    pub fn dp4a(a: u32, b: u32, c: i32) -> i32 {
        device {
            let d: i32;
            // SAFETY: arithmetic on registers.
            unsafe {
                asm!("dp4a.s32.s32 {0}, {1}, {2}, {3};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) c,
                    options(pure, nomem, nostack));
            }
            d
        }
        emulator {
            let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
            (0..4).fold(c, |sum, i| sum.wrapping_add(a[i] as i8 as i32 * b[i] as i8 as i32))
        }
    }

    /// `a & mask | set`, in one instruction where `|` and `&` of constants would be two. PTX: `lop3.b32`.
    pub fn and_or(a: u32, mask: u32, set: u32) -> u32 {
        device {
            let d: u32;
            // SAFETY: arithmetic on registers.
            unsafe {
                asm!("lop3.b32 {0}, {1}, {2}, {3}, 0xea;", out(reg32) d, in(reg32) a, in(reg32) mask, in(reg32) set,
                    options(pure, nomem, nostack));
            }
            d
        }
        emulator { a & mask | set }
    }

    /// Picks four of the eight bytes of `b:a` (`a` is bytes 0 to 3): nibble `i` of `selector` names byte `i`
    /// of the result in its low three bits; with bit 3 set the byte's sign is replicated instead. PTX:
    /// `prmt.b32`.
    pub fn byte_perm(a: u32, b: u32, selector: u32) -> u32 {
        device {
            let d: u32;
            // SAFETY: arithmetic on registers.
            unsafe {
                asm!("prmt.b32 {0}, {1}, {2}, {3};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) selector,
                    options(pure, nomem, nostack));
            }
            d
        }
        emulator {
            let bytes = (a as u64 | (b as u64) << 32).to_le_bytes();
            let pick = |i: u32| {
                let nibble = selector >> (4 * i) & 0xf;
                let byte = bytes[(nibble & 7) as usize];
                if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
            };
            u32::from_le_bytes([pick(0), pick(1), pick(2), pick(3)])
        }
    }
}

sides! {
    /// `x`, made anew each time: what is computed from it is not kept in registers across the rounds of a
    /// loop. For addresses that are cheap to compute where registers are short. PTX: `mov.b32`.
    pub fn renewed(x: u32) -> u32 {
        device {
            let y: u32;
            // SAFETY: moves a register. Without `pure` it stays inside its loop.
            unsafe { asm!("mov.b32 {0}, {1};", out(reg32) y, in(reg32) x, options(nomem, nostack)) }
            y
        }
        emulator { x }
    }
}

/// The low bytes of four words, packed: byte `i` of the result is the low byte of `words[i]`.
#[inline(always)]
pub fn pack_low_bytes(words: [u32; 4]) -> u32 {
    let low = byte_perm(words[0], words[1], 0x0040);
    let high = byte_perm(words[2], words[3], 0x0040);
    byte_perm(low, high, 0x5410)
}

/// `a / b`. A zero `b` breaks the launch's contract: the emulator reports it, the device does not look.
#[crate::device]
pub fn div_u32(a: u32, b: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: by the launch's contract, which the emulator checks. Without it the kernel would call `panic`.
    unsafe {
        core::hint::assert_unchecked(b != 0)
    }
    a / b
}

/// `a % b`. A zero `b` breaks the launch's contract: the emulator reports it, the device does not look.
#[crate::device]
pub fn rem_u32(a: u32, b: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: as in `div_u32`.
    unsafe {
        core::hint::assert_unchecked(b != 0)
    }
    a % b
}

/// `a / b`, rounded up. A zero `b` breaks the launch's contract: the emulator reports it, the device does not
/// look.
#[crate::device]
pub fn div_ceil_u64(a: u64, b: u64) -> u64 {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: as in `div_u32`.
    unsafe {
        core::hint::assert_unchecked(b != 0)
    }
    a.div_ceil(b)
}
