//! Tokens to try kernels on, brought in by chunks of every cut, and one step over them.

use super::{Encode, Handles, Plan, Setting, Store};
use crate::attention::dense::sample::{normal, random};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::kv::PARKED;
use crate::{Buffer, Device, Stream};
use half::f16;

/// What queries, keys and values hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// About N(0, 1), each channel of the keys with an offset of its own.
    Normal,
    /// The same with queries so long that few tokens matter.
    Sharp,
    /// Channels and tokens that never change, that have the largest numbers there are, the smallest ones, or
    /// neighbours; the others are normal.
    Odd,
    /// The same with infinities and NaN.
    Hostile,
    /// One token without a number, the others normal.
    #[cfg(test)]
    Void,
    /// One token whose channel 63 has none.
    #[cfg(test)]
    VoidEnd,
}

impl Input {
    pub(super) const ALL: [Input; 4] = [Input::Normal, Input::Sharp, Input::Odd, Input::Hostile];

    /// A number of keys (`kind` 0) or values (1).
    pub(super) fn element(self, kind: usize, row: usize, token: usize, channel: usize) -> f16 {
        let seed = 10 * row as u64 + kind as u64;
        let index = (token * 128 + channel) as u64;
        let x = normal(seed, index);
        let offset = if kind == 0 { 3.0 * normal(77, channel as u64) } else { 0.0 };
        let odd = matches!(self, Input::Odd | Input::Hostile);
        if self == Input::Hostile && random(seed, index) % 997 == 5 {
            return [f16::NAN, f16::INFINITY, f16::NEG_INFINITY][token % 3];
        }
        #[cfg(test)]
        if token == 37 && (self == Input::Void || self == Input::VoidEnd && channel == 63) {
            return f16::NAN;
        }
        // Of keys by channel, of values by token: whole groups are so.
        let of = if kind == 0 { channel } else { token };
        match of % 16 {
            3 if odd => f16::from_f32(-2.5),
            5 if odd => {
                if random(seed, index).is_multiple_of(2) {
                    f16::MAX
                } else {
                    f16::MIN
                }
            }
            7 if odd => f16::from_bits(random(seed, index) as u16 & 0x803f),
            9 if odd => f16::from_bits(0x4000 + (random(seed, index) % 3) as u16),
            11 if odd => {
                if random(seed, index).is_multiple_of(2) {
                    f16::ZERO
                } else {
                    f16::NEG_ZERO
                }
            }
            _ => f16::from_f32(x + offset),
        }
    }

    fn query(self, index: usize) -> f16 {
        let x = normal(3, index as u64);
        f16::from_f32(if self == Input::Sharp { 6.0 * x } else { x })
    }
}

/// A batch, how it is stored, and how it comes in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    /// Tokens of each sequence, that of the step included.
    pub lengths: &'static [u32],
    pub kv_heads: u32,
    /// Query heads of a KV head.
    pub queries: u32,
    pub head_dim: u32,
    pub max_tokens: u32,
    pub setting: Setting,
    pub input: Input,
    /// The chunks before the step; what is left is one more.
    pub cuts: &'static [u32],
}

/// What a run has left.
#[derive(Debug, PartialEq)]
pub(super) struct Found {
    pub output: Vec<u32>,
    pub codes: Vec<u32>,
    pub recent: [Vec<f16>; 2],
    pub lengths: Vec<u32>,
    pub refused: Vec<u32>,
    /// The first sequence restored, keys and values, [tiles, kv_heads, 16, head_dim].
    pub restored: [Vec<u16>; 2],
}

impl Batch {
    pub(super) fn problem(&self) -> StepProblem {
        let Batch { kv_heads, queries, head_dim, max_tokens, .. } = *self;
        let sequences = self.lengths.len() as u32;
        StepProblem { sequences, q_heads: kv_heads * queries, kv_heads, head_dim, max_tokens }
    }

    /// Rows [tokens, kv_heads, head_dim] of keys or values of a sequence.
    pub(super) fn rows(&self, kind: usize, sequence: usize, tokens: std::ops::Range<u32>) -> Vec<f16> {
        let heads = self.kv_heads as usize;
        let row = |token: u32, head: usize| {
            (0..self.head_dim as usize)
                .map(move |c| self.input.element(kind, sequence * heads + head, token as usize, c))
        };
        tokens.flat_map(|token| (0..heads).flat_map(move |head| row(token, head))).collect()
    }

    pub(super) fn queries(&self) -> Vec<f16> {
        let count = self.problem().dense().query_rows() * self.head_dim as usize;
        (0..count).map(|i| self.input.query(i)).collect()
    }

