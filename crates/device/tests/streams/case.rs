//! A case, and how it is tried.

use ferrokv_device::unordered::{Access, Doing, Unordered, Use};
use ferrokv_device::{Buffer, Device, Error, Event, Pinned, Result, Stream};
use simt::emu::{EmuOptions, STREAM_CHECK_VARIABLE};
use simt::{Global, GlobalMut, LaunchShape, kernel, thread};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};

/// How many elements the memory of a case has.
pub const N: usize = 64;

/// What is expected of a mistake.
#[derive(Clone, Debug)]
pub enum Found {
    /// An error in these words, and the bytes in conflict.
    As(&'static str, Range<u64>),
    /// The same as a panic.
    Panic(&'static str, Range<u64>),
    /// There is no mistake: it must pass.
    Legal,
    /// Not found, for this reason.
    Missed(&'static str),
}

pub struct Case {
    pub name: &'static str,
    pub mistake: &'static str,
    pub found: Found,
    pub source: &'static str,
    pub run: fn(&Given, bool) -> Result<()>,
}

/// Makes the cases of a file: a test for each, and the list `CASES`.
macro_rules! cases {
    ($file:literal; $($name:ident: $mistake:literal, $found:expr;)*) => {
        pub const CASES: &[crate::case::Case] = &[$(crate::case::Case {
            name: stringify!($name),
            mistake: $mistake,
            found: $found,
            source: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/streams/", $file, ".rs")),
            run: $name,
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

/// What every case is given.
pub struct Given {
    pub device: Device,
    pub a: Stream,
    pub b: Stream,
    pub c: Stream,
}

impl Given {
    fn new(options: EmuOptions) -> Given {
        let device = Device::cpu(options);
        let stream = || Stream::new(&device).unwrap();
        Given { a: stream(), b: stream(), c: stream(), device: device.clone() }
    }

    /// Elements that all are `value`.
    #[track_caller]
    pub fn buffer(&self, value: u32) -> Buffer<u32> {
        Buffer::from_slice(&self.device, &[value; N]).unwrap()
    }

    #[track_caller]
    pub fn pinned(&self, value: u32) -> Pinned<u32> {
        Pinned::from_slice(&self.device, &[value; N]).unwrap()
    }

    /// Has `to` wait for what is in `from`.
    pub fn order(&self, from: &Stream, to: &Stream) -> Result<()> {
        let event = Event::new(&self.device)?;
        from.record(&event)?;
        to.wait(&event)
    }
}

#[kernel(system = stream_test)]
pub fn double(x: Global<u32>, y: GlobalMut<u32>, start: u32) {
    let i = thread::index_1d() + start as usize;
    y.store(i, 2 * x.load(i));
}

#[kernel(system = stream_test)]
pub fn count(counter: GlobalMut<u32>) {
    counter.atomic_add(0, 1);
}

#[kernel(system = stream_test, overlaps)]
pub fn add_one(y: GlobalMut<u32>) {
    let i = thread::index_1d();
    y.store(i, y.load(i) + 1);
}

/// y := 2 x.
#[track_caller]
pub fn twice(stream: &Stream, x: &Buffer<u32>, y: &mut Buffer<u32>) -> Result<()> {
    twice_of(stream, x.global(), y.global_mut(), 0..N)
}

/// The same of some elements.
#[track_caller]
pub fn twice_of(stream: &Stream, x: Global<u32>, y: GlobalMut<u32>, of: Range<usize>) -> Result<()> {
    let args = double::Args { x, y, start: of.start as u32 };
    // SAFETY: memory of N elements, of which each thread has its own; the emulator runs it in this call.
    unsafe { stream.launch(&double::kernel(), LaunchShape::new(1, of.len() as u32), args) }
}

#[track_caller]
pub fn count_in(stream: &Stream, counter: &mut Buffer<u32>) -> Result<()> {
    let args = count::Args { counter: counter.global_mut() };
    // SAFETY: the memory is there, and the emulator runs it in this call.
    unsafe { stream.launch(&count::kernel(), LaunchShape::new(1, 32), args) }
}

/// y := y + 1, by a launch that may overlap others.
#[track_caller]
pub fn step(stream: &Stream, y: &mut Buffer<u32>) -> Result<()> {
    let args = add_one::Args { y: y.global_mut() };
    // SAFETY: memory of N elements, of which each thread has its own; the emulator runs it in this call.
    unsafe { stream.launch(&add_one::kernel(), LaunchShape::new(1, N as u32), args) }
}

#[track_caller]
pub fn up(stream: &Stream, from: &Pinned<u32>, to: &mut Buffer<u32>) -> Result<()> {
    // SAFETY: the emulator copies in this call.
    unsafe { stream.upload_async(from, .., to, 0) }
}

#[track_caller]
pub fn down(stream: &Stream, from: &Buffer<u32>, to: &mut Pinned<u32>) -> Result<()> {
    // SAFETY: the emulator copies in this call.
    unsafe { stream.download_async(from, .., to, 0) }
}

fn modes() -> [(EmuOptions, bool); 4] {
    let checked = EmuOptions { stream_check: true, ..EmuOptions::default() };
    let with_memory = EmuOptions { memory_check: true, ..checked };
    let asked = std::env::var_os(STREAM_CHECK_VARIABLE).is_some_and(|value| value != "0");
    [(EmuOptions::default(), asked), (checked, true), (with_memory, true), (EmuOptions::thorough(), true)]
}

/// Runs the mistake and its twin, with the check and without.
pub fn check(case: &Case) {
    for (options, checks) in modes() {
        if let Err(error) = (case.run)(&Given::new(options), false) {
            panic!("false alarm on the twin of {}: {error}", case.name);
        }
        let given = Given::new(options);
        let result = catch_unwind(AssertUnwindSafe(|| (case.run)(&given, true)));
        match (&case.found, result) {
            (Found::As(words, bytes), Ok(Err(Error::Unordered(found)))) if checks => {
                check_found(case, &found, words, bytes);
            }
            (Found::Panic(_, bytes), Err(panic)) if checks => {
                let text = *panic.downcast::<String>().unwrap();
                println!("{}: {text}", case.name);
                assert!(text.contains(&format!("(bytes {}..{})", bytes.start, bytes.end)), "{text}");
                assert!(marked(case, "FIRST").is_some());
                for line in [marked(case, "FIRST"), marked(case, "SECOND")].into_iter().flatten() {
                    assert!(text.contains(&format!("{}.rs:{line}:", file(case))), "{line}: {text}");
                }
            }
            (Found::As(..) | Found::Panic(..), Ok(Ok(()))) if !checks => {}
            (Found::Legal | Found::Missed(_), Ok(Ok(()))) => {}
            (found, result) => panic!("{}: {found:?} with {options:?}: {result:?}", case.name),
        }
    }
}

/// The file's name, as the case's source has it in its macro.
fn file(case: &Case) -> &'static str {
    case.source.split("cases! { \"").nth(1).and_then(|rest| rest.split('"').next()).expect("a name")
}

/// The line of the case's function that ends in a marker.
fn marked(case: &Case, marker: &str) -> Option<u32> {
    let lines = case.source.lines().enumerate();
    let body = lines.skip_while(|(_, line)| !line.starts_with(&format!("fn {}(", case.name)));
    let mut body = body.take_while(|(_, line)| *line != "}");
    let marks = |line: &str| line.ends_with(&format!("// {marker}")) || line.ends_with("// FIRST AND SECOND");
    body.find(|(_, line)| marks(line)).map(|(number, _)| number as u32 + 1)
}

/// `a launch reads`.
fn words(one: &Use) -> String {
    let who = match one.doing {
        Doing::Launch(_) => "a launch",
        Doing::Copy => "a copy",
        Doing::Fill => "a fill",
        Doing::Host => "the host",
        _ => unreachable!("{one:?}"),
    };
    let does = match one.access {
        Access::Read => "reads",
        Access::ReadAhead => "reads ahead",
        Access::Write => "writes",
        Access::Atomic => "counts up",
        Access::Free => "drops",
        _ => unreachable!("{one:?}"),
    };
    format!("{who} {does}")
}

fn check_found(case: &Case, found: &Unordered, expected: &str, bytes: &Range<u64>) {
    println!("{}: {found}", case.name);
    assert_eq!(format!("{} what {}", words(&found.second), words(&found.first)), expected, "{found}");
    assert_eq!(&found.bytes, bytes, "{found}");
    let place = |at: Option<&'static Location<'static>>| {
        let at = at.expect("a place");
        assert!(at.file().ends_with(&format!("{}.rs", file(case))), "{at}");
        Some(at.line())
    };
    assert_eq!(place(found.first.at), marked(case, "FIRST"), "{found}");
    assert_eq!(place(found.second.at), marked(case, "SECOND"), "{found}");
    let memory = found.memory.expect("the memory is known");
    assert_eq!((memory.element, memory.element_bytes, memory.len), ("u32", 4, N), "{found}");
    let text = found.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(!found.first.or_before && text.contains("nothing orders the two: "), "{text}");
}
