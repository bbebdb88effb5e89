//! A captured cache, and what a scheme does to it.

use super::{Error, family, references};
use crate::cli::captured::Facts;
use crate::cli::failure::Failure;
use crate::cli::layers::{Layer, Tensors};
use crate::cli::scheme::{has_file, plain};
use half::f16;
use host::eval::diagnosis::{self, Exact, Sample, Summary, summarize};
use host::kv::restored::{Coded, Original, Restored, through};
use host::kv::{Capacity, Geometry, Opening, Selection};
use host::tensor_file::TensorFile;
use host::{Device, Stream};
use serde::Serialize;
use simt::emu::EmuOptions;
use std::time::Instant;

/// Layers of a run with the queries that are asked.
pub struct Captured {
    /// What the file says of its model.
    pub facts: Facts,
    /// Its layers.
    pub layers: Vec<Layer>,
    path: String,
    data: Vec<Tensors<f16>>,
    /// Of each layer, the tokens that its queries are of.
    pub positions: Vec<Vec<usize>>,
}

/// A scheme's row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The scheme as it was given.
    pub kv: String,
    /// The same with the names of its files alone.
    #[serde(skip)]
    pub name: String,
    /// The scheme without its bits and files.
    #[serde(skip)]
    pub family: String,
    /// Whether it is one without kernels.
    pub reference: bool,
    /// Bytes of a KV head's key, with what belongs to it, on average over tokens and layers.
    pub key_bytes: f64,
    /// Of a value.
    pub value_bytes: f64,
    /// Bytes of a key that is read from its codes.
    pub key_code_bytes: f64,
    /// Of a value.
    pub value_code_bytes: f64,
    /// Tokens whose keys are read from codes, by a step behind the last.
    pub coded_keys: usize,
    /// Whose values are.
    pub coded_values: usize,
    /// Of all layers.
    #[serde(flatten)]
    pub summary: Summary,
    /// Of each layer.
    pub layers: Vec<OfLayer>,
    /// Storing, restoring and measuring.
    pub seconds: f64,
}

/// A scheme in one layer.
#[derive(Clone, Debug, Serialize)]
pub struct OfLayer {
    /// `layer.07`.
    pub layer: String,
    /// Bytes of a key there: heads may differ, and layers.
    pub key_bytes: f64,
    /// Of a value.
    pub value_bytes: f64,
    /// What was measured.
    #[serde(flatten)]
    pub summary: Summary,
}

impl Captured {
    /// Reads `queries` query tokens of each layer, evenly spread, and all keys and values.
    ///
    /// # Errors
    /// Fewer queries than that; what cannot be read, and what is not finite.
    pub fn read(
        file: &mut TensorFile,
        facts: Facts,
        layers: Vec<Layer>,
        queries: usize,
    ) -> Result<Self, Failure> {
        let path = file.path().display().to_string();
        let (mut data, mut positions) = (Vec::new(), Vec::new());
        for layer in &layers {
            let rows = layer.choose(queries)?;
            let read: Tensors<f16> = layer.read(file)?;
            let width = layer.heads * layer.head_dim;
            let chosen = rows.iter().flat_map(|row| &read.queries[row * width..(row + 1) * width]);
            positions.push(rows.iter().map(|row| layer.first_position + row).collect());
            data.push(Tensors { queries: chosen.copied().collect(), ..read });
        }
        Ok(Captured { facts, layers, path, data, positions })
    }

    /// Heads of a cache of `layers` layers.
    pub fn geometry(&self, layers: usize) -> Geometry {
        let Layer { heads, kv_heads, head_dim, .. } = self.layers[0];
        Geometry { layers, q_heads: heads, kv_heads, head_dim }
    }

    /// Tokens of each layer.
    pub fn tokens(&self) -> usize {
        self.layers[0].tokens
    }

    /// What a scheme has to do: storing each token, and as much again for measuring.
    pub fn work(&self) -> usize {
        2 * self.tokens() * self.layers.len()
    }

