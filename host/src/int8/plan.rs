//! Plan and run: a plan owns its scratch and fixes the launches; running it allocates nothing, waits for
//! nothing and can be captured in a graph.

use super::{Error, Int8Element, Matrix, Result, Variant};
use crate::{Buffer, Device, Stream};
use kernels_gpu::int8::{
    column_maxima, dequantize_naive, finish_scales, first_nonfinite, launch, quantize_fused, quantize_naive,
};
use simt::LaunchShape;
use std::marker::PhantomData;

/// Codes and scales of one matrix.
pub struct Quantized {
    /// int8 codes, row-major [tokens, channels].
    pub codes: Buffer<i8>,
    /// f32 scales, \[channels\], or [⌈tokens/16⌉, channels] from [`Variant::Fused`].
    pub scales: Buffer<f32>,
}

/// The launches that quantize matrices of one shape and element type, and their scratch.
pub struct Plan<T: Int8Element> {
    device: Device,
    matrix: Matrix,
    variant: Variant,
    /// The launch of the variant's kernels.
    shape: LaunchShape,
    /// Of the way back.
    back: LaunchShape,
    scan: LaunchShape,
    check: LaunchShape,
    /// Bits of the column maxima, \[channels\].
    maxima: Buffer<u32>,
    /// Flat index of the first value that is not finite.
    first: Buffer<u64>,
    element: PhantomData<T>,
}

impl<T: Int8Element> Plan<T> {
    /// A plan for matrices of this shape.
    ///
    /// # Errors
    /// [`Error::Empty`]; [`Error::TooLarge`] where a launch cannot number its threads; out of memory for the
    /// scratch (4 bytes a channel).
    pub fn new(device: &Device, matrix: Matrix, variant: Variant) -> Result<Self> {
        // The fields are public: what follows counts on their limits.
        let matrix = Matrix::new(matrix.tokens, matrix.channels)?;
        let too_large = || Error::TooLarge { tokens: matrix.tokens, channels: matrix.channels };
        let shape = matrix.shape();
        let launches = match variant {
            Variant::Naive => Some(launch::naive(shape)),
            Variant::Tiled => Some(launch::tiled(shape)),
            Variant::Coarsened => Some(launch::coarsened(shape)),
            Variant::Vectorized => launch::vectorized(shape),
            Variant::Rows => launch::rows(shape),
            Variant::Wide if matrix.is_wide() => launch::wide(shape),
            Variant::Wide => launch::rows(shape),
            Variant::Fused => launch::fused(shape),
        };
        let back = match variant {
            Variant::Wide if matrix.is_wide_back() => launch::wide_back::<T>(shape),
            Variant::Wide => launch::rows(shape),
            _ => launches,
        };
        Ok(Plan {
            device: device.clone(),
            matrix,
            variant,
            shape: launches.ok_or_else(too_large)?,
            back: back.ok_or_else(too_large)?,
            scan: launch::column_maxima(shape).ok_or_else(too_large)?,
            check: launch::first_nonfinite(shape).ok_or_else(too_large)?,
            maxima: Buffer::zeroed(device, matrix.channels)?,
            first: Buffer::zeroed(device, 1)?,
            element: PhantomData,
        })
    }

    /// The matrix that the plan is for.
    pub fn matrix(&self) -> Matrix {
        self.matrix
    }

    /// Which kernels it launches.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Buffers for the codes and scales of one matrix.
    ///
    /// # Errors
    /// Out of memory.
    pub fn allocate(&self) -> Result<Quantized> {
        Ok(Quantized {
            codes: Buffer::new(&self.device, self.matrix.elements())?,
            scales: Buffer::new(&self.device, self.matrix.scales(self.variant))?,
        })
    }

