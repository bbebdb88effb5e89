//! What can go wrong on a device, and the way out.

use crate::unordered::Unordered;
use simt::emu::Fault;
use simt::{KernelInfo, LaunchShape, TensorMapError};
use std::fmt;

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What a device, a launch or a copy reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The CUDA driver cannot be loaded here.
    #[error("{0}; or use the cpu backend")]
    NoDriver(#[from] cuda_lazy::DriverError),
    /// There is a driver but not this GPU.
    #[error(
        "there is no GPU number {ordinal}: the driver sees {count}; pick another one or use the cpu backend"
    )]
    NoDevice {
        /// The number asked for, from 0.
        ordinal: u32,
        /// How many GPUs the driver sees.
        count: u32,
    },
    /// The driver returned an error.
    #[error("CUDA error {code} ({name}) while {doing}{}", hint(*.code))]
    Cuda {
        /// The driver's code.
        code: u32,
        /// The driver's name for it.
        name: String,
        /// What was being done.
        doing: String,
    },
    /// The memory is not there.
    #[error("out of memory on {device}: {requested} bytes asked, {} free; use smaller sizes or drop buffers", free_text(*.free))]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// How many bytes were asked for.
        requested: u64,
        /// How many were free, if known.
        free: Option<u64>,
    },
    /// More bytes than an address can count.
    #[error("{len} elements of {element_bytes} bytes exceed the address space; use smaller sizes")]
    TooLarge {
        /// How many elements were asked for.
        len: usize,
        /// Bytes of one.
        element_bytes: usize,
    },
    /// A launch shape that the kernel or the device does not take.
    #[error("cannot launch {kernel} with {}: {reason}", shape_text(.shape))]
    Shape {
        /// The kernel's entry.
        kernel: &'static str,
        /// The shape asked for.
        shape: LaunchShape,
        /// The limit it breaks and the values.
        reason: String,
    },
    /// The emulator caught a mistake of the kernel or of its launch.
    #[error(transparent)]
    Fault(Box<Fault>),
    /// The program carries no PTX at all.
    #[error(
        "no kernels for the GPU are embedded in this program: it was built without a device compiler; run ./setup and build again, or use the cpu backend"
    )]
    NoPtx,
    /// The GPU is older than every PTX image.
    #[error(
        "{device} has compute capability {capability}, older than every embedded PTX (lowest: sm_{lowest}); use the cpu backend, or build with an older target"
    )]
    GpuTooOld {
        /// The GPU's name.
        device: String,
        /// Its compute capability, as in `sm_75`: 75.
        capability: u32,
        /// The lowest target embedded.
        lowest: u32,
    },
    /// The driver took none of the PTX images.
    #[error("the driver refused every embedded PTX for {device}: {}; update the driver or use the cpu backend", list(.refusals))]
    PtxRefused {
        /// The GPU's name.
        device: String,
        /// Each image tried, highest target first.
        refusals: Vec<PtxRefusal>,
    },
    /// The kernel is not in the PTX that was loaded.
    #[error(
        "kernel {kernel} is not in the PTX for sm_{sm} that was loaded; build again so that the PTX matches the program"
    )]
    KernelMissing {
        /// The kernel's entry.
        kernel: &'static str,
        /// The target of the image loaded.
        sm: u32,
    },
    /// The kernel is one for higher targets than that of the PTX that was loaded: `#[kernel(min_sm = …)]`, or
    /// the build found that the target lacks what the kernel is made of.
    #[error(
        "kernel {kernel} needs sm_{needs}: {why}; the PTX for sm_{sm} was loaded, the highest embedded that GPU and \
         driver take; use a newer GPU or the cpu backend"
    )]
    KernelNeeds {
        /// The kernel's entry.
        kernel: &'static str,
        /// The lowest target that has it.
        needs: u32,
        /// What of it needs that target.
        why: String,
        /// The target of the image loaded.
        sm: u32,
    },
    /// The kernel is one for GPUs of another compute capability alone: `#[kernel(only_sm = …)]`.
    #[error(
        "kernel {kernel} is for GPUs of compute capability {}.{} alone, and this one has {}.{}; launch another \
         kernel, or use the cpu backend",
        only / 10, only % 10, capability / 10, capability % 10
    )]
    KernelOnly {
        /// The kernel's entry.
        kernel: &'static str,
        /// The one that has it, 90 for 9.0.
        only: u32,
        /// The GPU's.
        capability: u32,
    },
    /// A range that reaches outside a buffer.
    #[error("range {start}..{end} is not inside the {what} of {len} elements")]
    Range {
        /// Which memory.
        what: &'static str,
        /// First element.
        start: usize,
        /// One past the last element.
        end: usize,
        /// How many elements there are.
        len: usize,
    },
    /// A copy within a buffer onto a part of what it copies.
    #[error(
        "elements {start}..{end} of a buffer cannot be copied to {to}, where they would overlap themselves; copy by way of another buffer"
    )]
    Overlap {
        /// The first element that is copied.
        start: usize,
        /// One past the last.
        end: usize,
        /// Where the first one was to go.
        to: usize,
    },
    /// A fill whose words do not fit its bytes.
    #[error("cannot fill {bytes} bytes with 4-byte words; choose a range whose size is a multiple of 4")]
    FillSize {
        /// Bytes of the range.
        bytes: usize,
    },
    /// A captured copy or fill of a buffer that is dropped; the emulator says so with `memory_check`.
    #[error("{doing} touches memory that is freed; keep the buffer for as long as the graph")]
    Freed {
        /// What was to be done.
        doing: &'static str,
    },
    /// Two uses of the same memory that nothing orders; the emulator says so with `stream_check`.
    #[error("{0}")]
    Unordered(Box<Unordered>),
    /// Things of two devices in one call.
    #[error("{what} belongs to another device than the stream; make both from one device")]
    WrongDevice {
        /// What is foreign.
        what: &'static str,
    },
    /// Something that waits for the stream or belongs to no graph, while the stream captures.
    #[error("{doing} is not possible while the stream captures; do it before or after the capture")]
    Capturing {
        /// What was asked for.
        doing: &'static str,
    },
    /// A node was asked for outside a capture.
    #[error(
        "launching {kernel} as a graph node needs a stream that captures; call launch_node inside Stream::capture"
    )]
    NotCapturing {
        /// The kernel's entry.
        kernel: &'static str,
    },
    /// A node of another graph.
    #[error("the node belongs to another graph; use the node that this graph's capture returned")]
    ForeignNode,
    /// A launch that may overlap the one before it cannot become one of a kernel that does not wait for that.
    #[error(
        "cannot update the launch to {kernel}: the captured kernel overlaps the launch before it, and {kernel} does \
         not wait for that; mark it #[kernel(overlaps)] or capture the graph anew"
    )]
    OverlappingNode {
        /// The new kernel's entry.
        kernel: &'static str,
    },
    /// Memory of another library that cannot hold such elements.
    #[error(
        "memory at {address:#x} cannot hold elements that are aligned to {align} bytes; give the address of the first \
         element, a multiple of {align}"
    )]
    Misaligned {
        /// Where it was said to be.
        address: u64,
        /// The alignment of an element, in bytes.
        align: usize,
    },
    /// A tensor of another library that is not what is needed.
    #[error(
        "the tensor {reason}; hand over one of the device and the type, whose elements lie one after another"
    )]
    Tensor {
        /// What is wrong with it.
        reason: String,
    },
    /// Memory of another library that the device does not reach.
    #[error("memory at {address:#x} is {found}, and the device is {device}; copy it there first")]
    NotReached {
        /// Where it was said to be.
        address: u64,
        /// What the driver says of it.
        found: String,
        /// The device's name.
        device: String,
    },
    /// What only its owner may do to a stream.
    #[error("{doing} is for the library that the stream belongs to; ask it, or use a stream of your own")]
    ForeignStream {
        /// What was asked for.
        doing: &'static str,
    },
    /// A tensor that there can be no map of.
    #[error(transparent)]
    TensorMap(#[from] TensorMapError),
    /// The driver makes no tensor maps.
    #[error(
        "the CUDA driver makes no tensor maps: update it to one of CUDA 12.0 or later, or use the cpu backend"
    )]
    NoTensorMaps,
    /// Times of launches on the CPU, where what takes time is the emulator.
    #[error("launches on the cpu backend are not timed; use a GPU")]
    NotTimed,
    /// An event that no stream has recorded.
    #[error("the event was never recorded; record it on a stream first")]
    EventNotRecorded,
}

