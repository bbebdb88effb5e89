//! The kernels: which PTX the driver takes, and where each kernel of it is.

use super::context::Context;
use super::ffi::{Relaxed, check, cu, is_lost, name, note};
use super::records::Record;
use super::ring::Ring;
use super::times::Times;
use crate::device::{DeviceInfo, KernelAttributes, LeftOut, PtxImage};
use crate::error::{Error, PtxRefusal, Result, shape_text};
use cust::sys::{CUfunction, CUfunction_attribute, CUjit_option, CUmodule};
use simt::print::Sink;
use simt::{KernelInfo, LaunchShape};
use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Room for what the driver's compiler says about a PTX that it refuses.
const LOG_BYTES: usize = 8192;
/// Set to 1, the driver compiles the PTX, whatever machine code there is.
const PTX_ALONE_ENV: &str = "FERROKV_PTX_ALONE";
/// Lists of kernels in the cache; a power of two, a few times the number of kernels.
const LISTS: usize = 256;

/// The first target whose kernels can wait for the launch before: below it the wait is compiled to nothing.
const OVERLAP_SM: u32 = 90;
/// The first CUDA version whose captures keep that a launch may overlap the one before (12.3).
const OVERLAP_DRIVER: u32 = 12030;

/// A loaded PTX image.
pub(super) struct Module {
    raw: CUmodule,
    image: PtxImage,
    /// The GPU's compute capability, 90 for 9.0.
    capability: u32,
    /// Whether launches of kernels that wait for the launch before may overlap it.
    pub(super) overlap: bool,
    /// How long launches of its kernels take, where that is asked for.
    pub(super) times: Times,
    /// Where kernels that panic say so; goes ahead of the context, which its memory is of.
    _record: Option<Record>,
    /// Where kernels print, if there are any that do.
    ring: Option<Ring>,
    context: Arc<Context>,
    /// Each kernel that was asked for, found by the address of its `KernelInfo`. Entries are only ever put in
    /// front of a list, and freed with the module: so a launch reads without a lock.
    cache: [AtomicPtr<Function>; LISTS],
    max_shared_bytes: u32,
}

// SAFETY: the driver lets any thread use a module; the cache is atomic.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a module.
pub(super) struct Function {
    key: &'static KernelInfo,
    pub(super) raw: CUfunction,
    pub(super) attributes: KernelAttributes,
    /// Dynamic shared memory that the driver now lets a launch have.
    dynamic_bytes: AtomicU32,
    /// The most it can be raised to.
    max_dynamic_bytes: u32,
    next: *mut Function,
}

impl Module {
    /// Loads the image with the highest target that is not above the GPU; when the driver refuses it, the
    /// next. Of an image its machine code comes first, which loads in a moment: compiling the PTX of some
    /// hundred kernels takes a driver most of a minute.
    pub(super) fn load(context: &Arc<Context>, info: &DeviceInfo, images: &[PtxImage]) -> Result<Self> {
        let Some(lowest) = images.iter().map(|image| image.sm).min() else {
            return Err(Error::NoPtx);
        };
        let capability = info.compute_capability.unwrap_or(0);
        let suitable = PtxImage::suitable(images, capability);
        if suitable.is_empty() {
            return Err(Error::GpuTooOld { device: info.name.clone(), capability, lowest });
        }
        context.bind()?;
        let mut refusals = Vec::new();
        for image in suitable {
            let machine_code =
                if image.runs_on(capability) && !ptx_alone() { load_machine_code(image) } else { None };
            let from = if machine_code.is_some() { "machine code" } else { "PTX" };
            match machine_code.map_or_else(|| load_image(image, capability), Ok) {
                Ok(raw) => {
                    tracing::debug!(sm = image.sm, gpu = capability, from, "loaded kernels");
                    return Ok(Module {
                        raw,
                        image: *image,
                        capability,
                        overlap: image.sm >= OVERLAP_SM && info.driver_version >= Some(OVERLAP_DRIVER),
                        times: Times::default(),
                        context: context.clone(),
                        cache: [const { AtomicPtr::new(null_mut()) }; LISTS],
                        max_shared_bytes: info.max_shared_bytes,
                        _record: Record::of(raw, image.text),
                        ring: Ring::of(raw, image.text),
                    });
                }
                Err(refusal) => {
                    tracing::warn!(%refusal, "the driver refused a PTX image");
                    refusals.push(refusal);
                }
            }
        }
        Err(Error::PtxRefused { device: info.name.clone(), refusals })
    }

