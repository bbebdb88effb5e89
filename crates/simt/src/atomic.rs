//! Integer atomics on global and shared memory, relaxed; those that update a word return the value before.
//!
//! # Scopes
//! Atomics of a [`GlobalMut`] are of the device's scope: atomic to all threads of the GPU. Those of
//! [`in_block_scope`](GlobalMut::in_block_scope) are atomic to threads of their own block alone, and may stay
//! in a multiprocessor's own cache; those of [`in_system_scope`](GlobalMut::in_system_scope) also to the host
//! and to other GPUs, on memory that these reach (updates of the host's memory only where the GPU says so, by
//! `hostNativeAtomicSupported`; loads and stores everywhere). Two atomics on a word are atomic to each other
//! if the scope of each takes in the thread of the other: if not, and nothing orders them, the emulator
//! reports `AtomicScope`. CUDA's `volatile` accesses of a word are loads and stores of the system's scope.
//!
//! | scope | load, store | `load_acquire`, `store_release` |
//! |---|---|---|
//! | block | `ld.relaxed.cta`, `st.relaxed.cta` | with `fence.acq_rel.cta` |
//! | device | `ld.relaxed.gpu`, `st.relaxed.gpu` | with `fence.acq_rel.gpu` |
//! | system | `ld.relaxed.sys`, `st.relaxed.sys` | with `fence.acq_rel.sys` |
//!
//! The emulator runs the blocks of one device. There the system's scope is that of the device.
//!
//! There is no float `add`: its result would depend on the order in which blocks arrive. A maximum of
//! non-negative floats is order-free on their bit patterns and goes through `u32`.
//!
//! PTX: `atom.global.OP` and `atom.shared.OP`, with `relaxed.cta` or `relaxed.sys` of the other scopes; ptxas
//! makes `red` of those whose result is unused.

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
    fn global(op: AtomicOp, scope: AtomicScope, address: *mut Self, value: Self, compare: Self) -> Self;
    #[cfg(target_arch = "nvptx64")]
    #[doc(hidden)]
    fn shared(op: AtomicOp, address: u32, value: Self, compare: Self) -> Self;
    #[cfg(target_arch = "nvptx64")]
    #[doc(hidden)]
    fn cluster(op: AtomicOp, address: u32, value: Self, compare: Self) -> Self;
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

/// Which threads an atomic is atomic to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum AtomicScope {
    Block,
    Device,
    System,
}