/// A PTX image that the driver did not take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PtxRefusal {
    /// The image's target.
    pub sm: u32,
    /// The driver's code.
    pub code: u32,
    /// The driver's name for it.
    pub name: String,
    /// What its compiler said, in one line.
    pub log: String,
}

impl fmt::Display for PtxRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}: {} ({})", self.sm, self.name, self.code)?;
        if self.log.is_empty() {
            return Ok(());
        }
        write!(f, ": {}", self.log)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Error::Fault(Box::new(fault))
    }
}

/// `grid (1,1,1), block (256,1,1), 0 bytes of shared memory`.
pub(crate) fn shape_text(shape: &LaunchShape) -> String {
    format!("grid {}, block {}, {} bytes of shared memory", shape.grid, shape.block, shape.shared_bytes)
}

/// What a launch was that failed.
pub(crate) fn launch_text(info: &KernelInfo, shape: &LaunchShape) -> String {
    let (kernel, shape, cluster) = (info.name, shape_text(shape), info.cluster);
    match cluster.count() {
        1 => format!("launching {kernel} with {shape}"),
        _ => format!("launching {kernel} with {shape}, in clusters of {cluster} blocks"),
    }
}

fn free_text(free: Option<u64>) -> String {
    free.map_or_else(|| "an unknown number".to_string(), |bytes| bytes.to_string())
}