    fn length(&self, what: &'static str, got: usize, expected: usize) -> Result<()> {
        if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected, matrix: self.matrix }) }
    }

    /// Plan and keys must be of the stream's device: an address means nothing on another.
    fn check_device(&self, stream: &Stream, keys: &Buffer<T>) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        Ok(stream.device().check_same(keys.device(), "the matrix")?)
    }

    fn check_buffers(
        &self,
        stream: &Stream,
        keys: &Buffer<T>,
        codes: &Buffer<i8>,
        scales: &Buffer<f32>,
    ) -> Result<()> {
        self.check_device(stream, keys)?;
        stream.device().check_same(codes.device(), "the buffer of codes")?;
        stream.device().check_same(scales.device(), "the buffer of scales")?;
        self.length("the matrix", keys.len(), self.matrix.elements())?;
        self.length("codes", codes.len(), self.matrix.elements())?;
        self.length("scales", scales.len(), self.matrix.scales(self.variant))
    }

    /// Equation (6): the scale of each column, on the device. Does nothing for [`Variant::Fused`], whose
    /// scales come with the codes.
    ///
    /// # Errors
    /// [`Error::Length`] for buffers of another matrix; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub fn scales(&mut self, stream: &Stream, keys: &Buffer<T>, out: &mut Quantized) -> Result<()> {
        self.check_buffers(stream, keys, &out.codes, &out.scales)?;
        if self.variant == Variant::Fused {
            return Ok(());
        }
        let shape = self.matrix.shape();
        stream.fill_u32(&mut self.maxima, .., 0)?;
        let maxima = self.maxima.global_mut();
        // SAFETY: the buffers hold what `shape` says (checked above; `maxima` was made for it); the kernels
        // stay inside and have no race, which their tests under the emulator show for every kind of shape.
        unsafe {
            let arguments =
                column_maxima::Args { keys: keys.global(), maxima, shape, band: launch::scan_band(shape) };
            stream.launch(&T::KERNELS.column_maxima, self.scan, arguments)?;
            let arguments = finish_scales::Args {
                maxima: maxima.as_const(),
                scales: out.scales.global_mut(),
                channels: shape.channels,
            };
            stream.launch(&T::KERNELS.finish_scales, launch::finish_scales(shape), arguments)?;
        }
        Ok(())
    }

    /// Equation (7) with the scales in `out`; [`Variant::Fused`] makes the scales as well.
    ///
    /// # Errors
    /// [`Error::Length`] for buffers of another matrix; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub fn codes(&self, stream: &Stream, keys: &Buffer<T>, out: &mut Quantized) -> Result<()> {
        self.check_buffers(stream, keys, &out.codes, &out.scales)?;
        let kernels = &T::KERNELS;
        let shape = self.matrix.shape();
        let kernel = match self.variant {
            Variant::Naive => &kernels.quantize_naive,
            Variant::Tiled => &kernels.quantize_tiled,
            Variant::Coarsened => &kernels.quantize_coarsened,
            Variant::Vectorized => &kernels.quantize_vectorized,
            Variant::Wide if self.matrix.is_wide() => &kernels.quantize_wide,
            Variant::Rows | Variant::Wide => &kernels.quantize_rows,
            Variant::Fused => {
                let arguments = quantize_fused::Args {
                    keys: keys.global(),
                    scales: out.scales.global_mut(),
                    codes: out.codes.global_mut(),
                    shape,
                };
                // SAFETY: as in `scales`.
                unsafe { stream.launch(&kernels.quantize_fused, self.shape, arguments)? };
                return Ok(());
            }
        };
        // Every variant takes the naive one's arguments.
        let arguments = quantize_naive::Args {
            keys: keys.global(),
            scales: out.scales.global(),
            codes: out.codes.global_mut(),
            shape,
        };
        // SAFETY: as in `scales`.
        unsafe { stream.launch(kernel, self.shape, arguments)? };
        Ok(())
    }

    /// Scales and codes.
    ///
    /// # Errors
    /// Those of [`scales`](Self::scales) and [`codes`](Self::codes).
    pub fn quantize(&mut self, stream: &Stream, keys: &Buffer<T>, out: &mut Quantized) -> Result<()> {
        self.scales(stream, keys, out)?;
        self.codes(stream, keys, out)
    }

    /// Equation (8).
    ///
    /// # Errors
    /// [`Error::Length`] for buffers of another matrix; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub fn dequantize(&self, stream: &Stream, from: &Quantized, keys: &mut Buffer<T>) -> Result<()> {
        self.check_buffers(stream, keys, &from.codes, &from.scales)?;
        let kernels = &T::KERNELS;
        let kernel = match self.variant {
            Variant::Naive => &kernels.dequantize_naive,
            Variant::Tiled => &kernels.dequantize_tiled,
            Variant::Coarsened => &kernels.dequantize_coarsened,
            Variant::Vectorized => &kernels.dequantize_vectorized,
            Variant::Wide if self.matrix.is_wide_back() => &kernels.dequantize_wide,
            Variant::Rows | Variant::Wide => &kernels.dequantize_rows,
            Variant::Fused => &kernels.dequantize_fused,
        };
        // As in `codes`.
        let arguments = dequantize_naive::Args {
            codes: from.codes.global(),
            scales: from.scales.global(),
            keys: keys.global_mut(),
            shape: self.matrix.shape(),
        };
        // SAFETY: as in `scales`.
        unsafe { stream.launch(kernel, self.back, arguments)? };
        Ok(())
    }

    /// The flat index of the first NaN or infinity, if there is one. Waits for the stream.
    ///
    /// The kernels accept such values (NaN gets code 0, infinities saturate), but no error bound covers them.
    ///
    /// # Errors
    /// [`Error::Length`] for a buffer of another matrix; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub fn first_nonfinite(&mut self, stream: &Stream, keys: &Buffer<T>) -> Result<Option<usize>> {
        self.check_device(stream, keys)?;
        drop(stream.outside_capture("looking for a value that is not finite")?);
        self.length("the matrix", keys.len(), self.matrix.elements())?;
        stream.fill_u8(&mut self.first, .., 0xff)?;
        let arguments = first_nonfinite::Args {
            keys: keys.global(),
            first: self.first.global_mut(),
            shape: self.matrix.shape(),
        };
        // SAFETY: as in `scales`.
        unsafe { stream.launch(&T::KERNELS.first_nonfinite, self.check, arguments)? };
        let mut first = [0];
        stream.download(&self.first, 0, &mut first)?;
        stream.synchronize()?;
        Ok((first[0] != u64::MAX).then_some(first[0] as usize))
    }
}
