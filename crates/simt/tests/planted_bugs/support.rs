//! Launches, and the place a fault must name.

use simt::emu::{self, EmuOptions, Fault, FaultKind, Place, ThreadId};
use simt::{Dim3, Global, GlobalMut, Kernel, KernelArgs, LaunchShape, Pod};

/// Both ways to run a kernel.
pub fn modes() -> [EmuOptions; 2] {
    [EmuOptions::default(), EmuOptions::race_checked()]
}

pub fn read<T: Pod>(data: &[T]) -> Global<T> {
    // SAFETY: used while `data` lives.
    unsafe { Global::from_raw(data.as_ptr() as u64, data.len()) }
}

pub fn write<T: Pod>(data: &mut [T]) -> GlobalMut<T> {
    // SAFETY: used while `data` lives.
    unsafe { GlobalMut::from_raw(data.as_mut_ptr() as u64, data.len()) }
}

/// Elements at an address that is a multiple of 16, as device memory is, for as long as the program runs.
pub fn aligned(value: impl Fn(u32) -> u32, len: usize) -> &'static mut [u32] {
    let memory = vec![0u128; len.div_ceil(4)].leak();
    let memory = &mut bytemuck::cast_slice_mut(memory)[..len];
    (0..).zip(&mut *memory).for_each(|(i, element)| *element = value(i));
    memory
}

pub fn launch<A: KernelArgs>(
    kernel: Kernel<A>,
    shape: LaunchShape,
    args: A,
    options: &EmuOptions,
) -> Result<(), Fault> {
    // SAFETY: each test's handles cover live vectors that only the launch uses.
    unsafe { emu::launch(&kernel, shape, args, options) }
}

/// Runs a correct kernel.
#[track_caller]
pub fn pass<A: KernelArgs>(kernel: Kernel<A>, shape: LaunchShape, args: A, options: &EmuOptions) {
    launch(kernel, shape, args, options).unwrap_or_else(|fault| panic!("{fault}"));
}

/// Where a fault must be.
pub struct At {
    pub file: &'static str,
    pub source: &'static str,
    /// The text that the line of the mistake, and no other, ends in.
    pub marker: &'static str,
    pub block: u32,
    pub thread: u32,
}

/// The line of this file that ends in `// BUG: marker`, in a block and thread of a one-dimensional launch.
macro_rules! at {
    ($marker:literal, block $block:expr, thread $thread:expr) => {
        $crate::support::At {
            file: file!(),
            source: SOURCE,
            marker: concat!("// BUG: ", $marker),
            block: $block,
            thread: $thread,
        }
    };
}
pub(crate) use at;

/// The line of this file that ends in `// BUG: marker` as a place, without a column.
macro_rules! line {
    ($marker:literal) => {
        $crate::support::place(file!(), SOURCE, concat!("// BUG: ", $marker))
    };
}
pub(crate) use line;

pub fn place(file: &'static str, source: &str, marker: &str) -> Place {
    let mut lines = source.lines().zip(1..).filter(|(text, _)| text.trim_end().ends_with(marker));
    let (_, line) = lines.next().unwrap_or_else(|| panic!("no line ends in `{marker}`"));
    assert!(lines.next().is_none(), "two lines end in `{marker}`");
    Place { file, line, column: 0 }
}

/// Runs a broken kernel: its fault must name the kernel, the thread and the line. Returns what went wrong,
/// its places without columns.
#[track_caller]
pub fn caught<A: KernelArgs>(
    kernel: Kernel<A>,
    shape: LaunchShape,
    args: A,
    options: &EmuOptions,
    at: At,
) -> FaultKind {
    let Err(fault) = launch(kernel, shape, args, options) else { panic!("{kernel:?} passes: {options:?}") };
    assert_eq!(fault.kernel, kernel.name(), "{fault}");
    assert_eq!(fault.thread, Some(thread(at.block, at.thread)), "the thread of: {fault}");
    assert_eq!(
        fault.place.map(without_column),
        Some(place(at.file, at.source, at.marker)),
        "the line of: {fault}"
    );
    let text = fault.to_string();
    assert!(text.contains(kernel.name()) && text.contains(at.file) && text.lines().count() == 1, "{text}");
    match fault.kind {
        FaultKind::DivergentBarrier { absent, waits_at } => {
            FaultKind::DivergentBarrier { absent, waits_at: waits_at.map(without_column) }
        }
        FaultKind::LaneMissing { mask, lane, waits_at } => {
            FaultKind::LaneMissing { mask, lane, waits_at: waits_at.map(without_column) }
        }
        FaultKind::Race(mut race) => {
            race.other_place = without_column(race.other_place);
            FaultKind::Race(race)
        }
        FaultKind::AtomicScope(mut pair) => {
            pair.other_place = without_column(pair.other_place);
            FaultKind::AtomicScope(pair)
        }
        kind => kind,
    }
}

fn without_column(place: Place) -> Place {
    Place { column: 0, ..place }
}

/// An index in one dimension.
pub fn index(x: u32) -> Dim3 {
    Dim3 { x, y: 0, z: 0 }
}

/// A thread of a one-dimensional launch.
pub fn thread(block: u32, thread: u32) -> ThreadId {
    ThreadId { block: index(block), thread: index(thread) }
}
