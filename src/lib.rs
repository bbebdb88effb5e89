//! Ferrokv: a language model's keys and values in few bits, and attention over them, with a bound on its
//! error if one is wanted. Kernels are Rust, one source for the GPU and the CPU, with the same bits on both.
//!
//! This crate is the front door: it embeds the kernels' PTX, gathers the crates below it and holds the
//! `ferrokv` command.
//!
//! | crate | what it is |
//! | --- | --- |
//! | [`simt`] | the kernel language and the emulator |
//! | [`kernels_gpu`] | the kernels, and the arithmetic that host and device share |
//! | [`host`] | the systems above the kernels, files; at its root all of the device layer |
//!
//! # Quantize a matrix
//! [`ptx`] is what a GPU needs to be opened; with no GPU the same calls run on the emulator.
//!
//! ```
//! use ferrokv::host::int8::{Matrix, Plan, Variant};
//! use ferrokv::host::{Buffer, Device, Stream};
//! use ferrokv::simt::emu::EmuOptions;
//!
//! // 64 tokens of 32 channels. `Device::auto(EmuOptions::default(), ferrokv::ptx())` takes a GPU if it can.
//! let device = Device::cpu(EmuOptions::default());
//! let stream = Stream::new(&device)?;
//! let values: Vec<f32> = (0..64 * 32).map(|i| (i as f32 * 0.37).sin()).collect();
//! let keys = Buffer::from_slice(&device, &values)?;
//!
//! let mut plan = Plan::<f32>::new(&device, Matrix::new(64, 32)?, Variant::Rows)?;
//! let mut quantized = plan.allocate()?;
//! plan.quantize(&stream, &keys, &mut quantized)?;
//! let mut restored = Buffer::new(&device, values.len())?;
//! plan.dequantize(&stream, &quantized, &mut restored)?;
//!
//! // Half a step of each channel's scale is the most that a value may move.
//! let scales = quantized.scales.to_vec()?;
//! for (i, (x, y)) in values.iter().zip(restored.to_vec()?).enumerate() {
//!     let bound = ferrokv::kernels_gpu::int8::quantizer::error_bound::<f32>(scales[i % 32]);
//!     assert!(f64::from((x - y).abs()) <= bound);
//! }
//! # Ok::<(), ferrokv::host::int8::Error>(())
//! ```

#[cfg(doctest)]
mod doc_tests;

pub use host;
pub use kernels_gpu;
pub use simt;

use host::PtxImage;
use simt::KernelInfo;
use std::sync::LazyLock;

/// What the build made of the kernels: the PTX, its entries and what they use.
pub mod embedded {
    include!(concat!(env!("OUT_DIR"), "/ptx_index.rs"));
}

/// The kernels' PTX, one image a target, each with its machine code where the build had ptxas; empty if the
/// build had no device compiler ([`embedded::BUILD_NOTE`] says why).
pub fn ptx() -> &'static [PtxImage] {
    static IMAGES: LazyLock<Vec<PtxImage>> =
        LazyLock::new(|| PtxImage::of(embedded::PTX, embedded::MACHINE_CODE));
    &IMAGES
}

/// What one code generator made of the kernels.
#[derive(Clone, Copy, Debug)]
pub struct Generated {
    /// Its name: `llvm` or `nvvm`.
    pub name: &'static str,
    /// Sixteen hexadecimal digits that change with its PTX.
    pub fingerprint: &'static str,
    /// An image a target; none as [`ptx`] says.
    pub images: &'static [PtxImage],
}

/// What each code generator made that the build was asked for, at least one: the one of [`ptx`] first, and a
/// second one, if there is one.
pub fn generated() -> Vec<Generated> {
    static SECOND: LazyLock<Vec<PtxImage>> =
        LazyLock::new(|| PtxImage::of(embedded::SECOND_PTX, embedded::SECOND_MACHINE_CODE));
    let first = Generated { name: embedded::CODEGEN, fingerprint: embedded::FINGERPRINT, images: ptx() };
    let fingerprint = embedded::SECOND_FINGERPRINT;
    let second = embedded::SECOND_CODEGEN.map(|name| Generated { name, fingerprint, images: &SECOND });
    [first].into_iter().chain(second).collect()
}

/// Every kernel instance, with the name of the system it belongs to.
pub fn kernels() -> impl Iterator<Item = (&'static str, &'static KernelInfo)> {
    host::SYSTEMS.iter().flat_map(|system| (system.kernels)().into_iter().map(|kernel| (system.name, kernel)))
}
