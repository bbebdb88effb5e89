//! A matrix to 8 bits and back.

use crate::device::{borrowed, ferrokv_device, load, on_slices};
use crate::status::{Failure, Status, call, end, give, handle};
use crate::tensor::{Count, Dtype, Element, buffer, dtype, ferrokv_tensor, tensor};
use ::ferrokv_device::cpu::handles::{slice, slice_mut};
use half::{bf16, f16};
use host::int8::{Int8Element, Matrix, Plan, Quantized, SYSTEM, Variant, cpu};
use host::{Device, Stream};
use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;

/// A plan for matrices of one shape and type.
pub struct ferrokv_int8 {
    device: Device,
    scales: u64,
    plan: Mutex<Box<dyn Int8>>,
}

/// The matrix, its codes and its scales.
struct Tensors {
    matrix: ferrokv_tensor,
    codes: ferrokv_tensor,
    scales: ferrokv_tensor,
}

/// A plan of any type.
trait Int8: Send {
    /// # Safety
    /// The contract of [`ferrokv_int8_quantize`].
    unsafe fn quantize(&mut self, device: &Device, stream: &Stream, tensors: &Tensors)
    -> Result<(), Failure>;
    /// # Safety
    /// The contract of [`ferrokv_int8_dequantize`].
    unsafe fn dequantize(
        &mut self,
        device: &Device,
        stream: &Stream,
        tensors: &Tensors,
    ) -> Result<(), Failure>;
}

/// Codes and scales as buffers.
///
/// # Safety
/// The contract of [`buffer`].
unsafe fn quantized<T: Int8Element>(
    plan: &Plan<T>,
    device: &Device,
    tensors: &Tensors,
) -> Result<Quantized, Failure> {
    let (matrix, scales) = (plan.matrix(), plan.matrix().scales(plan.variant()));
    // SAFETY: this function's contract.
    unsafe {
        Ok(Quantized {
            codes: buffer(device, "codes", &tensors.codes, Count::Exactly(matrix.elements()))?,
            scales: buffer(device, "scales", &tensors.scales, Count::Exactly(scales))?,
        })
    }
}

impl<T: Int8Element + Element> Int8 for Plan<T> {
    unsafe fn quantize(
        &mut self,
        device: &Device,
        stream: &Stream,
        tensors: &Tensors,
    ) -> Result<(), Failure> {
        let (matrix, variant) = (self.matrix(), self.variant());
        // SAFETY: the caller's word.
        let (keys, mut out) = unsafe {
            let keys = buffer::<T>(device, "matrix", &tensors.matrix, Count::Exactly(matrix.elements()))?;
            (keys, quantized(self, device, tensors)?)
        };
        if !on_slices(device) {
            return Ok(Plan::quantize(self, stream, &keys, &mut out)?);
        }
        // SAFETY: host memory, as long as just seen, and by the caller's word nobody else's during the call.
        let (keys, codes, scales) = unsafe {
            (slice(keys.global()), slice_mut(out.codes.global_mut()), slice_mut(out.scales.global_mut()))
        };
        if variant == Variant::Fused {
            cpu::quantize_blocks(keys, matrix, scales, codes);
        } else {
            cpu::column_scales(keys, matrix, scales);
            cpu::quantize(keys, matrix, scales, codes);
        }
        Ok(())
    }

    unsafe fn dequantize(
        &mut self,
        device: &Device,
        stream: &Stream,
        tensors: &Tensors,
    ) -> Result<(), Failure> {
        let matrix = self.matrix();
        // SAFETY: the caller's word.
        let (mut keys, from) = unsafe {
            let keys = buffer::<T>(device, "matrix", &tensors.matrix, Count::Exactly(matrix.elements()))?;
            (keys, quantized(self, device, tensors)?)
        };
        if !on_slices(device) {
            return Ok(Plan::dequantize(self, stream, &from, &mut keys)?);
        }
        // SAFETY: as above.
        let (codes, scales, keys) = unsafe {
            (slice(from.codes.global()), slice(from.scales.global()), slice_mut(keys.global_mut()))
        };
        cpu::dequantize(codes, matrix, scales, keys);
        Ok(())
    }
}

fn open<T: Int8Element + Element>(
    device: &Device,
    matrix: Matrix,
    variant: Variant,
) -> Result<Box<dyn Int8>, Failure> {
    Ok(Box::new(Plan::<T>::new(device, matrix, variant)?))
}

