//! What a typed launch costs the host beside a raw driver launch of the same kernel, on a GPU: the figures
//! are printed, what is asserted is that every launch happened.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use common::{add, increment};
use cust::module::Module;
use cust::sys;
use ferrokv_device::{Buffer, Stream};
use simt::LaunchShape;
use std::time::Instant;

/// Fewer than the driver queues before a launch has to wait for the GPU.
const BATCH: u32 = 400;
const ROUNDS: u32 = 200;

#[test]
fn typed_and_raw_launches_do_the_same() {
    let Some(device) = common::cuda() else { return };
    let stream = Stream::new(&device).unwrap();
    let mut buffer = Buffer::from_slice(&device, &[0_u32; 32]).unwrap();
    let address = buffer.global().address();

    let _context = cust::quick_init().unwrap();
    let module = Module::from_ptx(common::PTX, &[]).unwrap();
    let function = module.get_function(increment::kernel().name()).unwrap().to_raw();
    let mut raw_stream = std::ptr::null_mut();
    // SAFETY: the driver runs, and `raw_stream` is valid for a write.
    assert_eq!(unsafe { sys::cuStreamCreate(&mut raw_stream, 1) } as u32, 0);

    let raw = || {
        let start = Instant::now();
        for _ in 0..BATCH {
            let (pointer, by, n) = (address, 1_u32, 32_u32);
            let mut params = [
                (&raw const pointer).cast_mut().cast(),
                (&raw const by).cast_mut().cast(),
                (&raw const n).cast_mut().cast(),
            ];
            let none = std::ptr::null_mut();
            // SAFETY: three parameters as the kernel has them; the buffer has 32 elements.
            let code = unsafe {
                sys::cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, raw_stream, params.as_mut_ptr(), none)
            };
            assert_eq!(code as u32, 0);
        }
        let elapsed = start.elapsed();
        // SAFETY: the stream was made above.
        assert_eq!(unsafe { sys::cuStreamSynchronize(raw_stream) } as u32, 0);
        elapsed.as_nanos() as f64 / f64::from(BATCH)
    };
    let mut typed = || {
        let start = Instant::now();
        for _ in 0..BATCH {
            let args = add(&mut buffer, 1);
            // SAFETY: the buffer has 32 elements, each thread its own; each batch ends with a wait.
            unsafe { stream.launch(&increment::kernel(), LaunchShape::new(1, 32), args) }.unwrap();
        }
        let elapsed = start.elapsed();
        stream.synchronize().unwrap();
        elapsed.as_nanos() as f64 / f64::from(BATCH)
    };
    let (mut raw_times, mut typed_times) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        // In turns, each first every other time.
        if round % 2 == 0 {
            raw_times.push(raw());
            typed_times.push(typed());
        } else {
            typed_times.push(typed());
            raw_times.push(raw());
        }
    }
    let (raw, typed) = (median(raw_times), median(typed_times));
    println!(
        "{{\"launch_cost\": {{\"raw_ns\": {raw:.1}, \"typed_ns\": {typed:.1}, \"ratio\": {:.4}}}}}",
        typed / raw
    );
    assert_eq!(buffer.to_vec().unwrap(), [2 * BATCH * ROUNDS; 32]);
}

#[test]
fn a_graph_replays_a_thousand_launches_in_one_call() {
    let Some(device) = common::cuda() else { return };
    let stream = Stream::new(&device).unwrap();
    let mut buffer = Buffer::from_slice(&device, &[0_u32; 32]).unwrap();
    let mut record = |s: &Stream| {
        for _ in 0..1000 {
            // SAFETY: the buffer has 32 elements, each thread its own.
            unsafe { s.launch(&increment::kernel(), LaunchShape::new(1, 32), add(&mut buffer, 1)) }?;
        }
        Ok(())
    };
    let (graph, ()) = stream.capture(&mut record).unwrap();
    let exec = graph.instantiate().unwrap();
    let (mut calls, mut replays, mut singles) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..20 {
        let start = Instant::now();
        // SAFETY: the buffer is there.
        unsafe { exec.launch(&stream) }.unwrap();
        calls.push(start.elapsed().as_nanos() as f64);
        stream.synchronize().unwrap();
        replays.push(start.elapsed().as_nanos() as f64);
        let start = Instant::now();
        record(&stream).unwrap();
        stream.synchronize().unwrap();
        singles.push(start.elapsed().as_nanos() as f64);
    }
    println!(
        "{{\"graph_of_1000\": {{\"host_call_ns\": {:.0}, \"replay_ns\": {:.0}, \"single_launches_ns\": {:.0}}}}}",
        median(calls),
        median(replays),
        median(singles)
    );
    assert_eq!(buffer.to_vec().unwrap(), [40 * 1000; 32]);
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
