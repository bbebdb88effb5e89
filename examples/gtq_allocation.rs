//! Bits of keys by rotary blocks, compared in f64: what uniform bits, Block-GTQ as
//! published and parts of equal size do to the scores of a real cache, with the bytes that each takes.
//!
//! ```text
//! ferrokv capture --text moby-dick --start 100000 --tokens 2048 --queries 2048 -o calibration.safetensors
//! ferrokv capture --text sotu --start 200000 --tokens 3072 --queries 1024 -o judged.safetensors
//! cargo run --release --example gtq_allocation -- calibration.safetensors judged.safetensors [LAYER…]
//! ```
//!
//! Energies are of the first file, errors of the second: each 64th of its queries against all keys before it.
//! Scores are not scaled, as in the paper; the divergence is that of the softmax of scores over √D.

use ferrokv::host::attention::oracle::softmax;
use ferrokv::host::attention::rope::Pairing;
use ferrokv::host::gtq::allocation::{self, Energies, Quarters, Score, Table, allocate, blocks, groups};
use ferrokv::host::gtq::groups::{Book, Groups, Library, Norm};
use ferrokv::host::tensor_file::{Dtype, TensorFile};
use half::f16;
use std::error::Error;
use std::path::Path;

/// [tokens, heads, dim] of a layer.
struct Rows {
    heads: usize,
    dim: usize,
    numbers: Vec<f64>,
}

impl Rows {
    fn read(file: &mut TensorFile, name: &str) -> Result<Self, Box<dyn Error>> {
        let shape = file.entry(name)?.shape.clone();
        let &[_, heads, dim] = shape.as_slice() else { return Err(format!("{name} is no cache").into()) };
        let numbers = file.read::<f16>(name, Dtype::F16)?.iter().map(|x| x.to_f64()).collect();
        Ok(Rows { heads, dim, numbers })
    }

    fn tokens(&self) -> usize {
        self.numbers.len() / self.heads / self.dim
    }

    fn of(&self, head: usize) -> impl Iterator<Item = &[f64]> {
        self.numbers.chunks_exact(self.dim).skip(head).step_by(self.heads)
    }
}

