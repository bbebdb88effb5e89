//! When a GPU's lines are handed over, seen from a stand-in for the driver, compiled here, whose kernels
//! print.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod stand_in;

use ferrokv_device::{Buffer, Device, Event, PtxImage, Stream};
use simt::print::{Printed, Sink};
use simt::{LaunchShape, kernel};
use std::sync::{Arc, Mutex};

/// A launch of `x` blocks prints `x` lines, as `println!` does on the device.
const FAKE: &str = r#"
use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, c_char};

/// A module's number is its handle, and that of its functions.
static mut RINGS: [[u64; 3]; 8] = [[0; 3]; 8];
static mut MODULES: usize = 0;

unsafe fn print(module: usize, number_of_blocks: u32) {
    unsafe {
        let state = &mut *(&raw mut RINGS[module]);
        let ring = state[0] as *mut u64;
        for block in 0..number_of_blocks {
            if state[1] >= ring.read_volatile() {
                *ring.add(1) += 1;
                continue;
            }
            state[1] += 1;
            let number = state[2];
            state[2] += 1;
            let record = ring.add(16 + (number % 8192) as usize * 16);
            record.add(1).write(1 | (block as u64) << 32);
            [2, 3, 4].into_iter().for_each(|i| record.add(i).write(0));
            record.add(5).write(1);
            record.add(6).write(number_of_blocks as u64);
            record.write_volatile(number + 1);
        }
    }
}

functions! {
    cuThreadExchangeStreamCaptureMode() 0;
    cuModuleLoadDataEx(out: *mut usize) { MODULES += 1; *out = MODULES; 0 };
    cuModuleGetFunction(out: *mut usize, module: usize) { *out = module; 0 };
    cuModuleGetGlobal_v2(out: *mut u64, bytes: *mut usize, module: usize, name: *const c_char) {
        if CStr::from_ptr(name) == c"simt_print_ring" {
            (*out, *bytes) = ((&raw mut RINGS[module]) as u64, 24);
            0
        } else {
            500
        }
    };
    cuMemHostAlloc(out: *mut *mut u8, bytes: usize) {
        *out = alloc(Layout::from_size_align(bytes + 64, 64).unwrap());
        out.read().cast::<usize>().write(bytes);
        *out = out.read().add(64);
        0
    };
    cuMemFreeHost(at: *mut u8) {
        let at = at.sub(64);
        let bytes = at.cast::<usize>().read();
        dealloc(at, Layout::from_size_align(bytes + 64, 64).unwrap());
        0
    };
    cuMemHostGetDevicePointer_v2(out: *mut u64, host: u64) { *out = host; 0 };
    cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) { from.copy_to(to as *mut u8, bytes); 0 };
    cuMemcpyDtoHAsync_v2() 0;
    cuMemcpyHtoDAsync_v2() 0;
    cuMemsetD8Async() 0;
    cuEventRecord() 0;
    cuStreamCreate(out: *mut usize) { *out = 1; 0 };
    // A wait fails if it is told to: the context is lost.
    cuStreamSynchronize() if std::env::var_os("FAKE_DRIVER_FAILS").is_some() { 719 } else { 0 };
    cuGetErrorName() 1;
    cuLaunchKernel(function: usize, x: u32) { print(function, x); 0 };
    cuStreamBeginCapture_v2() 0;
    cuStreamEndCapture(_stream: usize, graph: *mut usize) { *graph = 1; 0 };
    cuGraphLaunch() { print(1, 2); 0 };
}
"#;

const PTX: &str = ".global .b64 simt_print_ring[3];\n// simt.print 1 tell src/x.rs:3:5 one of {0}\n";

#[kernel]
fn tell() {}

type Lines = Arc<Mutex<Vec<String>>>;
type Uses = Box<dyn Fn() + Send>;

fn launch_on(stream: &Stream, blocks: u32) {
    // SAFETY: the stand-in runs nothing.
    unsafe { stream.launch(&tell::kernel(), LaunchShape::new(blocks, 1), tell::Args {}) }.unwrap();
}

