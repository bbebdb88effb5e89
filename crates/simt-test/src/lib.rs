//! Property tests of kernels: `#[simt::test]`.
//!
//! A test is a function that draws shapes and inputs and returns a [`Trial`]: a kernel, a launch, its
//! arguments, and what it must write. This is a whole one:
//!
//! ```rust,test_harness
//! use simt::{Global, GlobalMut, LaunchShape, kernel, thread};
//! use simt_test::{Trial, array, bits, sizes};
//!
//! #[kernel]
//! fn scale(x: Global<f32>, y: GlobalMut<f32>, factor: f32, n: u32) {
//!     let i = thread::index_1d();
//!     if i < n as usize {
//!         y.store(i, x.load(i) * factor);
//!     }
//! }
//!
//! #[simt::test]
//! fn scaled(
//!     #[draw(sizes(1..=1000))] n: usize,
//!     #[draw(array(n, bits::<f32>()))] x: Vec<f32>,
//!     #[draw(bits::<f32>())] factor: f32,
//! ) -> Trial {
//!     let expected: Vec<f32> = x.iter().map(|x| x * factor).collect();
//!     Trial::new(scale::kernel(), LaunchShape::new(n.div_ceil(128) as u32, 128), move |memory| scale::Args {
//!         x: memory.input(&x),
//!         y: memory.output(&expected),
//!         factor,
//!         n: n as u32,
//!     })
//! }
//! ```
//!
//! # What a case is held against
//! For each case that is drawn, in this order:
//!
//! 1. The emulator runs it with every check (bounds, races, memory that nobody wrote, …) and in nine orders,
//!    whose results must be the same bits.
//! 2. The emulator runs it again on all cores, with other contents in the outputs: the same bits, and no
//!    element that no thread wrote.
//! 3. The outputs are held against the oracle: its bits ([`exact`]), or its f64 within a bound ([`near`]);
//!    and against the bits of other implementations ([`Expected::and`]).
//! 4. If there is a GPU, and the attribute names the PTX (`ptx = …`), it runs there: the same bits.
//!
//! A case that fails is shrunk, and the test ends with one message: kernel, block, thread and line of the
//! fault, or the first wrong element and who wrote it; the inputs; and a command that runs this case again.
//!
//! # Parameters
//! `#[draw(…)]` holds a [`Source`]: any strategy of [`proptest`], or [`array()`]. It may use the parameters
//! before it. [`sizes`] and [`multiples`] draw lengths around the sizes of warps and blocks, [`bits`] and
//! [`finite`] numbers with the edges of their type.
//!
//! # The attribute's options
//! - `cases = N`: how many cases; 64 without it.
//! - `orders = N`: in how many orders more the emulator runs each; 8 without it.
//! - `ptx = EXPRESSION`: a `&'static [`[`PtxImage`]`]` with the kernel in it, for a GPU.
//! - `result`: makes no test, but a function of the name that returns a `Result` of [`Report`] and
//!   [`Failed`]: for a test of what a kernel with a mistake reports.
//!
//! # The environment
//!
//! | variable | what it sets |
//! |---|---|
//! | `SIMT_TEST_CASES` | how many cases |
//! | `SIMT_TEST_ORDERS` | in how many orders more |
//! | `SIMT_TEST_SEED` | what to draw from: a number or `random`; without it the same cases each time |
//! | `SIMT_TEST_CASE` | the one case to run, as a failure names it |
//! | `SIMT_TEST_GPU` | `auto`; `off`; `required`: fail without one; `emulated`: see below |
//! | `SIMT_TEST_GPU_SECONDS` | how long a case may take on the GPU; 120 without it |
//!
//! # The GPU
//! Cases run on the GPU in a process of their own: the test's program once more, for this test alone. A
//! kernel that goes astray there takes its context with it, and the process ends; the test gets a
//! [`GpuError`], and the next case a fresh process. So the function of a test may run in two processes, and
//! must make the same case of the same values in both. With `SIMT_TEST_GPU=emulated` the process is there and
//! runs the emulator: so this machinery is tested without a GPU.
//!
//! # Misuse
//! A parameter without `#[draw(…)]` does not compile, and says what it lacks:
//!
//! ```compile_fail
//! #[simt::test(result)]
//! fn test(n: usize) -> Option<simt_test::Trial> {
//!     None
//! }
//! # fn main() {}
//! ```
//!
//! nor does one whose strategy draws another type:
//!
//! ```compile_fail,E0308
//! #[simt::test(result)]
//! fn test(#[draw(simt_test::sizes(1..9))] n: u32) -> Option<simt_test::Trial> {
//!     None
//! }
//! # fn main() {}
//! ```
//!
//! nor a function that returns no trial:
//!
//! ```compile_fail,E0277
//! #[simt::test(result)]
//! fn test(#[draw(simt_test::sizes(1..9))] n: usize) -> usize {
//!     n
//! }
//! # fn main() {}
//! ```

mod check;
mod draws;
mod element;
mod expected;
mod failure;
mod process;
mod settings;
mod show;
mod shrink;
mod strategies;
mod trial;

#[doc(hidden)]
pub use check::{Site, check};
#[doc(hidden)]
pub use settings::Options;

pub use check::Report;
pub use draws::{Array, Draws, Source, array};
pub use element::Element;
pub use expected::{Expected, exact, near, unstated};
pub use failure::{Difference, Failed, FailedCase, Failure, GpuError, Mismatch, Versus};
pub use ferrokv_device::PtxImage;
pub use proptest;
pub use strategies::{Bits, Candidates, Sizes, bits, finite, multiples, sizes};
pub use trial::{IntoTrial, Memory, Trial};
