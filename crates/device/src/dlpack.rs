//! Tensors of other libraries as DLPack describes them (`dlpack.h`, version 1): PyTorch, JAX, CuPy, TVM,
//! numpy and others hand them over.
//!
//! What a library hands over is a `DLManagedTensor` or a `DLManagedTensorVersioned` with a [`DlTensor`] in
//! it, and a function that gives it back. Here only the [`DlTensor`] is looked at: whoever got the managed
//! one keeps it for as long as the buffer, and gives it back.

use crate::buffer::Buffer;
use crate::device::{BackendKind, Device};
use crate::error::{Error, Result};
use bytemuck::Pod;
use half::{bf16, f16};
use std::ffi::c_void;

/// `DLDevice`: where memory is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDevice {
    /// The kind, a `DLDeviceType`: 1 is the CPU, 2 CUDA, 3 pinned memory of the host, 13 managed memory.
    pub device_type: i32,
    /// Its number among those of the kind.
    pub device_id: i32,
}

impl DlDevice {
    const CPU: i32 = 1;
    const CUDA: i32 = 2;
    const CUDA_HOST: i32 = 3;
    const CUDA_MANAGED: i32 = 13;

    /// Whether work of `device` may take memory there.
    fn is_of(self, device: &Device) -> bool {
        match device.kind() {
            BackendKind::Cpu => matches!(self.device_type, Self::CPU | Self::CUDA_HOST | Self::CUDA_MANAGED),
            BackendKind::Cuda => match self.device_type {
                Self::CUDA => i64::from(self.device_id) == i64::from(device.info().ordinal),
                Self::CUDA_MANAGED => true,
                _ => false,
            },
        }
    }

    fn words(self) -> String {
        let DlDevice { device_type, device_id } = self;
        match device_type {
            Self::CPU => "the CPU".into(),
            Self::CUDA => format!("GPU {device_id}"),
            Self::CUDA_HOST => "pinned memory of the host".into(),
            other => format!("number {device_id} of DLPack's devices of type {other}"),
        }
    }
}

/// `DLDataType`: what elements are.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlType {
    /// A `DLDataTypeCode`: 0 is a signed integer, 1 an unsigned one, 2 a float, 4 a bfloat.
    pub code: u8,
    /// Of a lane.
    pub bits: u8,
    /// Lanes of a vector; 1 for a scalar.
    pub lanes: u16,
}

impl DlType {
    const INT: u8 = 0;
    const UINT: u8 = 1;
    const FLOAT: u8 = 2;
    const BFLOAT: u8 = 4;

    const fn scalar(code: u8, bits: u8) -> Self {
        DlType { code, bits, lanes: 1 }
    }

    /// What it is called, such as `float16`.
    #[must_use]
    pub fn name(self) -> String {
        let DlType { code, bits, lanes } = self;
        let name = match code {
            Self::INT => format!("int{bits}"),
            Self::UINT => format!("uint{bits}"),
            Self::FLOAT => format!("float{bits}"),
            Self::BFLOAT => format!("bfloat{bits}"),
            other => format!("DLPack's type {other} of {bits} bits"),
        };
        if lanes == 1 { name } else { format!("{name} x {lanes}") }
    }

    /// Integers of one width are the same bits, signed or not.
    fn holds(self, wanted: DlType) -> bool {
        let integer = |of: DlType| matches!(of.code, Self::INT | Self::UINT);
        let same = self.code == wanted.code || integer(self) && integer(wanted);
        same && (self.bits, self.lanes) == (wanted.bits, wanted.lanes)
    }
}

/// An element that DLPack has a type for.
pub trait DlElement: Pod {
    /// That type.
    const TYPE: DlType;
}

macro_rules! elements {
    ($($element:ty: $code:ident $bits:literal),*) => {$(
        impl DlElement for $element {
            const TYPE: DlType = DlType::scalar(DlType::$code, $bits);
        }
    )*};
}
elements!(
    i8: INT 8, i16: INT 16, i32: INT 32, i64: INT 64, u8: UINT 8, u16: UINT 16, u32: UINT 32, u64: UINT 64,
    f16: FLOAT 16, f32: FLOAT 32, f64: FLOAT 64, bf16: BFLOAT 16
);

