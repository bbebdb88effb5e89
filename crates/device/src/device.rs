//! Devices: opening one, and what is known of it.

use crate::backend::DeviceBackend;
use crate::cpu::CpuDevice;
use crate::error::{Error, Result};
use crate::limits;
use crate::times::KernelTimes;
use simt::emu::{EmuOptions, Target, TensorCores};
use simt::print::Sink;
use simt::{Kernel, KernelArgs, KernelInfo, LaunchShape};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// What stands ahead of a kernel for one target alone, and behind it.
const ONLY_BEGIN: &str = "// simt.only_begin ";
const ONLY_END: &str = "// simt.only_end ";

/// One PTX text with every kernel in it, for one target.
#[derive(Clone, Copy, Debug)]
pub struct PtxImage {
    /// The target's number: 80 for `sm_80`.
    pub sm: u32,
    /// The PTX.
    pub text: &'static str,
    /// What ptxas made of the text for that target (a cubin), or nothing. GPUs of the target's generation
    /// run it as it is; where the driver refuses it, it compiles the text.
    pub machine_code: &'static [u8],
}

impl PtxImage {
    /// A text without machine code.
    pub const fn new(sm: u32, text: &'static str) -> Self {
        PtxImage { sm, text, machine_code: &[] }
    }

    /// Each text with its machine code, as a build's index lists them.
    ///
    /// # Panics
    /// If there are not as many of one as of the other.
    pub fn of(texts: &[(u32, &'static str)], machine_code: &[&'static [u8]]) -> Vec<Self> {
        assert_eq!(texts.len(), machine_code.len(), "machine code of each text");
        let images = texts.iter().zip(machine_code);
        images.map(|(&(sm, text), &machine_code)| PtxImage { sm, text, machine_code }).collect()
    }

    /// The kernels that the target cannot have, and that the build left out of the text: those of
    /// `#[kernel(min_sm = …)]`, and those of which an assembler said what they need a higher target for.
    pub fn left_out(&self) -> impl Iterator<Item = LeftOut> {
        self.text.lines().filter_map(LeftOut::read)
    }

    /// The images that a GPU of this compute capability can have, the best first: the highest target that is
    /// not above it.
    #[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
    pub(crate) fn suitable(images: &[PtxImage], capability: u32) -> Vec<&PtxImage> {
        let mut suitable: Vec<&PtxImage> = images.iter().filter(|image| image.sm <= capability).collect();
        suitable.sort_by_key(|image| std::cmp::Reverse(image.sm));
        suitable
    }

    /// Whether a GPU of this compute capability (90 for 9.0) runs the machine code: it is of the same major
    /// number, and no newer; of the same one, if there are kernels for that one alone.
    #[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
    pub(crate) fn runs_on(&self, capability: u32) -> bool {
        let fits = if self.text.contains(ONLY_BEGIN) {
            self.sm == capability
        } else {
            self.sm / 10 == capability / 10 && self.sm <= capability
        };
        fits && is_whole_elf(self.machine_code)
    }

    /// The text as a GPU of this compute capability takes it: without the kernels that are for another one
    /// alone, and without the features of the target's own that they need.
    #[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
    pub(crate) fn text_for(&self, capability: u32) -> Cow<'static, str> {
        if self.sm == capability || !self.text.contains(ONLY_BEGIN) {
            return Cow::Borrowed(self.text);
        }
        let mut text = String::with_capacity(self.text.len());
        let mut leaves = None;
        for line in self.text.split_inclusive('\n') {
            let name = |rest: &'static str| rest.split_whitespace().next();
            if leaves.is_none() {
                leaves = line.strip_prefix(ONLY_BEGIN).and_then(name);
            }
            match leaves {
                None => text.push_str(line),
                Some(own) if line.strip_prefix(ONLY_END).and_then(name) == Some(own) => leaves = None,
                Some(_) => {}
            }
        }
        if leaves.is_some() {
            // It ends nowhere: let the driver say what is wrong with the text.
            return Cow::Borrowed(self.text);
        }
        let (own, all) = (format!("\n.target sm_{}a", self.sm), format!("\n.target sm_{}", self.sm));
        Cow::Owned(text.replacen(&own, &all, 1))
    }
}

/// A kernel that a target cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The kernel's entry.
    pub kernel: &'static str,
    /// The lowest target that has it.
    pub needs: u32,
    /// What of it needs that target.
    pub why: &'static str,
}

impl LeftOut {
    /// The comment that the build leaves in the place of a kernel: `// simt.left_out KERNEL SM WHY`.
    fn read(line: &'static str) -> Option<LeftOut> {
        let rest = line.trim().strip_prefix("// simt.left_out ")?;
        let (kernel, rest) = rest.split_once(' ')?;
        let (needs, why) = rest.split_once(' ').unwrap_or((rest, ""));
        Some(LeftOut { kernel, needs: needs.parse().ok()?, why })
    }
}

