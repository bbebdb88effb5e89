//! One launch with its memory, and what must come of it.

use crate::element::Element;
use crate::expected::{Expected, exact_difference};
use crate::failure::{Difference, Versus};
use ferrokv_device::{Buffer, Device, Error, Stream};
use proptest::test_runner::Reason;
use simt::emu::{EmuOptions, Place, ThreadId, launch_watched};
use simt::{Global, GlobalMut, Kernel, KernelArgs, KernelInfo, LaunchShape, Pod};
use std::fmt;

/// A kernel, its launch, its arguments, and what it must write.
///
/// The closure makes the arguments. It is called for each run of the case, with the memory of the device in
/// question.
///
/// ```
/// use simt::{Global, GlobalMut, LaunchShape, kernel, thread};
/// use simt_test::Trial;
///
/// #[kernel]
/// fn negate(x: Global<f32>, y: GlobalMut<f32>, n: u32) {
///     let i = thread::index_1d();
///     if i < n as usize {
///         y.store(i, -x.load(i));
///     }
/// }
///
/// fn negated(x: Vec<f32>) -> Trial {
///     let (n, expected) = (x.len() as u32, x.iter().map(|x| -x).collect::<Vec<f32>>());
///     Trial::new(negate::kernel(), LaunchShape::new(n.div_ceil(128), 128), move |memory| negate::Args {
///         x: memory.input(&x),
///         y: memory.output(&expected),
///         n,
///     })
/// }
/// # fn main() { let _ = negated(vec![1.0]); }
/// ```
pub struct Trial {
    pub(crate) launch: Box<dyn Launch>,
}

impl Trial {
    /// A launch of `kernel` over `shape`, with the arguments that `arguments` makes.
    pub fn new<A: KernelArgs>(
        kernel: Kernel<A>,
        shape: LaunchShape,
        arguments: impl Fn(&mut Memory<'_>) -> A + 'static,
    ) -> Self {
        Trial { launch: Box::new(Bound { kernel, shape, arguments }) }
    }
}

impl fmt::Debug for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Trial").field(&self.launch.info().name).finish()
    }
}

/// What a test's function returns: a [`Trial`]; an `Option` of one, `None` where the drawn values are no
/// case; or a `Result`, whose error fails the test.
pub trait IntoTrial {
    /// The trial, if there is one.
    ///
    /// # Errors
    /// The function's error in words.
    fn into_trial(self) -> Result<Option<Trial>, Reason>;
}

impl IntoTrial for Trial {
    fn into_trial(self) -> Result<Option<Trial>, Reason> {
        Ok(Some(self))
    }
}

impl IntoTrial for Option<Trial> {
    fn into_trial(self) -> Result<Option<Trial>, Reason> {
        Ok(self)
    }
}

impl<T: IntoTrial, E: fmt::Display> IntoTrial for Result<T, E> {
    fn into_trial(self) -> Result<Option<Trial>, Reason> {
        self.map_err(|error| Reason::from(error.to_string()))?.into_trial()
    }
}

/// Where the arguments of a launch get their memory. Every array has exactly its elements, so that an access
/// behind the end is seen.
pub struct Memory<'d> {
    device: &'d Device,
    /// What outputs hold before; `None` for what a device gives, which counts as not written.
    poison: Option<u8>,
    held: Vec<Box<dyn Held>>,
    error: Option<Error>,
}

impl fmt::Debug for Memory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Memory<'_> {
    /// An array that the kernel reads.
    pub fn input<T: Pod + Send + Sync>(&mut self, values: &[T]) -> Global<T> {
        self.hold(values.len(), Some(values), None).as_const()
    }

    /// An array that the kernel writes: all of `expected`, whatever it held before. A read of an element
    /// ahead of its write is a fault.
    pub fn output<T: Element>(&mut self, expected: impl Into<Expected<T>>) -> GlobalMut<T> {
        let expected = expected.into();
        self.hold(expected.len(), None, Some(Typed::boxed(expected)))
    }

    /// An array that holds `values` and, after the launch, what is `expected`. Elements that the kernel does
    /// not write must be in both.
    pub fn in_out<T: Element>(&mut self, values: &[T], expected: impl Into<Expected<T>>) -> GlobalMut<T> {
        let expected = expected.into();
        self.hold(values.len(), Some(values), Some(Typed::boxed(expected)))
    }

    /// An array that the kernel reads and writes, and whose contents mean nothing after the launch: counters,
    /// partial sums.
    pub fn scratch<T: Pod + Send + Sync>(&mut self, values: &[T]) -> GlobalMut<T> {
        self.hold(values.len(), Some(values), None)
    }

    fn hold<T: Pod + Send + Sync>(
        &mut self,
        len: usize,
        values: Option<&[T]>,
        judge: Option<Box<dyn Judge>>,
    ) -> GlobalMut<T> {
        let buffer = match (values, self.poison) {
            (Some(values), _) => Buffer::from_slice(self.device, values),
            (None, None) => Buffer::new(self.device, len),
            (None, Some(byte)) => {
                let element: T = bytemuck::pod_read_unaligned(&vec![byte; size_of::<T>()]);
                Buffer::from_slice(self.device, &vec![element; len])
            }
        };
        match buffer {
            Ok(mut buffer) => {
                let handle = buffer.global_mut();
                self.held.push(Box::new(Holding { buffer, judge, fresh: values.is_none() }));
                handle
            }
            Err(error) => {
                self.error.get_or_insert(error);
                // SAFETY: it reaches no element, and nothing is launched after an error.
                unsafe { GlobalMut::from_raw(0, 0) }
            }
        }
    }
}

