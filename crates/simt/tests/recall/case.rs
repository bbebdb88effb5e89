//! A case, and how it is tried.

use simt::emu::{self, EmuOptions, Fault, allocations};
use simt::{Global, GlobalMut, Kernel, KernelArgs, LaunchShape, Pod};

/// A way to run the emulator, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    Default,
    Races,
    Memory,
    Orders,
    Thorough,
}

impl Mode {
    pub const ALL: [Mode; 5] = [Mode::Default, Mode::Races, Mode::Memory, Mode::Orders, Mode::Thorough];

    /// The options that find it, as the table has them.
    pub fn words(self) -> &'static str {
        match self {
            Mode::Default => "always",
            Mode::Races => "`race_check`",
            Mode::Memory => "`memory_check`",
            Mode::Orders => "`orders`",
            Mode::Thorough => "`thorough()`",
        }
    }

    pub fn options(self) -> EmuOptions {
        match self {
            Mode::Default => EmuOptions::default(),
            Mode::Races => EmuOptions::race_checked(),
            Mode::Memory => EmuOptions { memory_check: true, ..EmuOptions::default() },
            Mode::Orders => EmuOptions { orders: 8, ..EmuOptions::default() },
            Mode::Thorough => EmuOptions::thorough(),
        }
    }
}

/// What is expected of a bug.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    /// First found in this mode, as this variant of `FaultKind`, in the line that ends in `// BUG: marker`,
    /// by this block and thread.
    In(Mode, &'static str, &'static str, (u32, u32)),
    /// The same of a thread, in no line.
    OfThread(Mode, &'static str, (u32, u32)),
    /// The same of the launch as a whole, of no line and no thread.
    OfLaunch(Mode, &'static str),
    /// There is no bug: it must pass.
    Legal,
    /// Not found, for this reason.
    Missed(&'static str),
}

pub struct Case {
    pub name: &'static str,
    pub category: &'static str,
    pub mistake: &'static str,
    pub found: Found,
    pub source: &'static str,
    pub run: fn(u32, &EmuOptions) -> Result<(), Fault>,
}

/// Makes the cases of a file: a test for each, and the list `CASES`.
macro_rules! cases {
    ($category:literal; $($name:ident: $mistake:literal, $found:expr, |$bug:pat_param, $options:ident| $run:expr;)*) => {
        pub const CASES: &[crate::case::Case] = &[$(crate::case::Case {
            name: stringify!($name),
            category: $category,
            mistake: $mistake,
            found: $found,
            source: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recall/", $category, ".rs")),
            run: |$bug, $options| $run,
        }),*];

        mod tests {
            $(#[test]
            fn $name() {
                let case = super::CASES.iter().find(|case| case.name == stringify!($name));
                crate::case::check(case.expect("the list has every case"));
            })*
        }
    };
}
pub(crate) use cases;

/// Runs the bug and its twin.
pub fn check(case: &Case) {
    for mode in Mode::ALL {
        if let Err(fault) = (case.run)(0, &mode.options()) {
            panic!("false alarm on the twin of {} in mode {mode:?}: {fault}", case.name);
        }
    }
    for mode in Mode::ALL {
        let result = (case.run)(1, &mode.options());
        match (case.found, result) {
            (Found::In(by, kind, marker, at), Err(fault)) => {
                assert_eq!(by, mode, "{}: found in another mode: {fault}", case.name);
                check_fault(case, &fault, kind, marker, at);
                return;
            }
            (Found::OfLaunch(by, kind), Err(fault)) => {
                assert_eq!((by, kind, fault.thread), (mode, variant(&fault).as_str(), None), "{fault}");
                return;
            }
            (Found::OfThread(by, kind, at), Err(fault)) => {
                println!("{}: {fault}", case.name);
                assert_eq!((by, kind, fault.place), (mode, variant(&fault).as_str(), None), "{fault}");
                assert_eq!(fault.thread.map(|id| (id.block.x, id.thread.x)), Some(at), "{fault}");
                return;
            }
            (Found::In(by, ..) | Found::OfLaunch(by, _) | Found::OfThread(by, ..), Ok(())) => {
                assert!(by > mode, "{} is not found in mode {mode:?}", case.name);
            }
            (Found::Missed(_) | Found::Legal, Err(fault)) => {
                panic!("{} is found in mode {mode:?}: {fault}", case.name)
            }
            (Found::Missed(_) | Found::Legal, Ok(())) => {}
        }
    }
}

/// The name of what went wrong.
fn variant(fault: &Fault) -> String {
    let text = format!("{:?}", fault.kind);
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_string()
}

fn check_fault(case: &Case, fault: &Fault, kind: &str, marker: &str, (block, thread): (u32, u32)) {
    println!("{}: {fault}", case.name);
    assert_eq!(variant(fault), kind, "{fault}");
    let wanted = format!("// BUG: {marker}");
    let line = case.source.lines().position(|line| line.trim_end().ends_with(&wanted));
    let line = line.unwrap_or_else(|| panic!("no line ends in `{wanted}`")) as u32 + 1;
    assert_eq!(fault.place.map(|place| place.line), Some(line), "{fault}");
    let found = fault.thread.map(|id| (id.block.x, id.thread.x));
    assert_eq!(found, Some((block, thread)), "{fault}");
}

pub fn read<T: Pod>(data: &[T]) -> Global<T> {
    // SAFETY: used while `data` lives.
    unsafe { Global::from_raw(data.as_ptr() as u64, data.len()) }
}

pub fn write<T: Pod>(data: &mut [T]) -> GlobalMut<T> {
    // SAFETY: used while `data` lives.
    unsafe { GlobalMut::from_raw(data.as_mut_ptr() as u64, data.len()) }
}

/// Memory that the emulator keeps account of, until this is dropped.
pub struct Tracked(u64);

/// Nobody wrote these bytes.
pub fn tracked(address: u64, bytes: usize) -> Tracked {
    allocations::announce(address, bytes, 0);
    Tracked(address)
}

impl Drop for Tracked {
    fn drop(&mut self) {
        allocations::forget(self.0);
    }
}

pub fn go<A: KernelArgs>(
    kernel: Kernel<A>,
    shape: LaunchShape,
    args: A,
    options: &EmuOptions,
) -> Result<(), Fault> {
    // SAFETY: each case's handles cover live vectors that only the launch uses.
    unsafe { emu::launch(&kernel, shape, args, options) }
}