#[cfg(target_arch = "nvptx64")]
macro_rules! device_atomic {
    ($class:ident, $scope:literal, $qualifiers:literal, $space:literal, $suffix:literal, $bits:literal, $op:ident, $address:ident, $value:ident, $compare:ident) => {{
        let old;
        macro_rules! rmw {
            ($operation:literal, $type:literal) => {
                core::arch::asm!(concat!("atom.", $qualifiers, $space, ".", $operation, ".", $type, " {0}, [{1}], {2};"), out($class) old,
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
                    concat!("atom.", $qualifiers, $space, ".cas.", $bits, " {0}, [{1}], {2}, {3};"), out($class) old,
                    in(reg64) $address as u64, in($class) $compare, in($class) $value, options(nostack)),
                AtomicOp::Load => core::arch::asm!(
                    concat!("ld.relaxed.", $scope, ".", $space, ".", $bits, " {0}, [{1}];"), out($class) old,
                    in(reg64) $address as u64, options(nostack)),
                AtomicOp::Store => {
                    core::arch::asm!(concat!("st.relaxed.", $scope, ".", $space, ".", $bits, " [{0}], {1};"),
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
            fn global(op: AtomicOp, scope: AtomicScope, address: *mut Self, value: Self, compare: Self) -> Self {
                let address = crate::ptx::to_global(address);
                match scope {
                    AtomicScope::Block => {
                        device_atomic!($class, "cta", "relaxed.cta.", "global", $suffix, $bits, op, address, value, compare)
                    }
                    // An `atom` that says nothing is relaxed and of this scope.
                    AtomicScope::Device => {
                        device_atomic!($class, "gpu", "", "global", $suffix, $bits, op, address, value, compare)
                    }
                    AtomicScope::System => {
                        device_atomic!($class, "sys", "relaxed.sys.", "global", $suffix, $bits, op, address, value, compare)
                    }
                }
            }
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn shared(op: AtomicOp, address: u32, value: Self, compare: Self) -> Self {
                device_atomic!($class, "gpu", "", "shared", $suffix, $bits, op, address, value, compare)
            }
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn cluster(op: AtomicOp, address: u32, value: Self, compare: Self) -> Self {
                device_atomic!($class, "gpu", "", "shared::cluster", $suffix, $bits, op, address, value, compare)
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

/// Loads, stores and updates of words of global memory, in one scope.
macro_rules! of_global {
    ($handle:ident, $scope:ident, $fence:ident, $reaches:literal, |$self:ident| $memory:expr, $($(#[$doc:meta])* $name:ident, $op:ident;)*) => {
        impl<T: AtomicWord> $handle<T> {
            $(
                $(#[$doc])*
                #[crate::device]
                pub fn $name($self, index: usize, value: T) -> T {
                    #[cfg(target_arch = "nvptx64")]
                    return T::global(AtomicOp::$op, AtomicScope::$scope, $memory.element_pointer(index), value, value);
                    #[cfg(not(target_arch = "nvptx64"))]
                    emu::global_atomic(AtomicOp::$op, AtomicScope::$scope, $memory, index, value, value)
                }
            )*
            /// Element `index`, which other threads may update at the same time. It may be an older value, if
            /// no fence orders it: a thread that waits for one word and then looks at another one needs a
            /// fence in between.
            #[crate::device]
            pub fn atomic_load($self, index: usize) -> T {
                let none = T::zeroed();
                #[cfg(target_arch = "nvptx64")]
                return T::global(AtomicOp::Load, AtomicScope::$scope, $memory.element_pointer(index), none, none);
                #[cfg(not(target_arch = "nvptx64"))]
                emu::global_atomic(AtomicOp::Load, AtomicScope::$scope, $memory, index, none, none)
            }
            /// Puts `value` in element `index`, which other threads may update at the same time.
            #[crate::device]
            pub fn atomic_store($self, index: usize, value: T) {
                #[cfg(target_arch = "nvptx64")]
                T::global(AtomicOp::Store, AtomicScope::$scope, $memory.element_pointer(index), value, value);
                #[cfg(not(target_arch = "nvptx64"))]
                emu::global_atomic(AtomicOp::Store, AtomicScope::$scope, $memory, index, value, value);
            }
            /// [`atomic_load`](Self::atomic_load), and this thread's later accesses see what another thread
            #[doc = concat!("of ", $reaches)]
            /// wrote ahead of the [`store_release`](Self::store_release) whose value this is. PTX: the load,
            /// then the fence.
            #[crate::device]
            pub fn load_acquire($self, index: usize) -> T {
                let value = $self.atomic_load(index);
                crate::thread::$fence();
                value
            }
            /// [`atomic_store`](Self::atomic_store) behind all that this thread has written: who sees the
            /// value by [`load_acquire`](Self::load_acquire) sees that, too. PTX: the fence, then the store.
            #[crate::device]
            pub fn store_release($self, index: usize, value: T) {
                crate::thread::$fence();
                $self.atomic_store(index, value);
            }
            /// Writes `value` to element `index` if it holds `compare`.
            #[crate::device]
            pub fn atomic_cas($self, index: usize, compare: T, value: T) -> T {
                #[cfg(target_arch = "nvptx64")]
                return T::global(
                    AtomicOp::CompareExchange, AtomicScope::$scope, $memory.element_pointer(index), value, compare
                );
                #[cfg(not(target_arch = "nvptx64"))]
                emu::global_atomic(AtomicOp::CompareExchange, AtomicScope::$scope, $memory, index, value, compare)
            }
        }
    };
}

/// Words of global memory whose atomics are atomic to threads of one block: see the [module](self).
#[derive(Clone, Copy, Debug)]
pub struct BlockScope<T>(GlobalMut<T>);

/// Words of global memory whose atomics are atomic to all that reaches them, hosts and other GPUs included:
/// see the [module](self).
#[derive(Clone, Copy, Debug)]
pub struct SystemScope<T>(GlobalMut<T>);

impl<T: AtomicWord> GlobalMut<T> {
    /// The same words, with atomics of the block's scope: cheaper where threads of no other block use them.
    #[inline(always)]
    pub fn in_block_scope(self) -> BlockScope<T> {
        BlockScope(self)
    }

    /// The same words, with atomics of the system's scope.
    #[inline(always)]
    pub fn in_system_scope(self) -> SystemScope<T> {
        SystemScope(self)
    }
}

macro_rules! operations {
    ($($operations:tt)*) => {
        of_global!(GlobalMut, Device, device_fence, "the GPU", |self| self, $($operations)*);
        of_global!(BlockScope, Block, block_fence, "the block", |self| self.0, $($operations)*);
        of_global!(SystemScope, System, system_fence, "the system", |self| self.0, $($operations)*);
        of_shared!($($operations)*);
    };
}

/// The same of shared memory.
macro_rules! of_shared {
    ($($(#[$doc:meta])* $name:ident, $op:ident;)*) => {
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
