//! Integer atomics on global and shared memory, relaxed, at device scope; those that update a word return the
//! value before.
//!
//! There is no float `add`: its result would depend on the order in which blocks arrive. A maximum of
//! non-negative floats is order-free on their bit patterns and goes through `u32`.
//!
//! PTX: `atom.global.OP` and `atom.shared.OP`; ptxas makes `red` of those whose result is unused. Loads and
//! stores are `ld.relaxed` and `st.relaxed`.

use crate::{GlobalMut, Shared};
use bytemuck::Pod;

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;

mod sealed {
    pub trait Sealed: bytemuck::Pod {}
}

/// An integer that has atomics: `u32`, `i32`, `u64`.
pub trait AtomicWord: sealed::Sealed + Pod + Ord {
    #[cfg(target_arch = "nvptx64")]
    #[doc(hidden)]
    fn global(op: AtomicOp, address: *mut Self, value: Self, compare: Self) -> Self;
    #[cfg(target_arch = "nvptx64")]
    #[doc(hidden)]
    fn shared(op: AtomicOp, address: u32, value: Self, compare: Self) -> Self;
    #[cfg(not(target_arch = "nvptx64"))]
    #[doc(hidden)]
    fn combine(op: AtomicOp, old: Self, value: Self, compare: Self) -> Self;
    /// One read-modify-write as the host's memory does it, for blocks that run in parallel.
    ///
    /// # Safety
    /// `address` is valid and aligned.
    #[cfg(not(target_arch = "nvptx64"))]
    #[doc(hidden)]
    unsafe fn host_update(op: AtomicOp, address: *mut Self, value: Self, compare: Self) -> Self;
}

/// What an atomic does to the stored value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareExchange,
    /// A plain relaxed load.
    Load,
    /// A plain relaxed store; what it returns is not what was there.
    Store,
}

#[cfg(target_arch = "nvptx64")]
macro_rules! device_atomic {
    ($class:ident, $space:literal, $suffix:literal, $bits:literal, $op:ident, $address:ident, $value:ident, $compare:ident) => {{
        let old;
        macro_rules! rmw {
            ($operation:literal, $type:literal) => {
                core::arch::asm!(concat!("atom.", $space, ".", $operation, ".", $type, " {0}, [{1}], {2};"), out($class) old,
                    in(reg64) $address as u64, in($class) $value, options(nostack))
            };
        }
        // SAFETY: valid and aligned by the launch's contract.
        unsafe {
            match $op {
                AtomicOp::Add => rmw!("add", $suffix),
                AtomicOp::Min => rmw!("min", $suffix),
                AtomicOp::Max => rmw!("max", $suffix),
                AtomicOp::And => rmw!("and", $bits),
                AtomicOp::Or => rmw!("or", $bits),
                AtomicOp::Xor => rmw!("xor", $bits),
                AtomicOp::Exchange => rmw!("exch", $bits),
                AtomicOp::CompareExchange => core::arch::asm!(
                    concat!("atom.", $space, ".cas.", $bits, " {0}, [{1}], {2}, {3};"), out($class) old,
                    in(reg64) $address as u64, in($class) $compare, in($class) $value, options(nostack)),
                AtomicOp::Load => core::arch::asm!(
                    concat!("ld.relaxed.gpu.", $space, ".", $bits, " {0}, [{1}];"), out($class) old,
                    in(reg64) $address as u64, options(nostack)),
                AtomicOp::Store => {
                    core::arch::asm!(concat!("st.relaxed.gpu.", $space, ".", $bits, " [{0}], {1};"),
                        in(reg64) $address as u64, in($class) $value, options(nostack));
                    old = $value;
                }
            }
        }
        old
    }};
}

