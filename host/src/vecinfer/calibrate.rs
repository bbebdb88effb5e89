//! Codebooks and transformation, made from keys and values of a real run.

use super::books::{LARGEST_KEY, tensor_names};
use super::kmeans::{Points, ROUNDS, kmeans};
use super::setting::{CODE_OPTIONS, name};
use super::whole::{LARGEST_VALUE, multiple, of_multiple, step_for};
use super::{Books, Code, Error, HEAD_DIMS, LayerBooks, Setting, cpu};
use crate::kv::calibration::{Artifact, Calibration, Calibrator, Material, Passed};
use crate::kv::{Geometry, Kind, OptionSpec, Result, Selection, Value};
use crate::tensor_file::Dtype;
use half::f16;
use kernels_gpu::vecinfer::ROWS_OF_TRANSFORM;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

const ROWS: usize = ROWS_OF_TRANSFORM as usize;
/// How far a channel counts as moving at least, beside the one that moves furthest: λ is not below 2^−5.
const LEAST_MOVED: f32 = 1.0 / 1024.0;
/// Sub-vectors of a centroid, at least.
const LEAST: usize = 4;

/// What `ferrokv calibrate` is told.
pub(super) const CALIBRATOR: Calibrator = Calibrator {
    artifact: "codes",
    options: &[
        CODE_OPTIONS[0],
        CODE_OPTIONS[1],
        OptionSpec {
            name: "transform",
            about: "of keys: smoothed (s), Hadamard (h), one before the other; s+h",
            kind: Kind::Word(&["none", "s", "h", "h+s", "s+h"]),
        },
        OptionSpec {
            name: "mean",
            about: "whether each channel's mean is taken off keys; on",
            kind: Kind::Switch,
        },
        OptionSpec {
            name: "books",
            about: "one codebook for a layer or one for each KV head; layer",
            kind: Kind::Word(&["layer", "head"]),
        },
        OptionSpec { name: "seed", about: "of k-means; 1", kind: Kind::Count(0, u32::MAX as u64) },
    ],
    queries: false,
    chart: false,
    check: |selection| Ok(Setting::of(selection).checked().map(drop)?),
    run,
};

/// What keys pass through, and whose codebooks there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transform {
    /// Whether channels are divided by λ.
    pub smooth: bool,
    /// Whether the Hadamard matrix is applied.
    pub hadamard: bool,
    /// Whether λ comes behind the matrix.
    pub after: bool,
    /// Whether the mean is taken off.
    pub mean: bool,
    /// Whether each KV head has codebooks of its own.
    pub by_head: bool,
    /// Of k-means.
    pub seed: u64,
}

impl Transform {
    /// Mean off, then S + H; a codebook for a layer.
    pub const DEFAULT: Transform =
        Transform { smooth: true, hadamard: true, after: false, mean: true, by_head: false, seed: 1 };

    fn of(selection: &Selection) -> Self {
        let word = selection.word("transform", "s+h");
        Transform {
            smooth: word.contains('s'),
            hadamard: word.contains('h'),
            after: word == "h+s",
            mean: selection.value("mean") != Some(&Value::Switch(false)),
            by_head: selection.word("books", "layer") == "head",
            seed: selection.count("seed", Transform::DEFAULT.seed),
        }
    }
}

fn run(calibration: &Calibration<'_>) -> Result<Artifact> {
    let selection = calibration.selection;
    let Setting { keys, values, .. } = Setting::of(selection);
    let transform = Transform::of(selection);
    let material = calibration.material;
    let of_layer = if transform.by_head { material.geometry.kv_heads } else { 1 };
    let steps = 2 * material.geometry.layers * of_layer * (ROUNDS + 1);
    let done = AtomicUsize::new(0);
    let told = || calibration.tell(done.fetch_add(1, Ordering::Relaxed) + 1, steps);
    let books = make(material, [keys, values], transform, &told)?;
    let mut artifact = Artifact::default();
    for (layer, own) in books.layers.iter().enumerate() {
        let [transform, of_keys, of_values, steps] = tensor_names(layer);
        let Geometry { kv_heads, head_dim, .. } = material.geometry;
        artifact.add(transform, Dtype::F32, &[kv_heads, ROWS, head_dim], &own.transform);
        for (name, book, code) in [(of_keys, &own.keys, keys), (of_values, &own.values, values)] {
            let one = code.book_elements() as usize;
            let shape = [book.len() / one, code.centroids() as usize, code.d as usize];
            artifact.add(name, Dtype::F16, &shape, book);
        }
        if !own.steps.is_empty() {
            artifact.add(steps, Dtype::F16, &[own.steps.len()], &own.steps);
        }
    }
    artifact.say("keys", name(keys));
    artifact.say("values", name(values));
    artifact.say("hadamard", if books.hadamard { "on" } else { "off" });
    artifact.say("books_hash", format!("{:016x}", books.hash()));
    Ok(artifact)
}