#[test]
fn lines_come_with_a_wait() {
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in::library(folder.path(), &stand_in::driver(FAKE));
    // SAFETY: the only test of this process, before any other thread of it runs.
    unsafe { std::env::set_var(cuda_lazy::DRIVER_VARIABLE, &library) };

    let device = Device::cuda(0, &[PtxImage::new(90, PTX)]).unwrap();
    let lines = Lines::default();
    let (into, inside) = (lines.clone(), Arc::new(Mutex::new(None::<Uses>)));
    let uses = inside.clone();
    let sink: Sink = Arc::new(move |printed: &Printed| {
        into.lock().unwrap().push(printed.to_string());
        if let Some(uses) = &*uses.lock().unwrap() {
            uses();
        }
    });
    device.print_to(Some(sink));
    let taken = || std::mem::take(&mut *lines.lock().unwrap());
    let line = |block: u32, of: u32| format!("kernel tell, block ({block},0,0) thread (0,0,0): one of {of}");
    let stream = Arc::new(Stream::new(&device).unwrap());
    let launch = |blocks: u32| launch_on(&stream, blocks);

    launch(1);
    launch(3);
    assert!(taken().is_empty());
    stream.synchronize().unwrap();
    assert_eq!(taken(), [line(0, 1), line(0, 3), line(1, 3), line(2, 3)]);
    let graph = stream.capture(|_| Ok(())).unwrap().0.instantiate().unwrap();
    // SAFETY: as above.
    unsafe { graph.launch(&stream) }.unwrap();
    let event = Event::new(&device).unwrap();
    stream.record(&event).unwrap();
    event.synchronize().unwrap();
    assert_eq!(taken(), [line(0, 2), line(1, 2)]);
    launch(1);
    Buffer::<u32>::zeroed(&device, 1).unwrap().to_vec().unwrap();
    assert_eq!(taken(), [line(0, 1)]);

    // A sink that uses its device, whatever it is called from: no lock is held, and it is not called again.
    let on = stream.clone();
    let copies = move || {
        let device = on.device();
        device.synchronize().unwrap();
        Buffer::<u32>::zeroed(device, 1).unwrap().to_vec().unwrap();
        on.synchronize().unwrap();
        on.capture(|_| Ok(())).unwrap();
    };
    *inside.lock().unwrap() = Some(Box::new(copies));
    let mut buffer = Buffer::<u32>::zeroed(&device, 1).unwrap();
    let waits: [&mut dyn FnMut(); 5] = [
        &mut || device.synchronize().unwrap(),
        &mut || stream.synchronize().unwrap(),
        &mut || drop(Buffer::<u32>::zeroed(&device, 1).unwrap()),
        &mut || stream.download(&buffer, 0, &mut [0]).unwrap(),
        &mut || event.synchronize().unwrap(),
    ];
    for wait in waits {
        launch(1);
        wait();
        assert_eq!(taken(), [line(0, 1)]);
    }
    launch(1);
    stream.upload(&[1], &mut buffer, 0).unwrap();
    assert_eq!(taken(), [line(0, 1)]);
    drop(buffer);
    // One that waits for another device: that one's lines come, to its own sink.
    let (other, of_other) = (Device::cuda(0, &[PtxImage::new(90, PTX)]).unwrap(), Lines::default());
    let into = of_other.clone();
    other.print_to(Some(Arc::new(move |printed| into.lock().unwrap().push(printed.to_string()))));
    let on_other = Stream::new(&other).unwrap();
    let waits = other.clone();
    *inside.lock().unwrap() = Some(Box::new(move || waits.synchronize().unwrap()));
    launch_on(&stream, 1);
    launch_on(&on_other, 2);
    device.synchronize().unwrap();
    *inside.lock().unwrap() = None;
    assert_eq!(taken(), [line(0, 1)]);
    assert_eq!(std::mem::take(&mut *of_other.lock().unwrap()), [line(0, 2), line(1, 2)]);

    // More than there is room for, twice.
    for more in [1, 1000] {
        launch(8192 + more);
        stream.synchronize().unwrap();
        let said = taken();
        assert_eq!(said.len(), 8193);
        assert_eq!(said[8191], line(8191, 8192 + more));
        assert_eq!(said[8192], format!("{more} more lines of kernels found no room and are lost"));
    }

    launch(1);
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("FAKE_DRIVER_FAILS", "1") };
    assert!(stream.synchronize().is_err());
    assert_eq!(taken(), [line(0, 1)]);
    // SAFETY: as above.
    unsafe { std::env::remove_var("FAKE_DRIVER_FAILS") };

    launch(1);
    drop((graph, event, stream));
    assert!(taken().is_empty());
    drop(device);
    assert_eq!(taken(), [line(0, 1)]);

    // A sink that panics when all goes ends nothing but its lines.
    other.print_to(Some(Arc::new(|_| panic!("no more lines"))));
    launch_on(&on_other, 2);
    drop((on_other, other));
}