    /// Who gets what the kernels print.
    pub(super) fn print_to(&self, sink: Option<Sink>) {
        if let Some(ring) = &self.ring {
            ring.print_to(sink);
        }
    }

    /// What a wait for the kernels has come to; hands over what they have printed.
    #[inline]
    pub(super) fn handing_over<T>(&self, waited: Result<T>) -> Result<T> {
        if let Some(ring) = &self.ring {
            let stopped = match &waited {
                Err(Error::Fault(_)) => true,
                Err(Error::Cuda { code, .. }) => is_lost(*code),
                _ => false,
            };
            ring.hand_over(stopped);
        }
        waited
    }

    /// The kernel, found before or looked up now.
    #[inline]
    pub(super) fn function(&self, info: &'static KernelInfo) -> Result<&Function> {
        let list = &self.cache[list_of(info)];
        let mut entry = list.load(Ordering::Acquire);
        // SAFETY: entries are freed with the module only, and never change but for their atomic.
        while let Some(function) = unsafe { entry.as_ref() } {
            if std::ptr::eq(function.key, info) {
                return Ok(function);
            }
            entry = function.next;
        }
        self.look_up(info, list)
    }

    #[cold]
    fn look_up(&self, info: &'static KernelInfo, list: &AtomicPtr<Function>) -> Result<&Function> {
        let missing = || {
            let (kernel, sm) = (info.name, self.image.sm);
            if ![0, self.capability].contains(&info.only_sm) {
                return Error::KernelOnly { kernel, only: info.only_sm, capability: self.capability };
            }
            match self.image.left_out().find(|left_out| left_out.kernel == kernel) {
                Some(LeftOut { needs, why, .. }) => {
                    Error::KernelNeeds { kernel, needs, why: why.to_owned(), sm }
                }
                None if info.min_sm > sm => {
                    let (needs, why) = (info.min_sm, "it is marked so".to_owned());
                    Error::KernelNeeds { kernel, needs, why, sm }
                }
                None => Error::KernelMissing { kernel, sm },
            }
        };
        let Ok(entry_name) = CString::new(info.name) else {
            return Err(missing());
        };
        self.context.bind()?;
        // The driver may load the kernel's code only now.
        let _relaxed = Relaxed::enter();
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for a write, the module is loaded, the name ends in NUL.
        let code = unsafe { cu!(cuModuleGetFunction(&mut raw, self.raw, entry_name.as_ptr())) };
        if code == 500 {
            return Err(missing());
        }
        check(code, || format!("looking up kernel {}", info.name))?;
        let attribute = |which: CUfunction_attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: `value` is valid for a write and the function was just found.
            let code = unsafe { cu!(cuFuncGetAttribute(&mut value, which, raw)) };
            check(code, || format!("asking for the attributes of kernel {}", info.name))?;
            Ok(value.max(0) as u32)
        };
        use CUfunction_attribute::*;
        let attributes = KernelAttributes {
            registers: attribute(CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            static_shared_bytes: attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local_bytes: attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            max_threads: attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        };
        let dynamic_bytes = attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?;
        let entry = Box::into_raw(Box::new(Function {
            key: info,
            raw,
            attributes,
            dynamic_bytes: AtomicU32::new(dynamic_bytes),
            max_dynamic_bytes: self.max_shared_bytes.saturating_sub(attributes.static_shared_bytes),
            next: null_mut(),
        }));
        // Two threads may look the same kernel up at once; the list then holds it twice, and that is fine.
        let mut first = list.load(Ordering::Acquire);
        loop {
            // SAFETY: until it is in the list, the entry is this thread's alone.
            unsafe { (*entry).next = first };
            match list.compare_exchange_weak(first, entry, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: in the list, it lives as long as the module and changes no more.
                Ok(_) => return Ok(unsafe { &*entry }),
                Err(now) => first = now,
            }
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        for list in &mut self.cache {
            let mut entry = *list.get_mut();
            while !entry.is_null() {
                // SAFETY: made by `Box::into_raw`, in one list only, and nobody borrows the module now.
                let function = unsafe { Box::from_raw(entry) };
                entry = function.next;
            }
        }
        if self.context.bind_quietly() {
            // SAFETY: loaded by `load`, and not used again.
            note(unsafe { cu!(cuModuleUnload(self.raw)) }, "unloading the kernels");
        }
    }
}

impl Function {
    /// Makes the driver accept `shape`: refuses a block that the kernel's registers do not allow, and asks
    /// once for more dynamic shared memory than the usual 48 KiB.
    #[inline]
    pub(super) fn prepare(&self, shape: LaunchShape) -> Result<()> {
        if shape.block.count() > u64::from(self.attributes.max_threads)
            || shape.shared_bytes > self.dynamic_bytes.load(Ordering::Relaxed)
        {
            return self.prepare_rare(shape);
        }
        Ok(())
    }

