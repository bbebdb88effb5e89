//! Lines that kernels print under the emulator.

use simt::emu::{self, EmuOptions, Fault, Schedule};
use simt::half::{bf16, f16};
use simt::print::{self, Line, Printed, Sink};
use simt::{GlobalMut, LaunchShape, device, kernel, thread, warp};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

fn texts(lines: &[Printed]) -> Vec<&str> {
    lines.iter().filter_map(Printed::text).collect()
}

#[kernel]
fn in_steps(n: u32) {
    let t = thread::thread_idx_x();
    println!("{t} comes");
    thread::sync_threads();
    println!("{t} goes on");
    if t == 1 {
        assert!(n != 7, "seven");
    }
}

fn run(n: u32, shape: LaunchShape, options: &EmuOptions) -> (Result<(), Fault>, Vec<Printed>) {
    // SAFETY: it has no memory.
    print::captured(|| unsafe { emu::launch(&in_steps::kernel(), shape, in_steps::Args { n }, options) })
}

#[test]
fn lines_come_in_the_order_in_which_threads_ran() {
    let (result, lines) = run(0, LaunchShape::new(1, 2), &EmuOptions::default());
    assert_eq!(result, Ok(()));
    assert_eq!(texts(&lines), ["0 comes", "1 comes", "0 goes on", "1 goes on"]);
    let reversed = EmuOptions { schedule: Schedule::Reversed, ..EmuOptions::default() };
    let (_, lines) = run(0, LaunchShape::new(1, 2), &reversed);
    assert_eq!(texts(&lines), ["1 comes", "0 comes", "1 goes on", "0 goes on"]);
}

#[test]
fn a_line_names_its_thread_and_its_place() {
    let (_, lines) = run(0, LaunchShape::new((2, 3), (1, 2)), &EmuOptions::default());
    let Some(Printed::Line(Line { kernel, thread, place, text })) = lines.last() else { panic!("{lines:?}") };
    assert_eq!((*kernel, text.as_str()), ("in_steps", "0 goes on"));
    assert_eq!(thread.to_string(), "block (1,2,0) thread (0,1,0)");
    let source = include_str!("print.rs").lines().nth(place.line as usize - 1).unwrap();
    assert!(source.contains("goes on") && place.file.ends_with("print.rs"), "{place}");
}

#[test]
fn what_was_printed_before_a_fault_is_there() {
    let (result, lines) = run(7, LaunchShape::new(1, 2), &EmuOptions::default());
    assert!(result.unwrap_err().to_string().ends_with("the kernel panicked: seven"));
    assert_eq!(lines.len(), 4);
}

#[test]
fn many_blocks_lose_nothing_and_a_launch_in_many_orders_prints_once() {
    let (result, lines) = run(0, LaunchShape::new(500, 64), &EmuOptions::default());
    assert_eq!((result, lines.len()), (Ok(()), 500 * 64 * 2));
    let (result, lines) = run(0, LaunchShape::new(2, 64), &EmuOptions::thorough());
    assert_eq!((result, lines.len()), (Ok(()), 2 * 64 * 2));
}

#[device]
fn below(x: f32) -> f32 {
    println!("below with {x:?}");
    x + 1.0
}

#[kernel]
fn formats(y: GlobalMut<f32>) {
    let lane = warp::lane_id();
    if lane != 3 {
        return;
    }
    let x = below(0.5);
    y.store(0, x);
    println!();
    println!("{{}} \\ \n\"");
    println!("{x} {x:?} {x:>8.3} {x:*<6} {:+e} {:08.2}", 1.0f64 / 3.0, -x);
    println!("{} {:?} {:.1}", f16::from_f32(0.1), bf16::from_f32(2.0), f16::from_f32(0.25));
    println!("{lane:#x} {lane:04} {:b} {:x} {:X} {:o}", lane as u8, -1i8, i64::MIN, 8u16);
    println!("{} {:?} {:>3}|{:<3}|{n}", lane == 3, lane == 4, 'a', 'b', n = &lane);
    let value_0 = 7;
    println!("{} {}", 1u64 << 63, value_0);
    match lane {
        3 => println!("as an expression"),
        _ => simt::println!("never"),
    }
}

#[test]
fn formats_are_those_of_the_standard_library() {
    let mut y = [0f32];
    // SAFETY: one element, which lives until the launch is over.
    let args = formats::Args { y: unsafe { GlobalMut::from_raw(y.as_mut_ptr().addr() as u64, 1) } };
    // SAFETY: as above.
    let (result, lines) = print::captured(|| unsafe {
        emu::launch(&formats::kernel(), LaunchShape::new(1, 32), args, &EmuOptions::race_checked())
    });
    assert_eq!((result, y), (Ok(()), [1.5]));
    assert_eq!(
        texts(&lines),
        [
            "below with 0.5",
            "",
            "{} \\ \n\"",
            "1.5 1.5    1.500 1.5*** +3.333333333333333e-1 -0001.50",
            "0.099975586 2.0 0.2",
            "0x3 0003 11 ff 8000000000000000 10",
            "true false   a|b  |3",
            "9223372036854775808 7",
            "as an expression",
        ]
    );
}

