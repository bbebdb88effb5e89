//! Products of matrices by the tensor cores of sm_90, asynchronously, by groups of four warps.
//!
//! The 128 threads of warps 4·i to 4·i + 3 make every call together. One product is D = A·B or D = D + A·B
//! with 64 rows of A, N rows of B (the columns of D) and 32 bytes of each: K = 16 elements of [`F16`] or
//! [`Bf16`], 32 of [`I8`]. B lies in shared memory, A in shared memory or in registers, D in registers.
//!
//! ```text
//! let group = wgmma::begin();
//! let sums = group.multiply::<I8, 16>(a, tile.at(from));         // N = 32: 16 registers
//! let sums = group.multiply_add::<I8, 16>(sums, a2, tile.at(next));
//! group.commit();
//! /* other work */
//! let [sums] = wgmma::wait::<0, _, 16, 1>([sums]);
//! ```
//!
//! With `w` the number of the warp among its four, `g = lane / 4` and `q = lane % 4` a thread holds of D in
//! register 4·j + i (i < 4) row 16·w + g + 8·(i / 2) and column 8·j + 2·q + i % 2. Of A in registers it holds
//! what [`tensor`](crate::tensor) says of a warp's 16 rows: of `I8` in registers 0 to 3 rows g, g + 8, g and
//! g + 8, and four columns each from 4·q on, in 2 and 3 from 16 + 4·q on.
//!
//! **Under way.** What a product reads in shared memory stays unwritten until it was waited for; plain stores
//! ahead of it need a [`bulk::fence_shared`](crate::bulk::fence_shared) and a barrier, as ahead of bulk
//! copies. D is in a [`Pending`] meanwhile, which gives it up behind the wait. Registers of A stay as they
//! are until then, which is the compiler's to see to.
//!
//! **Numerics.** Integer products are exact. The float ones are chains of the sums that
//! `simt::emu::tensor` describes for Hopper.
//!
//! The instructions are those of one generation: mark the kernel `#[kernel(only_sm = 90)]`.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu::wgmma as model;
use crate::{Pod, Shared, Swizzle};
#[cfg(target_arch = "nvptx64")]
use core::arch::asm;
use core::marker::PhantomData;
#[cfg(target_arch = "nvptx64")]
use products::products;

#[cfg(target_arch = "nvptx64")]
mod products;

/// Products of f16 elements, 16 at a time, summed in f32.
#[derive(Clone, Copy, Debug)]
pub struct F16;
/// Products of bf16 elements, 16 at a time, summed in f32.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;
/// Products of signed bytes, 32 at a time, summed in i32 modulo 2^32.
#[derive(Clone, Copy, Debug)]
pub struct I8;

/// What is multiplied, and what sums are.
pub trait Format: Copy + 'static {
    /// An element of D.
    type Sum: Pod;
    /// Which format it is.
    #[doc(hidden)]
    const KIND: Kind;
}

/// The formats by number.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F16,
    Bf16,
    I8,
}

impl Format for F16 {
    type Sum = f32;
    const KIND: Kind = Kind::F16;
}
impl Format for Bf16 {
    type Sum = f32;
    const KIND: Kind = Kind::Bf16;
}
impl Format for I8 {
    type Sum = i32;
    const KIND: Kind = Kind::I8;
}

/// Rows of an operand in shared memory, each with its 32 bytes one after another along K.
///
/// Eight rows are a group. Without a swizzle the first 16 bytes of a group's rows lie one row behind another,
/// 128 bytes in one piece, and the other 16 bytes `along_k` bytes further. With one, a group's rows are
/// [`Swizzle::row`] bytes apart, and a place within them is exchanged as [`Swizzle::place`] says. The next
/// group begins `next_group` bytes further.
#[derive(Clone, Copy, Debug)]
pub struct Tile<T> {
    array: Shared<T>,
    index: u32,
    swizzle: Swizzle,
    next_group: u32,
    along_k: u32,
}

impl<T: Pod> Tile<T> {
    /// Without a swizzle, from element `index` of `array` on, which is aligned to 16 bytes. Both distances
    /// are in bytes, multiples of 16.
    #[inline(always)]
    pub const fn new(array: Shared<T>, index: u32, next_group: u32, along_k: u32) -> Self {
        Tile { array, index, swizzle: Swizzle::None, next_group, along_k }
    }

    /// Swizzled: groups of rows begin at multiples of [`Swizzle::period`] bytes of shared memory, as arrays
    /// of [`SharedPlan::tile`](crate::SharedPlan::tile) do. Element `index` is in the first row, a multiple
    /// of 32 bytes from its beginning.
    #[inline(always)]
    pub const fn swizzled(array: Shared<T>, index: u32, swizzle: Swizzle, next_group: u32) -> Self {
        Tile { array, index, swizzle, next_group, along_k: 16 }
    }

