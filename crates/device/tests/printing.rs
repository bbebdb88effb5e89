//! Each device hands what its kernels print to a sink of its own.

use ferrokv_device::{Device, Stream};
use simt::emu::EmuOptions;
use simt::print::{self, Printed, Sink};
use simt::{LaunchShape, kernel};
use std::sync::{Arc, Mutex};

#[kernel]
fn tell(x: u32) {
    println!("x is {x}");
}

fn launch(stream: &Stream, x: u32) {
    // SAFETY: it has no memory.
    unsafe { stream.launch(&tell::kernel(), LaunchShape::new(1, 1), tell::Args { x }) }.unwrap();
}

fn sink() -> (Sink, Arc<Mutex<Vec<String>>>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let into = lines.clone();
    let sink = move |printed: &Printed| into.lock().unwrap().extend(printed.text().map(str::to_owned));
    (Arc::new(sink), lines)
}

#[test]
fn lines_go_to_the_sink_that_the_device_has_when_they_are_printed() {
    for options in [EmuOptions::default(), EmuOptions { stream_check: true, ..EmuOptions::default() }] {
        let [a, b] = [(); 2].map(|()| Device::cpu(options));
        let [on_a, on_b] = [&a, &b].map(|device| Stream::new(device).unwrap());
        let [(to_a, of_a), (to_b, of_b)] = [sink(), sink()];
        a.print_to(Some(to_a));
        b.clone().print_to(Some(to_b));
        launch(&on_a, 1);
        launch(&on_b, 2);
        let (graph, ()) = on_a
            .capture(|stream| {
                launch(stream, 3);
                Ok(())
            })
            .unwrap();
        assert_eq!(*of_a.lock().unwrap(), ["x is 1"]);
        let graph = graph.instantiate().unwrap();
        for _ in 0..2 {
            // SAFETY: as above.
            unsafe { graph.launch(&on_a) }.unwrap();
        }
        let ((), theirs) = print::captured(|| launch(&on_b, 4));
        assert_eq!(theirs, []);
        b.print_to(None);
        let ((), mine) = print::captured(|| launch(&on_b, 5));
        assert_eq!(mine[0].text(), Some("x is 5"));
        assert_eq!(*of_a.lock().unwrap(), ["x is 1", "x is 3", "x is 3"]);
        assert_eq!(*of_b.lock().unwrap(), ["x is 2", "x is 4"]);
    }
}

/// Its lines are not its own: they would never end.
#[test]
fn a_sink_that_launches_what_prints_ends() {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let (into, on) = (lines.clone(), Stream::new(&device).unwrap());
    let sink: Sink = Arc::new(move |printed: &Printed| {
        into.lock().unwrap().extend(printed.text().map(str::to_owned));
        launch(&on, 2);
        let other = Stream::new(&Device::cpu(EmuOptions::default())).unwrap();
        let ((), theirs) = print::captured(|| launch(&other, 3));
        assert_eq!(theirs[0].text(), Some("x is 3"));
    });
    device.print_to(Some(sink));
    launch(&stream, 1);
    let ((), theirs) = print::captured(|| launch(&stream, 4));
    assert_eq!(
        (lines.lock().unwrap().as_slice(), theirs.len()),
        (&["x is 1".into(), "x is 4".into()][..], 0)
    );
    device.print_to(None);
}

/// What a sink drops may use the device, such as a guard that sets another one.
#[test]
fn a_sink_is_dropped_when_the_device_has_the_next() {
    struct Last(Device);
    impl Drop for Last {
        fn drop(&mut self) {
            self.0.print_to(None);
        }
    }
    let device = Device::cpu(EmuOptions::default());
    let last = Last(device.clone());
    device.print_to(Some(Arc::new(move |_: &Printed| {
        let _ = &last;
    })));
    device.print_to(None);
}