fn list(refusals: &[PtxRefusal]) -> String {
    let texts: Vec<String> = refusals.iter().map(PtxRefusal::to_string).collect();
    texts.join("; ")
}

/// What a reader can do about the driver's commonest errors.
fn hint(code: u32) -> &'static str {
    match code {
        700 | 716 | 718 | 719 => {
            "; a kernel made an illegal access: run the same launch on the cpu backend, which names the line"
        }
        222 => "; the driver is older than the PTX: update it",
        803 | 804 => "; the driver library and the kernel module do not match: update or reboot",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line_and_name_the_values() {
        let shape = LaunchShape::new((4, 2), 256).shared(1024);
        let errors = [
            (Error::NoDevice { ordinal: 3, count: 1 }, "number 3"),
            (
                Error::Cuda { code: 700, name: "CUDA_ERROR_ILLEGAL_ADDRESS".into(), doing: "waiting".into() },
                "700 (CUDA_ERROR_ILLEGAL_ADDRESS) while waiting; a kernel made",
            ),
            (Error::Cuda { code: 999, name: "X".into(), doing: "waiting".into() }, "while waiting"),
            (
                Error::OutOfMemory { device: "GPU".into(), requested: 77, free: Some(5) },
                "77 bytes asked, 5 free",
            ),
            (Error::OutOfMemory { device: "GPU".into(), requested: 77, free: None }, "unknown"),
            (
                Error::Shape { kernel: "k", shape, reason: "why".into() },
                "grid (4,2,1), block (256,1,1), 1024 bytes",
            ),
            (
                Error::KernelNeeds { kernel: "k", needs: 80, why: "cp.async, redux".into(), sm: 75 },
                "kernel k needs sm_80: cp.async, redux; the PTX for sm_75 was loaded",
            ),
            (
                Error::KernelOnly { kernel: "k", only: 90, capability: 120 },
                "capability 9.0 alone, and this one has 12.0",
            ),
            (Error::GpuTooOld { device: "GPU".into(), capability: 75, lowest: 80 }, "capability 75"),
            (Error::Overlap { start: 2, end: 5, to: 4 }, "elements 2..5 of a buffer cannot be copied to 4"),
            (
                Error::PtxRefused {
                    device: "GPU".into(),
                    refusals: vec![
                        PtxRefusal { sm: 90, code: 222, name: "OLD".into(), log: "ptxas fatal".into() },
                        PtxRefusal { sm: 80, code: 218, name: "BAD".into(), log: String::new() },
                    ],
                },
                "sm_90: OLD (222): ptxas fatal; sm_80: BAD (218);",
            ),
            (Error::NoDriver(cuda_lazy::DriverError::NotFound { reason: "no file".into() }), "cpu backend"),
        ];
        for (error, part) in errors {
            let text = error.to_string();
            assert!(text.contains(part), "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
        }
    }
}