    /// Brings everything in, and attends; with `slices` on the CPU's own path.
    pub(super) fn run(&self, device: &Device, slices: bool) -> super::Result<Found> {
        let stream = Stream::new(device)?;
        let problem = self.problem();
        let mut store = Store::new(device, problem, self.setting)?;
        // The same on every device: what is not written has to stay as it was.
        stream.fill_u8(&mut store.codes, .., 0x5a)?;
        stream.fill_u8(&mut store.recent_keys, .., 0x5a)?;
        stream.fill_u8(&mut store.recent_values, .., 0x5a)?;
        let sequences = self.lengths.len();
        let mut lengths = Buffer::<u32>::zeroed(device, sequences)?;
        for (sequence, length) in self.lengths.iter().enumerate() {
            let mut from = 0;
            let past = length.saturating_sub(1);
            for cut in self.cuts.iter().copied().chain([u32::MAX]) {
                let to = past.min(from + cut.min(past));
                if to == from {
                    continue;
                }
                let positions: Vec<u32> = (from..to).collect();
                let positions = Buffer::from_slice(device, &positions)?;
                let [keys, values] = [0, 1].map(|kind| self.rows(kind, sequence, from..to));
                let (keys, values) =
                    (Buffer::from_slice(device, &keys)?, Buffer::from_slice(device, &values)?);
                let new = Encode {
                    sequence: sequence as u32,
                    counts: [1, to - from],
                    keys: keys.global(),
                    values: values.global(),
                    positions: positions.global(),
                    lengths: lengths.global_range_mut(sequence..sequence + 1)?,
                };
                // SAFETY: buffers of this device that hold what they should; the stream is waited for.
                unsafe { store.encode_on(&stream, slices, new) }?;
                stream.synchronize()?;
                from = to;
            }
        }
        let positions: Vec<u32> = self.lengths.iter().map(|n| if *n == 0 { PARKED } else { n - 1 }).collect();
        let positions = Buffer::from_slice(device, &positions)?;
        let step = |kind: usize| {
            let of = |(sequence, n): (usize, &u32)| {
                let last = n.saturating_sub(1);
                self.rows(kind, sequence, last..last + 1)
            };
            self.lengths.iter().enumerate().flat_map(of).collect::<Vec<_>>()
        };
        let (keys, values) = (Buffer::from_slice(device, &step(0))?, Buffer::from_slice(device, &step(1))?);
        let new = Encode {
            sequence: 0,
            counts: [sequences as u32, 1],
            keys: keys.global(),
            values: values.global(),
            positions: positions.global(),
            lengths: lengths.global_mut(),
        };
        // SAFETY: as above.
        unsafe { store.encode_on(&stream, slices, new) }?;
        let queries = Buffer::from_slice(device, &self.queries())?;
        let mut output = Buffer::<f32>::new(device, queries.len())?;
        stream.fill_u8(&mut output, .., crate::check::poison(device.kind()))?;
        let mut plan = Plan::new(device, problem, self.setting)?;
        // Twice: counters are as they were.
        for _ in 0..2 {
            let (queries, lengths) = (queries.global(), lengths.global());
            let handles = Handles { queries, lengths, output: output.global_mut() };
            // SAFETY: as above.
            unsafe { plan.run_on(&stream, slices, &store, handles) }?;
            stream.synchronize()?;
        }
        let length = self.lengths[0];
        let blocks = length.div_ceil(BLOCK_TOKENS);
        let elements = (blocks * self.kv_heads * BLOCK_TOKENS * self.head_dim).max(1) as usize;
        let mut pools = [vec![f16::ONE; elements], vec![f16::ONE; elements]];
        if length > 0 {
            let [mut keys, mut values] =
                [Buffer::from_slice(device, &pools[0])?, Buffer::from_slice(device, &pools[1])?];
            let both = [keys.global_mut(), values.global_mut()];
            // SAFETY: as above; the pools have the tiles.
            unsafe { store.restore_on(&stream, slices, (0, length), both) }?;
            stream.synchronize()?;
            pools = [keys.to_vec()?, values.to_vec()?];
        }
        let bits = |pool: &Vec<f16>| pool.iter().map(|x| x.to_bits()).collect();
        Ok(Found {
            output: output.to_vec()?.iter().map(|x| x.to_bits()).collect(),
            codes: store.codes.to_vec()?,
            recent: [store.recent_keys.to_vec()?, store.recent_values.to_vec()?],
            lengths: lengths.to_vec()?,
            refused: store.refused().to_vec()?,
            restored: [bits(&pools[0]), bits(&pools[1])],
        })
    }
}
