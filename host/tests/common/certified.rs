//! Caches on the host for certified steps on slices, and the emulator that they are compared with.
// Each test binary takes a part.
#![allow(dead_code)]

use host::certified::cpu::{Level, Slices};
use host::certified::proof::{Batch, Input, Trial};
use host::certified::{
    Annotation, Attended, CacheElement, Certificate, Layout, Near, OriginalsRead, Policy, Rounding, Scratch,
    StepHandles, StepPlan, StepProblem,
};
use host::dense::sample::random;
use host::{Buffer, Device, Stream};
use kernels_gpu::certified::admit::HEADER;
use simt::emu::EmuOptions;

/// A few heads of 64.
pub const PROBLEM: StepProblem =
    StepProblem { sequences: 1, q_heads: 9, kv_heads: 3, head_dim: 64, max_tokens: 320 };

/// Every block is promoted.
pub const ALL: Policy = Policy {
    coverage: 1.0,
    min_keys: u32::MAX,
    max_keys: u32::MAX,
    value_tolerance: 0.0,
    max_values: u32::MAX,
    ..Policy::CODES
};

/// What becomes of some of the numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Spoilt {
    Nothing,
    /// Queries: any bits.
    Queries,
    /// Queries: the largest and the smallest numbers.
    Extremes,
    /// Originals: infinities and NaN, promoted blocks and the trailing one among them.
    Originals,
    /// Tiles: any bytes, scales and zeros that are no numbers among them.
    Tiles,
    /// Bounds that are infinite.
    Annotations,
}

/// A cache on the host, quantized.
pub struct Case<E: CacheElement> {
    pub layout: Layout,
    pub batch: Batch<E>,
    pub tiles: Vec<u32>,
    pub annotations: Vec<Annotation>,
}

impl<E: CacheElement> Case<E> {
    pub fn new(problem: StepProblem, sequences: &[(Input, u32)], seed: u64) -> Self {
        Self::with_layout(problem, sequences, seed, Layout::Compact)
    }

    pub fn with_layout(problem: StepProblem, sequences: &[(Input, u32)], seed: u64, layout: Layout) -> Self {
        let problem = StepProblem { sequences: sequences.len() as u32, ..problem };
        let batch = Batch::<E>::new(problem, sequences, seed, seed ^ 9);
        let device = Device::cpu(EmuOptions::default());
        // The paper's layout has no steps that ask for chances.
        let rounding = match layout {
            Layout::Compact => Rounding::Stochastic { seed: 5 },
            Layout::Paper => Rounding::Nearest,
        };
        let mut trial =
            Trial::with_layout(&device, problem, batch.blocks(), layout).unwrap().with_rounding(rounding);
        trial.load(&batch).unwrap();
        let (tiles, annotations) = trial.quantized().unwrap();
        let tiles = tiles.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        Case { layout, batch, tiles, annotations }
    }

    pub fn spoil(&mut self, spoilt: Spoilt, every: u64, seed: u64) {
        let inf = if E::IS_F16 { 0x7c00 } else { 0x7f80 };
        let Batch { queries, keys, values, .. } = &mut self.batch;
        let some = |elements: &mut [u16], pick: &dyn Fn(usize, u16) -> u16| {
            for (i, x) in elements.iter_mut().enumerate() {
                let z = random(seed, i as u64);
                if z.is_multiple_of(every) {
                    *x = pick((z >> 32) as usize, *x);
                }
            }
        };
        match spoilt {
            Spoilt::Nothing => {}
            Spoilt::Queries => some(bytemuck::cast_slice_mut(queries), &|z, _| z as u16),
            Spoilt::Extremes => some(bytemuck::cast_slice_mut(queries), &|z, _| {
                [inf - 1, (inf - 1) | 0x8000, 1, 0x8001, inf / 2, 0x8000, 0][z % 7]
            }),
            Spoilt::Originals => {
                let pick = |z: usize, _| [inf, inf | 0x8000, 0x7fff, 0][z % 4];
                some(bytemuck::cast_slice_mut(keys), &pick);
                some(bytemuck::cast_slice_mut(values), &pick);
            }
            Spoilt::Tiles => some(bytemuck::cast_slice_mut(&mut self.tiles), &|z, _| z as u16),
            Spoilt::Annotations => {
                for (i, annotation) in self.annotations.iter_mut().enumerate() {
                    let z = random(seed, i as u64);
                    if z.is_multiple_of(every) {
                        let Annotation { eta, nu, eps, zeta, spread, step, reach, .. } = annotation;
                        *[eta, nu, eps, zeta, spread, step, reach][(z >> 32) as usize % 7] = f32::INFINITY;
                    }
                }
            }
        }
    }

