//! Tensor maps, as the driver makes them.

use super::ffi::{check, tensor_map_encode_tiled};
use crate::error::{Error, Result};
use simt::{Swizzle, TensorMap, TensorMapShape};
use std::ffi::c_void;

/// The driver's code for what it does not have.
const NOT_SUPPORTED: u32 = 801;

/// `CU_TENSOR_MAP_INTERLEAVE_NONE`.
const NO_INTERLEAVE: u32 = 0;
/// `CU_TENSOR_MAP_L2_PROMOTION_L2_128B`: what is read comes to the second-level cache in lines.
const WHOLE_LINES: u32 = 2;
/// `CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE`: zeros in the place of what is outside.
const ZEROS: u32 = 0;

/// What the driver writes, aligned as it asks.
#[repr(align(64))]
struct Words([u64; 16]);

/// The map of a tensor at `address`, whose shape is checked.
pub(super) fn encode(shape: &TensorMapShape, address: u64) -> Result<TensorMap> {
    let swizzle = match shape.swizzle() {
        Swizzle::None => 0,
        Swizzle::B32 => 1,
        Swizzle::B64 => 2,
        Swizzle::B128 => 3,
    };
    let mut map = Words([0; 16]);
    let rank = shape.rank();
    let steps = vec![1; rank];
    // SAFETY: the arrays have `rank` elements, and the strides one less, from the second on; the driver reads
    // them and writes the map, which is aligned to 64 bytes. The address is but a number to it.
    let code = unsafe {
        tensor_map_encode_tiled(
            &raw mut map.0,
            shape.format(),
            rank as u32,
            address as *mut c_void,
            shape.extents().as_ptr(),
            shape.strides()[1..].as_ptr(),
            shape.tile().as_ptr(),
            steps.as_ptr(),
            NO_INTERLEAVE,
            swizzle,
            WHOLE_LINES,
            ZEROS,
        )
    };
    if code == NOT_SUPPORTED {
        return Err(Error::NoTensorMaps);
    }
    check(code, || format!("making a tensor map of {shape:?} at {address:#x}"))?;
    Ok(TensorMap::from_words(map.0))
}
