//! Cases of a step's token that one launch turns and encodes.

use super::{STEP, Step, made_up};
use crate::attention::StepProblem;
use crate::attention::rope::{Pairing, RopeShape, frequencies, rotate};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, poisoned};
use crate::kv::PARKED;
use crate::vecinfer::turning::kernel;
use crate::vecinfer::{Code, Encode, HEAD_DIMS, Setting, Source, Store, Tables, Turning};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::mixed;
use kernels_gpu::vecinfer::CODES;

/// How a step's tokens come in.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Turned {
    pub head_dim: u32,
    pub code: Code,
    pub pairing: Pairing,
    /// Channels that turn.
    pub rotary: u32,
    pub kv_heads: u32,
    /// As a step has them.
    pub step: Step,
}

/// One of each instance that takes all ways, others where a way is the instance's.
pub(in super::super) fn all(coverage: Coverage) -> Vec<Turned> {
    let mut all = Vec::new();
    for head_dim in HEAD_DIMS {
        for code in CODES.into_iter().filter(|code| kernel(head_dim, code.number()).is_some()) {
            let small = Turned {
                head_dim,
                code,
                pairing: Pairing::HalfSplit,
                rotary: head_dim,
                kv_heads: 1,
                step: Step { recent: 32, ..STEP },
            };
            let neighbours = Turned { pairing: Pairing::Interleaved, rotary: head_dim / 2, ..small };
            all.push(small);
            all.push(Turned { step: Step { by_head: true, sink: 0, ..STEP }, kv_heads: 2, ..neighbours });
            if coverage != Coverage::Small {
                let hostile = Step { hostile: true, hadamard: false, ..STEP };
                all.push(Turned { kv_heads: 8, rotary: 0, step: hostile, ..neighbours });
                all.push(Turned { kv_heads: 3, rotary: head_dim / 2, step: hostile, ..small });
            }
        }
    }
    all
}

pub(super) fn cases(coverage: Coverage) -> impl Iterator<Item = Case> {
    all(coverage).into_iter().map(move |turned| {
        let Turned { head_dim, code, pairing, rotary, kv_heads, step } = turned;
        let label = format!(
            "{pairing:?} turn={rotary} kv_heads={kv_heads} sink={} hadamard={} books-by-head={} hostile={}",
            step.sink, step.hadamard, step.by_head, step.hostile
        );
        let (kernel, _) = kernel(head_dim, code.number()).expect("an instance");
        let case = Case::new(kernel.info(), label, move |device| outputs(device, turned, true));
        if coverage == Coverage::Small { case.race_checked() } else { case }
    })
}

/// Room of a sequence.
const MOST: u32 = 96;
/// Sequences at places of tiles and windows, one past its room, one that is not there.
const POSITIONS: [u32; 8] = [0, 1, 15, 16, 47, MOST - 1, MOST, PARKED];

/// What the launch writes: or, of the same tokens, the rotation and `encode` one after another.
pub(in super::super) fn outputs(
    device: &Device,
    turned: Turned,
    at_once: bool,
) -> Result<Vec<OutputBuffer>, CaseError> {
    let Turned { head_dim, code, pairing, rotary, kv_heads, step } = turned;
    let stream = Stream::new(device)?;
    let (sequences, q_heads) = (POSITIONS.len(), 3 * kv_heads);
    let problem = StepProblem { sequences: sequences as u32, q_heads, kv_heads, head_dim, max_tokens: MOST };
    let setting = Setting { keys: code, values: code, recent: step.recent, sink: step.sink };
    let books = made_up([code; 2], kv_heads, head_dim, step);
    let tables = Tables::new(device, &books, 0)?;
    let mut store = Store::new(device, problem, setting)?;
    let heads = (q_heads + 2 * kv_heads) as usize;
    let number = |i: usize| {
        let wild = [f32::NAN, f32::INFINITY, f32::MAX, -0.0, f32::MIN_POSITIVE];
        match mixed(7, i as u64) {
            bits if step.hostile && bits.is_multiple_of(97) => wild[bits as usize / 97 % wild.len()],
            bits => ((bits >> 40) as f32 / 2f32.powi(23) - 1.0) * 3.0,
        }
    };
    let qkv: Vec<f32> = (0..sequences * heads * head_dim as usize).map(number).collect();
    let (qkv, positions) = (Buffer::from_slice(device, &qkv)?, Buffer::from_slice(device, &POSITIONS)?);
    // One more than is read: an empty table has no memory to point at.
    let turns = Buffer::from_slice(device, &frequencies(10_000.0, rotary as usize + 2))?;
    let turns = turns.global_range(..rotary as usize / 2)?;
    let mut queries = poisoned::<f16>(&stream, sequences * (q_heads * head_dim) as usize)?;
    let mut lengths = Buffer::from_slice(device, &[7u32; POSITIONS.len()])?;
    if at_once {
        let turning = Turning {
            qkv: qkv.global(),
            frequencies: turns,
            rotary,
            pairing,
            queries: queries.global_mut(),
            positions: positions.global(),
            lengths: lengths.global_mut(),
        };
        // SAFETY: buffers of the device, host memory on the CPU, which are there until the stream was waited
        // for.
        unsafe { store.rotate_and_encode(&stream, &tables, turning) }?;
        stream.synchronize()?;
    } else {
        let rows = sequences * (kv_heads * head_dim) as usize;
        let mut both = [Buffer::<f16>::zeroed(device, rows)?, Buffer::<f16>::zeroed(device, rows)?];
        let [keys, values] = &mut both;
        let args = kernels_gpu::attention::rotation::rope::Args {
            qkv: qkv.global(),
            positions: positions.global(),
            frequencies: turns,
            queries: queries.global_mut(),
            keys: keys.global_mut(),
            values: values.global_mut(),
            shape: RopeShape { q_heads, kv_heads, head_dim, rotary },
        };
        // SAFETY: as above.
        unsafe { rotate(&stream, pairing, args, sequences) }?;
        let encode = Encode {
            sequence: 0,
            counts: [sequences as u32, 1],
            source: Source::Rows,
            keys: keys.global(),
            values: values.global(),
            positions: positions.global(),
            lengths: lengths.global_mut(),
            pool: None,
        };
        // SAFETY: as above.
        unsafe { store.encode_on(&stream, false, &tables, encode) }?;
        stream.synchronize()?;
    }
    let [recent_keys, recent_values] = store.recent();
    Ok(vec![
        OutputBuffer::download("queries", &queries)?,
        OutputBuffer::download("codes", store.codes())?,
        OutputBuffer::download("recent keys", recent_keys)?,
        OutputBuffer::download("recent values", recent_values)?,
        OutputBuffer::download("lengths", &lengths)?,
        OutputBuffer::download("refused", store.refused())?,
    ])
}
