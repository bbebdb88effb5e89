//! The certified system's cases for `ferrokv check`: every instance over hostile inputs.

use super::{Annotation, BLOCK_TOKENS, CertifiedElement, Geometry, HEAD_DIMS, Job, Layout, Rounding, Writer};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, poisoned};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::mixed;

/// What a pool of originals holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Uniform in [-1, 1).
    Uniform,
    /// Random bits: NaN, infinities, subnormals and every exponent.
    Bits,
    /// Random bits of finite numbers that f16 has: every exponent in one block.
    Finite,
    /// One number a channel.
    Constant,
    /// Channels far from zero, with a range of a few steps of their type.
    Offset,
    /// Multiples of half a scale.
    Ties,
    /// One channel 1000 times the others.
    Outlier,
    /// Zeros of both signs and subnormals.
    Tiny,
    /// The largest numbers of f16.
    Huge,
    /// The block's first token again and again, but for one.
    Repeated,
}

impl Input {
    /// All of them.
    pub const ALL: [Input; 10] = [
        Input::Uniform,
        Input::Bits,
        Input::Finite,
        Input::Constant,
        Input::Offset,
        Input::Ties,
        Input::Outlier,
        Input::Tiny,
        Input::Huge,
        Input::Repeated,
    ];

    /// The name in labels.
    pub fn name(self) -> &'static str {
        match self {
            Input::Uniform => "uniform",
            Input::Bits => "bits",
            Input::Finite => "finite",
            Input::Constant => "constant",
            Input::Offset => "offset",
            Input::Ties => "ties",
            Input::Outlier => "outlier",
            Input::Tiny => "tiny",
            Input::Huge => "huge",
            Input::Repeated => "repeated",
        }
    }

    /// Whether every element can be quantized.
    pub fn is_sound(self) -> bool {
        self != Input::Bits
    }

    /// Element `index` of a pool with `head_dim` channels: the same on every machine.
    fn value<T: CertifiedElement>(self, index: usize, head_dim: usize, seed: u64) -> T {
        let (channel, token) = (index % head_dim, index / head_dim % BLOCK_TOKENS as usize);
        let z = mixed(seed, index as u64);
        let of_channel =
            mixed(seed ^ 1, (index / (head_dim * BLOCK_TOKENS as usize) * head_dim + channel) as u64);
        let uniform = |z: u64| (z >> 40) as f32 / (1 << 23) as f32 - 1.0;
        // Bits of any f16 but infinities and NaN.
        let finite =
            |z: u64| f16::from_bits(((z >> 32) as u16 % 0x7c00) | ((z >> 16) as u16 & 0x8000)).to_f32();
        // A bf16 that is rounded up must not pass f16's last value.
        let inside = |x: f32| x.clamp(-65280.0, 65280.0);
        let x = match self {
            Input::Uniform => uniform(z),
            Input::Bits => f32::from_bits((z >> 32) as u32),
            Input::Finite => inside(finite(z)),
            Input::Constant => inside(finite(of_channel)),
            Input::Offset => {
                let base = finite(of_channel).clamp(-30000.0, 30000.0);
                base * (1.0 + (z % 5) as f32 / 1024.0)
            }
            Input::Ties if token == 0 => -64.0,
            Input::Ties => (z % 256) as f32 * 0.5 - 64.0,
            Input::Outlier if channel == head_dim / 2 => uniform(z) * 1000.0,
            Input::Outlier => uniform(z),
            Input::Tiny if z.is_multiple_of(3) => [0.0, -0.0][(z >> 8) as usize % 2],
            Input::Tiny => f16::from_bits((z >> 32) as u16 & 0x83ff).to_f32(),
            Input::Huge => [65504.0, -65504.0, 65472.0, 0.0][(z >> 8) as usize % 4],
            Input::Repeated if token == 7 => uniform(z),
            Input::Repeated => uniform(of_channel) * 8.0,
        };
        // To bf16 some of these round past f16.
        let x = if self == Input::Huge && T::LARGEST > 65504.0 { inside(x) } else { x };
        T::from_f32(x)
    }

    /// A pool of `blocks` blocks of originals.
    pub fn pool<T: CertifiedElement>(self, geometry: Geometry, blocks: usize, seed: u64) -> Vec<T> {
        let head_dim = geometry.head_dim() as usize;
        (0..geometry.pool_elements(blocks)).map(|index| self.value(index, head_dim, seed)).collect()
    }
}