/// A buffer of any element.
trait Held {
    fn address(&self) -> u64;
    fn bytes(&self) -> usize;
    fn contents(&self) -> Result<Vec<u8>, Error>;
    /// Takes what its contents are held against; `None` for what is none of the results.
    fn judge(&mut self) -> Option<(Box<dyn Judge>, bool)>;
}

struct Holding<T: Pod> {
    buffer: Buffer<T>,
    judge: Option<Box<dyn Judge>>,
    fresh: bool,
}

impl<T: Pod> Held for Holding<T> {
    fn address(&self) -> u64 {
        self.buffer.global().address()
    }

    fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    fn contents(&self) -> Result<Vec<u8>, Error> {
        Ok(bytemuck::cast_slice(&self.buffer.to_vec()?).to_vec())
    }

    fn judge(&mut self) -> Option<(Box<dyn Judge>, bool)> {
        Some((self.judge.take()?, self.fresh))
    }
}

/// What knows the type of an output's elements.
pub(crate) trait Judge {
    /// The first difference of two runs' contents.
    fn between(&self, expected: &[u8], found: &[u8]) -> Option<Difference>;
    /// The first difference from what was expected.
    fn expected(&self, found: &[u8]) -> Option<(Versus, Difference)>;
    /// Bytes of an element.
    fn element_bytes(&self) -> usize;
}

struct Typed<T>(Expected<T>);

impl<T: Element> Typed<T> {
    fn boxed(expected: Expected<T>) -> Box<dyn Judge> {
        Box::new(Typed(expected))
    }
}

fn elements<T: Element>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

impl<T: Element> Judge for Typed<T> {
    fn between(&self, expected: &[u8], found: &[u8]) -> Option<Difference> {
        exact_difference::<T>(&elements(expected), &elements(found))
    }

    fn expected(&self, found: &[u8]) -> Option<(Versus, Difference)> {
        let found = elements::<T>(found);
        if found.len() != self.0.len() {
            let unstated = vec![T::zeroed(); self.0.len()];
            return exact_difference(&unstated, &found).map(|difference| (Versus::Oracle, difference));
        }
        self.0.difference(&found)
    }

    fn element_bytes(&self) -> usize {
        size_of::<T>()
    }
}

/// What a launch left in one of its outputs.
pub(crate) struct Output {
    /// The kernel's parameter.
    pub parameter: &'static str,
    pub contents: Vec<u8>,
    pub judge: Box<dyn Judge>,
    /// Whether the kernel must write all of it.
    pub fresh: bool,
    /// Which of the launch's arrays it is.
    array: usize,
}

/// A launch without the types of its arguments.
pub(crate) trait Launch {
    fn info(&self) -> &'static KernelInfo;
    fn shape(&self) -> LaunchShape;
    /// Runs it and returns its outputs.
    fn run(&self, device: &Device, poison: Option<u8>) -> Result<Vec<Output>, Error>;
    /// Who writes an element of an output last, with threads in ascending order.
    fn writer(&self, output: &Output, element: usize) -> Option<(ThreadId, Place)>;
}

struct Bound<A: KernelArgs, F> {
    kernel: Kernel<A>,
    shape: LaunchShape,
    arguments: F,
}

impl<A: KernelArgs, F: Fn(&mut Memory<'_>) -> A> Bound<A, F> {
    fn bind<'d>(&self, device: &'d Device, poison: Option<u8>) -> Result<(A, Memory<'d>), Error> {
        let mut memory = Memory { device, poison, held: Vec::new(), error: None };
        let arguments = (self.arguments)(&mut memory);
        match memory.error.take() {
            Some(error) => Err(error),
            None => Ok((arguments, memory)),
        }
    }
}

impl<A: KernelArgs, F: Fn(&mut Memory<'_>) -> A> Launch for Bound<A, F> {
    fn info(&self) -> &'static KernelInfo {
        self.kernel.info()
    }

    fn shape(&self) -> LaunchShape {
        self.shape
    }

    fn run(&self, device: &Device, poison: Option<u8>) -> Result<Vec<Output>, Error> {
        let stream = Stream::new(device)?;
        let (arguments, mut memory) = self.bind(device, poison)?;
        // SAFETY: every handle is of a buffer of `memory`, which is there until the stream is waited for, and
        // no other work knows of it. What the kernel does with them the emulator has checked by the time a
        // GPU runs it; there it runs in a process of its own.
        unsafe { stream.launch(&self.kernel, self.shape, arguments) }?;
        stream.synchronize()?;
        let mut outputs = Vec::new();
        for (array, held) in memory.held.iter_mut().enumerate() {
            let Some((judge, fresh)) = held.judge() else { continue };
            let mut parameter = "(an array without elements)";
            arguments.memory(&mut |name, handle| {
                let own = held.address()..held.address() + held.bytes() as u64;
                if own.contains(&handle.address) {
                    parameter = name;
                }
            });
            outputs.push(Output { parameter, contents: held.contents()?, judge, fresh, array });
        }
        Ok(outputs)
    }

    fn writer(&self, output: &Output, element: usize) -> Option<(ThreadId, Place)> {
        let device = Device::cpu(EmuOptions::default());
        let (arguments, memory) = self.bind(&device, None).ok()?;
        let size = output.judge.element_bytes() as u64;
        let start = memory.held.get(output.array)?.address() + element as u64 * size;
        let options = EmuOptions { schedule: simt::emu::Schedule::Ascending, ..EmuOptions::default() };
        // SAFETY: the handles are of host memory that `memory` keeps, and nothing else uses it.
        let watched =
            unsafe { launch_watched(&self.kernel, self.shape, arguments, &options, start..start + size) };
        watched.ok().flatten()
    }
}
