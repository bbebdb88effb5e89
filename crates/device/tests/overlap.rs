//! Which launches are told that they may overlap the one before them, seen from a stand-in for the driver,
//! compiled here, that writes down what it is asked for.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;
mod stand_in;

use common::{increment, overlapping};
use ferrokv_device::{Buffer, Device, Event, PtxImage, Stream};
use simt::{Kernel, LaunchShape};
use std::path::Path;

/// A GPU of compute capability 9.0 whose streams are numbered from 1. It reads the structures at the offsets
/// of CUDA's headers.
const FAKE: &str = r#"
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

static STREAMS: AtomicUsize = AtomicUsize::new(0);

fn log(what: &str, stream: usize) -> i32 {
    let file = std::env::var_os("FAKE_DRIVER_LOG").unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
    writeln!(file, "{stream} {what}").unwrap();
    0
}

functions! {
    cuModuleLoadDataEx(out: *mut usize) { *out = 1; 0 };
    // Of kernels that neither panic nor print nobody asks where they write.
    cuModuleGetGlobal_v2() std::process::abort();
    cuModuleGetFunction(out: *mut usize) { *out = 1; 0 };
    cuEventRecord(_event: usize, stream: usize) log("record", stream);
    cuStreamCreate(out: *mut usize) { *out = STREAMS.fetch_add(1, Ordering::Relaxed) + 1; 0 };
    cuStreamSynchronize() 0;
    cuStreamWaitEvent(stream: usize, _event: usize) log("wait", stream);
    cuMemsetD8Async(_to: usize, _value: u8, _count: usize, stream: usize) log("fill", stream);
    cuMemsetD32Async(_to: usize, _value: u32, _count: usize, stream: usize) log("fill", stream);
    cuMemcpyDtoDAsync_v2(_to: usize, _from: usize, _bytes: usize, stream: usize) log("copy", stream);
    cuLaunchKernel(
        _function: usize, x: u32, _y: u32, _z: u32, _bx: u32, _by: u32, _bz: u32, _shared: u32, stream: usize
    ) log(&format!("launch of {x}"), stream);
    cuLaunchKernelEx(config: *const u8, _function: usize, _params: usize, extra: usize) {
        let word = |at: usize| config.add(at).cast::<u32>().read();
        let place = |at: usize| config.add(at).cast::<usize>().read();
        let attribute = place(40) as *const u32;
        assert_eq!((word(48), attribute.read(), attribute.add(2).read(), extra), (1, 6, 1, 0));
        assert_eq!([4, 8, 12, 16, 20, 24].map(word), [2, 3, 32, 4, 2, 400]);
        log(&format!("overlapping launch of {}", word(0)), place(32))
    };
    cuStreamBeginCapture_v2(stream: usize) log("capture", stream);
    cuStreamEndCapture(stream: usize, graph: *mut usize) { *graph = 1; log("captured", stream) };
    cuStreamGetCaptureInfo_v2(
        _stream: usize, _status: usize, _id: usize, _graph: usize, nodes: *mut *const usize, count: *mut usize
    ) { static NODE: usize = 1; *nodes = &NODE; *count = 1; 0 };
    cuGraphExecKernelNodeSetParams() 0;
    cuGraphLaunch(_exec: usize, stream: usize) log("graph", stream);
}
"#;

/// What the driver was asked for since the last call, in the stream that was asked last.
fn asked(log: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(log).unwrap();
    std::fs::write(log, "").unwrap();
    let lines: Vec<(&str, &str)> = text.lines().map(|line| line.split_once(' ').unwrap()).collect();
    let last = lines.last().unwrap().0;
    lines.iter().filter(|line| line.0 == last).map(|line| line.1.to_owned()).collect()
}

#[test]
fn a_launch_overlaps_only_a_launch_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let library = stand_in::library(folder.path(), &stand_in::driver(FAKE));
    // SAFETY: the only test of this process, before any other thread of it runs.
    unsafe {
        std::env::set_var(cuda_lazy::DRIVER_VARIABLE, &library);
        std::env::set_var("FAKE_DRIVER_LOG", &log);
    }

    let run = |sm: u32| {
        let device = Device::cuda(0, &[PtxImage::new(sm, common::PTX)]).unwrap();
        let stream = Stream::new(&device).unwrap();
        let other = Buffer::<u32>::zeroed(&device, 8).unwrap();
        let mut buffer = Buffer::<u32>::zeroed(&device, 8).unwrap();
        let address = buffer.global_mut();
        // The number of blocks tells the launches apart.
        let launch = |kernel: &Kernel<_>, x: u32| {
            let shape = LaunchShape::new((x, 2, 3), (32, 4, 2)).shared(400);
            // SAFETY: the stand-in runs nothing.
            unsafe { stream.launch(kernel, shape, increment::Args { y: address, by: 1, n: 8 }) }
        };
        let links = |range: std::ops::Range<u32>| {
            range.into_iter().try_for_each(|x| launch(&overlapping::increment::kernel(), x))
        };
        // The first has nothing to overlap; one of the other kind never does, and may be overlapped.
        links(1..4).unwrap();
        launch(&increment::kernel(), 4).unwrap();
        links(5..6).unwrap();
        stream.fill_u8(&mut buffer, .., 1).unwrap();
        links(6..8).unwrap();
        stream.fill_u32(&mut buffer, .., 1).unwrap();
        links(8..9).unwrap();
        stream.copy(&other, .., &mut buffer, 0).unwrap();
        links(9..11).unwrap();
        let event = Event::new(&device).unwrap();
        stream.record(&event).unwrap();
        links(11..13).unwrap();
        stream.wait(&event).unwrap();
        links(13..15).unwrap();
        let (graph, node) = stream
            .capture(|stream| {
                links(15..17)?;
                let shape = LaunchShape::new((17, 2, 3), (32, 4, 2)).shared(400);
                // SAFETY: the stand-in runs nothing.
                let node = unsafe {
                    stream.launch_node(
                        &overlapping::increment::kernel(),
                        shape,
                        increment::Args { y: address, by: 1, n: 8 },
                    )
                }?;
                links(18..19)?;
                Ok(node)
            })
            .unwrap();
        links(19..21).unwrap();
        let mut exec = graph.instantiate().unwrap();
        // SAFETY: as above.
        unsafe {
            exec.update(
                node,
                &overlapping::increment::kernel(),
                LaunchShape::new(1, 32),
                increment::Args { y: address, by: 1, n: 8 },
            )
            .unwrap();
            exec.launch(&stream).unwrap();
        }
        links(21..23).unwrap();
        asked(&log)
    };
    let expected = [
        "launch of 1",
        "overlapping launch of 2",
        "overlapping launch of 3",
        "launch of 4",
        "overlapping launch of 5",
        "fill",
        "launch of 6",
        "overlapping launch of 7",
        "fill",
        "launch of 8",
        "copy",
        "launch of 9",
        "overlapping launch of 10",
        "record",
        "launch of 11",
        "overlapping launch of 12",
        "wait",
        "launch of 13",
        "overlapping launch of 14",
        "record",
        "capture",
        "launch of 15",
        "overlapping launch of 16",
        "overlapping launch of 17",
        "overlapping launch of 18",
        "captured",
        "launch of 19",
        "overlapping launch of 20",
        "graph",
        "launch of 21",
        "overlapping launch of 22",
    ];
    assert_eq!(run(90), expected);
    // The kernels of an older target do not wait.
    assert_eq!(run(80), expected.map(|what| what.trim_start_matches("overlapping ")));
}
