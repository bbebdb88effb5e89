//! Tensors that others own.

use crate::device::ferrokv_device;
use crate::status::{Failure, Status, call, handle};
use ::ferrokv_device::dlpack::{DlElement, DlTensor, DlType};
use bytemuck::Pod;
use half::{bf16, f16};
use host::{Buffer, Device, Error};
use std::ffi::c_void;

/// Types of elements.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE-754 binary32.
    F32 = 0,
    /// IEEE-754 binary16.
    F16 = 1,
    /// The upper half of a binary32.
    Bf16 = 2,
    /// Signed, 8 bits.
    I8 = 3,
    /// 32 bits; numbers below 2^31 are the same signed or not.
    I32 = 4,
}

impl Dtype {
    pub(crate) const ALL: [Dtype; 5] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8, Dtype::I32];

    /// Its type in DLPack.
    fn in_dlpack(self) -> DlType {
        match self {
            Dtype::F32 => f32::TYPE,
            Dtype::F16 => f16::TYPE,
            Dtype::Bf16 => bf16::TYPE,
            Dtype::I8 => i8::TYPE,
            Dtype::I32 => i32::TYPE,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::F16 => "float16",
            Dtype::Bf16 => "bfloat16",
            Dtype::I8 => "int8",
            Dtype::I32 => "int32",
        }
    }
}

/// The type with number `dtype`, one of `allowed`.
pub(crate) fn dtype(what: &str, dtype: u32, allowed: &[Dtype]) -> Result<Dtype, Failure> {
    allowed.iter().copied().find(|known| *known as u32 == dtype).ok_or_else(|| {
        let found = Dtype::ALL.iter().find(|known| **known as u32 == dtype);
        let found = found.map_or_else(|| format!("type number {dtype}"), |known| known.name().to_string());
        let names: Vec<&str> = allowed.iter().map(|known| known.name()).collect();
        Failure::argument(format!("{what} is of {found}; give it in {}", names.join(" or ")))
    })
}

/// Elements in memory that the caller owns, one after another.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferrokv_tensor {
    /// The first; of a device pointer on a GPU.
    pub data: *mut c_void,
    /// How many there are.
    pub elements: u64,
    /// Their type, a [`Dtype`].
    pub dtype: u32,
    /// 0.
    pub reserved: u32,
}

/// Elements that have a [`Dtype`].
pub(crate) trait Element: Pod {
    const DTYPE: Dtype;
    /// What kernels may take at once of such a tensor: vectors of 16 bytes, but for indices.
    const ALIGN: usize;
}

macro_rules! elements {
    ($($element:ty: $dtype:ident $align:literal),*) => {$(
        impl Element for $element {
            const DTYPE: Dtype = Dtype::$dtype;
            const ALIGN: usize = $align;
        }
    )*};
}
elements!(f32: F32 16, f16: F16 16, bf16: Bf16 16, i8: I8 16, u32: I32 4);

/// How many elements a tensor must have.
#[derive(Clone, Copy)]
pub(crate) enum Count {
    Exactly(usize),
    /// A multiple of this, at least once.
    Multiple(usize),
}

/// A tensor as a buffer.
///
/// # Safety
/// The contract of [`Buffer::from_raw`], but for address, alignment and number, which are checked as
/// far as they can be.
pub(crate) unsafe fn buffer<T: Element>(
    device: &Device,
    what: &str,
    tensor: &ferrokv_tensor,
    count: Count,
) -> Result<Buffer<T>, Failure> {
    dtype(what, tensor.dtype, &[T::DTYPE])?;
    let elements = usize::try_from(tensor.elements).unwrap_or(usize::MAX);
    let fits = match count {
        Count::Exactly(expected) => elements == expected,
        Count::Multiple(of) => elements != 0 && elements.is_multiple_of(of.max(1)),
    };
    if !fits {
        let expected = match count {
            Count::Exactly(expected) => format!("{expected}"),
            Count::Multiple(of) => format!("a multiple of {of}"),
        };
        let message =
            format!("{what} has {elements} elements, and {expected} are needed; give it in the plan's shape");
        return Err(Failure::argument(message));
    }
    let address = tensor.data.expose_provenance() as u64;
    if address == 0 || !address.is_multiple_of(T::ALIGN as u64) {
        let align = T::ALIGN;
        let message = format!(
            "{what} is at {address:#x}, which is no multiple of {align} bytes; give a copy of its own memory"
        );
        return Err(Failure::argument(message));
    }
    // SAFETY: the caller's word; the address was seen to be aligned.
    unsafe { Buffer::from_raw(device, address, elements) }.map_err(|error| match error {
        Error::Misaligned { .. } | Error::NotReached { .. } | Error::TooLarge { .. } => {
            Failure::argument(format!("{what}: {error}"))
        }
        error => error.into(),
    })
}

/// What a pointer to a tensor points at.
///
/// # Safety
/// It is null or valid for reads.
pub(crate) unsafe fn tensor(what: &str, tensor: *const ferrokv_tensor) -> Result<ferrokv_tensor, Failure> {
    // SAFETY: this function's contract.
    let found = unsafe { tensor.as_ref() };
    found.copied().ok_or_else(|| Failure::argument(format!("{what} is NULL; give a tensor")))
}

/// A tensor of another library, as DLPack hands it over, as one of this: of the device, of one of the types
/// here, with elements one after another. Nothing is copied, and nothing kept: the managed tensor stays the
/// caller's.
///
/// # Safety
/// `device` is null or a handle; `dl_tensor` is null or a `DLTensor` whose `shape`, and `strides` unless it
/// is null, have `ndim` elements; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_tensor_from_dlpack(
    device: *const ferrokv_device,
    dl_tensor: *const c_void,
    out: *mut ferrokv_tensor,
) -> Status {
    // SAFETY: this function's contract.
    call(|| unsafe {
        let device = &handle("device", device)?.device;
        let given = dl_tensor.cast::<DlTensor>().as_ref();
        let given = given.ok_or_else(|| Failure::argument("the DLPack tensor is NULL; give a DLTensor"))?;
        let out = out.as_mut();
        let out =
            out.ok_or_else(|| Failure::argument("the place for the tensor is NULL; give an address"))?;
        let known = Dtype::ALL.into_iter().find(|dtype| dtype.in_dlpack() == given.dtype);
        let dtype = known.ok_or_else(|| {
            let names = Dtype::ALL.map(Dtype::name).join(", ");
            Failure::argument(format!("the tensor is of {}; give it in one of {names}", given.dtype.name()))
        })?;
        let address = given.address(device, given.dtype)?;
        let elements = given.elements()? as u64;
        let data = std::ptr::with_exposed_provenance_mut(address as usize);
        *out = ferrokv_tensor { data, elements, dtype: dtype as u32, reserved: 0 };
        Ok(())
    })
}
