//! Where a case runs: the emulator, or a GPU.

use ferrokv_device::{Buffer, Device, Error, Result, Stream};
use simt::emu::{self, EmuOptions, allocations};
use simt::{Global, GlobalMut, Kernel, KernelArgs, LaunchShape, Pod, TensorMap, TensorMapShape};
use std::cell::RefCell;

/// The emulator with some options, or a GPU. A case asks it for memory and for launches; it is made anew for
/// each run.
pub enum Machine {
    /// The emulator: kernels use the case's own memory.
    Emulator(EmuOptions),
    /// A GPU: kernels use copies of it.
    Gpu(Gpu),
}

/// A GPU's stream, and what it holds of the case's memory.
pub struct Gpu {
    stream: Stream,
    copies: RefCell<Vec<Copied>>,
}

/// Device memory of exactly as many bytes as the case's own.
struct Copied {
    host: *mut u8,
    device: Buffer<u8>,
    /// Whether the case looks at what the launch wrote.
    comes_back: bool,
}

impl Gpu {
    /// The copy at `address`.
    fn copy<R>(&self, address: u64, f: impl FnOnce(&mut Copied) -> R) -> R {
        let mut copies = self.copies.borrow_mut();
        let copy = copies.iter_mut().find(|copy| copy.device.global().address() == address);
        f(copy.expect("the machine has placed it"))
    }
}

impl Machine {
    /// A GPU that holds the kernels.
    pub fn gpu(device: &Device) -> Result<Machine> {
        Ok(Machine::Gpu(Gpu { stream: Stream::new(device)?, copies: RefCell::new(Vec::new()) }))
    }

    /// The emulator's options, if it is the emulator.
    pub(crate) fn options(&self) -> Option<&EmuOptions> {
        match self {
            Machine::Emulator(options) => Some(options),
            Machine::Gpu(_) => None,
        }
    }

    /// Memory to read.
    pub(crate) fn read<T: Pod>(&self, data: &[T]) -> Result<Global<T>> {
        let address = self.place(data.as_ptr().cast_mut().cast(), size_of_val(data), false)?;
        self.wrote(address, size_of_val(data))?;
        // SAFETY: used while `data` and the machine live.
        Ok(unsafe { Global::from_raw(address, data.len()) })
    }

    /// Memory to read and write.
    pub(crate) fn write<T: Pod>(&self, data: &mut [T]) -> Result<GlobalMut<T>> {
        let address = self.place(data.as_mut_ptr().cast(), size_of_val(data), true)?;
        self.wrote(address, size_of_val(data))?;
        // SAFETY: used while `data` and the machine live.
        Ok(unsafe { GlobalMut::from_raw(address, data.len()) })
    }

    /// Memory that nobody wrote, until the guard is dropped.
    pub(crate) fn unwritten<T: Pod>(&self, data: &mut [T]) -> Result<(GlobalMut<T>, Tracked)> {
        // A copy back would be a read of it, too.
        let address = self.place(data.as_mut_ptr().cast(), size_of_val(data), false)?;
        let tracked = matches!(self, Machine::Emulator(_)).then_some(address);
        if tracked.is_some() {
            allocations::announce(address, size_of_val(data), 0);
        }
        // SAFETY: used while `data` and the machine live.
        Ok((unsafe { GlobalMut::from_raw(address, data.len()) }, Tracked(tracked)))
    }

    /// A map of a tensor that begins where placed memory does, to read by.
    pub(crate) fn tensor_map<T: Pod>(&self, x: Global<T>, shape: &TensorMapShape) -> Result<TensorMap> {
        match self {
            Machine::Emulator(_) => Ok(emu::tensor_map(x, shape)?),
            Machine::Gpu(gpu) => gpu.copy(x.address(), |copy| copy.device.tensor_map(0, shape)),
        }
    }

    /// The same to write by.
    pub(crate) fn tensor_map_mut<T: Pod>(
        &self,
        y: GlobalMut<T>,
        shape: &TensorMapShape,
    ) -> Result<TensorMap> {
        match self {
            Machine::Emulator(_) => Ok(emu::tensor_map_mut(y, shape)?),
            Machine::Gpu(gpu) => gpu.copy(y.address(), |copy| copy.device.tensor_map_mut(0, shape)),
        }
    }

    /// The host writes the first `bytes` of the memory at `address`.
    pub(crate) fn wrote(&self, address: u64, bytes: usize) -> Result<()> {
        let Machine::Gpu(gpu) = self else {
            allocations::write(address, bytes);
            return Ok(());
        };
        gpu.copy(address, |copy| {
            // SAFETY: as many bytes of the case's own memory, which nobody writes meanwhile.
            copy.device.write(0, unsafe { std::slice::from_raw_parts(copy.host, bytes) })
        })
    }

    /// The host frees the memory at `address`.
    pub(crate) fn free(&self, address: u64) {
        match self {
            Machine::Emulator(_) => allocations::free(address),
            Machine::Gpu(gpu) => {
                gpu.copies.borrow_mut().retain(|copy| copy.device.global().address() != address);
            }
        }
    }

    /// Launches, and waits.
    pub(crate) fn go<A: KernelArgs>(&self, kernel: Kernel<A>, shape: LaunchShape, args: A) -> Result<()> {
        match self {
            Machine::Emulator(options) => {
                // SAFETY: each case's handles cover live memory that only the launch uses.
                unsafe { emu::launch(&kernel, shape, args, options) }
                    .map_err(|fault| Error::Fault(Box::new(fault)))
            }
            Machine::Gpu(gpu) => {
                // SAFETY: nobody's, where a bug is planted: the process is for this launch alone.
                unsafe { gpu.stream.launch(&kernel, shape, args) }?;
                gpu.stream.synchronize()?;
                gpu.copies.borrow().iter().filter(|copy| copy.comes_back).try_for_each(|copy| {
                    // SAFETY: the case's own memory, which it does not use before this returns.
                    let host = unsafe { std::slice::from_raw_parts_mut(copy.host, copy.device.len()) };
                    copy.device.read(0, host)
                })
            }
        }
    }

    /// Where kernels find the case's memory.
    fn place(&self, host: *mut u8, bytes: usize, comes_back: bool) -> Result<u64> {
        let Machine::Gpu(gpu) = self else { return Ok(host as u64) };
        let device = Buffer::<u8>::new(gpu.stream.device(), bytes)?;
        let address = device.global().address();
        gpu.copies.borrow_mut().push(Copied { host, device, comes_back });
        Ok(address)
    }
}

/// Memory that the emulator keeps account of, until this is dropped.
pub(crate) struct Tracked(Option<u64>);

impl Drop for Tracked {
    fn drop(&mut self) {
        if let Some(address) = self.0 {
            allocations::forget(address);
        }
    }
}