/// The cases of every instance; the full coverage has pools of thousands of blocks.
pub fn cases(coverage: Coverage) -> Vec<Case> {
    let (mut cases, large) = (Vec::new(), coverage == Coverage::Full);
    let small = coverage == Coverage::Small;
    if coverage == Coverage::Huge {
        return cases;
    }
    for head_dim in HEAD_DIMS {
        for input in Input::ALL {
            // Several blocks and heads take no other way than one, but for their places.
            let few: &[(u32, usize)] =
                if small && input != Input::Bits { &[(1, 1)] } else { &[(1, 1), (3, 4)] };
            for &(kv_heads, blocks) in few {
                add_types(&mut cases, (kv_heads, head_dim), STORED[0], blocks, input);
            }
            add_types(&mut cases, (2, head_dim), STORED[1], 1, input);
        }
        for input in [Input::Uniform, Input::Offset, Input::Tiny, Input::Bits] {
            for stored in &STORED[2..] {
                add_types(&mut cases, (2, head_dim), *stored, 1, input);
            }
        }
        if large {
            for input in [Input::Uniform, Input::Finite, Input::Bits] {
                for stored in STORED {
                    add_types(&mut cases, (8, head_dim), stored, 1000, input);
                }
            }
        }
    }
    cases.extend(super::cache::cases::cases(coverage));
    cases.extend(super::step_cases::cases(coverage));
    cases
}

/// How a pool is stored.
type Stored = (Layout, Rounding);

/// Each way.
const STORED: [Stored; 4] = [
    (Layout::Compact, Rounding::Nearest),
    (Layout::Paper, Rounding::Nearest),
    (Layout::Compact, Rounding::Stochastic { seed: 6 }),
    (Layout::Paper, Rounding::Stochastic { seed: 7 }),
];

fn add_types(cases: &mut Vec<Case>, heads: (u32, u32), stored: Stored, blocks: usize, input: Input) {
    add::<f16>(cases, heads, stored, blocks, input);
    add::<bf16>(cases, heads, stored, blocks, input);
}

/// What labels say of a layout: nothing of the usual one.
pub(super) fn in_layout(layout: Layout) -> &'static str {
    match layout {
        Layout::Compact => "",
        Layout::Paper => " in the paper's layout",
    }
}

fn add<T: CertifiedElement>(
    cases: &mut Vec<Case>,
    (kv_heads, head_dim): (u32, u32),
    (layout, rounding): Stored,
    blocks: usize,
    input: Input,
) {
    let Ok(geometry) = Geometry::new(kv_heads, head_dim) else { return };
    let geometry = geometry.with_layout(layout).with_rounding(rounding);
    let label = format!(
        "{} heads={kv_heads} head_dim={head_dim} blocks={blocks} {}{}{}",
        T::NAME,
        input.name(),
        in_layout(layout),
        if rounding == Rounding::Nearest { "" } else { " rounded by chance" }
    );
    let run = move |device: &Device| run::<T>(device, geometry, blocks, input);
    let case = Case::new(T::quantize_block(geometry).info(), label, run);
    cases.push(if blocks == 1 { case.race_checked() } else { case });
}

/// Quantizes every block, in reverse order, with one job among them that is none.
fn run<T: CertifiedElement>(
    device: &Device,
    geometry: Geometry,
    blocks: usize,
    input: Input,
) -> Result<Vec<OutputBuffer>, CaseError> {
    let stream = Stream::new(device)?;
    let keys = Buffer::from_slice(device, &input.pool::<T>(geometry, blocks, 2))?;
    let values = Buffer::from_slice(device, &input.pool::<T>(geometry, blocks, 4))?;
    let mut tiles = poisoned::<u8>(&stream, geometry.tile_bytes(blocks))?;
    let mut annotations = poisoned::<Annotation>(&stream, geometry.pairs(blocks))?;
    let mut jobs: Vec<Job> =
        (0..blocks as u32).map(|block| Job::new(block, blocks as u32 - 1 - block, block + 1)).collect();
    jobs.insert(blocks / 2, Job::NONE);
    let mut writer = Writer::<T>::new(device, geometry, jobs.len().min(300))?;
    writer.write(&stream, &keys, &values, &jobs, &mut tiles, &mut annotations)?;
    let problems = writer.take_problems(&stream)?;
    Ok(vec![
        OutputBuffer::download("tiles", &tiles)?,
        OutputBuffer::new(
            "annotations",
            bytemuck::cast_slice::<Annotation, f32>(&annotations.to_vec()?).to_vec(),
        ),
        OutputBuffer::new("problems", bytemuck::cast::<_, [u64; 4]>(problems).to_vec()),
    ])
}