/// Whether these are as many bytes as the header of the ELF file says: a driver is handed an address alone,
/// and reads as far as the header tells it to.
fn is_whole_elf(file: &[u8]) -> bool {
    // The header of 64 bytes has, little-endian, where the tables of segments and of sections begin, and how
    // many entries of which size they have.
    let number = |at: usize, bytes: usize| -> Option<u64> {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(file.get(at..at + bytes)?);
        Some(u64::from_le_bytes(word))
    };
    let fits = |start, size, count| -> Option<bool> {
        let end = number(start, 8)?.checked_add(number(size, 2)? * number(count, 2)?)?;
        Some(end <= file.len() as u64)
    };
    let segments = fits(0x20, 0x36, 0x38);
    let sections = fits(0x28, 0x3a, 0x3c);
    file.starts_with(b"\x7fELF\x02\x01") && segments == Some(true) && sections == Some(true)
}

/// Which implementation stands behind a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendKind {
    /// The emulator.
    Cpu,
    /// A GPU through the CUDA driver.
    Cuda,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BackendKind::Cpu => "cpu",
            BackendKind::Cuda => "cuda",
        })
    }
}

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Which backend it belongs to.
    pub backend: BackendKind,
    /// Its number among the driver's GPUs; 0 for the CPU.
    pub ordinal: u32,
    /// What it is called.
    pub name: String,
    /// The GPU's compute capability as PTX targets write it: 90 for 9.0.
    pub compute_capability: Option<u32>,
    /// The GPU's multiprocessors, or the CPU's hardware threads.
    pub multiprocessors: u32,
    /// Its memory in bytes, if known.
    pub memory_bytes: Option<u64>,
    /// The GPU's second-level cache in bytes.
    pub l2_bytes: Option<u64>,
    /// The bytes per second of the GPU's memory by its clock and bus width.
    pub memory_bandwidth: Option<u64>,
    /// The most dynamic shared memory of a block, in bytes.
    pub max_shared_bytes: u32,
    /// The newest CUDA version that the driver serves: 12080 for 12.8.
    pub driver_version: Option<u32>,
}

/// What the driver's compiler made of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelAttributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Shared memory that the kernel declares itself, in bytes.
    pub static_shared_bytes: u32,
    /// Local memory of a thread in bytes: spills and arrays that found no registers.
    pub local_bytes: u32,
    /// The most threads a block may have with these registers.
    pub max_threads: u32,
}

/// A GPU or the CPU's emulator; clones are the same device.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn DeviceBackend>,
    /// What is said of it in place of what the backend says.
    limited: Option<Arc<DeviceInfo>>,
}

impl Device {
    /// The emulator. Launches run where they are called and have finished when the call returns.
    pub fn cpu(options: EmuOptions) -> Device {
        Device::new(Arc::new(CpuDevice::new(options)))
    }

