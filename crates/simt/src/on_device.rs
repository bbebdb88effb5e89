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
#[cfg(target_arch = "nvptx64")]
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
    /// One with a sign, of up to 32 bits, extended to 64.
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
}

impl Kind {
    /// Every kind, by its number.
    pub const ALL: [Kind; 10] = [
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
    ];
}

/// A value that a message on the device may have.
#[cfg(target_arch = "nvptx64")]
#[diagnostic::on_unimplemented(
    message = "on the device a message cannot have a value of type `{Self}`",
    note = "it may have numbers, `bool` and `char`"
)]
pub trait Value: Copy {
    /// What it is.
    const KIND: Kind;
    /// Its bits.
    fn word(self) -> u64;
}

#[cfg(target_arch = "nvptx64")]
macro_rules! values {
    ($($ty:ty: $kind:ident, |$x:ident| $word:expr;)*) => {$(
        impl Value for $ty {
            const KIND: Kind = Kind::$kind;
            #[inline(always)]
            fn word(self) -> u64 {
                let $x = self;
                $word
            }
        }
    )*};
}

#[cfg(target_arch = "nvptx64")]
values! {
    u8: Unsigned, |x| x as u64;
    u16: Unsigned, |x| x as u64;
    u32: Unsigned, |x| x as u64;
    u64: Unsigned, |x| x;
    usize: Unsigned, |x| x as u64;
    i8: Signed, |x| x as i64 as u64;
    i16: Signed, |x| x as i64 as u64;
    i32: Signed, |x| x as i64 as u64;
    i64: Signed64, |x| x as u64;
    isize: Signed64, |x| x as i64 as u64;
    f32: F32, |x| x.to_bits() as u64;
    f64: F64, |x| x.to_bits();
    f16: F16, |x| x.to_bits() as u64;
    bf16: Bf16, |x| x.to_bits() as u64;
    bool: Bool, |x| x as u64;
    char: Char, |x| x as u64;
}

#[cfg(target_arch = "nvptx64")]
impl<T: Value> Value for &T {
    const KIND: Kind = T::KIND;
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

#[cfg(target_arch = "nvptx64")]
pub use crate::__stop as stop;
#[cfg(target_arch = "nvptx64")]
pub use simt_macros::{
    device_assert as assert, device_assert_eq as assert_eq, device_assert_ne as assert_ne,
    device_panic as panic, device_todo as todo, device_unimplemented as unimplemented,
    device_unreachable as unreachable,
};
