//! Device-only building blocks: inline PTX, one instruction each.
//!
//! Values cross into PTX as integers: an f16 has no register class of its own in inline assembly. A generic
//! pointer to global memory is converted inside the same statement; ptxas folds the conversion away.

use bytemuck::Pod;
use core::arch::{asm, global_asm};
use core::mem::{size_of, transmute_copy};

// The one dynamic shared memory array of every kernel, aligned as the widest swizzle of tiles.
global_asm!(".extern .shared .align 1024 .b8 simt_dynamic_shared[];");

/// Address of the block's dynamic shared memory, in the shared window.
#[inline(always)]
pub fn shared_base() -> u32 {
    let address: u32;
    // SAFETY: takes the address of a module-level symbol.
    unsafe {
        asm!("mov.u32 {0}, simt_dynamic_shared;", out(reg32) address, options(pure, nomem, nostack));
    }
    address
}

/// The same, in a register of each lane. ptxas 13.0 and drivers take an address's last term, where it is the
/// same for all lanes, for an operand of the copy. A copy with a cache policy then names registers that were
/// never written, an illegal instruction. `laneid & lanemask_eq` is always 0, as l < 2^l, which they do not
/// know.
#[inline(always)]
pub fn shared_base_of_lane() -> u32 {
    let address: u32;
    // SAFETY: as above.
    unsafe {
        asm!(
            "{{ .reg .b32 l, m; mov.u32 l, %laneid; mov.u32 m, %lanemask_eq; and.b32 l, l, m; \
             mov.u32 m, simt_dynamic_shared; add.u32 {0}, m, l; }}",
            out(reg32) address, options(pure, nomem, nostack)
        );
    }
    address
}

/// The policy that the L2 cache gives lines up by first: the same for all copies, so that it is made once.
#[inline(always)]
pub fn evict_first() -> u64 {
    let policy: u64;
    // SAFETY: makes a number.
    unsafe {
        asm!("createpolicy.fractional.L2::evict_first.b64 {0}, 1.0;", out(reg64) policy, options(pure, nomem, nostack));
    }
    policy
}

/// `$name(address) -> V`: one load instruction for each size of `V`.
macro_rules! load {
    ($(#[$doc:meta])* $name:ident, $address:ty, $class:ident, $open:literal, $operand:literal, $instruction:literal, ($($option:ident),*)) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<V: Pod>(address: $address) -> V {
            // SAFETY: reads `size_of::<V>()` bytes, valid and aligned by the launch's contract; a `Pod` may
            // be made of any bytes, and each arm makes it of its own size.
            unsafe {
                match size_of::<V>() {
                    1 => {
                        let x: u16;
                        asm!(concat!($open, $instruction, ".b8 {0}, [", $operand, "]; }}"), out(reg16) x, in($class) address, options($($option),*));
                        transmute_copy(&(x as u8))
                    }
                    2 => {
                        let x: u16;
                        asm!(concat!($open, $instruction, ".b16 {0}, [", $operand, "]; }}"), out(reg16) x, in($class) address, options($($option),*));
                        transmute_copy(&x)
                    }
                    4 => {
                        let x: u32;
                        asm!(concat!($open, $instruction, ".b32 {0}, [", $operand, "]; }}"), out(reg32) x, in($class) address, options($($option),*));
                        transmute_copy(&x)
                    }
                    8 => {
                        let (mut x, mut y): (u32, u32);
                        asm!(concat!($open, $instruction, ".v2.b32 {{{0}, {2}}}, [", $operand, "]; }}"), out(reg32) x, in($class) address, out(reg32) y, options($($option),*));
                        transmute_copy(&[x, y])
                    }
                    16 => {
                        let (mut x, mut y, mut z, mut w): (u32, u32, u32, u32);
                        asm!(concat!($open, $instruction, ".v4.b32 {{{0}, {2}, {3}, {4}}}, [", $operand, "]; }}"), out(reg32) x, in($class) address, out(reg32) y, out(reg32) z, out(reg32) w, options($($option),*));
                        transmute_copy(&[x, y, z, w])
                    }
                    _ => const { assert!(is_access_size(size_of::<V>()), "an access is 1, 2, 4, 8 or 16 bytes"); core::mem::zeroed() },
                }
            }
        }
    };
}

const fn is_access_size(bytes: usize) -> bool {
    matches!(bytes, 1 | 2 | 4 | 8 | 16)
}

