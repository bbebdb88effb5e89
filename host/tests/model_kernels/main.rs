//! The forward pass's operations: emulated kernels, every CPU path and an oracle in f64.

mod activations;
mod cases;
mod choice;
mod products;
mod small;
mod step;

use half::f16;
use host::model::gguf::TensorType;
use host::model::linear::{PackedWeights, Rows, WeightKind};
use host::{Device, Stream};
use simt::emu::EmuOptions;
use simt::random::SplitMix64;

/// The emulator.
fn emulator() -> (Device, Stream) {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    (device, stream)
}

/// Numbers from a seed.
#[derive(Clone, Copy)]
struct Numbers(SplitMix64);

impl Numbers {
    fn new(seed: u64) -> Self {
        Numbers(SplitMix64(seed))
    }

    fn bits(&mut self) -> u64 {
        self.0.word()
    }

    /// In [-1, 1).
    fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.uniform() * scale).collect()
    }

    /// Any f32 at all: NaN, infinities, subnormals.
    fn wild(&mut self) -> f32 {
        match self.bits() % 4 {
            0 => f32::from_bits(self.bits() as u32),
            1 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -0.0, f32::MIN_POSITIVE]
                [self.bits() as usize % 6],
            2 => f32::from_bits(self.bits() as u32 & 0x807f_ffff),
            _ => self.uniform(),
        }
    }
}

/// The blocks of random weights; wild ones have any bytes, scales included.
fn blocks(tensor_type: TensorType, rows: usize, columns: usize, seed: u64, wild: bool) -> Vec<u8> {
    let mut numbers = Numbers::new(seed);
    let mut bytes: Vec<u8> =
        (0..tensor_type.row_bytes(columns).unwrap() * rows).map(|_| numbers.bits() as u8).collect();
    if wild {
        return bytes;
    }
    let scales = match tensor_type {
        TensorType::Q4_1 => 2,
        TensorType::Q4_0 | TensorType::Q8_0 => 1,
        TensorType::F16 | TensorType::Bf16 | TensorType::F32 => {
            for element in bytes.chunks_exact_mut(tensor_type.block_bytes()) {
                let x = numbers.uniform();
                match tensor_type {
                    TensorType::F16 => element.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
                    TensorType::Bf16 => element.copy_from_slice(&half::bf16::from_f32(x).to_le_bytes()),
                    _ => element.copy_from_slice(&x.to_le_bytes()),
                }
            }
            return bytes;
        }
        other => panic!("no blocks of {other} here"),
    };
    for block in bytes.chunks_exact_mut(tensor_type.block_bytes()) {
        for scale in block[..2 * scales].chunks_exact_mut(2) {
            scale.copy_from_slice(&f16::from_f32(numbers.uniform() * 0.1).to_le_bytes());
        }
    }
    bytes
}

fn weights(kind: WeightKind, rows: usize, columns: usize, seed: u64, wild: bool) -> PackedWeights {
    let bytes = blocks(kind.tensor_type(), rows, columns, seed, wild);
    PackedWeights::new(&[Rows { tensor_type: kind.tensor_type(), rows, columns, bytes: &bytes }]).unwrap()
}

/// Equality of bits, with the place of the first difference.
#[track_caller]
fn assert_bits(what: &str, expected: &[f32], found: &[f32]) {
    assert_eq!(expected.len(), found.len(), "{what}");
    for (i, (a, b)) in expected.iter().zip(found).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {i} is {b:e} and not {a:e}");
    }
}
