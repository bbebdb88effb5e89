//! A step's token as the product gives it: turned and encoded in one launch.

use super::books::Tables;
use super::{Error, Result, Store};
use crate::Stream;
use crate::attention::rope::{Pairing, RopeShape, check_rope};
use half::f16;
use kernels_gpu::vecinfer::{CODES, ENCODE_THREADS, encode_bytes, rope_encode, step_blocks};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

/// The kernel's handle, and its shared memory.
type Turn = (Kernel<rope_encode::Args>, u32);

/// That of a head_dim and the code of keys and values, if there is one.
pub(super) fn kernel(head_dim: u32, code: u32) -> Option<Turn> {
    macro_rules! instances {
        ($(($dim:literal, $code:literal))*) => {
            match (head_dim, code) {
                $(($dim, $code) => {
                    Some((rope_encode::kernel::<$dim, $code>(), encode_bytes::<$dim, $code>()))
                })*
                _ => None,
            }
        };
    }
    instances!((64, 208)(64, 408)(64, 808)(96, 208)(96, 408)(128, 208)(128, 408)(128, 808)(256, 408))
}

/// One token of each sequence, from the first one on.
#[derive(Clone, Copy, Debug)]
pub struct Turning {
    /// Queries, keys and values, [sequences, (q_heads + 2·kv_heads)·head_dim].
    pub qkv: Global<f32>,
    /// Radians a position, [rotary / 2].
    pub frequencies: Global<f32>,
    /// Channels of a head that turn.
    pub rotary: u32,
    /// Which of them turn together.
    pub pairing: Pairing,
    /// Where the turned queries go, [sequences, q_heads, head_dim].
    pub queries: GlobalMut<f16>,
    /// \[sequences\].
    pub positions: Global<u32>,
    /// \[sequences\]: becomes one more than the position.
    pub lengths: GlobalMut<u32>,
}

impl Store {
    fn turn(&self) -> Option<Turn> {
        let setting = self.setting();
        let same = setting.keys == setting.values;
        same.then(|| kernel(self.problem().head_dim, setting.keys.number())).flatten()
    }

    /// Whether there is a launch that turns and encodes: of keys and values in the same codes of 8 bits.
    pub fn turns(&self) -> bool {
        self.turn().is_some()
    }

    /// Turns queries, keys and values of a step and puts keys and values in: the bits of
    /// [`rotate`](crate::attention::rope::rotate) and [`encode_on`](Self::encode_on) one after another. It
    /// allocates nothing, waits for nothing and can be captured.
    ///
    /// # Safety
    /// As [`encode_on`](Self::encode_on).
    ///
    /// # Errors
    /// [`Error::Codes`] where there is no such launch; [`Error::Length`]; more channels that turn than a head
    /// has; what the launch reports.
    pub unsafe fn rotate_and_encode(&mut self, stream: &Stream, tables: &Tables, new: Turning) -> Result<()> {
        let Some((kernel, shared)) = self.turn() else { return Err(self.none_turns()) };
        let Turning { qkv, frequencies, rotary, pairing, queries, positions, lengths } = new;
        let (problem, sequences) = (self.problem(), positions.len());
        if sequences > problem.sequences as usize {
            let (what, expected) = ("the buffer of positions", problem.sequences as usize);
            return Err(Error::Length { what, got: sequences, expected });
        }
        let crate::attention::StepProblem { q_heads, kv_heads, head_dim, .. } = problem;
        let width = ((q_heads + 2 * kv_heads) * head_dim) as usize;
        super::error::length("the buffer of queries, keys and values", qkv.len(), sequences * width)?;
        let of_queries = sequences * (q_heads * head_dim) as usize;
        super::error::length("the buffer of queries", queries.len(), of_queries)?;
        super::error::length("the buffer of lengths", lengths.len(), sequences)?;
        let rope = RopeShape { q_heads, kv_heads, head_dim, rotary };
        check_rope(rope)?;
        super::error::length("the table of frequencies", frequencies.len(), rotary as usize / 2)?;
        let shape = self.setting().encode_shape(tables.complete(self.shape()), head_dim, 1);
        let grid = (1, step_blocks(q_heads, kv_heads, head_dim), sequences as u32);
        let args = rope_encode::Args {
            qkv,
            positions,
            frequencies,
            queries,
            transforms: tables.transform.global(),
            key_books: tables.keys.global(),
            value_books: tables.values.global(),
            codes: self.codes.global_mut(),
            recent_keys: self.recent_keys.global_mut(),
            recent_values: self.recent_values.global_mut(),
            lengths,
            refused: self.refused_mut(),
            rope,
            interleaved: (pairing == Pairing::Interleaved).into(),
            shape,
        };
        let launch = LaunchShape::new(grid, ENCODE_THREADS).shared(shared);
        // SAFETY: lengths as just checked; a thread block is alone with a tile, and what is past the room is
        // left out. No launch writes codebooks and transformations. The rest is this function's contract.
        Ok(unsafe { stream.launch(&kernel, launch, args) }?)
    }

    fn none_turns(&self) -> Error {
        let setting = self.setting();
        Error::Codes {
            keys: super::setting::name(setting.keys),
            values: super::setting::name(setting.values),
            head_dim: Some(self.problem().head_dim),
            there: turned(self.problem().head_dim),
        }
    }
}

/// What can be turned and encoded at once.
fn turned(head_dim: u32) -> String {
    let there = CODES.into_iter().filter(|code| kernel(head_dim, code.number()).is_some());
    let names: Vec<String> = there.map(super::setting::name).collect();
    format!("{}, for keys and values alike, that turn and encode at once", names.join(", "))
}
