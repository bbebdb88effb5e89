//! Lines that kernels print: what [`println!`](crate::println) makes on the host.
//!
//! A line has its text, and says which thread of which kernel printed it and where. It goes to a [`Sink`]:
//! that of the device that runs the kernel, or of [`launch_printing`](crate::emu::launch_printing), else that
//! of [`to`], else standard error.
//!
//! ```
//! use simt::emu::{self, EmuOptions};
//! use simt::print::{self, Printed};
//! use simt::{LaunchShape, kernel, thread};
//!
//! #[kernel]
//! fn odd(n: u32) {
//!     let i = thread::thread_idx_x();
//!     if i % 2 == 1 {
//!         println!("{i} of {n}: {:08.3}, {:#06x}", i as f32 / 3.0, i << 8);
//!     }
//! }
//!
//! # fn main() -> Result<(), emu::Fault> {
//! let (result, lines) = print::captured(|| {
//!     let (shape, options) = (LaunchShape::new(1, 4), EmuOptions::default());
//!     // SAFETY: it has no memory.
//!     unsafe { emu::launch(&odd::kernel(), shape, odd::Args { n: 4 }, &options) }
//! });
//! result?;
//! let text: Vec<String> = lines.iter().map(Printed::to_string).collect();
//! assert_eq!(text, [
//!     "kernel odd, block (0,0,0) thread (1,0,0): 1 of 4: 0000.333, 0x0100",
//!     "kernel odd, block (0,0,0) thread (3,0,0): 3 of 4: 0001.000, 0x0300",
//! ]);
//! # Ok(())
//! # }
//! ```

use crate::emu::{Place, ThreadId};
use std::cell::RefCell;
use std::fmt;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

#[doc(hidden)]
pub use crate::emu::print::line;

/// A line of text of one thread of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The kernel's entry.
    pub kernel: &'static str,
    /// Who printed it.
    pub thread: ThreadId,
    /// Where the macro stands in the source.
    pub place: Place,
    /// The text, without a line end behind it.
    pub text: String,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}, {}: {}", self.kernel, self.thread, self.text)
    }
}

/// What a sink is given.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Printed {
    /// A line.
    Line(Line),
    /// So many lines found no room on a GPU: its kernels printed more between two waits than a GPU keeps.
    /// They are those that came last, among those of the kernels that ran since the wait before.
    Lost {
        /// How many.
        lines: u64,
    },
}

impl Printed {
    /// The line's text; nothing of those that are lost.
    pub fn text(&self) -> Option<&str> {
        match self {
            Printed::Line(line) => Some(&line.text),
            Printed::Lost { .. } => None,
        }
    }
}

impl fmt::Display for Printed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Printed::Line(line) => line.fmt(f),
            Printed::Lost { lines } => write!(f, "{lines} more lines of kernels found no room and are lost"),
        }
    }
}

/// Where lines go. It is called from any thread, with one line at a time of a block's.
///
/// It may launch under the emulator, and use devices, also the one that it gets lines of. What it launches
/// prints to standard error, if it would come to this same sink (so that lines do not make lines without
/// end), or if nothing inside the sink names another one; lines of a GPU come with a later wait.
pub type Sink = Arc<dyn Fn(&Printed) + Send + Sync>;

/// The sink that is used if there is no other: a line of standard error each.
pub fn standard_error() -> Sink {
    // A closed pipe is no reason to panic.
    Arc::new(|printed| drop(writeln!(std::io::stderr().lock(), "{printed}")))
}

thread_local! {
    /// Where launches of this thread print to, if not to standard error.
    static SINK: RefCell<Option<Sink>> = const { RefCell::new(None) };
    /// The sinks that are being called here, one inside the other.
    static CALLED: RefCell<Vec<Sink>> = const { RefCell::new(Vec::new()) };
}

/// Puts back what was in [`SINK`], also if what comes between unwinds.
struct Before(Option<Sink>);

impl Drop for Before {
    fn drop(&mut self) {
        drop(replaced_by(self.0.take()));
    }
}

/// Puts `sink` into [`SINK`]; what was there. A thread that ends may have none any more.
fn replaced_by(sink: Option<Sink>) -> Option<Sink> {
    SINK.try_with(|now| now.replace(sink)).unwrap_or_default()
}

/// Gives `sink` the lines of what `launches` launches in this thread: by [`emu::launch`](crate::emu::launch)
/// and those like it, or on a device of the CPU backend that has no sink of its own.
pub fn to<R>(sink: &Sink, launches: impl FnOnce() -> R) -> R {
    let _before = Before(replaced_by(Some(sink.clone())));
    launches()
}

/// What `launches` returns, and the lines of what it launches in this thread, as [`to`] has it.
pub fn captured<R>(launches: impl FnOnce() -> R) -> (R, Vec<Printed>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let into = lines.clone();
    let sink: Sink = Arc::new(move |printed: &Printed| {
        into.lock().unwrap_or_else(PoisonError::into_inner).push(printed.clone());
    });
    let result = to(&sink, launches);
    let lines = std::mem::take(&mut *lines.lock().unwrap_or_else(PoisonError::into_inner));
    (result, lines)
}

/// Runs a launch, whose sink is known: what other work this thread is lent meanwhile is none of that sink's.
pub(crate) fn away_from_sink<R>(launch: impl FnOnce() -> R) -> R {
    let _before = Before(replaced_by(None));
    launch()
}

/// Calls a sink. What it launches in this thread is none of the sink's that the thread has.
#[doc(hidden)]
pub fn call(sink: &Sink, printed: &Printed) {
    /// Also when the sink panics, it is over.
    struct Left;
    impl Drop for Left {
        fn drop(&mut self) {
            let _ = CALLED.try_with(|called| called.borrow_mut().pop());
        }
    }
    let _before = Before(replaced_by(None));
    let _ = CALLED.try_with(|called| called.borrow_mut().push(sink.clone()));
    let _left = Left;
    sink(printed);
}

/// Where a launch of this thread prints to: to `of_device`, if the device that it is on has a sink.
pub(crate) fn sink(of_device: Option<&Sink>) -> Sink {
    let sink = of_device.cloned().or_else(|| SINK.with_borrow(Option::clone));
    let called = |sink: &Sink| CALLED.with_borrow(|called| called.iter().any(|one| Arc::ptr_eq(one, sink)));
    sink.filter(|sink| !called(sink)).unwrap_or_else(standard_error)
}
