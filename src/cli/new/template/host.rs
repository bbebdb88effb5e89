//! What launches the kernel, and the PTX that a GPU is opened with.

use crate::axpy;
use ferrokv_device::{Buffer, Error, PtxImage, Stream};
use simt::LaunchShape;

/// The kernels as the build script made them: what a GPU is opened with.
pub fn ptx() -> &'static [PtxImage] {
    ferrokv_device::embedded_ptx!()
}

/// `y = a·x + y` over all elements of `y`, on the stream's device.
///
/// # Errors
/// What the device says; on the emulator also what is wrong with the kernel.
///
/// # Panics
/// If `x` and `y` are not of one length, or have 2^32 elements.
pub fn add_scaled(stream: &Stream, a: f32, x: &Buffer<f32>, y: &mut Buffer<f32>) -> Result<(), Error> {
    assert_eq!(x.len(), y.len(), "x and y are of one length");
    let n = u32::try_from(y.len()).expect("fewer than 2^32 elements");
    if n == 0 {
        return Ok(());
    }
    let args = axpy::Args { a, x: x.global(), y: y.global_mut(), n };
    // SAFETY: both buffers have n elements, no thread touches another one's, and the buffers outlive what the
    // stream has to do: dropping one waits.
    unsafe { stream.launch(&axpy::kernel(), LaunchShape::new(n.div_ceil(256), 256), args) }
}
