//! The instruction, in each of its shapes.

use super::{Format, Kind, Operand, is_width};
use core::arch::asm;

/// One `wgmma.mma_async`: `out` or `inout` of the sums' registers, the width with their numbers, what the
/// name has behind the width, what follows B's descriptor, and whether sums are kept.
macro_rules! product {
    ($d:ident $out:ident, ($n:literal; $($i:literal)*), $shape:literal, $tail:literal, $keep:literal, [$a:ident], $b:ident) => {
        // SAFETY: it reads shared memory in bounds, by the launch's contract, which the emulator checks, as
        // it does convergence. Without `pure` it stays where it is.
        unsafe {
            asm!(
                // Behind what has written A.
                "wgmma.fence.sync.aligned;",
                concat!(product!(@head $keep, $n, $shape; $($i)*), "{{{a0}, {a1}, {a2}, {a3}}}, {b}, p", $tail, "; }}"),
                $($out(reg32) $d[$i],)*
                a0 = in(reg32) $a[0], a1 = in(reg32) $a[1], a2 = in(reg32) $a[2], a3 = in(reg32) $a[3],
                b = in(reg64) $b, options(nostack)
            )
        }
    };
    ($d:ident $out:ident, ($n:literal; $($i:literal)*), $shape:literal, $tail:literal, $keep:literal, $a:ident, $b:ident) => {
        // SAFETY: as above.
        unsafe {
            asm!(
                concat!(product!(@head $keep, $n, $shape; $($i)*), "{a}, {b}, p", $tail, "; }}"),
                $($out(reg32) $d[$i],)*
                a = in(reg64) $a, b = in(reg64) $b, options(nostack)
            )
        }
    };
    (@head $keep:literal, $n:literal, $shape:literal; $first:literal $($i:literal)*) => {
        concat!(
            "{{ .reg .pred p; setp.ne.b32 p, ", $keep, ", 0; wgmma.mma_async.sync.aligned.m64n", $n, $shape,
            " {{{", $first, "}", $(", {", $i, "}",)* "}}, "
        )
    };
}

/// The arms of all widths, formats and places of A.
macro_rules! widths {
    ($d:ident, $words:ident, $a:ident, $b:ident; $($registers:literal => $list:tt,)*) => {
        match L {
            $($registers => widths!(@formats $d, $words, $a, $b, $list),)*
            _ => const { assert!(is_width(L), "sums have 4, 8, 16, 32, 48, 64, 96 or 128 registers") },
        }
    };
    (@formats $d:ident, $words:ident, $a:ident, $b:ident, $list:tt) => {
        match F::KIND {
            Kind::F16 => widths!(@floats $d, $words, $a, $b, $list, "k16.f32.f16.f16"),
            Kind::Bf16 => widths!(@floats $d, $words, $a, $b, $list, "k16.f32.bf16.bf16"),
            Kind::I8 => match (A::IN_REGISTERS, ADD) {
                (true, false) => product!($d out, $list, "k32.s32.s8.s8", "", 0, [$words], $b),
                (true, true) => product!($d inout, $list, "k32.s32.s8.s8", "", 1, [$words], $b),
                (false, false) => product!($d out, $list, "k32.s32.s8.s8", "", 0, $a, $b),
                (false, true) => product!($d inout, $list, "k32.s32.s8.s8", "", 1, $a, $b),
            },
        }
    };
    // Behind B: signs of A and B, then for descriptors that K is what lies side by side.
    (@floats $d:ident, $words:ident, $a:ident, $b:ident, $list:tt, $shape:literal) => {
        match (A::IN_REGISTERS, ADD) {
            (true, false) => product!($d out, $list, $shape, ", 1, 1, 0", 0, [$words], $b),
            (true, true) => product!($d inout, $list, $shape, ", 1, 1, 0", 1, [$words], $b),
            (false, false) => product!($d out, $list, $shape, ", 1, 1, 0, 0", 0, $a, $b),
            (false, true) => product!($d inout, $list, $shape, ", 1, 1, 0, 0", 1, $a, $b),
        }
    };
}

/// A·B, or `sums` + A·B with `ADD`; `b` is B's descriptor.
#[inline(always)]
pub(super) fn products<F: Format, A: Operand, const L: usize, const ADD: bool>(
    mut sums: [u32; L],
    a: A,
    b: u64,
) -> [u32; L] {
    let (words, a) = a.words();
    widths! { sums, words, a, b;
        4 => ("8";
            0 1 2 3
        ),
        8 => ("16";
            0 1 2 3 4 5 6 7
        ),
        16 => ("32";
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
        ),
        32 => ("64";
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        ),
        48 => ("96";
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47
        ),
        64 => ("128";
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62
            63
        ),
        96 => ("192";
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62
            63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92
            93 94 95
        ),
        128 => ("256";
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62
            63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92
            93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116
            117 118 119 120 121 122 123 124 125 126 127
        ),
    }
    sums
}