/// Codebooks of one layer from its own keys and values: for workloads that are given no file.
pub(super) fn of_itself(material: &Material, setting: Setting) -> Result<Books> {
    make(material, [setting.keys, setting.values], Transform::DEFAULT, &|| Ok(()))
}

/// Makes all of it, layers, keys and values, and heads side by side. `told` hears of each round of k-means.
pub(super) fn make(
    material: &Material,
    codes: [Code; 2],
    transform: Transform,
    told: &(dyn Fn() -> Result<()> + Sync),
) -> Result<Books> {
    let Geometry { kv_heads, head_dim, .. } = material.geometry;
    if !HEAD_DIMS.iter().any(|dim| *dim as usize == head_dim) {
        return Err(Error::HeadDim { head_dim: u32::try_from(head_dim).unwrap_or(u32::MAX) }.into());
    }
    let [keys, values] = codes;
    super::plan::kernel_info(head_dim as u32, Setting { keys, values, ..Setting::DEFAULT }, 1)?;
    let heads = if transform.by_head { kv_heads } else { 1 };
    let width = kv_heads * head_dim / heads;
    // Before anything is run.
    for (layer, passed) in material.layers.iter().enumerate() {
        for (what, rows, code) in [("keys", &passed.keys, keys), ("values", &passed.values, values)] {
            let of_token = width / code.d as usize;
            let found = rows.len() / (kv_heads * head_dim) * of_token;
            let centroids = code.centroids() as usize;
            if found < LEAST * centroids {
                let what = format!("the {what} of layer {layer}");
                let needed = (LEAST * centroids).div_ceil(of_token);
                return Err(Error::TooFew { what, found, centroids, needed }.into());
            }
        }
    }
    let layer = |(layer, passed): (usize, &Passed)| -> Result<LayerBooks> {
        let mut table = table(&passed.keys, kv_heads, head_dim, transform);
        let keys = transformed(&passed.keys, &table, kv_heads, head_dim, transform.hadamard);
        if let Some(at) = keys.iter().position(|x| !x.is_finite()) {
            let (row, channel) = (at / head_dim, at % head_dim);
            let (token, head) = (row / kv_heads, row % kv_heads);
            return Err(Error::KeyOverflow { layer, token, head, channel }.into());
        }
        let of = |rows: &[f16], code: Code| -> Result<Vec<f16>> {
            let books: Vec<Result<Vec<f32>>> = (0..heads)
                .into_par_iter()
                .map(|head| {
                    let stride = kv_heads * head_dim;
                    let points = Points { rows, stride, first: head * width, width, d: code.d as usize };
                    kmeans(points, code.centroids() as usize, transform.seed, told)
                })
                .collect();
            let mut all = Vec::new();
            for book in books {
                all.extend(book?.into_iter().map(f16::from_f32));
            }
            Ok(all)
        };
        let (keys, values) = rayon::join(|| of(&keys, codes[0]), || of(&passed.values, codes[1]));
        let (mut keys, mut values) = (keys?, values?);
        if codes[0].whole_keys() {
            make_whole(&mut keys, &mut table, head_dim);
        }
        let mut steps = Vec::new();
        if codes[1].whole_values() {
            let largest = values.iter().fold(0f32, |most, x| most.max(x.to_f32().abs()));
            if largest > LARGEST_VALUE {
                return Err(Error::TooLarge { layer, largest, most: LARGEST_VALUE }.into());
            }
            steps = make_multiples(&mut values, codes[1]);
        }
        Ok(LayerBooks { transform: table, keys, values, steps })
    };
    let layers: Vec<Result<LayerBooks>> = material.layers.par_iter().enumerate().map(layer).collect();
    // Of several errors the first layer's, whichever came first.
    let layers = layers.into_iter().collect::<Result<_>>()?;
    Ok(Books { hadamard: transform.hadamard, codes, layers })
}