load!(
    /// `ld.global.nc`: the data is not written during the launch.
    load_readonly, *const V, reg64, "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; ", "g", "ld.global.nc", (pure, readonly, nostack)
);
load!(
    /// `ld.global.nc.L1::no_allocate`: the data is not written during the launch and not read again.
    load_streaming, *const V, reg64, "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; ", "g", "ld.global.nc.L1::no_allocate", (pure, readonly, nostack)
);
load!(
    /// `ld.global.L1::no_allocate`, without `.nc`: ptxas moves no such load across `griddepcontrol.wait`, and
    /// read-only ones behind it. The data is not written while the launch is under way, nor by those that it
    /// may overlap.
    load_ahead, *const V, reg64, "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; ", "g", "ld.global.L1::no_allocate", (pure, readonly, nostack)
);
load!(
    /// `ld.shared`.
    shared_load, u32, reg32, "{{ ", "{1}", "ld.shared", (readonly, nostack)
);
load!(
    /// `ld.shared::cluster`.
    cluster_load, u32, reg32, "{{ ", "{1}", "ld.shared::cluster", (readonly, nostack)
);

/// `$name(address, value)`: one store instruction for each size of `V`.
macro_rules! store {
    ($(#[$doc:meta])* $name:ident, $address:ty, $class:ident, $open:literal, $operand:literal, $instruction:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<V: Pod>(address: $address, value: V) {
            // SAFETY: writes `size_of::<V>()` bytes, valid, aligned and without a race by the launch's
            // contract; each arm reads `value` as its own size.
            unsafe {
                match size_of::<V>() {
                    1 => {
                        let x: u8 = transmute_copy(&value);
                        asm!(concat!($open, $instruction, ".b8 [", $operand, "], {1}; }}"), in($class) address, in(reg16) x as u16, options(nostack));
                    }
                    2 => {
                        let x: u16 = transmute_copy(&value);
                        asm!(concat!($open, $instruction, ".b16 [", $operand, "], {1}; }}"), in($class) address, in(reg16) x, options(nostack));
                    }
                    4 => {
                        let x: u32 = transmute_copy(&value);
                        asm!(concat!($open, $instruction, ".b32 [", $operand, "], {1}; }}"), in($class) address, in(reg32) x, options(nostack));
                    }
                    8 => {
                        let [x, y]: [u32; 2] = transmute_copy(&value);
                        asm!(concat!($open, $instruction, ".v2.b32 [", $operand, "], {{{1}, {2}}}; }}"), in($class) address, in(reg32) x, in(reg32) y, options(nostack));
                    }
                    16 => {
                        let [x, y, z, w]: [u32; 4] = transmute_copy(&value);
                        asm!(concat!($open, $instruction, ".v4.b32 [", $operand, "], {{{1}, {2}, {3}, {4}}}; }}"), in($class) address, in(reg32) x, in(reg32) y, in(reg32) z, in(reg32) w, options(nostack));
                    }
                    _ => const { assert!(is_access_size(size_of::<V>()), "an access is 1, 2, 4, 8 or 16 bytes") },
                }
            }
        }
    };
}

store!(
    /// `st.global.cs`: the data is not touched again.
    store_streaming, *mut V, reg64, "{{ .reg .b64 g; cvta.to.global.u64 g, {0}; ", "g", "st.global.cs"
);
store!(
    /// `st.shared`.
    shared_store, u32, reg32, "{{ ", "{0}", "st.shared"
);
store!(
    /// `st.shared::cluster`.
    cluster_store, u32, reg32, "{{ ", "{0}", "st.shared::cluster"
);

/// Where an address of the block's shared memory is in that of block number `rank` of the cluster.
#[inline(always)]
pub fn map_to_block(address: u32, rank: u32) -> u32 {
    let mapped: u32;
    // SAFETY: arithmetic on registers; the cluster has the block by the launch's contract.
    unsafe {
        asm!("mapa.shared::cluster.u32 {0}, {1}, {2};", out(reg32) mapped, in(reg32) address, in(reg32) rank,
            options(pure, nomem, nostack));
    }
    mapped
}

/// Instructions that several threads execute together, as LLVM intrinsics.
///
/// Inline assembly would not do: LLVM does not know it as *convergent* and may move it into the arms of a
/// branch, where only some of the threads arrive (seen: a barrier duplicated before `if`, and a kernel that
/// hangs).
pub mod convergent {
    /// In the place of a barrier's number, the halves of the cluster's barrier. The module is compiled for
    /// the lowest target, for which LLVM refuses the intrinsics of these; `ptx-build` writes the
    /// instructions.
    pub const CLUSTER_ARRIVE: u32 = 9001;
    pub const CLUSTER_WAIT: u32 = 9002;

