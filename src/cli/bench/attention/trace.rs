//! Keys, values and queries of real runs, in place of made-up ones: captures joined into a long text.

use super::Error;
use super::arguments::{Arguments, Shape};
use super::report::Subject;
use crate::cli::failure::Failure;
use crate::cli::layers::{Layer, Tensors, layers};
use half::{bf16, f16};
use host::attention::dense::DenseElement;
use host::attention::page;
use host::int8::file::Dtype;
use host::tensor_file::TensorFile;
use std::path::Path;

/// A layer's numbers, as their bits.
struct Bits {
    /// [tokens, kv_heads, head_dim].
    keys: Vec<u16>,
    /// Likewise.
    values: Vec<u16>,
    /// [query tokens, heads, head_dim].
    queries: Vec<u16>,
}

impl Bits {
    fn of<E: DenseElement>(tensors: Tensors<E>) -> Self {
        let bits = |from: Vec<E>| bytemuck::cast_slice::<E, u16>(&from).to_vec();
        Bits { keys: bits(tensors.keys), values: bits(tensors.values), queries: bits(tensors.queries) }
    }
}

/// Layers of captured runs whose tokens follow each other, with the queries of the last of them.
pub struct Trace {
    /// Heads.
    pub shape: Shape,
    /// `f16` or `bf16`.
    pub dtype: &'static str,
    /// Tokens of each layer.
    pub tokens: u32,
    /// Layers: each is a sequence.
    layers: Vec<Bits>,
    /// Query tokens that steps ask, the last ones.
    asked: usize,
}

impl Trace {
    /// Reads what `--trace` names; none if it names nothing.
    ///
    /// # Errors
    /// Files that cannot be read or that do not belong together; fewer queries than are asked for.
    pub fn open(arguments: &Arguments) -> Result<Option<Trace>, Failure> {
        let mut joined: Option<Trace> = None;
        for path in &arguments.trace {
            let next = Trace::read(path, &arguments.layers)?;
            match &mut joined {
                None => joined = Some(next),
                Some(joined) => joined.append(next, path)?,
            }
        }
        let Some(mut trace) = joined else { return Ok(None) };
        let there = trace.layers[0].queries.len() / trace.query_width();
        let wanted = arguments.queries as usize;
        if wanted > there {
            return Err(Error::FewQueries { there, wanted }.into());
        }
        trace.asked = wanted;
        Ok(Some(trace))
    }

    fn read(path: &Path, wanted: &[u32]) -> Result<Trace, Failure> {
        let mut file = TensorFile::open(path)?;
        let found = layers(&file, wanted)?;
        let first = found[0].clone();
        let like = |layer: &Layer| {
            (layer.heads, layer.kv_heads, layer.head_dim) == (first.heads, first.kv_heads, first.head_dim)
                && (layer.tokens, layer.dtype) == (first.tokens, first.dtype)
        };
        if let Some(other) = found.iter().find(|layer| !like(layer)) {
            let (path, first, other) = (path.display().to_string(), first.name, other.name.clone());
            return Err(Error::Unlike {
                path,
                what: format!("{other} is not as long as {first}, or of other extents"),
            }
            .into());
        }
        let bits = found.iter().map(|layer| -> Result<Bits, Failure> {
            Ok(match layer.dtype {
                Dtype::Bf16 => Bits::of(layer.read::<bf16>(&mut file)?),
                Dtype::F16 | Dtype::F32 => Bits::of(layer.read::<f16>(&mut file)?),
            })
        });
        Ok(Trace {
            shape: Shape {
                q_heads: first.heads as u32,
                kv_heads: first.kv_heads as u32,
                head_dim: first.head_dim as u32,
            },
            dtype: if first.dtype == Dtype::Bf16 { "bf16" } else { "f16" },
            tokens: first.tokens as u32,
            layers: bits.collect::<Result<_, _>>()?,
            asked: 0,
        })
    }

    /// The tokens of `next` behind these, and its queries in place of these.
    fn append(&mut self, next: Trace, path: &Path) -> Result<(), Failure> {
        let what = if next.shape != self.shape {
            format!("its heads are {}, those of the files ahead of it {}", next.shape, self.shape)
        } else if next.dtype != self.dtype {
            format!("it holds {}, the files ahead of it {}", next.dtype, self.dtype)
        } else if next.layers.len() != self.layers.len() {
            format!("it has {} layers, the files ahead of it {}", next.layers.len(), self.layers.len())
        } else if self.tokens.checked_add(next.tokens).is_none() {
            "with it there are more than 2^32 tokens".into()
        } else {
            self.tokens += next.tokens;
            for (own, next) in self.layers.iter_mut().zip(next.layers) {
                own.keys.extend(next.keys);
                own.values.extend(next.values);
                own.queries = next.queries;
            }
            return Ok(());
        };
        Err(Error::Unlike { path: path.display().to_string(), what }.into())
    }

    /// What is measured of it: its last tokens, and of its layers the first.
    ///
    /// # Errors
    /// More tokens or layers than there are.
    pub fn subjects(&self, arguments: &Arguments) -> Result<Vec<Subject>, Failure> {
        let all = |given: &[u32], there: u32| if given.is_empty() { vec![there] } else { given.to_vec() };
        let there = self.layers.len() as u32;
        let (batches, contexts) = (all(&arguments.batches, there), all(&arguments.contexts, self.tokens));
        let beyond = |what, given: &[u32], there| match given.iter().find(|given| **given > there) {
            Some(&wanted) => Err(Error::ShortTrace { what, there, wanted }),
            None => Ok(()),
        };
        beyond("layers", &batches, there)?;
        beyond("tokens", &contexts, self.tokens)?;
        let mut subjects = Vec::new();
        for &batch in &batches {
            for &context in &contexts {
                for &blocks in &arguments.blocks {
                    subjects.push(Subject { shape: self.shape, batch, context, dtype: self.dtype, blocks });
                }
            }
        }
        Ok(subjects)
    }

    fn query_width(&self) -> usize {
        (self.shape.q_heads * self.shape.head_dim) as usize
    }

    /// The last `context` tokens of layer `layer` in the blocks of `row`: keys, or values, into `pool`, which
    /// is [blocks, kv_heads, 16, head_dim].
    pub fn fill<E: DenseElement>(&self, layer: usize, keys: bool, context: u32, row: &[u32], pool: &mut [E]) {
        let (heads, dim) = (self.shape.kv_heads as usize, self.shape.head_dim as usize);
        let of = &self.layers[layer];
        let from = if keys { &of.keys } else { &of.values };
        let from: &[E] = bytemuck::cast_slice(&from[(self.tokens - context) as usize * heads * dim..]);
        page(from, [heads, dim], row, pool);
    }

    /// The queries of steps that follow each other, each [layers, heads, head_dim], and how many of `context`
    /// tokens each sees: those of the last tokens from the last one back, and forwards again.
    pub fn queries<E: DenseElement>(&self, layers: usize, context: u32) -> Vec<(Vec<E>, u32)> {
        let width = self.query_width();
        let rows = self.layers[0].queries.len() / width;
        let of = |row: usize| {
            let of_layer = |layer: &Bits| {
                bytemuck::cast_slice::<u16, E>(&layer.queries[row * width..][..width]).to_vec()
            };
            let queries = self.layers[..layers].iter().flat_map(of_layer).collect();
            (queries, context.saturating_sub((rows - 1 - row) as u32).max(1))
        };
        let back = (rows - self.asked..rows).rev();
        let forwards = (rows - self.asked + 1)..rows.saturating_sub(1);
        back.chain(forwards).map(of).collect()
    }
}
