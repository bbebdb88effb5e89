//! A graph of several kernels, captured once, replayed twice with a parameter changed in between.
//!
//! ```text
//! cargo run --release --example graph
//! ```
//!
//! The graph copies keys into place, scales and quantizes them (INT8, scales on the device) and restores
//! them. It runs on the emulator and, where there is one, on a GPU; both must give the bits of the SIMD path.
//! A kernel defined here, in an example, is not in the embedded PTX: the graph with the step `gain` runs on
//! the emulator only. Exit code 1 if any bit differs.

use ferrokv::host::int8::{self, Matrix, Plan, Variant};
use ferrokv::host::{Buffer, Device, Stream};
use ferrokv::kernels_gpu::roofline::{Grid, copy_four, launch};
use simt::emu::EmuOptions;
use simt::{GlobalMut, LaunchShape, kernel, thread};
use std::process::ExitCode;

/// keys = gain · keys
#[kernel]
fn gain(keys: GlobalMut<f32>, gain: f32, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        keys.store(i, keys.load(i) * gain);
    }
}

const TOKENS: usize = 512;
const CHANNELS: usize = 128;
const N: usize = TOKENS * CHANNELS;
/// What `copy_four` counts in: vectors of 16 bytes, here in rows of 256.
const VECTORS: Grid = Grid::new(N as u64 / 4, 256);
/// The gain of each replay of the graph that has that step. Powers of two: the codes do not change.
const GAINS: [f32; 2] = [1.0, 0.25];

/// Two inputs; the second replay copies the second one.
fn inputs() -> [Vec<f32>; 2] {
    [0.37f32, 0.11].map(|step| (0..N).map(|i| (i as f32 * step).sin()).collect())
}

/// The codes and the restored keys of both replays.
fn replay(device: &Device, with_gain: bool) -> int8::Result<[(Vec<i8>, Vec<f32>); 2]> {
    let stream = Stream::new(device)?;
    let matrix = Matrix::new(TOKENS, CHANNELS)?;
    let mut plan = Plan::<f32>::new(device, matrix, Variant::Rows)?;
    let [first, second] =
        inputs().map(|input| Buffer::from_slice(device, bytemuck::cast_slice::<f32, u32>(&input)));
    let (first, second) = (first?, second?);
    let (mut keys, mut restored) = (Buffer::<f32>::new(device, N)?, Buffer::<f32>::new(device, N)?);
    let mut out = plan.allocate()?;
    // SAFETY: the words of `keys`, which lives as long as the graph.
    let target: GlobalMut<u32> = unsafe { GlobalMut::from_raw(keys.global_mut().address(), N) };
    let (copy, line) = (copy_four::kernel(), LaunchShape::new((N as u32).div_ceil(256), 256));
    let shape = launch(VECTORS, 1).expect("a small launch");
    let moved = |from: &Buffer<u32>| copy_four::Args { source: from.global(), target, grid: VECTORS };

    let (graph, recorded) = stream.capture(|stream| {
        // SAFETY: every buffer has N elements and lives until the last replay has been waited for; no step
        // has a race, as the emulator checks below.
        let copied = unsafe { stream.launch_node(&copy, shape, moved(&first)) }?;
        let gained = match with_gain {
            // SAFETY: as above.
            true => Some(unsafe {
                stream.launch_node(
                    &gain::kernel(),
                    line,
                    gain::Args { keys: keys.global_mut(), gain: GAINS[0], n: N as u32 },
                )
            }?),
            false => None,
        };
        let quantized = plan.quantize(stream, &keys, &mut out);
        let restored = quantized.and_then(|()| plan.dequantize(stream, &out, &mut restored));
        Ok(restored.map(|()| (copied, gained)))
    })?;
    let (copied, gained) = recorded?;
    let mut exec = graph.instantiate()?;
    let mut results = Vec::new();
    for round in 0..2 {
        if round == 1 {
            // SAFETY: as above.
            unsafe { exec.update(copied, &copy, shape, moved(&second)) }?;
            if let Some(node) = gained {
                // SAFETY: as above.
                unsafe {
                    exec.update(
                        node,
                        &gain::kernel(),
                        line,
                        gain::Args { keys: keys.global_mut(), gain: GAINS[1], n: N as u32 },
                    )
                }?;
            }
        }
        // SAFETY: as above.
        unsafe { exec.launch(&stream) }?;
        stream.synchronize()?;
        results.push((out.codes.to_vec()?, restored.to_vec()?));
    }
    println!("{:4}  {} steps a replay", device.kind(), graph.len());
    Ok(results.try_into().unwrap_or_else(|_| unreachable!("two replays")))
}

/// What the SIMD path makes of the two inputs.
fn expected(with_gain: bool) -> int8::Result<[(Vec<i8>, Vec<f32>); 2]> {
    let matrix = Matrix::new(TOKENS, CHANNELS)?;
    let [first, second] = inputs();
    Ok([(first, GAINS[0]), (second, GAINS[1])].map(|(mut keys, gain)| {
        if with_gain {
            keys.iter_mut().for_each(|key| *key *= gain);
        }
        let (mut scales, mut codes) = (vec![0.0; CHANNELS], vec![0; N]);
        int8::cpu::column_scales(&keys, matrix, &mut scales);
        int8::cpu::quantize(&keys, matrix, &scales, &mut codes);
        int8::cpu::dequantize(&codes, matrix, &scales, &mut keys);
        (codes, keys)
    }))
}

fn run() -> int8::Result<u64> {
    let mut differing = 0;
    let emulator = Device::cpu(EmuOptions::race_checked());
    let mut devices = vec![(emulator.clone(), true), (emulator, false)];
    match Device::cuda(0, ferrokv::ptx()) {
        Ok(gpu) => devices.push((gpu, false)),
        Err(reason) => println!("no GPU: {reason}"),
    }
    for (device, with_gain) in &devices {
        let (got, expected) = (replay(device, *with_gain)?, expected(*with_gain)?);
        for (round, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let codes = got.0.iter().zip(&expected.0).filter(|(a, b)| a != b).count() as u64;
            let values =
                got.1.iter().zip(&expected.1).filter(|(a, b)| a.to_bits() != b.to_bits()).count() as u64;
            let steps = if *with_gain { "copy, gain, int8" } else { "copy, int8" };
            println!(
                "{:4}  replay {round} of {steps:16}  {codes} of {N} codes and {values} values differ",
                device.kind()
            );
            differing += codes + values;
        }
    }
    Ok(differing)
}

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(differing) => {
            eprintln!("{differing} bit patterns differ");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
