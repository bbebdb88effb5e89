//! Work on the same memory that nothing orders: what the CPU backend's stream check reports.

use std::fmt;
use std::ops::Range;
use std::panic::Location;

/// Two uses of the same bytes, one of which changes them, that a GPU may do in either order or at once.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unordered {
    /// The use that was asked for first.
    pub first: Use,
    /// The use that found the other one unfinished.
    pub second: Use,
    /// The memory, if it is a buffer or pinned.
    pub memory: Option<Memory>,
    /// The first bytes in conflict, counted from the start of the memory; addresses where it is not known.
    pub bytes: Range<u64>,
}

/// A buffer or pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Whether it is a [`Pinned`](crate::Pinned), not a [`Buffer`](crate::Buffer).
    pub pinned: bool,
    /// The type of its elements.
    pub element: &'static str,
    /// The size of an element in bytes.
    pub element_bytes: usize,
    /// How many elements it has.
    pub len: usize,
    /// Where it was made.
    pub at: &'static Location<'static>,
}

/// What uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Doing {
    /// A launch of the kernel of this name.
    Launch(&'static str),
    /// A copy.
    Copy,
    /// A fill.
    Fill,
    /// The host itself, which looks at pinned memory or drops it.
    Host,
}

/// How memory is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// It is read.
    Read,
    /// It is read before [`wait_for_previous`](simt::thread::wait_for_previous), by a launch that may start
    /// before the launches ahead of it have ended.
    ReadAhead,
    /// It is written.
    Write,
    /// It is changed by atomics.
    Atomic,
    /// It is given back.
    Free,
}

/// One use of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Use {
    /// What it is.
    pub doing: Doing,
    /// What it does to the bytes.
    pub access: Access,
    /// The stream, if it is work of one: streams of a device are numbered from 1 as they are made.
    pub stream: Option<u64>,
    /// The how many-th work of the stream it is, from 1. Each step of a graph counts.
    pub number: u64,
    /// For a step of a graph: which it is, from 1, and where the graph was launched.
    pub step: Option<(usize, &'static Location<'static>)>,
    /// Where it was asked for; for a step of a graph, in the capture. Not known of a drop.
    pub at: Option<&'static Location<'static>>,
    /// Whether it may be work of the stream somewhat before that one: there is too much to tell apart.
    pub or_before: bool,
}

impl Memory {
    pub(crate) fn of<T>(len: usize, pinned: bool, at: &'static Location<'static>) -> Memory {
        Memory { pinned, element: std::any::type_name::<T>(), element_bytes: size_of::<T>(), len, at }
    }

    /// Its size. No memory is larger than an address can say.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.element_bytes
    }
}

impl Access {
    fn verb(self) -> &'static str {
        match self {
            Access::Read => "reads",
            Access::ReadAhead => "reads ahead of its wait",
            Access::Write => "writes",
            Access::Atomic => "updates by atomics",
            Access::Free => "frees",
        }
    }
}

impl Use {
    /// `launch`, or what else it is; a step of a graph comes and goes with the graph.
    fn noun(&self) -> &'static str {
        match self.doing {
            _ if self.step.is_some() => "graph",
            Doing::Launch(_) => "launch",
            Doing::Copy => "copy",
            Doing::Fill => "fill",
            Doing::Host => "host",
        }
    }
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.doing {
            Doing::Launch(kernel) => write!(f, "the launch of {kernel}")?,
            Doing::Copy => f.write_str("the copy")?,
            Doing::Fill => f.write_str("the fill")?,
            Doing::Host => f.write_str("the host")?,
        }
        if let Some(at) = self.at {
            write!(f, " at {at}")?;
        }
        if let Some(stream) = self.stream {
            f.write_str(" (")?;
            if let Some((step, at)) = self.step {
                write!(f, "step {step} of the graph launched at {at}, ")?;
            }
            write!(f, "number {} of stream {stream})", self.number)?;
        }
        if self.or_before {
            f.write_str(", or work before it,")?;
        }
        Ok(())
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Memory { pinned, element, len, at, .. } = self;
        let kind = if *pinned { "Pinned" } else { "Buffer" };
        write!(f, "the {kind}<{element}> of {len} elements made at {at}")
    }
}

impl fmt::Display for Unordered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unordered { first, second, memory, bytes } = self;
        write!(f, "{second} {} ", second.access.verb())?;
        match memory {
            Some(memory) => {
                let element = memory.element_bytes as u64;
                let elements = bytes.start / element..bytes.end.div_ceil(element);
                write!(f, "elements {}..{} ", elements.start, elements.end)?;
                write!(f, "(bytes {}..{}) of {memory}", bytes.start, bytes.end)?;
            }
            None => write!(f, "the memory at {:#x}..{:#x}", bytes.start, bytes.end)?,
        }
        write!(f, ", which {first} {}, and nothing orders the two: ", first.access.verb())?;
        let number = first.stream.unwrap_or_default();
        match second.stream {
            None if second.access == Access::Free => {
                write!(f, "synchronize stream {number} before the memory is dropped")
            }
            None => write!(f, "synchronize stream {number}, or an event behind the {}, first", first.noun()),
            Some(same) if same == number => {
                f.write_str("the launch may start before that one has ended; read this behind its wait")
            }
            Some(other) => write!(
                f,
                "record an event on stream {number} behind the {} and have stream {other} wait for it ahead of \
                 the {}, or synchronize stream {number} in between",
                first.noun(),
                second.noun()
            ),
        }
    }
}