    /// GPU number `ordinal`, with the kernels of the image that suits it: the highest target that is not
    /// above the GPU and that the driver accepts.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`], [`Error::NoPtx`], [`Error::GpuTooOld`],
    /// [`Error::PtxRefused`], or what the driver reports.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub fn cuda(ordinal: u32, images: &[PtxImage]) -> Result<Device> {
        Ok(Device::new(Arc::new(crate::cuda::CudaDevice::open(ordinal, images)?)))
    }

    /// There is no CUDA backend on this platform.
    ///
    /// # Errors
    /// Always [`Error::NoDriver`].
    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    pub fn cuda(_ordinal: u32, _images: &[PtxImage]) -> Result<Device> {
        Err(Error::NoDriver(cuda_lazy::DriverError::Platform))
    }

    /// GPU number 0 if it can be used, else the emulator and the reason.
    pub fn auto(options: EmuOptions, images: &[PtxImage]) -> (Device, Option<Error>) {
        match Device::cuda(0, images) {
            Ok(device) => (device, None),
            Err(reason) => (Device::cpu(options), Some(reason)),
        }
    }

    fn new(backend: Arc<dyn DeviceBackend>) -> Device {
        tracing::debug!(device = backend.info().name, backend = %backend.info().backend, "opened a device");
        Device { backend, limited: None }
    }

    /// What is known of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.limited.as_deref().unwrap_or_else(|| self.backend().info())
    }

    /// The same device with no more than so many bytes of shared memory for a block: what is planned for it
    /// takes kernels that fit, and launches on its streams that want more are refused; streams of the device
    /// itself are not limited. For tests of what smaller GPUs take.
    #[must_use]
    pub fn with_max_shared_bytes(&self, bytes: u32) -> Device {
        let info = self.info();
        let limited = DeviceInfo { max_shared_bytes: bytes.min(info.max_shared_bytes), ..info.clone() };
        Device { backend: self.backend.clone(), limited: Some(Arc::new(limited)) }
    }

    /// Which backend it belongs to.
    pub fn kind(&self) -> BackendKind {
        self.info().backend
    }

    /// The GPU that it is, or that it emulates: the newest one that is known and not above it.
    pub fn target(&self) -> Target {
        self.backend().target()
    }

    /// Whether code of the host may do kernels' work in their place, with the same bits: on the CPU, where
    /// the GPU that is emulated has the tensor cores that such code follows, which are Hopper's.
    pub fn has_host_paths(&self) -> bool {
        self.kind() == BackendKind::Cpu && self.target().tensor_cores() == TensorCores::Hopper
    }

    /// Makes ready for launches of `kernel` with blocks of this shape: for plans, so that what the device
    /// cannot do is said before any work is. The grid does not matter.
    ///
    /// # Errors
    /// What launches of this shape would report: [`Error::Shape`], [`Error::KernelMissing`] and
    /// [`Error::KernelNeeds`].
    pub fn prepare<A: KernelArgs>(&self, kernel: &Kernel<A>, shape: LaunchShape) -> Result<()> {
        let shape = LaunchShape { grid: 1.into(), ..shape };
        limits::check(kernel.info(), shape, self.info().max_shared_bytes)?;
        self.backend().prepare(kernel.info(), shape)
    }

    /// What the driver's compiler made of `kernel`; `None` on the CPU.
    ///
    /// # Errors
    /// [`Error::KernelMissing`] if the loaded PTX lacks it.
    pub fn kernel_attributes(&self, kernel: &'static KernelInfo) -> Result<Option<KernelAttributes>> {
        self.backend().attributes(kernel)
    }

    /// Waits until all work that streams of the device were given is done. A stream that captures is waited
    /// for up to where its capture began.
    ///
    /// # Errors
    /// What a kernel did wrong since the last wait.
    pub fn synchronize(&self) -> Result<()> {
        self.backend().synchronize()
    }

    /// Gives `sink` what kernels of this device print from now on, by [`simt::println!`]; `None` is standard
    /// error, as it is at first.
    ///
    /// On the CPU a line is handed over while the launch runs, and one that is launched in several orders
    /// ([`orders`](EmuOptions::orders)) prints in the first. On a GPU the lines come with the wait for a
    /// stream, an event or the device, also a wait that fails, in the order in which they found their places;
    /// those of different threads have no other order. A wait for one stream may come while a kernel of
    /// another has found a place for its line and not written it yet: that line and those behind it come with
    /// a later wait. A device keeps 8192 lines between two waits; of more it says how many are
    /// [lost](simt::print::Printed::Lost). What is left when the device goes comes then.
    ///
    /// A sink is called from any thread, and may use the device: copy, launch, wait, and on a GPU capture.
    /// What kernels print meanwhile that it launches on its own device goes to standard error on the CPU, and
    /// on a GPU comes with a later wait. It must not wait for another thread that waits for the device, and
    /// on the CPU not begin a capture of the stream that is under way.
    pub fn print_to(&self, sink: Option<Sink>) {
        self.backend().print_to(sink);
    }

    /// Has every launch of this device timed from here on, on whichever of its streams, or none. At first
    /// none is. What was timed waits for [`take_times`](Self::take_times), with two events of the driver a
    /// launch.
    ///
    /// A time is from an event ahead of the launch to one behind it. Where the stream has nothing to do, that
    /// holds what the host takes to launch, some 2 µs: times of small kernels are mostly of it. Between
    /// events no launch [overlaps](simt::KernelInfo::overlaps) the one before it, so that each time is of one
    /// kernel. What a stream captures is not timed, neither then nor when the graph runs.
    ///
    /// # Errors
    /// [`Error::NotTimed`] on the CPU.
    pub fn record_times(&self, on: bool) -> Result<()> {
        self.backend().record_times(on)
    }

    /// Waits for the launches that were timed since the last call, and says how long each took: kernels in
    /// the order of their first launches. Launches of one stream are in their order; of those by several
    /// threads there is none.
    ///
    /// # Errors
    /// [`Error::NotTimed`] on the CPU, or what a kernel did wrong; the times are lost then.
    pub fn take_times(&self) -> Result<Vec<KernelTimes>> {
        self.backend().take_times()
    }

    pub(crate) fn backend(&self) -> &dyn DeviceBackend {
        &*self.backend
    }

    /// Refuses things of another device: only those of one device may be used together. `what` names the
    /// thing.
    ///
    /// # Errors
    /// [`Error::WrongDevice`].
    pub fn check_same(&self, other: &Device, what: &'static str) -> Result<()> {
        let same = self.kind() == other.kind() && self.backend().context() == other.backend().context();
        if same { Ok(()) } else { Err(Error::WrongDevice { what }) }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(self.info()).finish()
    }
}

