//! What the host holds of a kernel: a typed handle that every backend can launch.
//!
//! `#[kernel]` makes one [`Kernel`] per instance. The handle carries the entry's name in the PTX for the
//! GPU, and the kernel function itself for the [emulator](crate::emu); its type carries the arguments, by the
//! names of the kernel's parameters, so a launch with the wrong arguments does not compile.

use bytemuck::Pod;
use core::ffi::c_void;
use core::fmt;

/// The most parameters one kernel may take: what a launch has room to point at. Drivers limit their bytes
/// alone.
pub const MAX_PARAMS: usize = 64;

/// A value that may be handed to a kernel: plain data, or a handle to global memory.
///
/// On the device the parameter is the value itself (plain data) or one 64-bit pointer (a handle). A handle
/// inside a parameter struct would be a generic pointer there and is therefore not plain data here.
#[diagnostic::on_unimplemented(
    message = "a launch cannot pass a `{Self}`",
    note = "an argument is a number, a struct that derives `Clone, Copy, Pod, Zeroable` with `#[repr(C)]`, or a \
            handle: `Global<T>`, `GlobalMut<T>`"
)]
pub trait KernelArg: Copy + Send + Sync + 'static {
    /// Address of the bytes that the driver copies into the kernel's parameter space.
    fn param(&self) -> *const c_void {
        (&raw const *self).cast()
    }

    /// The memory that a handle leads to.
    #[doc(hidden)]
    fn memory(&self) -> Option<ArgMemory> {
        None
    }
}

/// The memory that a handle leads to.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct ArgMemory {
    /// Where it starts.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// The size of an element.
    pub element_bytes: usize,
    /// Whether the handle allows writes.
    pub writable: bool,
    /// Whether the elements are tensor maps, which lead to more memory.
    pub maps: bool,
}

impl<T: Pod + Send + Sync> KernelArg for T {}

/// All arguments of one kernel: the `Args` that `#[kernel]` makes, a field for each parameter.
///
/// ```
/// use simt::{Global, GlobalMut, KernelArgs, kernel, thread};
///
/// #[kernel]
/// fn gather(from: Global<u32>, rows: Global<u32>, to: GlobalMut<u32>) {
///     let i = thread::index_1d();
///     to.store(i, from.load(rows.load(i) as usize));
/// }
///
/// fn arguments(from: Global<u32>, rows: Global<u32>, to: GlobalMut<u32>) -> gather::Args {
///     gather::Args { rows, from, to }
/// }
/// # fn main() { assert_eq!(<gather::Args as KernelArgs>::COUNT, 3); }
/// ```
///
/// Without one of them it does not compile:
///
/// ```compile_fail,E0063
/// # use simt::{Global, GlobalMut, kernel};
/// # #[kernel]
/// # fn gather(from: Global<u32>, rows: Global<u32>, to: GlobalMut<u32>) {}
/// fn arguments(from: Global<u32>, to: GlobalMut<u32>) -> gather::Args {
///     gather::Args { from, to }
/// }
/// # fn main() {}
/// ```
///
/// nor by places, where two of one type could be swapped unseen:
///
/// ```compile_fail,E0308
/// # use simt::{Global, GlobalMut, emu, kernel};
/// # #[kernel]
/// # fn gather(from: Global<u32>, rows: Global<u32>, to: GlobalMut<u32>) {}
/// unsafe fn run(from: Global<u32>, rows: Global<u32>, to: GlobalMut<u32>) -> Result<(), emu::Fault> {
///     emu::launch(&gather::kernel(), simt::LaunchShape::new(1, 32), (rows, from, to), &Default::default())
/// }
/// # fn main() {}
/// ```
///
/// nor where a kernel that shares the arguments of another has them in another order:
///
/// ```compile_fail,E0080
/// # use simt::{Global, GlobalMut, kernel};
/// # #[kernel]
/// # fn gather(from: Global<u32>, rows: Global<u32>, to: GlobalMut<u32>) {}
/// #[kernel(args = gather)]
/// fn gather_readonly(rows: Global<u32>, from: Global<u32>, to: GlobalMut<u32>) {}
/// # fn main() {}
/// ```
pub trait KernelArgs: Copy + Send + Sync + 'static {
    /// How many parameters there are.
    const COUNT: usize;
    /// Writes the address of each parameter, in order, to the start of `out`.
    fn params(&self, out: &mut [*const c_void; MAX_PARAMS]);
    /// Calls `visit` with the name and the memory of each parameter that is a handle.
    #[doc(hidden)]
    fn memory(&self, visit: &mut dyn FnMut(&'static str, ArgMemory)) {
        let _ = visit;
    }
}

