//! Memory that nobody wrote, is freed or is another device's, under the emulator with `memory_check`. Each
//! mistake has its twin without it.

mod common;

use common::{add, affine, cover, increment};
use ferrokv_device::{Buffer, Device, Error, Stream};
use simt::LaunchShape;
use simt::emu::{EmuOptions, Fault, FaultKind};

fn checked() -> (Device, Stream) {
    let device = Device::cpu(EmuOptions { memory_check: true, ..EmuOptions::default() });
    let stream = Stream::new(&device).unwrap();
    (device, stream)
}

fn fault(result: Result<(), Error>) -> Fault {
    match result {
        Err(Error::Fault(fault)) => *fault,
        other => panic!("{other:?}"),
    }
}

fn thread_of(fault: &Fault) -> (u32, u32) {
    fault.thread.map(|id| (id.block.x, id.thread.x)).unwrap()
}

fn run(stream: &Stream, x: &Buffer<f32>, y: &mut Buffer<f32>, n: u32) -> Result<(), Error> {
    let args = affine::Args { x: x.global(), y: y.global_mut(), a: 2.0, n };
    // SAFETY: every buffer of these tests has at least `n` elements.
    unsafe { stream.launch(&affine::kernel(), cover(n as usize), args) }
}

#[test]
fn a_buffer_that_nobody_filled() {
    let (device, stream) = checked();
    let mut y = Buffer::new(&device, 300).unwrap();
    let fault = fault(run(&stream, &Buffer::new(&device, 300).unwrap(), &mut y, 300));
    assert_eq!((fault.kernel, thread_of(&fault)), ("host_test_affine", (0, 0)));
    assert_eq!(fault.kind, FaultKind::Unwritten { index: 0, bytes: 4 });
    assert!(fault.to_string().contains("common/mod.rs"), "{fault}");
    run(&stream, &Buffer::zeroed(&device, 300).unwrap(), &mut y, 300).unwrap();
    // Nobody says a word where the check is off.
    let device = Device::cpu(EmuOptions::default());
    let (stream, mut y) = (Stream::new(&device).unwrap(), Buffer::new(&device, 300).unwrap());
    run(&stream, &Buffer::new(&device, 300).unwrap(), &mut y, 300).unwrap();
}

#[test]
fn a_tail_that_no_thread_took() {
    for orders in [0, 3] {
        let device =
            Device::cpu(EmuOptions { memory_check: true, orders, race_check: true, ..EmuOptions::default() });
        let stream = Stream::new(&device).unwrap();
        for n in [299, 300] {
            let x = Buffer::zeroed(&device, 300).unwrap();
            let (mut y, mut z) = (Buffer::new(&device, 300).unwrap(), Buffer::new(&device, 300).unwrap());
            run(&stream, &x, &mut y, n).unwrap();
            let second = run(&stream, &y, &mut z, 300);
            if n == 300 {
                second.unwrap();
                continue;
            }
            let fault = fault(second);
            assert_eq!(thread_of(&fault), (2, 43));
            assert_eq!(fault.kind, FaultKind::Unwritten { index: 299, bytes: 4 });
        }
    }
}

#[test]
fn a_copy_of_what_nobody_wrote() {
    let (device, stream) = checked();
    for filled in [false, true] {
        let mut from = Buffer::<f32>::new(&device, 64).unwrap();
        stream.fill_u32(&mut from, if filled { 0..64 } else { 0..60 }, 0).unwrap();
        let (mut middle, mut y) = (Buffer::zeroed(&device, 64).unwrap(), Buffer::new(&device, 64).unwrap());
        stream.copy(&from, 0..64, &mut middle, 0).unwrap();
        let result = run(&stream, &middle, &mut y, 64);
        if filled {
            result.unwrap();
        } else {
            assert_eq!(fault(result).kind, FaultKind::Unwritten { index: 60, bytes: 4 });
        }
    }
}

#[test]
fn a_handle_that_outlives_its_buffer() {
    let (device, stream) = checked();
    let mut buffer = Buffer::<u32>::zeroed(&device, 64).unwrap();
    let args = add(&mut buffer, 1);
    // SAFETY: the buffer lives.
    unsafe { stream.launch(&increment::kernel(), cover(64), args) }.unwrap();
    drop(buffer);
    // A new buffer of the same size does not hide it.
    let _other = Buffer::<u32>::zeroed(&device, 64).unwrap();
    // SAFETY: the check refuses the launch before it touches the memory.
    let fault = fault(unsafe { stream.launch(&increment::kernel(), cover(64), args) });
    assert_eq!((fault.kernel, fault.kind), ("host_test_increment", FaultKind::Freed { parameter: "y" }));
}

#[test]
fn a_graph_over_freed_memory() {
    for launches in [true, false] {
        let (device, stream) = checked();
        let (mut y, from) = (Buffer::<u32>::zeroed(&device, 64).unwrap(), [7u32; 64]);
        let source = Buffer::from_slice(&device, &from).unwrap();
        let (graph, ()) = stream
            .capture(|stream| {
                if launches {
                    let args = add(&mut y, 1);
                    // SAFETY: the emulator refuses the launch if the buffer is gone.
                    unsafe { stream.launch(&increment::kernel(), LaunchShape::new(1, 64), args) }
                } else {
                    stream.copy(&source, 0..64, &mut y, 0)
                }
            })
            .unwrap();
        let exec = graph.instantiate().unwrap();
        // SAFETY: the buffers live.
        unsafe { exec.launch(&stream) }.unwrap();
        drop(y);
        // SAFETY: as above.
        match unsafe { exec.launch(&stream) } {
            Err(Error::Fault(fault)) => assert_eq!(fault.kind, FaultKind::Freed { parameter: "y" }),
            Err(Error::Freed { doing: "a copy" }) => assert!(!launches),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_buffer_of_another_device() {
    let ((one, stream), (other, _)) = (checked(), checked());
    let mut y = Buffer::new(&one, 64).unwrap();
    for (device, foreign) in [(&one, false), (&other, true)] {
        let x = Buffer::<f32>::zeroed(device, 64).unwrap();
        let launched = run(&stream, &x, &mut y, 64);
        let copied = stream.copy(&x, 0..64, &mut y, 0);
        if foreign {
            assert!(matches!(launched, Err(Error::WrongDevice { what: "x" })), "{launched:?}");
            assert!(matches!(copied, Err(Error::WrongDevice { what: "the source buffer" })), "{copied:?}");
        } else {
            launched.unwrap();
            copied.unwrap();
        }
    }
}