    // The names and types are those of LLVM's IntrinsicsNVVM.td.
    unsafe extern "unadjusted" {
        #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
        pub fn barrier(id: u32);
        #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
        pub fn named_barrier_sync(id: u32, threads: u32);
        #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
        pub fn named_barrier_arrive(id: u32, threads: u32);
        #[link_name = "llvm.nvvm.barrier.cta.red.popc.aligned.all"]
        pub fn barrier_count(id: u32, predicate: bool) -> u32;
        #[link_name = "llvm.nvvm.barrier.cta.red.and.aligned.all"]
        pub fn barrier_and(id: u32, predicate: bool) -> bool;
        #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.all"]
        pub fn barrier_or(id: u32, predicate: bool) -> bool;
        #[link_name = "llvm.nvvm.activemask"]
        pub fn active_mask() -> u32;
        #[link_name = "llvm.nvvm.bar.warp.sync"]
        pub fn warp_barrier(mask: u32);
        #[link_name = "llvm.nvvm.vote.ballot.sync"]
        pub fn vote_ballot(mask: u32, predicate: bool) -> u32;
        #[link_name = "llvm.nvvm.vote.all.sync"]
        pub fn vote_all(mask: u32, predicate: bool) -> bool;
        #[link_name = "llvm.nvvm.vote.any.sync"]
        pub fn vote_any(mask: u32, predicate: bool) -> bool;
        #[link_name = "llvm.nvvm.match.any.sync.i32"]
        pub fn match_any(mask: u32, value: u32) -> u32;
        #[link_name = "llvm.nvvm.match.any.sync.i64"]
        pub fn match_any_wide(mask: u32, value: u64) -> u32;
        #[link_name = "llvm.nvvm.match.all.sync.i32p"]
        fn match_all_p(mask: u32, value: u32) -> Matched;
        #[link_name = "llvm.nvvm.match.all.sync.i64p"]
        fn match_all_wide_p(mask: u32, value: u64) -> Matched;
        #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
        pub fn shuffle_idx(mask: u32, value: u32, source: u32, control: u32) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
        pub fn shuffle_up(mask: u32, value: u32, delta: u32, control: u32) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
        pub fn shuffle_down(mask: u32, value: u32, delta: u32, control: u32) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
        pub fn shuffle_xor(mask: u32, value: u32, lane_mask: u32, control: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.add"]
        pub fn reduce_add(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.umin"]
        pub fn reduce_umin(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.umax"]
        pub fn reduce_umax(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.min"]
        pub fn reduce_min(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.max"]
        pub fn reduce_max(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.and"]
        pub fn reduce_and(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.or"]
        pub fn reduce_or(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.xor"]
        pub fn reduce_xor(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.mma.m16n8k16.row.col.bf16"]
        fn mma_m16n8k16_bf16(
            a0: u32,
            a1: u32,
            a2: u32,
            a3: u32,
            b0: u32,
            b1: u32,
            c0: f32,
            c1: f32,
            c2: f32,
            c3: f32,
        ) -> Four<f32>;
        #[link_name = "llvm.nvvm.mma.m16n8k32.row.col.s8"]
        fn mma_m16n8k32_s8(
            a0: u32,
            a1: u32,
            a2: u32,
            a3: u32,
            b0: u32,
            b1: u32,
            c0: u32,
            c1: u32,
            c2: u32,
            c3: u32,
        ) -> Four<u32>;
        #[link_name = "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.b16.p0"]
        fn ldmatrix_x4(row: *const u8) -> Four<u32>;
        #[link_name = "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.trans.b16.p0"]
        fn ldmatrix_x4_trans(row: *const u8) -> Four<u32>;
    }

    /// LLVM's `{ i32, i1 }`: the mask if all are equal, else 0, and whether they are.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Matched(u32, bool);

    #[inline(always)]
    pub fn match_all(mask: u32, value: u32) -> bool {
        // SAFETY: no precondition but convergence, which the emulator checks.
        unsafe { match_all_p(mask, value) }.1
    }

    #[inline(always)]
    pub fn match_all_wide(mask: u32, value: u64) -> bool {
        // SAFETY: as above.
        unsafe { match_all_wide_p(mask, value) }.1
    }

    /// LLVM's `{ T, T, T, T }`.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Four<T>(T, T, T, T);

    impl<T> Four<T> {
        #[inline(always)]
        fn array(self) -> [T; 4] {
            [self.0, self.1, self.2, self.3]
        }
    }

    /// The one of these in assembly: LLVM's intrinsic takes `<2 x half>`, which rustc passes to no function.
    /// Without `pure` it stays where it is: LLVM sinks no side effect into a branch, and its jump threading,
    /// which could copy one there, does nothing for targets whose branches diverge.
    #[inline(always)]
    pub fn mma_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        let [mut d0, mut d1, mut d2, mut d3] = c;
        // SAFETY: no precondition but convergence, which the emulator checks.
        unsafe {
            core::arch::asm!(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
                inout(reg32) d0, inout(reg32) d1, inout(reg32) d2, inout(reg32) d3,
                in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
                options(nomem, nostack)
            );
        }
        [d0, d1, d2, d3]
    }

    #[inline(always)]
    pub fn mma_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        // SAFETY: no precondition but convergence, which the emulator checks.
        unsafe { mma_m16n8k16_bf16(a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]) }.array()
    }

    #[inline(always)]
    pub fn mma_i8(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
        let c = c.map(|x| x as u32);
        // SAFETY: no precondition but convergence, which the emulator checks.
        unsafe { mma_m16n8k32_s8(a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]) }
            .array()
            .map(|x| x as i32)
    }

    /// `ldmatrix` of the row at byte `offset` of the dynamic shared memory. Rust has no pointers into the
    /// shared window, and without one the intrinsic's access is generic: the one exception that the lint
    /// knows.
    #[inline(always)]
    pub fn load_matrix<const TRANSPOSED: bool>(offset: u32) -> [u32; 4] {
        let row: *const u8;
        // SAFETY: arithmetic on registers.
        unsafe {
            core::arch::asm!(
                "{{ .reg .b64 w; cvt.u64.u32 w, {1}; cvta.shared.u64 {0}, w; }}",
                out(reg64) row, in(reg32) super::shared_base() + offset, options(pure, nomem, nostack)
            );
        }
        // SAFETY: in bounds and aligned by the launch's contract; convergence the emulator checks.
        unsafe { if TRANSPOSED { ldmatrix_x4_trans(row) } else { ldmatrix_x4(row) } }.array()
    }
}

/// A generic pointer as an address in the global window. PTX: `cvta.to.global.u64`.
#[inline(always)]
pub fn to_global<T>(pointer: *mut T) -> u64 {
    let address: u64;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("cvta.to.global.u64 {0}, {1};", out(reg64) address, in(reg64) pointer, options(pure, nomem, nostack));
    }
    address
}

/// `ld.relaxed.gpu.global`: from the cache that all multiprocessors share, whoever writes meanwhile, and
/// nothing stays in one that an ordinary load behind it would look at. 0 if not `wanted`, and nothing is read
/// then.
#[inline(always)]
pub fn peek(address: *const u32, wanted: bool) -> u32 {
    let value;
    // SAFETY: in bounds and aligned by the launch's contract; relaxed, so that a write beside it is no race.
    // It reads what others may write, so it is not `pure`, and with the memory clobber that LLVM assumes it
    // moves across no wait.
    unsafe {
        asm!(
            "{{ .reg .b64 g; .reg .pred p; cvta.to.global.u64 g, {1}; setp.ne.u32 p, {2}, 0; mov.b32 {0}, 0; \
             @p ld.relaxed.gpu.global.b32 {0}, [g]; }}",
            out(reg32) value, in(reg64) address, in(reg32) wanted as u32, options(nostack)
        );
    }
    value
}

/// A hint that `bytes` bytes from `address` on, multiples of 16, will be read; by threads with `wanted`.
/// Without `pure` it stays where it is, and with the memory clobber that LLVM assumes it moves across no
/// wait.
#[inline(always)]
pub fn prefetch<T>(address: *const T, bytes: u32, wanted: bool) {
    // SAFETY: reads nothing that the program sees; in bounds by the launch's contract.
    unsafe {
        asm!(
            "{{ .reg .b64 g; .reg .pred p; cvta.to.global.u64 g, {0}; setp.ne.u32 p, {2}, 0;",
            "\t@p cp.async.bulk.prefetch.L2.global [g], {1}; // simt.since 90",
            "\t}}",
            in(reg64) address, in(reg32) bytes, in(reg32) wanted as u32, options(nostack)
        );
    }
}
