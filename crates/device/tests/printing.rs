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
