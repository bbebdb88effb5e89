//! One layer's step of decoding, to be measured, judged and proven: what `bench attention`, `attend` and
//! `prove` know of a scheme.

mod judge;
mod material;
mod through_cache;

pub use judge::{Data, Exact, Judged, Rows, judge, norm};
pub use through_cache::open as through_cache;
pub(crate) use through_cache::open_with as through_cache_of;

use super::{Error, Geometry, HeadReport, Result, Selection};
use crate::attention::dense::{Attended, DenseElement, Problem};
use crate::attention::{BlockTable, PagedPool};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Keys, values and queries of one layer: equal caches for steps to take in turns, so that no step finds its
/// data in the device's own cache.
#[derive(Debug)]
pub struct Input<E: DenseElement> {
    /// Where it is.
    pub device: Device,
    /// Its extents; one query token a sequence.
    pub problem: Problem,
    /// Tokens of each sequence.
    pub lengths: Vec<u32>,
    /// The caches.
    pub pools: Vec<PagedPool<E>>,
    /// Which block holds which tokens: the same for all caches.
    pub table: BlockTable,
    /// The same on the host: the blocks of each sequence.
    pub blocks: Vec<Vec<u32>>,
    /// Queries of steps that follow each other, each [sequences, q_heads, head_dim]; at least one.
    pub queries: Vec<Buffer<E>>,
    /// Of each of these steps, what each sequence has of its tokens then, \[sequences\]: for queries of
    /// tokens that more have come after. None: all of them, in every step. A scheme that asks the first
    /// queries alone, which see everything, needs none.
    pub seen: Vec<Buffer<u32>>,
}

impl<E: DenseElement> Input<E> {
    /// Its heads, as those of a model of one layer.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            layers: 1,
            q_heads: self.problem.q_heads as usize,
            kv_heads: self.problem.kv_heads as usize,
            head_dim: self.problem.head_dim as usize,
        }
    }

    /// Bytes of the keys and values of a token, in all KV heads.
    pub fn token_bytes(&self) -> u64 {
        let Problem { kv_heads, head_dim, .. } = self.problem;
        2 * size_of::<E>() as u64 * u64::from(kv_heads) * u64::from(head_dim)
    }

    /// Whether launches take the CPU's own path in place of the kernels, which gives the same bits: not where
    /// a graph wants launches.
    pub fn on_slices(&self, stream: &Stream) -> bool {
        self.device.has_host_paths() && !stream.is_capturing()
    }

    /// Where a step may write, full of what no right result is.
    ///
    /// # Errors
    /// Out of memory; what the device reports.
    pub fn unwritten(&self, stream: &Stream) -> Result<Attended> {
        let rows = self.problem.query_rows();
        let mut out = Attended {
            output: Buffer::new(&self.device, rows * self.problem.head_dim as usize)?,
            lse: Buffer::new(&self.device, rows)?,
        };
        stream.fill_u8(&mut out.output, .., 0xff)?;
        stream.fill_u8(&mut out.lse, .., 0xff)?;
        Ok(out)
    }
}

/// An [`Input`] of either element type.
#[derive(Clone, Debug)]
pub enum AnyInput {
    /// Keys and values in f16.
    F16(Arc<Input<f16>>),
    /// Keys and values in bf16.
    Bf16(Arc<Input<bf16>>),
}

impl From<Arc<Input<f16>>> for AnyInput {
    fn from(input: Arc<Input<f16>>) -> Self {
        AnyInput::F16(input)
    }
}

impl From<Arc<Input<bf16>>> for AnyInput {
    fn from(input: Arc<Input<bf16>>) -> Self {
        AnyInput::Bf16(input)
    }
}

/// Where a scheme keeps originals, if it keeps any besides what it stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Originals {
    /// All of them in the device's memory.
    #[default]
    Device,
    /// In page-locked host memory, and of each KV head the keys of so many blocks on the device after use,
    /// and as many values.
    Host {
        /// Blocks of a KV head.
        scratch: u32,
    },
}

/// What a scheme is given to open a workload.
#[derive(Clone, Debug)]
pub struct Opening<'a> {
    /// Keys, values and queries.
    pub input: AnyInput,
    /// The scheme with its preset and options.
    pub selection: &'a Selection,
    /// Where originals are.
    pub originals: Originals,
    /// Which layer of a model it is, where that is known: what was made for a model is then used for it.
    pub layer: Option<usize>,
}