    pub fn slices(&self) -> Slices<'_, E> {
        Slices {
            queries: &self.batch.queries,
            tiles: &self.tiles,
            annotations: &self.annotations,
            table: &self.batch.table,
            lengths: &self.batch.lengths,
            keys: &self.batch.keys,
            values: &self.batch.values,
        }
    }
}

/// Words of output, log-sums and certificates.
pub type Words = [Vec<u32>; 3];

/// A step's buffers on the emulator.
pub struct Emulated<E: CacheElement> {
    stream: Stream,
    pub plan: StepPlan<E>,
    pub out: Attended,
    queries: Buffer<E>,
    tiles: Buffer<u32>,
    annotations: Buffer<Annotation>,
    table: Buffer<u32>,
    lengths: Buffer<u32>,
    keys: Buffer<E>,
    values: Buffer<E>,
    near: Buffer<E>,
    directory: Buffer<u64>,
    scratch: Scratch,
}

impl<E: CacheElement> Emulated<E> {
    /// A copy of the case, beside a scratch of so many slots.
    pub fn new(case: &Case<E>, policy: &Policy, slots: [u32; 2]) -> Self {
        let device = Device::cpu(EmuOptions::default());
        let Case { layout, batch, tiles, annotations } = case;
        let plan = StepPlan::<E>::with_layout(&device, batch.problem, policy, *layout).unwrap();
        let out = plan.allocate().unwrap();
        let [key_slots, value_slots] = slots;
        let scratch = match slots {
            [0, 0] => Scratch::NONE,
            _ => Scratch { key_slots, value_slots, fresh: 0, admits: 1 },
        };
        let mut directory = Vec::new();
        let mut near = Vec::new();
        if scratch != Scratch::NONE {
            directory.resize(HEADER as usize, 0);
            for _ in 0..key_slots + value_slots {
                directory.extend([u64::MAX, u64::from(Scratch::EMPTY)]);
            }
            near.resize(
                scratch.tiles() as usize * 16 * batch.problem.head_dim as usize,
                E::from_f32(f32::NAN),
            );
        }
        Emulated {
            stream: Stream::new(&device).unwrap(),
            plan,
            out,
            queries: Buffer::from_slice(&device, &batch.queries).unwrap(),
            tiles: Buffer::from_slice(&device, tiles).unwrap(),
            annotations: Buffer::from_slice(&device, annotations).unwrap(),
            table: Buffer::from_slice(&device, &batch.table).unwrap(),
            lengths: Buffer::from_slice(&device, &batch.lengths).unwrap(),
            keys: Buffer::from_slice(&device, &batch.keys).unwrap(),
            values: Buffer::from_slice(&device, &batch.values).unwrap(),
            near: Buffer::from_slice(&device, &near).unwrap(),
            directory: Buffer::from_slice(&device, &directory).unwrap(),
            scratch,
        }
    }

    /// Whether steps claim slots of the scratch.
    pub fn admit(&mut self, admits: bool) {
        self.scratch.admits = u32::from(admits && self.scratch != Scratch::NONE);
    }

    /// Takes an empty list that is renewed so many steps early.
    pub fn restart(&mut self, phase: u32) {
        let mut list = self.plan.carried(phase).unwrap();
        self.plan.swap_carried(&mut list).unwrap();
    }

