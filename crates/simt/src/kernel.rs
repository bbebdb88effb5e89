//! What the host holds of a kernel: a typed handle that every backend can launch.
//!
//! `#[kernel]` makes one [`Kernel`] per instance. The handle carries the entry's name in the PTX for the
//! GPU, and the kernel function itself for the [emulator](crate::emu); its type carries the arguments, so a
//! launch with the wrong arguments does not compile.

use bytemuck::Pod;
use core::ffi::c_void;
use core::fmt;

/// The most parameters one kernel may take.
pub const MAX_PARAMS: usize = 24;

/// A value that may be handed to a kernel: plain data, or a handle to global memory.
///
/// On the device the parameter is the value itself (plain data) or one 64-bit pointer (a handle). A handle
/// inside a parameter struct would be a generic pointer there and is therefore not plain data here.
pub trait KernelArg: Copy + Send + Sync + 'static {
    /// Address of the bytes that the driver copies into the kernel's parameter space.
    fn param(&self) -> *const c_void {
        (&raw const *self).cast()
    }
}

impl<T: Pod + Send + Sync> KernelArg for T {}

/// All arguments of one kernel, as a tuple of [`KernelArg`]s.
pub trait KernelArgs: Copy + Send + Sync + 'static {
    /// How many parameters there are.
    const COUNT: usize;
    /// Writes the address of each parameter, in order, to the start of `out`.
    fn params(&self, out: &mut [*const c_void; MAX_PARAMS]);
}

macro_rules! kernel_args {
    ($count:literal: $($name:ident . $index:tt),*) => {
        impl<$($name: KernelArg),*> KernelArgs for ($($name,)*) {
            const COUNT: usize = $count;
            #[allow(unused_variables)]
            fn params(&self, out: &mut [*const c_void; MAX_PARAMS]) {
                $( out[$index] = self.$index.param(); )*
            }
        }
    };
}
kernel_args!(0:);
kernel_args!(1: A.0);
kernel_args!(2: A.0, B.1);
kernel_args!(3: A.0, B.1, C.2);
kernel_args!(4: A.0, B.1, C.2, D.3);
kernel_args!(5: A.0, B.1, C.2, D.3, E.4);
kernel_args!(6: A.0, B.1, C.2, D.3, E.4, F.5);
kernel_args!(7: A.0, B.1, C.2, D.3, E.4, F.5, G.6);
kernel_args!(8: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7);
kernel_args!(9: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8);
kernel_args!(10: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9);
kernel_args!(11: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10);
kernel_args!(12: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11);
kernel_args!(13: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12);
kernel_args!(14: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13);
kernel_args!(15: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14);
kernel_args!(16: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15);
kernel_args!(17: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15, Q.16);
kernel_args!(18: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15, Q.16, R.17);
kernel_args!(19: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15, Q.16, R.17, S.18);
kernel_args!(20: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15, Q.16, R.17, S.18, T.19);
kernel_args!(21: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15, Q.16, R.17, S.18, T.19, U.20);
kernel_args!(22: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15, Q.16, R.17, S.18, T.19, U.20, V.21);
kernel_args!(23: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15, Q.16, R.17, S.18, T.19, U.20, V.21, W.22);
kernel_args!(24: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7, I.8, J.9, K.10, L.11, M.12, N.13, O.14, P.15, Q.16, R.17, S.18, T.19, U.20, V.21, W.22, X.23);

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
    /// Whether a launch may start before the launch ahead of it has ended: the device's entry waits for that one
    /// before anything else (`#[kernel(overlaps)]`), or the kernel does before all but loads of what no launch writes and hints
    /// (`#[kernel(overlaps = late)]`, `by_hand`).
    pub overlaps: bool,
    /// Whether it is the kernel that waits, and not its entry.
    pub waits_late: bool,
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