    #[cold]
    fn prepare_rare(&self, shape: LaunchShape) -> Result<()> {
        let kernel = self.key.name;
        let most = self.attributes.max_threads;
        if shape.block.count() > u64::from(most) {
            let registers = self.attributes.registers;
            let reason = format!(
                "{} threads in a block; with {registers} registers a thread {most} is the most on this GPU",
                shape.block.count()
            );
            return Err(Error::Shape { kernel, shape, reason });
        }
        if shape.shared_bytes > self.max_dynamic_bytes {
            let reason = format!(
                "{} bytes of shared memory; beside the {} it declares itself, {} is the most on this GPU",
                shape.shared_bytes, self.attributes.static_shared_bytes, self.max_dynamic_bytes
            );
            return Err(Error::Shape { kernel, shape, reason });
        }
        if shape.shared_bytes > self.dynamic_bytes.load(Ordering::Relaxed) {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let _relaxed = Relaxed::enter();
            // SAFETY: the function lives as long as its module, which the caller holds.
            let code = unsafe { cu!(cuFuncSetAttribute(self.raw, attribute, self.max_dynamic_bytes as i32)) };
            check(code, || {
                format!("raising the shared memory of kernel {kernel} for {}", shape_text(&shape))
            })?;
            self.dynamic_bytes.store(self.max_dynamic_bytes, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Where in the cache a kernel is: by the address of its information, which lives for ever. Where the
/// compiler keeps two copies of one, the kernel is looked up twice.
#[inline]
fn list_of(info: &'static KernelInfo) -> usize {
    let address = (&raw const *info).addr() as u64;
    // Fibonacci hashing: the upper bits of the product depend on all bits of the address.
    (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize % LISTS
}

/// Whether the driver is to compile the PTX even where machine code is at hand.
fn ptx_alone() -> bool {
    std::env::var_os(PTX_ALONE_ENV).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Machine code that the driver takes; a driver older than the ptxas that made it may refuse it.
fn load_machine_code(image: &PtxImage) -> Option<CUmodule> {
    let mut raw = null_mut();
    // SAFETY: `raw` is valid for a write; the bytes are a whole ELF file, which says how long it is.
    let code = unsafe { cu!(cuModuleLoadData(&mut raw, image.machine_code.as_ptr().cast())) };
    if code == 0 {
        return Some(raw);
    }
    tracing::debug!(
        sm = image.sm,
        code,
        name = name(code),
        "the driver refused machine code; it gets the PTX"
    );
    None
}

fn load_image(image: &PtxImage, capability: u32) -> std::result::Result<CUmodule, PtxRefusal> {
    let refuse = |code, name, log| PtxRefusal { sm: image.sm, code, name, log };
    let Ok(text) = CString::new(image.text_for(capability).into_owned()) else {
        return Err(refuse(0, "not sent".into(), "the PTX holds a NUL byte".into()));
    };
    let mut log = vec![0_u8; LOG_BYTES];
    let mut options =
        [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The driver takes the size as a number in the place of a pointer.
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
    let mut raw = null_mut();
    // SAFETY: the text ends in NUL; options and values are two each, and the log is as long as said.
    let code = unsafe {
        cu!(cuModuleLoadDataEx(
            &mut raw,
            text.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr()
        ))
    };
    if code == 0 {
        return Ok(raw);
    }
    let log = CStr::from_bytes_until_nul(&log).unwrap_or(c"").to_string_lossy().into_owned();
    let lines: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Err(refuse(code, name(code), lines.join(" / ")))
}