/// A plan for row-major matrices of so many tokens (rows) and channels (columns), of float32, float16 or
/// bfloat16. `variant` says which kernels do it: `wide` is the fastest with a scale for each channel, `fused`
/// the one with a scale for each channel of 16 tokens; null is `wide`.
///
/// # Safety
/// `device` is null or a handle, `variant` null or a string that ends in 0, `out` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_int8_create(
    device: *const ferrokv_device,
    element: u32,
    tokens: u64,
    channels: u64,
    variant: *const c_char,
    out: *mut *mut ferrokv_int8,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        give(out, || {
            let device = handle("device", device)?.device.clone();
            let variant = match variant.is_null() {
                true => Variant::Wide,
                false => CStr::from_ptr(variant).to_string_lossy().parse()?,
            };
            let extent = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
            let matrix = Matrix::new(extent(tokens), extent(channels))?;
            let plan = match dtype("the plan's element", element, &[Dtype::F32, Dtype::F16, Dtype::Bf16])? {
                Dtype::F16 => open::<f16>(&device, matrix, variant)?,
                Dtype::Bf16 => open::<bf16>(&device, matrix, variant)?,
                _ => open::<f32>(&device, matrix, variant)?,
            };
            load(&device, (SYSTEM.kernels)())?;
            Ok(ferrokv_int8 { device, scales: matrix.scales(variant) as u64, plan: Mutex::new(plan) })
        })
    }
}

/// How many scales a plan's matrix has: one a channel, or one a channel of 16 tokens; 0 for null.
///
/// # Safety
/// `int8` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_int8_scales(int8: *const ferrokv_int8) -> u64 {
    // SAFETY: this function's contract.
    unsafe { handle("plan", int8) }.map_or(0, |int8| int8.scales)
}

/// # Safety
/// As for the two functions that call it.
unsafe fn run(
    int8: *const ferrokv_int8,
    stream: *mut c_void,
    tensors: [*const ferrokv_tensor; 3],
    what: impl FnOnce(&mut dyn Int8, &Device, &Stream, &Tensors) -> Result<(), Failure>,
) -> Status {
    // SAFETY: this function's contract.
    call(|| unsafe {
        let ferrokv_int8 { device, plan, .. } = handle("plan", int8)?;
        let [matrix, codes, scales] = tensors;
        let tensors = Tensors {
            matrix: tensor("matrix", matrix)?,
            codes: tensor("codes", codes)?,
            scales: tensor("scales", scales)?,
        };
        let mut plan = plan.lock().map_err(|_| Failure::broken("plan"))?;
        what(&mut **plan, device, &borrowed(device, stream)?, &tensors)
    })
}

/// Scales and codes of a matrix, behind what is in `stream`: `matrix` [tokens, channels] of the plan's type,
/// `codes` [tokens, channels] int8, `scales` float32.
///
/// # Safety
/// `int8` is null or a handle, the tensors null or valid for a read, `stream` a stream of the device
/// that nothing else is put into during the call. Until the launches have finished (for a capture: each run
/// of the graph) all tensors are there, nothing else writes what is read or touches what is written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_int8_quantize(
    int8: *const ferrokv_int8,
    stream: *mut c_void,
    matrix: *const ferrokv_tensor,
    codes: *const ferrokv_tensor,
    scales: *const ferrokv_tensor,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        run(int8, stream, [matrix, codes, scales], |plan, device, stream, tensors| {
            plan.quantize(device, stream, tensors)
        })
    }
}

/// The matrix that codes and scales stand for, as [`ferrokv_int8_quantize`] has them.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_int8_dequantize(
    int8: *const ferrokv_int8,
    stream: *mut c_void,
    codes: *const ferrokv_tensor,
    scales: *const ferrokv_tensor,
    matrix: *const ferrokv_tensor,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        run(int8, stream, [matrix, codes, scales], |plan, device, stream, tensors| {
            plan.dequantize(device, stream, tensors)
        })
    }
}

/// Ends a plan: its launches have finished, and no graph that has them runs again.
///
/// # Safety
/// `int8` is null or a handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_int8_destroy(int8: *mut ferrokv_int8) {
    // SAFETY: this function's contract.
    unsafe { end(int8) }
}