    /// The same of a tile that begins at element `index`.
    #[inline(always)]
    pub const fn at(self, index: u32) -> Self {
        Tile { index, ..self }
    }

    /// The matrix descriptor.
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    fn descriptor(self) -> u64 {
        // Places are below 2^18: what is in front of them says which block of a cluster. Added up so that an
        // index costs one addition.
        let base = (crate::ptx::shared_base() & 0x3_ffff) >> 4;
        let address = base + (self.array.byte_offset(self.index) >> 4);
        let mode = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::B128 => 1,
            Swizzle::B64 => 2,
            Swizzle::B32 => 3,
        };
        let low = address + ((self.along_k >> 4) << 16);
        let high = self.next_group >> 4 | mode << 30;
        low as u64 | (high as u64) << 32
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn placed(self) -> model::Placed {
        let (base, len) = self.array.extent();
        let (element, Tile { index, swizzle, next_group, along_k, .. }) = (size_of::<T>() as u32, self);
        model::Placed { base, len, element, index, swizzle, next_group, along_k }
    }
}

/// Where A is: in registers, `[u32; 4]`, or in shared memory, a [`Tile`].
pub trait Operand: sealed::Operand {}

impl Operand for [u32; 4] {}
impl<T: Pod> Operand for Tile<T> {}

mod sealed {
    #[cfg(not(target_arch = "nvptx64"))]
    use super::model;

    pub trait Operand: Copy {
        #[cfg(target_arch = "nvptx64")]
        const IN_REGISTERS: bool;
        /// The registers, and the descriptor.
        #[cfg(target_arch = "nvptx64")]
        fn words(self) -> ([u32; 4], u64);
        #[cfg(not(target_arch = "nvptx64"))]
        fn source(self) -> model::Source;
    }
}

impl sealed::Operand for [u32; 4] {
    #[cfg(target_arch = "nvptx64")]
    const IN_REGISTERS: bool = true;
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    fn words(self) -> ([u32; 4], u64) {
        (self, 0)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    fn source(self) -> model::Source {
        model::Source::Registers(self)
    }
}

impl<T: Pod> sealed::Operand for Tile<T> {
    #[cfg(target_arch = "nvptx64")]
    const IN_REGISTERS: bool = false;
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    fn words(self) -> ([u32; 4], u64) {
        ([0; 4], self.descriptor())
    }
    #[cfg(not(target_arch = "nvptx64"))]
    fn source(self) -> model::Source {
        model::Source::Shared(self.placed())
    }
}

/// A thread's part of sums that are under way: L registers, of N = 2·L columns.
#[derive(Debug)]
#[must_use = "sums are there behind a wait"]
pub struct Pending<S, const L: usize> {
    #[cfg(target_arch = "nvptx64")]
    sums: [u32; L],
    #[cfg(not(target_arch = "nvptx64"))]
    id: u32,
    sum: PhantomData<S>,
}

/// Products that are one group: what a [`wait`] waits for.
#[derive(Debug)]
#[must_use = "nothing is waited for that is in no group: call `commit`"]
pub struct Group(());

/// Begins a group: what the threads have written to registers is there for its products. PTX:
/// `wgmma.fence.sync.aligned`.
#[crate::device]
pub fn begin() -> Group {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no precondition but convergence, which the emulator checks. Without `pure` it stays where it
    // is.
    unsafe {
        asm!("wgmma.fence.sync.aligned;", options(nostack))
    }
    #[cfg(not(target_arch = "nvptx64"))]
    model::begin();
    Group(())
}

impl Group {
    /// D = A·B, of N = 2·L columns; L is 4, 8, 16, 32, 48, 64, 96 or 128. PTX:
    /// `wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16`, `.f32.bf16.bf16`, `m64nNk32.s32.s8.s8`.
    #[crate::device]
    pub fn multiply<F: Format, const L: usize>(
        &self,
        a: impl Operand,
        b: Tile<impl Pod>,
    ) -> Pending<F::Sum, L> {
        #[cfg(target_arch = "nvptx64")]
        return Pending { sums: products::<F, _, L, false>([0; L], a, b.descriptor()), sum: PhantomData };
        #[cfg(not(target_arch = "nvptx64"))]
        return Pending {
            id: model::multiply(None, (F::KIND, columns::<L>()), a.source(), b.placed()),
            sum: PhantomData,
        };
    }

    /// D = D + A·B: of sums that are under way. PTX: as [`multiply`](Self::multiply).
    #[crate::device]
    pub fn multiply_add<F: Format, const L: usize>(
        &self,
        sums: Pending<F::Sum, L>,
        a: impl Operand,
        b: Tile<impl Pod>,
    ) -> Pending<F::Sum, L> {
        #[cfg(target_arch = "nvptx64")]
        return Pending { sums: products::<F, _, L, true>(sums.sums, a, b.descriptor()), sum: PhantomData };
        #[cfg(not(target_arch = "nvptx64"))]
        return Pending {
            id: model::multiply(Some(sums.id), (F::KIND, columns::<L>()), a.source(), b.placed()),
            sum: PhantomData,
        };
    }