    /// Takes over what a step changes: queries, lengths, and which blocks the sequences have.
    pub fn renew(&mut self, case: &Case<E>) {
        self.queries.write(0, &case.batch.queries).unwrap();
        self.lengths.write(0, &case.batch.lengths).unwrap();
        self.table.write(0, &case.batch.table).unwrap();
    }

    /// What a step returns and reads, on the kernels or on the plan's own path for slices.
    pub fn step(&mut self, case: &Case<E>, on_slices: bool) -> (Words, OriginalsRead) {
        self.renew(case);
        for buffer in [&mut self.out.output, &mut self.out.lse] {
            self.stream.fill_u8(buffer, .., 0xff).unwrap();
        }
        self.stream.fill_u8(&mut self.out.certificates, .., 0xff).unwrap();
        let near = match self.scratch == Scratch::NONE {
            true => Near::none(),
            false => Near {
                tiles: self.near.global_mut(),
                directory: self.directory.global_mut(),
                scratch: self.scratch,
            },
        };
        let handles = StepHandles {
            queries: self.queries.global(),
            tiles: self.tiles.global(),
            annotations: self.annotations.global(),
            table: self.table.global(),
            lengths: self.lengths.global(),
            keys: self.keys.global(),
            values: self.values.global(),
            near,
        };
        if on_slices {
            // SAFETY: buffers of the batch's extents, which nobody else uses.
            unsafe { self.plan.run_on_slices(&handles, self.out.handles()) }.unwrap();
        } else {
            // SAFETY: as above; they live until the launches are done.
            unsafe { self.plan.run(&self.stream, &handles, self.out.handles()) }.unwrap();
        }
        let words = [
            bytemuck::cast_slice(&self.out.output.to_vec().unwrap()).to_vec(),
            bytemuck::cast_slice(&self.out.lse.to_vec().unwrap()).to_vec(),
            bytemuck::cast_slice(&self.out.certificates.to_vec().unwrap()).to_vec(),
        ];
        (words, self.plan.originals_read(&case.batch.lengths).unwrap())
    }

    /// What the scratch holds: bits of its tiles, and its directory.
    pub fn scratch_contents(&self) -> (Vec<u16>, Vec<u64>) {
        let tiles = self.near.to_vec().unwrap();
        (bytemuck::cast_slice(&tiles).to_vec(), self.directory.to_vec().unwrap())
    }
}

/// What a step returns, before it is written.
pub struct Results {
    pub output: Vec<f32>,
    pub lse: Vec<f32>,
    pub certificates: Vec<Certificate>,
}

impl Results {
    pub fn new(problem: StepProblem) -> Self {
        let heads = (problem.sequences * problem.q_heads) as usize;
        Results {
            output: vec![f32::from_bits(u32::MAX); heads * problem.head_dim as usize],
            lse: vec![f32::from_bits(u32::MAX); heads],
            certificates: vec![Certificate { promoted_keys: 77, ..Certificate::UNKNOWN }; heads],
        }
    }

    pub fn out(&mut self) -> host::certified::cpu::Out<'_> {
        let Results { output, lse, certificates } = self;
        host::certified::cpu::Out { output, lse, certificates }
    }

    /// Every word is what the emulator gives.
    pub fn check(&self, expected: &Words, level: Level, what: &dyn std::fmt::Display) {
        let got: [&[u32]; 3] = [
            bytemuck::cast_slice(&self.output),
            bytemuck::cast_slice(&self.lse),
            bytemuck::cast_slice(&self.certificates),
        ];
        for (name, got, expected) in [
            ("lse", got[1], &expected[1]),
            ("certificate", got[2], &expected[2]),
            ("output", got[0], &expected[0]),
        ] {
            let other = got.iter().zip(expected).position(|(a, b)| a != b);
            if let Some(i) = other {
                panic!(
                    "{name} word {i}: {:#x} ({:e}), the emulator gives {:#x} ({:e}); {level:?}, {what}",
                    got[i],
                    f32::from_bits(got[i]),
                    expected[i],
                    f32::from_bits(expected[i]),
                );
            }
        }
    }
}
