//! The first kernel of `docs/kernel-guide.md` as a whole program, and two mistakes that the emulator catches.
//!
//! ```text
//! cargo run --release --example first_kernel             # runs the kernel and checks its output
//! cargo run --release --example first_kernel -- --bug    # runs two broken versions and shows the messages
//! ```
//!
//! Exit code 1 if the output is wrong, or if a mistake goes unnoticed.

use ferrokv::host::{Buffer, Device, Error, Stream};
use simt::emu::EmuOptions;
use simt::{Global, GlobalMut, Kernel, LaunchShape, kernel, math, thread};
use std::process::ExitCode;

/// y = a·x + y, one thread an element.
#[kernel]
fn axpy(a: f32, x: Global<f32>, y: GlobalMut<f32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.store(i, math::fma(a, x.load(i), y.load(i)));
    }
}

/// The same with `<=` for `<`: the thread after the last element reads past the end of x.
#[kernel(args = axpy)]
fn axpy_past_the_end(a: f32, x: Global<f32>, y: GlobalMut<f32>, n: u32) {
    let i = thread::index_1d();
    if i <= n as usize {
        y.store(i, math::fma(a, x.load(i), y.load(i)));
    }
}

/// Adds the right neighbour in place: whether thread i reads it before or after thread i + 1 writes it is
/// open.
#[kernel(args = axpy)]
fn axpy_in_place(a: f32, _x: Global<f32>, y: GlobalMut<f32>, n: u32) {
    let i = thread::index_1d();
    if i + 1 < n as usize {
        y.store(i, math::fma(a, y.load(i + 1), y.load(i)));
    }
}

const N: u32 = 1000;

/// Runs `kernel` over 1000 elements on `device` and returns y.
fn run(device: &Device, kernel: &Kernel<axpy::Args>) -> Result<Vec<f32>, Error> {
    let stream = Stream::new(device)?;
    let x = Buffer::from_slice(device, &(0..N).map(|i| i as f32).collect::<Vec<_>>())?;
    let mut y = Buffer::from_slice(device, &[1f32; N as usize])?;
    let shape = LaunchShape::new(N.div_ceil(256), 256);
    let args = axpy::Args { a: 0.5, x: x.global(), y: y.global_mut(), n: N };
    // SAFETY: both buffers have N elements and live until `to_vec` has waited for the launch. On the emulator
    // a kernel that breaks the rest of the contract is an error, not undefined behaviour.
    unsafe { stream.launch(kernel, shape, args) }?;
    y.to_vec()
}

fn main() -> ExitCode {
    let device = Device::cpu(EmuOptions::race_checked());
    if std::env::args().any(|argument| argument == "--bug") {
        for kernel in [axpy_past_the_end::kernel(), axpy_in_place::kernel()] {
            match run(&device, &kernel) {
                Err(error) => println!("{error}"),
                Ok(_) => {
                    eprintln!("{} went unnoticed", kernel.name());
                    return ExitCode::FAILURE;
                }
            }
        }
        return ExitCode::SUCCESS;
    }
    let y = match run(&device, &axpy::kernel()) {
        Ok(y) => y,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let expected = (0..N).map(|i| 0.5 * i as f32 + 1.0);
    let right = y.iter().copied().eq(expected);
    println!("axpy over {N} elements: {}", if right { "as expected" } else { "wrong" });
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
