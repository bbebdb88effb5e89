//! What `assert!`, `panic!` and their kin are inside kernels on the device.
//!
//! [`kernel`](macro@crate::kernel) and [`device`](macro@crate::device) bring these names into a function's
//! body; on the host the names are those of the standard library, and the emulator reports what they say. On
//! the device the first thread that panics writes a [record](RECORD_WORDS) to memory of the host, all others
//! wait for it, and the grid traps. The device layer reads the record when a wait on the stream fails: its
//! error is the emulator's, with kernel, block, thread, file, line and message.
//!
//! A panic of other origin, a slice's index or an overflow in a function of another crate, is a trap without
//! a record.
//!
//! `println!` is made of the same parts: a comment with the text, and a [record](lines) with the values.
//! There is room for [`lines::COUNT`] of them; the host empties it when it waits.
use half::{bf16, f16};

/// 32-bit words of the record: state (0, 1 while it is written, 2 when it is there), the site's number, the
/// block's three indices, the thread's three, the kinds of the values, one that is not used, and four values
/// of two words, the lower one first.
pub const RECORD_WORDS: usize = 18;

/// The symbol of a module's `.u64` that holds the record's address, or 0.
pub const RECORD_SYMBOL: &str = "simt_stop_record";

/// What a value of a message is: a byte each in the record's word of kinds, the first value's the lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// There is none.
    None = 0,
    /// A whole number without a sign.
    Unsigned = 1,
    /// One with a sign, of 32 bits, extended to 64.
    Signed = 2,
    /// An f32.
    F32 = 3,
    /// An f64.
    F64 = 4,
    /// An f16.
    F16 = 5,
    /// A bf16.
    Bf16 = 6,
    /// A truth value.
    Bool = 7,
    /// A character.
    Char = 8,
    /// A whole number with a sign, of 64 bits.
    Signed64 = 9,
    /// One with a sign, of 8 bits, extended to 64.
    Signed8 = 10,
    /// One with a sign, of 16 bits, extended to 64.
    Signed16 = 11,
}

impl Kind {
    /// Every kind, by its number.
    pub const ALL: [Kind; 12] = [
        Kind::None,
        Kind::Unsigned,
        Kind::Signed,
        Kind::F32,
        Kind::F64,
        Kind::F16,
        Kind::Bf16,
        Kind::Bool,
        Kind::Char,
        Kind::Signed64,
        Kind::Signed8,
        Kind::Signed16,
    ];
}

/// Where `println!` puts its records. `__print!` has the numbers as they are in its instructions.
pub mod lines {
    /// The symbol of a module's three `.u64`: the address of the host's memory, or 0; places asked for, less
    /// those that there were not; and the number of the next line.
    pub const SYMBOL: &str = "simt_print_ring";
    /// How many lines there is room for until the host reads them; a power of two.
    pub const COUNT: u64 = 8192;
    /// Ahead of the records: two 64-bit words, how many lines there may be in all (the host's to write), and
    /// how many found no room. The rest is not used.
    pub const HEAD_BYTES: usize = 128;
    /// 32-bit words of a record, line `n` in record `n % COUNT`: `n + 1` in two words, when all else is
    /// there; the number of the place in the source; the block's three indices; the thread's three; one that
    /// is not used; the kinds of the values, a byte each, in two words; and eight values of two words. In
    /// pairs of words the lower one is first.
    pub const RECORD_WORDS: usize = 32;
    /// Where in a record the kinds are, and behind them the values.
    pub const KINDS: usize = 10;
    /// Values that a record has room for.
    pub const VALUES: usize = 8;
}

/// A value that a message on the device may have.
#[diagnostic::on_unimplemented(
    message = "on the device a message cannot have a value of type `{Self}`",
    note = "it may have numbers, `bool` and `char`"
)]
pub trait Value: Copy {
    /// What it is.
    const KIND: Kind;
    /// What the host writes: the value itself, of f16 and bf16 the f32 that they are.
    #[cfg(not(target_arch = "nvptx64"))]
    type Shown;
    /// Its bits.
    fn word(self) -> u64;
    /// It as it is written.
    #[cfg(not(target_arch = "nvptx64"))]
    fn shown(self) -> Self::Shown;
}