    /// Attention of all queries over keys and values as they were.
    pub fn exact(&self) -> Vec<Exact<'_>> {
        let layers = self.data.iter().zip(&self.positions);
        let exact = layers.map(|(data, positions)| {
            Exact::new(diagnosis::Layer {
                geometry: self.geometry(1),
                original: Original { layer: 0, keys: &data.keys, values: &data.values },
                queries: &data.queries,
                positions,
                rope: self.facts.rope.as_ref(),
            })
        });
        exact.collect()
    }

    /// What a scheme's codes of each layer stand for.
    fn restored(&self, selection: &Selection, watch: impl FnMut(usize)) -> Result<Vec<Restored>, Failure> {
        // A file is for all layers of a model, and each layer has a number there; else those that were
        // captured are all.
        let whole = has_file(selection);
        let kv = || plain(selection);
        let count = match (whole, self.facts.layers) {
            (true, None) => return Err(Error::NoModel { path: self.path.clone(), kv: kv() }.into()),
            (true, Some(layers)) => layers,
            (false, _) => self.layers.len(),
        };
        let place = |index: usize, layer: &Layer| layer.number().filter(|_| whole).unwrap_or(index);
        let originals = self.layers.iter().zip(&self.data).enumerate();
        let originals: Vec<Original<'_>> = originals
            .map(|(index, (layer, data))| Original {
                layer: place(index, layer),
                keys: &data.keys,
                values: &data.values,
            })
            .collect();
        let selection = match &self.facts.model_hash {
            Some(hash) => selection.of_model(hash.clone()),
            None => selection.clone(),
        };
        let device = Device::cpu(EmuOptions::default());
        let (geometry, rope) = (self.geometry(count), self.facts.rope.as_ref());
        if references::is_reference(&selection) {
            let capacity = Capacity::from(self.tokens());
            let opening = Opening { device: &device, geometry, rope, capacity, selection: &selection };
            return Ok(references::restored(&opening, &originals, watch)?);
        }
        let mut cache = selection.open(&device, geometry, rope, self.tokens())?;
        Ok(through(&mut *cache, &Stream::new(&device)?, &originals, watch)?)
    }
}

/// Puts a cache through a scheme and measures.
///
/// # Errors
/// What the scheme says of it.
pub fn row(
    captured: &Captured,
    exact: &[Exact<'_>],
    selection: &Selection,
    seed: u64,
    mut watch: impl FnMut(usize),
) -> Result<Row, Failure> {
    let start = Instant::now();
    let restored = captured.restored(selection, &mut watch)?;
    let (tokens, head_dim) = (captured.tokens(), captured.layers[0].head_dim);
    let mut layers = Vec::new();
    let mut all: Vec<Sample> = Vec::new();
    for ((layer, exact), restored) in captured.layers.iter().zip(exact).zip(&restored) {
        let samples = exact.judge(restored);
        let bytes = [&restored.keys, &restored.values].map(|side| side.bytes_at(tokens, head_dim));
        let ([key_bytes, value_bytes], summary) = (bytes, summarize(&samples, seed));
        layers.push(OfLayer { layer: layer.name.clone(), key_bytes, value_bytes, summary });
        all.extend(samples);
        watch(tokens);
    }
    let mean = |of: &dyn Fn(&OfLayer) -> f64| layers.iter().map(of).sum::<f64>() / layers.len() as f64;
    let coded = |of: &dyn Fn(&Restored) -> Coded| {
        restored.iter().map(|restored| of(restored).count(tokens)).min().unwrap_or(0)
    };
    let codes = |of: &dyn Fn(&Restored) -> f64| restored.iter().map(of).sum::<f64>() / restored.len() as f64;
    Ok(Row {
        kv: selection.to_string(),
        name: plain(selection),
        family: family(selection),
        reference: references::is_reference(selection),
        key_bytes: mean(&|layer| layer.key_bytes),
        value_bytes: mean(&|layer| layer.value_bytes),
        key_code_bytes: codes(&|layer| layer.keys.bytes),
        value_code_bytes: codes(&|layer| layer.values.bytes),
        coded_keys: coded(&|layer| layer.keys.coded),
        coded_values: coded(&|layer| layer.values.coded),
        summary: summarize(&all, seed),
        layers,
        seconds: start.elapsed().as_secs_f64(),
    })
}