macro_rules! atomic_words {
    ($($t:ty, $atomic:ident, $class:ident, $suffix:literal, $bits:literal;)*) => {$(
        impl sealed::Sealed for $t {}
        impl AtomicWord for $t {
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn global(op: AtomicOp, address: *mut Self, value: Self, compare: Self) -> Self {
                let address = crate::ptx::to_global(address);
                device_atomic!($class, "global", $suffix, $bits, op, address, value, compare)
            }
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn shared(op: AtomicOp, address: u32, value: Self, compare: Self) -> Self {
                device_atomic!($class, "shared", $suffix, $bits, op, address, value, compare)
            }
            #[cfg(not(target_arch = "nvptx64"))]
            fn combine(op: AtomicOp, old: Self, value: Self, compare: Self) -> Self {
                match op {
                    AtomicOp::Add => old.wrapping_add(value),
                    AtomicOp::Min => old.min(value),
                    AtomicOp::Max => old.max(value),
                    AtomicOp::And => old & value,
                    AtomicOp::Or => old | value,
                    AtomicOp::Xor => old ^ value,
                    AtomicOp::Exchange | AtomicOp::Store => value,
                    AtomicOp::Load => old,
                    AtomicOp::CompareExchange => if old == compare { value } else { old },
                }
            }
            #[cfg(not(target_arch = "nvptx64"))]
            unsafe fn host_update(op: AtomicOp, address: *mut Self, value: Self, compare: Self) -> Self {
                use core::sync::atomic::{$atomic, Ordering};
                // SAFETY: valid and aligned, says the caller; other blocks reach it through atomics alone, or
                // the kernel has the race that race-check mode reports.
                let cell = unsafe { $atomic::from_ptr(address) };
                let update = |old| Some(Self::combine(op, old, value, compare));
                // The closure never returns `None`, so both arms carry the previous value.
                match cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, update) {
                    Ok(old) | Err(old) => old,
                }
            }
        }
    )*};
}
atomic_words! {
    u32, AtomicU32, reg32, "u32", "b32";
    i32, AtomicI32, reg32, "s32", "b32";
    u64, AtomicU64, reg64, "u64", "b64";
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident, $op:ident;)*) => {
        impl<T: AtomicWord> GlobalMut<T> {
            $(
                $(#[$doc])*
                #[crate::device]
                pub fn $name(self, index: usize, value: T) -> T {
                    #[cfg(target_arch = "nvptx64")]
                    return T::global(AtomicOp::$op, self.element_pointer(index), value, value);
                    #[cfg(not(target_arch = "nvptx64"))]
                    emu::global_atomic(AtomicOp::$op, self.address(), self.len(), index, value, value)
                }
            )*
            /// Element `index`, which other threads may update at the same time. It may be an older value, if
            /// no fence orders it: a thread that waits for one word and then looks at another one needs a
            /// fence in between.
            #[crate::device]
            pub fn atomic_load(self, index: usize) -> T {
                #[cfg(target_arch = "nvptx64")]
                {
                    let none = T::zeroed();
                    return T::global(AtomicOp::Load, self.element_pointer(index), none, none);
                }
                #[cfg(not(target_arch = "nvptx64"))]
                emu::global_atomic(AtomicOp::Load, self.address(), self.len(), index, T::zeroed(), T::zeroed())
            }
            /// Puts `value` in element `index`, which other threads may update at the same time.
            #[crate::device]
            pub fn atomic_store(self, index: usize, value: T) {
                #[cfg(target_arch = "nvptx64")]
                T::global(AtomicOp::Store, self.element_pointer(index), value, value);
                #[cfg(not(target_arch = "nvptx64"))]
                emu::global_atomic(AtomicOp::Store, self.address(), self.len(), index, value, value);
            }
            /// [`atomic_load`](Self::atomic_load), and this thread's later accesses see what another thread
            /// of the GPU wrote ahead of the [`store_release`](Self::store_release) whose value this is.
            /// PTX: `ld.relaxed.gpu`, `fence.acq_rel.gpu`.
            #[crate::device]
            pub fn load_acquire(self, index: usize) -> T {
                let value = self.atomic_load(index);
                crate::thread::device_fence();
                value
            }
            /// [`atomic_store`](Self::atomic_store) behind all that this thread has written: who sees the
            /// value by [`load_acquire`](Self::load_acquire) sees that, too. PTX: `fence.acq_rel.gpu`,
            /// `st.relaxed.gpu`.
            #[crate::device]
            pub fn store_release(self, index: usize, value: T) {
                crate::thread::device_fence();
                self.atomic_store(index, value);
            }
            /// Writes `value` to element `index` if it holds `compare`.
            #[crate::device]
            pub fn atomic_cas(self, index: usize, compare: T, value: T) -> T {
                #[cfg(target_arch = "nvptx64")]
                return T::global(AtomicOp::CompareExchange, self.element_pointer(index), value, compare);
                #[cfg(not(target_arch = "nvptx64"))]
                emu::global_atomic(AtomicOp::CompareExchange, self.address(), self.len(), index, value, compare)
            }
        }
        impl<T: AtomicWord> Shared<T> {
            $(
                $(#[$doc])*
                #[crate::device]
                pub fn $name(self, index: u32, value: T) -> T {
                    #[cfg(target_arch = "nvptx64")]
                    return T::shared(AtomicOp::$op, crate::ptx::shared_base() + self.byte_offset(index), value, value);
                    #[cfg(not(target_arch = "nvptx64"))]
                    emu::shared_atomic(AtomicOp::$op, self.byte_offset(0), self.len(), index, value, value)
                }
            )*
            /// Element `index`, which other threads may update at the same time; without a fence perhaps an
            /// older value.
            #[crate::device]
            pub fn atomic_load(self, index: u32) -> T {
                #[cfg(target_arch = "nvptx64")]
                {
                    let none = T::zeroed();
                    return T::shared(AtomicOp::Load, crate::ptx::shared_base() + self.byte_offset(index), none, none);
                }
                #[cfg(not(target_arch = "nvptx64"))]
                emu::shared_atomic(AtomicOp::Load, self.byte_offset(0), self.len(), index, T::zeroed(), T::zeroed())
            }
            /// Puts `value` in element `index`, which other threads may update at the same time.
            #[crate::device]
            pub fn atomic_store(self, index: u32, value: T) {
                #[cfg(target_arch = "nvptx64")]
                T::shared(AtomicOp::Store, crate::ptx::shared_base() + self.byte_offset(index), value, value);
                #[cfg(not(target_arch = "nvptx64"))]
                emu::shared_atomic(AtomicOp::Store, self.byte_offset(0), self.len(), index, value, value);
            }
            /// [`atomic_load`](Self::atomic_load), and this thread's later accesses see what another thread
            /// of the block wrote ahead of the [`store_release`](Self::store_release) whose value this is.
            /// PTX: `ld.relaxed`, `fence.acq_rel.cta`.
            #[crate::device]
            pub fn load_acquire(self, index: u32) -> T {
                let value = self.atomic_load(index);
                crate::thread::block_fence();
                value
            }
            /// [`atomic_store`](Self::atomic_store) behind all that this thread has written: who sees the
            /// value by [`load_acquire`](Self::load_acquire) sees that, too. PTX: `fence.acq_rel.cta`,
            /// `st.relaxed`.
            #[crate::device]
            pub fn store_release(self, index: u32, value: T) {
                crate::thread::block_fence();
                self.atomic_store(index, value);
            }
            /// Writes `value` to element `index` if it holds `compare`.
            #[crate::device]
            pub fn atomic_cas(self, index: u32, compare: T, value: T) -> T {
                #[cfg(target_arch = "nvptx64")]
                return T::shared(AtomicOp::CompareExchange, crate::ptx::shared_base() + self.byte_offset(index), value, compare);
                #[cfg(not(target_arch = "nvptx64"))]
                emu::shared_atomic(AtomicOp::CompareExchange, self.byte_offset(0), self.len(), index, value, compare)
            }
        }
    };
}
operations! {
    /// Adds `value` to element `index`, modulo its width.
    atomic_add, Add;
    /// Lowers element `index` to `value` if that is smaller.
    atomic_min, Min;
    /// Raises element `index` to `value` if that is larger.
    atomic_max, Max;
    /// Ands `value` into element `index`.
    atomic_and, And;
    /// Ors `value` into element `index`.
    atomic_or, Or;
    /// Exclusive-ors `value` into element `index`.
    atomic_xor, Xor;
    /// Puts `value` in element `index`.
    atomic_exchange, Exchange;
}