    /// Sums that a product of this group is to be added to.
    #[crate::device]
    pub fn resume<S: Pod, const L: usize>(&self, sums: [S; L]) -> Pending<S, L> {
        const { is_a_sum::<S>() }
        #[cfg(target_arch = "nvptx64")]
        {
            // SAFETY: both are L times four bytes, which may be any.
            let sums = tied(unsafe { core::mem::transmute_copy::<[S; L], [u32; L]>(&sums) });
            // Behind what has written them. The group is open already.
            let _ = begin();
            return Pending { sums, sum: PhantomData };
        }
        #[cfg(not(target_arch = "nvptx64"))]
        return Pending { id: model::resume(bytemuck::cast_slice(&sums)), sum: PhantomData };
    }

    /// Ends the group. PTX: `wgmma.commit_group.sync.aligned`.
    #[crate::device]
    pub fn commit(self) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as for `begin`.
        unsafe {
            asm!("wgmma.commit_group.sync.aligned;", options(nostack))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        model::commit();
    }
}

/// Waits until at most the last `PENDING` groups are under way, and gives the sums of those before. PTX:
/// `wgmma.wait_group.sync.aligned`.
#[crate::device]
pub fn wait<const PENDING: usize, S: Pod, const L: usize, const COUNT: usize>(
    sums: [Pending<S, L>; COUNT],
) -> [[S; L]; COUNT] {
    const { is_a_sum::<S>() }
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: as for `begin`.
    unsafe {
        asm!("wgmma.wait_group.sync.aligned {0};", const PENDING, options(nostack))
    }
    #[cfg(target_arch = "nvptx64")]
    return sums.map(|pending| {
        let words = tied(pending.sums);
        // SAFETY: both are L times four bytes, and a `Pod` may be made of any.
        unsafe { core::mem::transmute_copy(&words) }
    });
    #[cfg(not(target_arch = "nvptx64"))]
    {
        model::wait(PENDING);
        let mut taken = [[S::zeroed(); L]; COUNT];
        for (sums, pending) in taken.iter_mut().zip(sums) {
            *sums = model::take::<L>(pending.id).map(|word| bytemuck::cast(word));
        }
        taken
    }
}

/// This group's threads keep `N` registers each, and give the others up for groups of the block that
/// [claim](claim_registers) them: threads that only start copies need few. `N` is a multiple of 8 from 24 to
/// 256, and no more than a launch gives a thread: what fits `#[kernel(max_threads = …, min_blocks = 1)]`, in
/// whole groups. PTX: `setmaxnreg.dec.sync.aligned.u32`.
#[crate::device]
pub fn release_registers<const N: u32>() {
    const { are_registers(N) }
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: as for `begin`; the compiler of PTX sees to what is in registers.
    unsafe {
        asm!("setmaxnreg.dec.sync.aligned.u32 {0};", const N, options(nostack))
    }
    #[cfg(not(target_arch = "nvptx64"))]
    model::registers(N);
}

/// This group's threads wait until the block's other groups have given up enough registers for `N` of each,
/// and go on with them. What all groups have together is what the launch gave the block: with more one of
/// them would wait forever. The emulator refuses that where each group says once what it holds, and takes the
/// block to be alone on its multiprocessor. PTX: `setmaxnreg.inc.sync.aligned.u32`.
#[crate::device]
pub fn claim_registers<const N: u32>() {
    const { are_registers(N) }
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: as for `release_registers`.
    unsafe {
        asm!("setmaxnreg.inc.sync.aligned.u32 {0};", const N, options(nostack))
    }
    #[cfg(not(target_arch = "nvptx64"))]
    model::registers(N);
}

/// The same words, as what follows the assembly ahead of this and precedes that behind it.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn tied<const L: usize>(mut words: [u32; L]) -> [u32; L] {
    let mut i = 0;
    while i < L {
        // SAFETY: does nothing.
        unsafe { asm!("// {0}", inout(reg32) words[i], options(nostack)) }
        i += 1;
    }
    words
}

const fn are_registers(count: u32) {
    assert!(count >= 24 && count <= 256 && count.is_multiple_of(8), "24 to 256 registers, a multiple of 8");
}

const fn is_a_sum<S>() {
    assert!(size_of::<S>() == 4, "sums are f32 or i32");
}

/// N of sums of L registers.
#[cfg(not(target_arch = "nvptx64"))]
const fn columns<const L: usize>() -> u32 {
    const { assert!(is_width(L), "sums have 4, 8, 16, 32, 48, 64, 96 or 128 registers") }
    2 * L as u32
}

/// Widths that have an instruction here.
const fn is_width(registers: usize) -> bool {
    matches!(registers, 4 | 8 | 16 | 32 | 48 | 64 | 96 | 128)
}
