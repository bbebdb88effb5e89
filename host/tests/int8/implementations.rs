//! Every way to quantize that there is, behind one signature.

use ferrokv::host::int8::{Int8Element, Matrix, Plan, Variant, cpu};
use ferrokv::host::{Buffer, Device, Stream};
use ferrokv::simt::emu::EmuOptions;
use std::sync::OnceLock;

/// What an implementation made of a matrix.
pub struct Output<T> {
    pub scales: Vec<f32>,
    pub codes: Vec<i8>,
    pub restored: Vec<T>,
}

/// Quantizes and restores on the CPU's SIMD path; in blocks of 16 tokens or by whole columns.
pub fn simd<T: Int8Element>(keys: &[T], matrix: Matrix, blocks: bool) -> Output<T> {
    let mut scales = vec![0.0; matrix.scales(if blocks { Variant::Fused } else { Variant::Naive })];
    let mut codes = vec![0; keys.len()];
    if blocks {
        cpu::quantize_blocks(keys, matrix, &mut scales, &mut codes);
    } else {
        cpu::column_scales(keys, matrix, &mut scales);
        cpu::quantize(keys, matrix, &scales, &mut codes);
    }
    let mut restored = keys.to_vec();
    cpu::dequantize(&codes, matrix, &scales, &mut restored);
    Output { scales, codes, restored }
}

fn paper<T: Int8Element>(keys: &[T], matrix: Matrix) -> Output<T> {
    let mut scales = vec![0.0; matrix.channels];
    let mut codes = vec![0; keys.len()];
    let mut restored = keys.to_vec();
    cpu::paper::column_scales(keys, matrix, &mut scales);
    cpu::paper::quantize(keys, matrix, &scales, &mut codes);
    cpu::paper::dequantize(&codes, matrix, &scales, &mut restored);
    Output { scales, codes, restored }
}

/// Quantizes and restores with one variant's kernels. Output buffers start poisoned.
pub fn kernels<T: Int8Element>(device: &Device, variant: Variant, keys: &[T], matrix: Matrix) -> Output<T> {
    let stream = Stream::new(device).unwrap();
    let mut plan = Plan::<T>::new(device, matrix, variant).unwrap();
    let mut out = plan.allocate().unwrap();
    stream.fill_u8(&mut out.codes, .., 0xa5).unwrap();
    stream.fill_u8(&mut out.scales, .., 0xa5).unwrap();
    let input = Buffer::from_slice(device, keys).unwrap();
    plan.quantize(&stream, &input, &mut out).unwrap();
    let mut restored = Buffer::<T>::new(device, keys.len()).unwrap();
    stream.fill_u8(&mut restored, .., 0xa5).unwrap();
    plan.dequantize(&stream, &out, &mut restored).unwrap();
    stream.synchronize().unwrap();
    Output {
        scales: out.scales.to_vec().unwrap(),
        codes: out.codes.to_vec().unwrap(),
        restored: restored.to_vec().unwrap(),
    }
}

/// The devices to run kernels on: the emulator, and the GPU where there is one. The race check keeps a record
/// of every access, so it is for small matrices.
fn devices(elements: usize) -> Vec<Device> {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    let all = DEVICES.get_or_init(|| {
        let mut devices = vec![Device::cpu(EmuOptions::race_checked()), Device::cpu(EmuOptions::default())];
        match Device::cuda(0, ferrokv::ptx()) {
            Ok(gpu) => devices.push(gpu),
            Err(error) => println!("without a GPU: {error}"),
        }
        devices
    });
    let mut devices = all.clone();
    devices.remove(if elements <= 4096 { 1 } else { 0 });
    devices
}

/// Every implementation's name and output. `blocks` asks for a scale every 16 tokens.
pub fn all<T: Int8Element>(keys: &[T], matrix: Matrix, blocks: bool) -> Vec<(String, Output<T>)> {
    let mut outputs = vec![("simd".to_string(), simd(keys, matrix, blocks))];
    if !blocks {
        outputs.push(("paper's loop".to_string(), paper(keys, matrix)));
    }
    for device in devices(keys.len()) {
        for variant in Variant::ALL.into_iter().filter(|variant| (*variant == Variant::Fused) == blocks) {
            outputs
                .push((format!("{variant} on {:?}", device.kind()), kernels(&device, variant, keys, matrix)));
        }
    }
    outputs
}