/// Every GPU that the driver sees, without opening any.
///
/// # Errors
/// [`Error::NoDriver`] where there is none, or what the driver reports.
pub fn cuda_devices() -> Result<Vec<DeviceInfo>> {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    return crate::cuda::devices();
    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    Err(Error::NoDriver(cuda_lazy::DriverError::Platform))
}

/// The bytes of `len` elements of type `T`.
pub(crate) fn size_of_many<T>(len: usize) -> Result<usize> {
    let element_bytes = size_of::<T>();
    len.checked_mul(element_bytes)
        .filter(|bytes| *bytes <= isize::MAX as usize)
        .ok_or(Error::TooLarge { len, element_bytes })
}

#[cfg(test)]
mod tests {
    use super::{LeftOut, PtxImage, is_whole_elf};

    /// A header that says: no segments, two sections of 64 bytes behind the header.
    fn elf() -> Vec<u8> {
        let mut file = vec![0; 64 + 2 * 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[0x28] = 64;
        file[0x3a] = 64;
        file[0x3c] = 2;
        file
    }

    #[test]
    fn a_file_that_is_cut_short_is_no_machine_code() {
        let whole = elf();
        assert!(is_whole_elf(&whole));
        for length in 0..whole.len() {
            assert!(!is_whole_elf(&whole[..length]), "{length} bytes");
        }
        let mut beyond = whole.clone();
        beyond[0x28..0x30].fill(0xff);
        assert!(!is_whole_elf(&beyond), "a table that begins beyond the file");
        let mut other = whole;
        other[4] = 1;
        assert!(!is_whole_elf(&other), "32 bits");
    }

    #[test]
    fn machine_code_runs_on_its_generation_from_its_target_up() {
        let image = PtxImage { sm: 80, text: "", machine_code: elf().leak() };
        let runs = [75, 80, 86, 89, 90].map(|capability| image.runs_on(capability));
        assert_eq!(runs, [false, true, true, true, false]);
        assert!(!PtxImage::new(80, "").runs_on(80));
    }

    #[test]
    fn kernels_for_one_generation_are_cut_out_for_others() {
        let text = ".version 8.3\n.target sm_90a\n.entry a() { ret; }\n// simt.only_begin b 90\n.entry b() { wgmma; }\n\
                    // simt.only_end b\n.entry c() { ret; }\n// simt.only_begin d 90\n.entry d() { ret; }\n\
                    // simt.only_end d\n";
        let image = PtxImage { sm: 90, text, machine_code: elf().leak() };
        assert_eq!(image.text_for(90), text);
        let others = ".version 8.3\n.target sm_90\n.entry a() { ret; }\n.entry c() { ret; }\n";
        assert_eq!(image.text_for(100), others);
        let cut = PtxImage { text: text.trim_end().trim_end_matches('d'), ..image };
        assert_eq!(cut.text_for(100), cut.text);
        assert_eq!([90, 91, 100].map(|capability| image.runs_on(capability)), [true, false, false]);
        let plain = PtxImage { text: ".target sm_90\n", ..image };
        assert_eq!(plain.text_for(100), plain.text);
        assert!(plain.runs_on(91));
    }

    #[test]
    fn the_best_image_is_the_highest_target_that_is_not_above_the_gpu() {
        let images = [75, 80, 86, 89, 90, 100, 103, 120].map(|sm| PtxImage::new(sm, ""));
        let best = |capability| -> Vec<u32> {
            PtxImage::suitable(&images, capability).iter().map(|image| image.sm).take(2).collect()
        };
        assert_eq!(best(70), []);
        assert_eq!(best(75), [75]);
        // What no image is for takes that of the GPU below.
        for (capability, expected) in [
            (80, [80, 75]),
            (87, [86, 80]),
            (89, [89, 86]),
            (90, [90, 89]),
            (110, [103, 100]),
            (121, [120, 103]),
        ] {
            assert_eq!(best(capability), expected, "{capability}");
        }
    }

    #[test]
    fn a_text_says_which_kernels_it_has_not_and_why() {
        let text = ".version 8.3\n// simt.left_out a 80 cp.async, .NaN\n.visible .entry b() { ret; }\n\
                    \t// simt.left_out c 90 #[kernel(min_sm = 90)]\n// simt.left_out d many\n// simt.left_out e\n";
        let found: Vec<LeftOut> = PtxImage::new(75, text).left_out().collect();
        let a = LeftOut { kernel: "a", needs: 80, why: "cp.async, .NaN" };
        assert_eq!(found, [a, LeftOut { kernel: "c", needs: 90, why: "#[kernel(min_sm = 90)]" }]);
    }
}