/// Whether two kernels name their parameters alike, in one order. Used by `#[kernel(args = …)]`.
#[doc(hidden)]
pub const fn same_names(a: &[&str], b: &[&str]) -> bool {
    let mut same = a.len() == b.len();
    let mut i = 0;
    while same && i < a.len() {
        let (x, y) = (a[i].as_bytes(), b[i].as_bytes());
        same = x.len() == y.len();
        let mut j = 0;
        while same && j < x.len() {
            same = x[j] == y[j];
            j += 1;
        }
        i += 1;
    }
    same
}

/// An extent or an index in three dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct Dim3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl Dim3 {
    /// The number of points in the extent; the largest `u64` if there are more.
    pub const fn count(self) -> u64 {
        (self.x as u64 * self.y as u64).saturating_mul(self.z as u64)
    }

    /// The index of point number `linear`, x fastest.
    pub const fn at(self, linear: u64) -> Dim3 {
        let (x, y) = (self.x as u64, self.y as u64);
        Dim3 { x: (linear % x) as u32, y: (linear / x % y) as u32, z: (linear / (x * y)) as u32 }
    }

    /// The number of the point `at`, x fastest.
    pub const fn number(self, at: Dim3) -> u64 {
        at.x as u64 + self.x as u64 * (at.y as u64 + self.y as u64 * at.z as u64)
    }

    /// Whether `part`, which has no 0, divides it along each axis.
    pub const fn is_multiple_of(self, part: Dim3) -> bool {
        self.x.is_multiple_of(part.x) && self.y.is_multiple_of(part.y) && self.z.is_multiple_of(part.z)
    }
}

impl From<u32> for Dim3 {
    fn from(x: u32) -> Self {
        Dim3 { x, y: 1, z: 1 }
    }
}

impl From<(u32, u32)> for Dim3 {
    fn from((x, y): (u32, u32)) -> Self {
        Dim3 { x, y, z: 1 }
    }
}

impl From<(u32, u32, u32)> for Dim3 {
    fn from((x, y, z): (u32, u32, u32)) -> Self {
        Dim3 { x, y, z }
    }
}

impl fmt::Display for Dim3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({},{},{})", self.x, self.y, self.z)
    }
}

/// How many blocks of how many threads, with how much dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks in the grid.
    pub grid: Dim3,
    /// Threads in a block.
    pub block: Dim3,
    /// Dynamic shared memory of each block, in bytes.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// A launch of `grid` blocks of `block` threads without shared memory.
    pub fn new(grid: impl Into<Dim3>, block: impl Into<Dim3>) -> Self {
        LaunchShape { grid: grid.into(), block: block.into(), shared_bytes: 0 }
    }

    /// The same launch with `bytes` of dynamic shared memory a block.
    pub fn shared(self, bytes: u32) -> Self {
        LaunchShape { shared_bytes: bytes, ..self }
    }
}

/// What is known of a kernel instance without its types: for listings and for matching PTX entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The entry's name in the PTX.
    pub name: &'static str,
    /// The Rust module that holds the kernel.
    pub module: &'static str,
    /// The source file, as the compiler names it.
    pub file: &'static str,
    /// The line of the kernel's attribute.
    pub line: u32,
    /// The most threads a block may have; 1024 unless the attribute says otherwise.
    pub max_threads: u32,
    /// Whether a launch may start before the launch ahead of it has ended: the device's entry waits for that
    /// one before anything else (`#[kernel(overlaps)]`), or the kernel does before all but loads of what no
    /// launch writes and hints (`#[kernel(overlaps = late)]`, `by_hand`).
    pub overlaps: bool,
    /// Whether it is the kernel that waits, and not its entry.
    pub waits_late: bool,
    /// The lowest target whose PTX holds it, 90 for sm_90; 0 if all do.
    pub min_sm: u32,
    /// The one compute capability that has it, 90 for 9.0; 0 if it is not for one alone.
    pub only_sm: u32,
    /// The blocks of a cluster; one unless the attribute says otherwise.
    pub cluster: Dim3,
}

/// One kernel instance: its PTX entry and its body, typed by its arguments.
pub struct Kernel<A: KernelArgs> {
    info: &'static KernelInfo,
    body: fn(A),
}

impl<A: KernelArgs> Clone for Kernel<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: KernelArgs> Copy for Kernel<A> {}

impl<A: KernelArgs> Kernel<A> {
    /// Used by `#[kernel]`.
    #[doc(hidden)]
    pub const fn new(info: &'static KernelInfo, body: fn(A)) -> Self {
        Kernel { info, body }
    }

    /// What is known of the kernel without its types.
    pub const fn info(&self) -> &'static KernelInfo {
        self.info
    }

    /// The entry's name in the PTX.
    pub const fn name(&self) -> &'static str {
        self.info.name
    }

    /// The kernel function: what the emulator runs once per thread.
    pub const fn body(&self) -> fn(A) {
        self.body
    }
}

impl<A: KernelArgs> fmt::Debug for Kernel<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.info.name).finish()
    }
}