/// Scales centroids of keys so that the largest element is 127, and rounds them to whole numbers; keys are
/// scaled alike, queries the other way. An element is off by 1/254 of the largest, which adds less than a
/// thousandth to the squared error of codes of 2 bits.
fn make_whole(book: &mut [f16], table: &mut [f32], head_dim: usize) {
    let largest = book.iter().fold(0f32, |most, x| most.max(x.to_f32().abs()));
    let scale = if largest > 0.0 { LARGEST_KEY / largest } else { 1.0 };
    for x in book {
        *x = f16::from_f32((x.to_f32() * scale).round().clamp(-LARGEST_KEY, LARGEST_KEY));
    }
    for rows in table.chunks_exact_mut(ROWS * head_dim) {
        for (row, factor) in [(2, scale), (4, 1.0 / scale)] {
            rows[row * head_dim..][..head_dim].iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Rounds centroids of values to whole multiples of a step, one of each codebook, 127 at most, and gives the
/// steps. An element is off by 1/248 of the largest at most; none is above [`LARGEST_VALUE`].
pub(super) fn make_multiples(books: &mut [f16], code: Code) -> Vec<f16> {
    let one = books.chunks_exact_mut(code.book_elements() as usize);
    one.map(|book| {
        let step = step_for(book.iter().fold(0f32, |most, x| most.max(x.to_f32().abs())));
        book.iter_mut().for_each(|x| *x = of_multiple(multiple(x.to_f32(), step), step));
        step
    })
    .collect()
}

/// The transformation's table, [kv_heads, 5, head_dim], of keys [tokens, kv_heads, head_dim].
fn table(keys: &[f16], kv_heads: usize, head_dim: usize, transform: Transform) -> Vec<f32> {
    let mut table = vec![0f32; kv_heads * ROWS * head_dim];
    for (head, table) in table.chunks_exact_mut(ROWS * head_dim).enumerate() {
        let rows = || keys.chunks_exact(head_dim).skip(head).step_by(kv_heads);
        table[head_dim..].fill(1.0);
        if transform.mean {
            let mut sums = vec![0f64; head_dim];
            for row in rows() {
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.to_f64());
            }
            let count = rows().len() as f64;
            table[..head_dim].iter_mut().zip(sums).for_each(|(mean, sum)| *mean = (sum / count) as f32);
        }
        if transform.smooth {
            let mut largest = vec![0f32; head_dim];
            let mut out = vec![f16::ZERO; head_dim];
            for row in rows() {
                cpu::transform(row, table, true, transform.hadamard && transform.after, &mut out);
                largest.iter_mut().zip(&out).for_each(|(most, x)| *most = most.max(x.to_f32().abs()));
            }
            let (key, query) = if transform.after { (2, 4) } else { (1, 3) };
            let all = largest.iter().copied().fold(0f32, f32::max);
            for (channel, most) in largest.into_iter().enumerate() {
                // A channel that is always the same has nothing to smooth, and of one that hardly moved on
                // this text nobody knows how far it may. The largest λ is 1, so that neither keys nor queries
                // leave f16: a factor that all channels have changes nothing else.
                let lambda = if most > 0.0 { (most / all).max(LEAST_MOVED).sqrt() } else { 1.0 };
                table[key * head_dim + channel] = 1.0 / lambda;
                table[query * head_dim + channel] = lambda;
            }
        }
    }
    table
}

/// Keys as they are stored in f16.
fn transformed(keys: &[f16], table: &[f32], kv_heads: usize, head_dim: usize, hadamard: bool) -> Vec<f16> {
    let mut out = vec![f16::ZERO; keys.len()];
    for (row, (key, out)) in keys.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)).enumerate() {
        let table = &table[row % kv_heads * ROWS * head_dim..][..ROWS * head_dim];
        cpu::transform(key, table, true, hadamard, out);
    }
    out
}