#[test]
fn sinks_are_of_a_thread_and_of_a_time() {
    let counted = Arc::new(AtomicU64::new(0));
    let into = counted.clone();
    let outer: Sink = Arc::new(move |_: &Printed| {
        into.fetch_add(1, Ordering::Relaxed);
    });
    let launch = || run(0, LaunchShape::new(1, 1), &EmuOptions::default()).1.len();
    let inner = print::to(&outer, || {
        let taken = launch();
        let uncaught = std::panic::catch_unwind(|| print::captured(|| panic!("in between")));
        assert!(uncaught.is_err());
        // SAFETY: it has no memory.
        unsafe {
            let (shape, options) = (LaunchShape::new(1, 1), EmuOptions::default());
            emu::launch(&in_steps::kernel(), shape, in_steps::Args { n: 0 }, &options).unwrap();
        }
        taken
    });
    assert_eq!((inner, counted.load(Ordering::Relaxed)), (2, 2));
}

/// What it prints comes to nobody's sink twice.
#[test]
fn a_sink_that_launches_what_prints_is_not_called_for_that() {
    let called = Arc::new(AtomicU64::new(0));
    let into = called.clone();
    // SAFETY: it has no memory.
    let launch = |sink: Option<&Sink>| unsafe {
        let (shape, options) = (LaunchShape::new(1, 1), EmuOptions::default());
        emu::launch_printing(&in_steps::kernel(), shape, in_steps::Args { n: 0 }, &options, sink).unwrap();
    };
    let itself = Arc::new(Mutex::new(None::<Sink>));
    let again = itself.clone();
    let sink: Sink = Arc::new(move |_: &Printed| {
        into.fetch_add(1, Ordering::Relaxed);
        let itself = again.lock().unwrap().clone();
        launch(itself.as_ref());
    });
    print::to(&sink, || launch(None));
    assert_eq!(called.load(Ordering::Relaxed), 2, "the thread's sink");
    *itself.lock().unwrap() = Some(sink.clone());
    launch(Some(&sink));
    assert_eq!(called.load(Ordering::Relaxed), 4, "the launch's sink");
    *itself.lock().unwrap() = None;
    launch(Some(&sink));
    let ((), others) = print::captured(|| launch(Some(&sink)));
    assert_eq!((called.load(Ordering::Relaxed), others.len()), (8, 0));
}

#[kernel]
fn without_end(y: GlobalMut<u32>, lines: u32) {
    for i in 0..lines {
        println!("{i}");
        y.store(0, i + 1);
    }
}

/// No more than so many lines wait, however many a kernel prints before it ends.
#[test]
fn very_many_lines_are_handed_over_early() {
    let word = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let (done, most) = (word.clone(), Arc::new(AtomicU64::new(0)));
    let into = most.clone();
    let next = AtomicU64::new(0);
    let sink: Sink = Arc::new(move |printed: &Printed| {
        let line = next.fetch_add(1, Ordering::Relaxed);
        assert_eq!(printed.text(), Some(line.to_string().as_str()));
        let ahead = u64::from(done.load(Ordering::Relaxed)) - line;
        into.fetch_max(ahead, Ordering::Relaxed);
    });
    for options in [EmuOptions::default(), EmuOptions::race_checked()] {
        let sink: Sink = if options.race_check { Arc::new(|_: &Printed| ()) } else { sink.clone() };
        // SAFETY: one element, which lives until the launch is over.
        let y = unsafe { GlobalMut::from_raw(word.as_ptr().addr() as u64, 1) };
        // SAFETY: as above; the sink reads it while no thread of the kernel runs.
        unsafe {
            let (shape, args) = (LaunchShape::new(1, 1), without_end::Args { y, lines: 50_000 });
            emu::launch_printing(&without_end::kernel(), shape, args, &options, Some(&sink)).unwrap();
        }
        assert_eq!(word.swap(0, Ordering::Relaxed), 50_000);
    }
    let most = most.load(Ordering::Relaxed);
    assert!(most <= 8192, "{most} lines behind");
}

/// A sink has a whole stack, and may launch.
#[test]
fn a_sink_may_do_what_it_likes() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let into = lines.clone();
    let sink: Sink = Arc::new(move |printed: &Printed| {
        let room = std::hint::black_box([1u8; 300 * 1024]);
        let (_, other) = run(0, LaunchShape::new(1, 1), &EmuOptions::default());
        into.lock().unwrap().push(format!("{printed}; {} {}", other.len(), room[5]));
    });
    // SAFETY: it has no memory.
    print::to(&sink, || unsafe {
        let (shape, options) = (LaunchShape::new(1, 2), EmuOptions::default());
        emu::launch(&in_steps::kernel(), shape, in_steps::Args { n: 0 }, &options).unwrap();
    });
    let lines = lines.lock().unwrap();
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[3], "kernel in_steps, block (0,0,0) thread (1,0,0): 1 goes on; 2 1");
}