macro_rules! values {
    ($($ty:ty as $shown:ty: $kind:ident, |$x:ident| $word:expr;)*) => {$(
        impl Value for $ty {
            const KIND: Kind = Kind::$kind;
            #[cfg(not(target_arch = "nvptx64"))]
            type Shown = $shown;
            #[cfg(not(target_arch = "nvptx64"))]
            fn shown(self) -> $shown {
                self.into()
            }
            #[inline(always)]
            fn word(self) -> u64 {
                let $x = self;
                $word
            }
        }
    )*};
}

values! {
    u8 as u8: Unsigned, |x| x as u64;
    u16 as u16: Unsigned, |x| x as u64;
    u32 as u32: Unsigned, |x| x as u64;
    u64 as u64: Unsigned, |x| x;
    usize as usize: Unsigned, |x| x as u64;
    i8 as i8: Signed8, |x| x as i64 as u64;
    i16 as i16: Signed16, |x| x as i64 as u64;
    i32 as i32: Signed, |x| x as i64 as u64;
    i64 as i64: Signed64, |x| x as u64;
    isize as isize: Signed64, |x| x as i64 as u64;
    f32 as f32: F32, |x| x.to_bits() as u64;
    f64 as f64: F64, |x| x.to_bits();
    f16 as f32: F16, |x| x.to_bits() as u64;
    bf16 as f32: Bf16, |x| x.to_bits() as u64;
    bool as bool: Bool, |x| x as u64;
    char as char: Char, |x| x as u64;
}

impl<T: Value> Value for &T {
    const KIND: Kind = T::KIND;
    #[cfg(not(target_arch = "nvptx64"))]
    type Shown = T::Shown;
    #[cfg(not(target_arch = "nvptx64"))]
    fn shown(self) -> T::Shown {
        (*self).shown()
    }
    #[inline(always)]
    fn word(self) -> u64 {
        (*self).word()
    }
}

/// A value's bits and its kind.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub fn packed<T: Value>(value: T) -> (u64, u32) {
    (value.word(), T::KIND as u32)
}

/// A value that a message may have, as the host writes it.
#[cfg(not(target_arch = "nvptx64"))]
pub fn value<T: Value>(value: T) -> T::Shown {
    value.shown()
}

/// Writes the record and ends the grid. `simt_site` is a name that `ptx-build` replaces by a number.
///
/// Whoever finds the record taken waits until it is there: a trap would end the thread that writes it.
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
#[macro_export]
macro_rules! __stop {
    ($text:literal, $kinds:expr, $a:expr, $b:expr, $c:expr, $d:expr) => {
        ::core::arch::asm!(
            ::core::concat!(
                "// simt.site ", ::core::file!(), ":", ::core::line!(), ":", ::core::column!(), " ", $text
            ),
            "{{",
            ".reg .pred none;",
            ".reg .b32 state, x, y, z;",
            ".reg .b64 record;",
            "ld.global.u64 record, [simt_stop_record];",
            "setp.eq.u64 none, record, 0;",
            "@none bra simt_stop;",
            "atom.relaxed.sys.global.cas.b32 state, [record], 0, 1;",
            "setp.ne.u32 none, state, 0;",
            "@none bra simt_told;",
            "st.global.u32 [record+4], simt_site;",
            "mov.u32 x, %ctaid.x;",
            "mov.u32 y, %ctaid.y;",
            "mov.u32 z, %ctaid.z;",
            "st.global.u32 [record+8], x;",
            "st.global.u32 [record+12], y;",
            "st.global.u32 [record+16], z;",
            "mov.u32 x, %tid.x;",
            "mov.u32 y, %tid.y;",
            "mov.u32 z, %tid.z;",
            "st.global.u32 [record+20], x;",
            "st.global.u32 [record+24], y;",
            "st.global.u32 [record+28], z;",
            "st.global.u32 [record+32], {kinds};",
            "st.global.u64 [record+40], {a};",
            "st.global.u64 [record+48], {b};",
            "st.global.u64 [record+56], {c};",
            "st.global.u64 [record+64], {d};",
            "fence.acq_rel.sys;",
            "st.relaxed.sys.global.u32 [record], 2;",
            "fence.acq_rel.sys;",
            "simt_told:",
            "ld.relaxed.sys.global.u32 state, [record];",
            "setp.ne.u32 none, state, 2;",
            "@none bra simt_told;",
            "simt_stop:",
            "trap;",
            "}}",
            kinds = in(reg32) $kinds,
            a = in(reg64) $a,
            b = in(reg64) $b,
            c = in(reg64) $c,
            d = in(reg64) $d,
            options(noreturn, nostack),
        )
    };
}

