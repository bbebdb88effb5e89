//! Which launches are timed, and by which events: seen from a stand-in for the driver, compiled here, whose
//! clock goes on by one microsecond an event and by the number of its blocks a launch.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;
mod stand_in;

use common::{increment, overlapping, reverse};
use ferrokv_device::{Buffer, Device, Error, KernelTimes, PtxImage, Stream};
use simt::emu::EmuOptions;
use simt::{Kernel, LaunchShape};

/// A GPU of compute capability 9.0. An event is its number; a launch in a capture takes no time.
const FAKE: &str = r#"
use std::io::Write;
use std::sync::Mutex;

struct State {
    now: u32, events: Vec<u32>, destroyed: usize, capturing: bool, launches: usize, overlapping: usize,
}
static STATE: Mutex<State> = Mutex::new(State {
    now: 0, events: Vec::new(), destroyed: 0, capturing: false, launches: 0, overlapping: 0,
});

fn with(change: impl FnOnce(&mut State)) -> i32 {
    let mut state = STATE.lock().unwrap();
    change(&mut state);
    let events = state.events.len() - state.destroyed;
    let text = format!("{events} {} {}", state.launches, state.overlapping);
    let file = std::env::var_os("FAKE_DRIVER_LOG").unwrap();
    std::fs::File::create(file).unwrap().write_all(text.as_bytes()).unwrap();
    0
}

fn launch(blocks: u32) -> i32 {
    with(|state| {
        state.launches += 1;
        if !state.capturing { state.now += blocks }
    })
}

functions! {
    cuModuleLoadDataEx(out: *mut usize) { *out = 1; 0 };
    cuModuleGetGlobal_v2() std::process::abort();
    cuModuleGetFunction(out: *mut usize) { *out = 1; 0 };
    cuEventCreate(out: *mut usize) with(|state| { state.events.push(0); *out = state.events.len() });
    cuEventDestroy_v2() with(|state| state.destroyed += 1);
    cuEventRecord(event: usize, _stream: usize) with(|state| {
        assert!(!state.capturing);
        state.now += 1;
        state.events[event - 1] = state.now;
    });
    cuEventElapsedTime(out: *mut f32, start: usize, end: usize) with(|state| {
        *out = (state.events[end - 1] - state.events[start - 1]) as f32 / 1000.0;
    });
    cuStreamCreate(out: *mut usize) { *out = 1; 0 };
    cuMemsetD8Async() 0;
    cuStreamSynchronize() 0;
    cuStreamIsCapturing(_stream: usize, out: *mut u32) with(|state| *out = state.capturing.into());
    cuStreamBeginCapture_v2() with(|state| state.capturing = true);
    cuStreamEndCapture(_stream: usize, graph: *mut usize) with(|state| { *graph = 1; state.capturing = false });
    cuLaunchKernel(_function: usize, x: u32) launch(x);
    cuLaunchKernelEx(config: *const u32) { with(|state| state.overlapping += 1); launch(1000 + config.read()) };
}
"#;

#[test]
fn launches_are_timed_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let library = stand_in::library(folder.path(), &stand_in::driver(FAKE));
    // SAFETY: no other test of this process loads the driver or reads these.
    unsafe {
        std::env::set_var(cuda_lazy::DRIVER_VARIABLE, &library);
        std::env::set_var("FAKE_DRIVER_LOG", &log);
    }
    let logged = || -> Vec<usize> {
        let text = std::fs::read_to_string(&log).unwrap();
        text.split(' ').map(|word| word.parse().unwrap()).collect()
    };
    // Events that are there, launches there were.
    let seen = || (logged()[0], logged()[1]);
    let overlapping_launches = || logged()[2];

    let device = Device::cuda(0, &[PtxImage::new(90, common::PTX)]).unwrap();
    let stream = Stream::new(&device).unwrap();
    let mut buffer = Buffer::<u32>::zeroed(&device, 8).unwrap();
    let address = buffer.global_mut();
    let increment = |kernel: &Kernel<_>, blocks: u32| {
        let args = increment::Args { y: address, by: 1, n: 8 };
        // SAFETY: the stand-in runs nothing.
        unsafe { stream.launch(kernel, LaunchShape::new(blocks, 32), args) }
    };
    let reverse = |blocks: u32| {
        let shape = LaunchShape::new(blocks, 32);
        // SAFETY: as above.
        unsafe { stream.launch(&reverse::kernel(), shape, reverse::Args { y: address, stride: 1 }) }
    };

    increment(&increment::kernel(), 5).unwrap();
    let (events, launches) = seen();
    assert_eq!(device.take_times().unwrap(), []);

    device.record_times(true).unwrap();
    // Behind a launch that nobody times: it would overlap, and take a thousand more.
    increment(&overlapping::increment::kernel(), 7).unwrap();
    reverse(3).unwrap();
    assert_eq!(seen(), (events + 4, launches + 2), "two events a launch");
    stream.capture(|_| increment(&increment::kernel(), 4)).unwrap();
    assert_eq!(seen(), (events + 4, launches + 3), "none in a capture");
    increment(&overlapping::increment::kernel(), 9).unwrap();
    device.record_times(false).unwrap();
    // Behind an event, and behind a launch.
    increment(&overlapping::increment::kernel(), 2).unwrap();
    assert_eq!(overlapping_launches(), 0, "nothing overlaps what is timed");
    increment(&overlapping::increment::kernel(), 2).unwrap();
    assert_eq!(overlapping_launches(), 1);
    assert_eq!(seen(), (events + 6, launches + 6));

    // With the event behind it, which takes a microsecond of the stand-in's.
    let expected = [("host_test_increment", vec![8.0, 10.0]), ("host_test_reverse", vec![4.0])];
    assert_eq!(
        device.take_times().unwrap(),
        expected.map(|(kernel, microseconds)| KernelTimes { kernel, microseconds })
    );
    assert_eq!(seen().0, events, "the events are given back");
    assert_eq!(device.take_times().unwrap(), []);
}

#[test]
fn the_emulator_has_no_times() {
    let device = Device::cpu(EmuOptions::default());
    for result in [device.record_times(true), device.take_times().map(drop)] {
        assert!(matches!(result, Err(Error::NotTimed)), "{result:?}");
    }
}