/// `DLTensor`: memory, and how elements lie in it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DlTensor {
    /// Where the memory starts: a device pointer on a GPU.
    pub data: *mut c_void,
    /// Where it is.
    pub device: DlDevice,
    /// Dimensions.
    pub ndim: i32,
    /// What elements are.
    pub dtype: DlType,
    /// Extents, \[ndim\].
    pub shape: *mut i64,
    /// Steps from an element to the next one of each dimension, in elements, \[ndim\]; null if elements lie
    /// one after another, the last dimension first.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

impl DlTensor {
    /// Shape and strides as slices; no strides where elements lie one after another.
    ///
    /// # Safety
    /// `shape`, and `strides` unless it is null, have `ndim` elements.
    unsafe fn extents(&self) -> Result<(&[i64], Option<&[i64]>)> {
        let count =
            usize::try_from(self.ndim).map_err(|_| refused(format!("has {} dimensions", self.ndim)))?;
        if count == 0 {
            return Ok((&[], None));
        }
        if self.shape.is_null() {
            return Err(refused(format!("has {count} dimensions and no shape")));
        }
        // SAFETY: this function's contract.
        let shape = unsafe { std::slice::from_raw_parts(self.shape, count) };
        // SAFETY: as above, where there are strides.
        let strides =
            (!self.strides.is_null()).then(|| unsafe { std::slice::from_raw_parts(self.strides, count) });
        Ok((shape, strides))
    }

    /// How many elements there are, if they lie one after another.
    ///
    /// # Safety
    /// `shape`, and `strides` unless it is null, have `ndim` elements.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    pub unsafe fn elements(&self) -> Result<usize> {
        // SAFETY: this function's contract.
        let (shape, strides) = unsafe { self.extents() }?;
        let count = shape.iter().try_fold(1usize, |count, extent| {
            let extent = usize::try_from(*extent).ok()?;
            count.checked_mul(extent)
        });
        let count = count.ok_or_else(|| refused(format!("has shape {shape:?}")))?;
        if let Some(strides) = strides.filter(|_| count > 0) {
            // Of a dimension of one element nobody takes a step.
            let mut step = 1i64;
            for (extent, stride) in shape.iter().zip(strides).rev() {
                if *extent != 1 && *stride != step {
                    return Err(refused(format!(
                        "has shape {shape:?} and strides {strides:?}, so that its elements do not lie one after another"
                    )));
                }
                step = step.saturating_mul(*extent);
            }
        }
        Ok(count)
    }

    /// Where the first element is, of memory of `device` with elements of a type.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the memory is elsewhere, or elements are of another type.
    pub fn address(&self, device: &Device, wanted: DlType) -> Result<u64> {
        if !self.device.is_of(device) {
            return Err(refused(format!(
                "is on {}, and the device is {}",
                self.device.words(),
                device.info().name
            )));
        }
        if !self.dtype.holds(wanted) {
            return Err(refused(format!("is of {}, and {} is needed", self.dtype.name(), wanted.name())));
        }
        let start = self.data.expose_provenance() as u64;
        start
            .checked_add(self.byte_offset)
            .ok_or_else(|| refused(format!("begins {} bytes behind {start:#x}", self.byte_offset)))
    }
}

fn refused(reason: String) -> Error {
    Error::Tensor { reason }
}

impl<T: DlElement> Buffer<T> {
    /// A tensor that another library hands over, all elements of it, as [`from_raw`](Self::from_raw) has
    /// memory. Nothing is copied. What it takes of a GPU: memory of the same number among the driver's GPUs,
    /// and managed memory; of the CPU: its own, pinned and managed memory. Integers of one width are taken
    /// signed or not.
    ///
    /// # Safety
    /// The contract of `from_raw`; `shape`, and `strides` unless it is null, have `ndim` elements. The
    /// managed tensor is not given back until the buffer is dropped and all work that was given it has
    /// finished. Of a versioned one the major version is 1, and what is flagged read-only is not written. The
    /// library's own work on the memory is ordered with this device's.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is elsewhere, of another type, or its elements do not lie one after another;
    /// those of `from_raw`.
    pub unsafe fn from_dlpack(device: &Device, tensor: &DlTensor) -> Result<Self> {
        let address = tensor.address(device, T::TYPE)?;
        // SAFETY: this function's contract.
        unsafe { Buffer::from_raw(device, address, tensor.elements()?) }
    }
}