impl Opening<'_> {
    /// The input, for a scheme that takes f16 alone.
    ///
    /// # Errors
    /// [`Error::Refused`] for bf16.
    pub fn f16(&self) -> Result<Arc<Input<f16>>> {
        #[derive(Debug, thiserror::Error)]
        #[error("{0} has no kernels for bf16; give it f16")]
        struct NoBf16(&'static str);
        match &self.input {
            AnyInput::F16(input) => Ok(input.clone()),
            AnyInput::Bf16(_) => Err(Error::refused(NoBf16(self.selection.scheme().name))),
        }
    }
}

/// What a settled step returned: one with the first queries, over the first cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// [sequences, q_heads, head_dim].
    pub output: Vec<f32>,
    /// Natural log-sum-exp of the weights used, [sequences, q_heads]; empty for a scheme that has none.
    pub lse: Vec<f32>,
    /// What is known of each head, [sequences, q_heads].
    pub heads: Vec<HeadReport>,
}

/// What a scheme promises of a row of its output.
#[derive(Clone, Debug, PartialEq)]
pub enum Promise {
    /// Nothing: what can be said is how far off it is.
    Nothing,
    /// The Euclidean norm of its error, at most.
    Norm(f64),
    /// The error of each element and of the log-sum-exp, at most.
    Elements {
        /// `[head_dim]`.
        output: Vec<f64>,
        /// Of the log-sum-exp.
        lse: f64,
    },
}

/// A figure of a workload that its scheme alone knows the meaning of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fact {
    /// What it is, short: a column's head.
    pub name: String,
    /// Its value.
    pub value: Figure,
}

/// A value with its unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Figure {
    /// So many, or a mean of numbers.
    Count(f64),
    /// Bytes.
    Bytes(u64),
    /// An error, or a bound of one; none if it is not finite.
    Error(Option<f64>),
    /// Words.
    Text(String),
}

impl Fact {
    /// So many.
    pub fn count(name: &str, value: f64) -> Fact {
        Fact { name: name.into(), value: Figure::Count(value) }
    }

    /// Bytes.
    pub fn bytes(name: &str, value: u64) -> Fact {
        Fact { name: name.into(), value: Figure::Bytes(value) }
    }

    /// An error or a bound.
    pub fn error(name: &str, value: f64) -> Fact {
        Fact { name: name.into(), value: Figure::Error(Some(value).filter(|x| x.is_finite())) }
    }

    /// Words.
    pub fn text(name: &str, value: impl Into<String>) -> Fact {
        Fact { name: name.into(), value: Figure::Text(value.into()) }
    }
}

/// Bytes that a workload's cache takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Of the device, one cache: what steps need besides the queries, their scratch not counted.
    pub device: u64,
    /// Page-locked bytes of the host.
    pub host: u64,
}

/// One layer's step of decoding over given keys and values.
///
/// Opening one stores the input's keys and values as the scheme does, and takes steps until they are as all
/// later ones: the last of these has the first queries, and is the [`Outcome`].
pub trait Workload {
    /// What a step consists of, in order: the plan's stages. At least one.
    fn stages(&self) -> &'static [&'static str];

    /// Puts the first `stages` stages of the step that comes next into the stream, over cache `set`. It may
    /// be captured.
    ///
    /// # Errors
    /// What the launches report.
    fn enqueue(&mut self, stream: &Stream, set: usize, stages: usize) -> Result<()>;

    /// After how many steps what they launch, and which queries they have, is the same again.
    fn period(&self) -> usize {
        1
    }

    /// Bytes of one cache that a step reads at least.
    fn read_bytes(&self) -> u64;

    /// What a cache takes.
    fn memory(&self) -> Memory;

    /// What a settled step returned.
    ///
    /// # Errors
    /// What the device reports.
    fn outcome(&self) -> Result<Outcome>;

    /// What an exact fallback computes of all heads of the first queries over the first cache, in each way
    /// that it may cut the work, [sequences, q_heads, head_dim]. None: as `dense` does.
    ///
    /// # Errors
    /// What the device reports.
    fn exact_outputs(&mut self, _stream: &Stream) -> Result<Vec<Vec<f32>>> {
        Ok(Vec::new())
    }

    /// What is promised of row `row` of the outcome, [sequences, q_heads]; `data` is what attention is over.
    fn promise(&self, _row: usize, _data: &Data<'_>) -> Promise {
        Promise::Nothing
    }

    /// Figures of the settled step.
    ///
    /// # Errors
    /// What the device reports.
    fn facts(&self) -> Result<Vec<Fact>> {
        Ok(Vec::new())
    }

    /// Figures of a row of the outcome: the parts of its bound, say, and why it is exact.
    fn row_facts(&self, _row: usize) -> Vec<Fact> {
        Vec::new()
    }
}