/// Writes a line's record, if there is room for it. `simt_print_site` is a name that `ptx-build` replaces by
/// a number.
///
/// A thread first asks for a place. Who gets one is one of the first so many, and stays counted; all others
/// give back what they have asked for. So there are never more lines than places, and the number that a line
/// then takes is that of a place that is free.
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
#[macro_export]
macro_rules! __print {
    ($text:literal, $kinds:expr $(, $at:literal $name:ident $value:expr)*) => {
        ::core::arch::asm!(
            ::core::concat!(
                "// simt.print ", ::core::file!(), ":", ::core::line!(), ":", ::core::column!(), " ", $text
            ),
            "{{",
            ".reg .pred is;",
            ".reg .b32 x, y, z;",
            ".reg .b64 ring, record, limit, number;",
            "ld.global.u64 ring, [simt_print_ring];",
            "setp.eq.u64 is, ring, 0;",
            "@is bra simt_printed;",
            "ld.acquire.sys.global.u64 limit, [ring];",
            "ld.relaxed.gpu.global.u64 number, [simt_print_ring+8];",
            "setp.ge.u64 is, number, limit;",
            "@is bra simt_full;",
            "atom.relaxed.gpu.global.add.u64 number, [simt_print_ring+8], 1;",
            "setp.lt.u64 is, number, limit;",
            "@is bra simt_place;",
            "red.relaxed.gpu.global.add.u64 [simt_print_ring+8], 0xffffffffffffffff;",
            "simt_full:",
            "red.relaxed.sys.global.add.u64 [ring+8], 1;",
            "bra simt_printed;",
            "simt_place:",
            "atom.acq_rel.gpu.global.add.u64 number, [simt_print_ring+16], 1;",
            "and.b64 record, number, 8191;",
            "shl.b64 record, record, 7;",
            "add.u64 record, record, ring;",
            "add.u64 record, record, 128;",
            "st.global.u32 [record+8], simt_print_site;",
            "mov.u32 x, %ctaid.x;",
            "mov.u32 y, %ctaid.y;",
            "mov.u32 z, %ctaid.z;",
            "st.global.u32 [record+12], x;",
            "st.global.u32 [record+16], y;",
            "st.global.u32 [record+20], z;",
            "mov.u32 x, %tid.x;",
            "mov.u32 y, %tid.y;",
            "mov.u32 z, %tid.z;",
            "st.global.u32 [record+24], x;",
            "st.global.u32 [record+28], y;",
            "st.global.u32 [record+32], z;",
            "st.global.u64 [record+40], {simt_kinds};",
            $(::core::concat!("st.global.u64 [record+", $at, "], {", ::core::stringify!($name), "};"),)*
            "add.u64 number, number, 1;",
            "st.release.sys.global.u64 [record], number;",
            "simt_printed:",
            "mov.b64 record, 0;",
            "}}",
            simt_kinds = in(reg64) $kinds,
            $($name = in(reg64) $value,)*
            options(nostack),
        )
    };
}

#[cfg(target_arch = "nvptx64")]
pub use crate::__print as print;
#[cfg(target_arch = "nvptx64")]
pub use crate::__stop as stop;
#[cfg(target_arch = "nvptx64")]
pub use simt_macros::{
    device_assert as assert, device_assert_eq as assert_eq, device_assert_ne as assert_ne,
    device_panic as panic, device_todo as todo, device_unimplemented as unimplemented,
    device_unreachable as unreachable,
};