/// Mean absolute error of scores, and mean divergence of their softmax.
fn judge(keys: &Rows, queries: &Rows, head: usize, groups: &Groups) -> [f64; 2] {
    let group = queries.heads / keys.heads;
    let exact: Vec<&[f64]> = keys.of(head).collect();
    let restored: Vec<Vec<f64>> = exact.iter().map(|key| groups.restored(key)).collect();
    let first = keys.tokens() - queries.tokens();
    let scale = 1.0 / (keys.dim as f64).sqrt();
    let (mut errors, mut scores, mut divergence, mut rows) = (0.0, 0usize, 0.0, 0usize);
    for q_head in head * group..(head + 1) * group {
        for (token, query) in queries.of(q_head).enumerate().step_by(64) {
            let seen = first + token + 1;
            let product = |key: &[f64]| query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
            let [right, found]: [Vec<f64>; 2] = [
                exact[..seen].iter().map(|key| product(key)).collect(),
                restored[..seen].iter().map(|key| product(key)).collect(),
            ];
            errors += right.iter().zip(&found).map(|(a, b)| (a - b).abs()).sum::<f64>();
            scores += seen;
            let scaled = |x: &[f64]| softmax(&x.iter().map(|s| s * scale).collect::<Vec<_>>()).0;
            let (p, q) = (scaled(&right), scaled(&found));
            let terms = p.iter().zip(&q).filter(|(p, _)| **p > 0.0);
            divergence += terms.map(|(p, q)| p * (p / q.max(1e-300)).ln()).sum::<f64>();
            rows += 1;
        }
    }
    [errors / scores as f64, divergence / rows as f64]
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [calibration, judged, layers @ ..] = arguments.as_slice() else {
        return Err("give a capture to calibrate on, one to judge, and layers".into());
    };
    let (mut calibration, mut judged) =
        (TensorFile::open(Path::new(calibration))?, TensorFile::open(Path::new(judged))?);
    let layers: Vec<String> = if layers.is_empty() { vec!["2".into(), "17".into()] } else { layers.to_vec() };
    let table = Table::of_sphere(32, 8);
    let mut library = Library::default();
    // Of each variant: its name, bytes, and errors layer by layer.
    let mut found: Vec<(String, f64, Vec<[f64; 2]>)> = Vec::new();
    let (mut heads, mut count) = (0, 0.0);
    for layer in &layers {
        let layer: usize = layer.parse()?;
        let name = |what: &str| format!("layer.{layer:02}.{what}");
        let (keys, queries) =
            (Rows::read(&mut calibration, &name("key"))?, Rows::read(&mut calibration, &name("query"))?);
        let (judged_keys, judged_queries) =
            (Rows::read(&mut judged, &name("key"))?, Rows::read(&mut judged, &name("query"))?);
        let pairs = blocks(keys.dim, keys.dim, Pairing::Interleaved);
        let all: Vec<usize> = (0..pairs.len()).collect();
        heads = keys.heads;
        let group = queries.heads / keys.heads;
        for head in 0..keys.heads {
            count += 1.0;
            let of_head = (head * group..(head + 1) * group).flat_map(|q_head| queries.of(q_head));
            let energies = Energies::of(&pairs, keys.of(head), of_head);
            for bits in [2u32, 3, 4] {
                let total = bits * pairs.len() as u32;
                let published = groups(&allocate(&Score::Average.of(&energies), total, [1, 8], &Quarters)?);
                let product = groups(&allocate(&Score::Product.of(&energies), total, [1, 8], &table)?);
                let parts = |n: usize| allocation::parts(&energies, n, bits, [1, 6], &table);
                let profile = [[4, 2, 1, 1], [6, 3, 2, 1], [6, 4, 3, 3]][bits as usize - 2];
                let profile = profile.into_iter().zip(allocation::ranked(&energies, 4)).collect();
                let uniform = vec![(bits, all.clone())];
                let variants = [
                    ("uniform", uniform, Book::Sphere, Norm::Half),
                    ("Block-GTQ as published", published.clone(), Book::Normal, Norm::Half),
                    ("… levels of the sphere", published.clone(), Book::Sphere, Norm::Half),
                    ("… and norms of a byte", published, Book::Sphere, Norm::Byte),
                    ("product score, norms of a byte", product, Book::Sphere, Norm::Byte),
                    ("two parts, norms of a byte", parts(2)?, Book::Sphere, Norm::Byte),
                    ("four parts, norms of a byte", parts(4)?, Book::Sphere, Norm::Byte),
                    ("four parts, the same bits everywhere", profile, Book::Sphere, Norm::Byte),
                ];
                for (variant, parts, book, norm) in variants {
                    let name = format!("{bits} {variant}");
                    let groups = Groups::new(&mut library, &pairs, &parts, book, norm);
                    let errors = judge(&judged_keys, &judged_queries, head, &groups);
                    match found.iter_mut().find(|(known, ..)| *known == name) {
                        Some((_, bytes, all)) => {
                            *bytes += groups.bytes();
                            all.push(errors);
                        }
                        None => found.push((name, groups.bytes(), vec![errors])),
                    }
                }
            }
        }
    }
    println!("bits and variant | bytes a key | error | divergence | error by layer {}", layers.join(", "));
    found.sort_by_key(|(name, ..)| name.as_bytes().first().copied());
    for (name, bytes, errors) in found {
        let mean = |i: usize| errors.iter().map(|error| error[i]).sum::<f64>() / count;
        let of_layer = |errors: &[[f64; 2]]| errors.iter().map(|error| error[0]).sum::<f64>() / heads as f64;
        let by_layer: Vec<String> =
            errors.chunks(heads).map(|errors| format!("{:.2}", of_layer(errors))).collect();
        println!("{name} | {:.1} | {:.3} | {:.4} | {}", bytes / count, mean(0), mean(1), by_layer.join(" "));
    }
    Ok(())
}
