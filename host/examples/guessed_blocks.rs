//! How many of the blocks that a staging pool of `gather` lacks could be fetched before the layer that wants
//! them has a query: by several guesses at its list, each with what it fetches in vain.
//!
//! ```text
//! ferrokv capture --tokens 8000 --queries 1000 -o CACHE
//! cargo run --release -p ferrokv-host --example guessed_blocks -- MODEL CACHE K BLOCK LOCAL
//! ```
//!
//! CACHE has all layers. Lists are by scores in f32 over the text's last tokens, one by one. The stream that
//! enters each layer is computed again from the embedding, with attention over the captured keys and values:
//! a layer's guessed query is its projection of what entered an earlier layer. No GPU is used.

use half::f16;
use host::gather::Support;
use host::gather::staging::trace::Lru;
use host::model::Model;
use host::model::weights::Tensor;
use host::tensor_file::{Dtype, TensorFile};
use rayon::prelude::*;
use std::error::Error;
use std::path::Path;

/// Blocks that are ranked beyond the k best, over k.
const WIDEST: usize = 2;

/// A layer as the capture has it, and its lists.
struct Layer {
    /// [tokens, kv_heads, dim].
    keys: Vec<f32>,
    values: Vec<f32>,
    /// [steps, q_heads, dim], after RoPE.
    queries: Vec<f32>,
    /// Largest and smallest key of each block, [kv_heads, blocks, 2, dim].
    bounds: Vec<f32>,
}

/// The extents of all of it.
#[derive(Clone, Copy)]
struct Extents {
    tokens: usize,
    steps: usize,
    kv_heads: usize,
    q_heads: usize,
    dim: usize,
    support: Support,
}

impl Extents {
    fn group(self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// The first block of a step that is near.
    fn near(self, step: usize) -> usize {
        let blocks = (self.tokens - self.steps + step + 1).div_ceil(self.support.block as usize);
        blocks.saturating_sub(self.support.local as usize)
    }
}

fn wide(values: &[f16]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    for (a, b) in a.chunks_exact(16).zip(b.chunks_exact(16)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

/// Rows of `inputs` by a matrix.
fn project(tensor: &Tensor, bias: Option<&Tensor>, inputs: &[f32]) -> Vec<f32> {
    let (weights, columns, rows) = (tensor.to_f32(), tensor.columns, tensor.rows);
    let bias = bias.map_or_else(|| vec![0.0; rows], Tensor::to_f32);
    let mut outputs = vec![0.0; inputs.len() / columns * rows];
    let chunks = outputs.par_chunks_mut(16 * rows).zip(inputs.par_chunks(16 * columns));
    chunks.for_each(|(outputs, inputs)| {
        for (row, weights) in weights.chunks_exact(columns).enumerate() {
            for (output, input) in outputs.chunks_exact_mut(rows).zip(inputs.chunks_exact(columns)) {
                output[row] = dot(weights, input) + bias[row];
            }
        }
    });
    outputs
}

fn norm(tensor: &Tensor, eps: f32, inputs: &[f32]) -> Vec<f32> {
    let weights = tensor.to_f32();
    let one = |row: &[f32]| {
        let scale = 1.0 / (dot(row, row) / row.len() as f32 + eps).sqrt();
        row.iter().zip(&weights).map(move |(x, weight)| x * scale * weight).collect::<Vec<f32>>()
    };
    inputs.chunks_exact(weights.len()).flat_map(one).collect()
}

/// Queries of a layer for the streams of all steps, after RoPE.
fn queries(model: &Model, layer: usize, extents: Extents, streams: &[f32]) -> Vec<f32> {
    let (config, weights) = (&model.config, &model.weights.layers[layer]);
    let input = norm(&weights.attn_norm, config.norm_eps, streams);
    let mut all = project(&weights.attn_q, weights.attn_q_bias.as_ref(), &input);
    let frequencies = config.rope.frequencies();
    for (step, row) in all.chunks_exact_mut(extents.q_heads * extents.dim).enumerate() {
        let position = (extents.tokens - extents.steps + step) as f64;
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position * frequency).sin_cos();
            let (sin, cos) = (sin as f32, cos as f32);
            let (a, b) = config.rope.kind.pair(i, config.rope.dims);
            for head in row.chunks_exact_mut(extents.dim) {
                (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
            }
        }
    }
    all
}

/// Attention of all steps over the captured keys and values: [steps, q_heads, dim].
fn attend(layer: &Layer, extents: Extents) -> Vec<f32> {
    let Extents { tokens, steps, kv_heads, q_heads, dim, .. } = extents;
    let mut output = vec![0f32; layer.queries.len()];
    let rows = output.par_chunks_exact_mut(dim).zip(layer.queries.par_chunks_exact(dim));
    rows.enumerate().for_each(|(row, (output, query))| {
        let (seen, head) = (tokens - steps + row / q_heads + 1, row % q_heads / extents.group());
        let at = |token: usize| (token * kv_heads + head) * dim;
        let scale = 1.0 / (dim as f32).sqrt();
        let scores: Vec<f32> = (0..seen).map(|t| dot(query, &layer.keys[at(t)..][..dim]) * scale).collect();
        let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for (token, score) in scores.iter().enumerate() {
            let weight = (score - most).exp();
            sum += weight;
            output.iter_mut().zip(&layer.values[at(token)..]).for_each(|(to, x)| *to += weight * x);
        }
        output.iter_mut().for_each(|x| *x /= sum);
    });
    output
}

/// The streams of all steps that enter a layer, and those behind its attention, layer by layer: [steps,
/// hidden].
fn streams(model: &Model, layers: &[Layer], extents: Extents, tokens: &[u32]) -> [Vec<Vec<f32>>; 2] {
    let (config, weights) = (&model.config, &model.weights);
    let mut stream = vec![0f32; tokens.len() * config.hidden];
    for (row, token) in stream.chunks_exact_mut(config.hidden).zip(tokens) {
        weights.token_embedding.dequantize_row(*token as usize, row);
    }
    let add = |stream: &mut [f32], more: &[f32]| stream.iter_mut().zip(more).for_each(|(x, y)| *x += y);
    let mut all = [Vec::new(), Vec::new()];
    for (layer, of) in layers.iter().zip(&weights.layers) {
        all[0].push(stream.clone());
        add(&mut stream, &project(&of.attn_output, of.attn_output_bias.as_ref(), &attend(layer, extents)));
        all[1].push(stream.clone());
        let input = norm(&of.ffn_norm, config.norm_eps, &stream);
        let mut gate = project(&of.ffn_gate, None, &input);
        let up = project(&of.ffn_up, None, &input);
        gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
        add(&mut stream, &project(&of.ffn_down, None, &gate));
    }
    all
}

/// Bounds of each whole block.
fn bounds(keys: &[f32], extents: Extents) -> Vec<f32> {
    let Extents { tokens, kv_heads, dim, support, .. } = extents;
    let block = support.block as usize;
    let mut all = Vec::new();
    for head in 0..kv_heads {
        for index in 0..tokens / block {
            let (mut most, mut least) = (vec![f32::NEG_INFINITY; dim], vec![f32::INFINITY; dim]);
            for token in index * block..(index + 1) * block {
                for (c, x) in keys[(token * kv_heads + head) * dim..][..dim].iter().enumerate() {
                    most[c] = most[c].max(*x);
                    least[c] = least[c].min(*x);
                }
            }
            all.extend(most);
            all.extend(least);
        }
    }
    all
}

/// The best distant blocks of each step by some queries, the best one first, up to [`WIDEST`] times k:
/// [kv_heads][steps].
fn ranked(queries: &[f32], bounds: &[f32], extents: Extents) -> Vec<Vec<Vec<u32>>> {
    let Extents { tokens, steps, kv_heads, q_heads, dim, support } = extents;
    let group = extents.group();
    let blocks = tokens / support.block as usize;
    let of_step = |head: usize, step: usize| {
        let of_group = &queries[(step * q_heads + head * group) * dim..][..group * dim];
        let score = |block: usize| {
            let own = &bounds[(head * blocks + block) * 2 * dim..][..2 * dim];
            let (most, least) = own.split_at(dim);
            let of_query = |query: &[f32]| {
                let terms = query.iter().zip(most.iter().zip(least));
                terms.map(|(q, (most, least))| (q * most).max(q * least)).sum::<f32>()
            };
            of_group.chunks_exact(dim).map(of_query).fold(f32::NEG_INFINITY, f32::max)
        };
        let mut scored: Vec<(f32, u32)> =
            (1..extents.near(step)).map(|block| (score(block), block as u32)).collect();
        scored.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scored.truncate(WIDEST * support.k as usize);
        scored.into_iter().map(|(_, block)| block).collect::<Vec<u32>>()
    };
    (0..kv_heads).map(|head| (0..steps).into_par_iter().map(|step| of_step(head, step)).collect()).collect()
}

/// The far blocks of a list of the `count` best.
fn list(ranked: &[u32], count: usize) -> Vec<u32> {
    std::iter::once(0).chain(ranked.iter().copied().take(count)).collect()
}

/// What a guess is made from: nothing, or rankings of the layers' heads and steps.
struct Guess {
    name: &'static str,
    /// Blocks of it, by layer, head and step, those that are fetched first at the front.
    blocks: Vec<Vec<Vec<Vec<u32>>>>,
}

/// Blocks of a step and KV head.
#[derive(Clone, Copy, Default)]
struct Sums {
    wanted: f64,
    /// Of these in the guess.
    guessed: f64,
    /// Fetched when the list is known.
    late: f64,
    /// Fetched before.
    ahead: f64,
}

/// What is fetched, and when, with pools of so many slots.
fn simulate(lists: &[Vec<Vec<Vec<u32>>>], guess: Option<&Guess>, slots: usize) -> Sums {
    let mut sums = Sums::default();
    let mut steps = 0.0;
    for (layer, heads) in lists.iter().enumerate() {
        for (head, lists) in heads.iter().enumerate() {
            let mut pool = Lru::new(slots);
            for (step, list) in lists.iter().enumerate() {
                if let Some(guess) = guess {
                    let mut blocks = guess.blocks[layer][head][step].clone();
                    blocks.truncate(slots);
                    sums.guessed += list.iter().filter(|block| blocks.contains(block)).count() as f64;
                    blocks.sort_unstable();
                    sums.ahead += pool.step(&blocks).misses as f64;
                }
                let mut list = list.clone();
                list.sort_unstable();
                let counts = pool.step(&list);
                sums.wanted += list.len() as f64;
                sums.late += counts.misses as f64;
                steps += 1.0;
            }
        }
    }
    let Sums { wanted, guessed, late, ahead } = sums;
    Sums { wanted: wanted / steps, guessed: guessed / wanted, late: late / steps, ahead: ahead / steps }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, path, numbers @ ..] = &arguments[..] else {
        return Err("give it a model and a file of `ferrokv capture`".into());
    };
    let numbers = numbers.iter().map(|number| number.parse()).collect::<Result<Vec<u32>, _>>()?;
    let [k, block, local] = numbers[..] else {
        return Err("give it K, BLOCK and LOCAL behind the file".into());
    };
    let support = Support { k, block, local }.checked()?;
    let model = Model::open(model)?;
    let mut file = TensorFile::open(Path::new(path))?;
    let ids = file.metadata().get("token_ids").ok_or("a capture says what its tokens are")?;
    let ids = ids.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    let shape = |file: &TensorFile, what: &str| Ok::<_, Box<dyn Error>>(file.entry(what)?.shape.clone());
    let (keys, query) = (shape(&file, "layer.00.key")?, shape(&file, "layer.00.query")?);
    let extents = Extents {
        tokens: keys[0],
        steps: query[0],
        kv_heads: keys[1],
        q_heads: query[1],
        dim: keys[2],
        support,
    };
    let mut layers = Vec::new();
    for layer in 0..model.config.layers {
        let mut read = |what: &str| -> Result<Vec<f32>, Box<dyn Error>> {
            Ok(wide(&file.read(&format!("layer.{layer:02}.{what}"), Dtype::F16)?))
        };
        let (keys, values, queries) = (read("key")?, read("value")?, read("query")?);
        let bounds = bounds(&keys, extents);
        layers.push(Layer { keys, values, queries, bounds });
    }
    let [entering, behind] = streams(&model, &layers, extents, &ids[extents.tokens - extents.steps..]);
    let mut worst = 0f32;
    for (layer, own) in layers.iter().enumerate() {
        let made = queries(&model, layer, extents, &entering[layer]);
        let off: f32 = made.iter().zip(&own.queries).map(|(a, b)| (a - b) * (a - b)).sum();
        worst = worst.max((off / dot(&own.queries, &own.queries)).sqrt());
    }

    let of = |queries: &[f32], layer: usize| ranked(queries, &layers[layer].bounds, extents);
    let own: Vec<_> = (0..layers.len()).map(|layer| of(&layers[layer].queries, layer)).collect();
    let none = vec![vec![Vec::new(); extents.steps]; extents.kv_heads];
    // A layer's ranking from what entered an earlier one, or is behind its attention.
    let from = |streams: &[Vec<f32>], back: usize| -> Vec<_> {
        let guessed = |layer: usize| match layer.checked_sub(back) {
            Some(earlier) => of(&queries(&model, layer, extents, &streams[earlier]), layer),
            None => none.clone(),
        };
        (0..layers.len()).map(guessed).collect()
    };
    let query_before: Vec<_> = (0..layers.len())
        .map(|layer| layer.checked_sub(1).map_or(none.clone(), |before| of(&layers[before].queries, layer)))
        .collect();
    let (k, steps) = (k as usize, extents.steps);
    let (near, two) = (from(&entering, 1), from(&entering, 2));
    let behind = from(&behind, 1);
    // The best of a ranking, or nothing where there is none.
    let cut = |ranked: &[u32], count: usize| if ranked.is_empty() { Vec::new() } else { list(ranked, count) };
    let best = |all: &[Vec<Vec<Vec<u32>>>], count: usize, lag: usize| -> Vec<Vec<Vec<Vec<u32>>>> {
        let of_step = |steps: &Vec<Vec<u32>>, step: usize| {
            step.checked_sub(lag).map_or_else(Vec::new, |step| cut(&steps[step], count))
        };
        let of_head = |lists: &Vec<Vec<u32>>| (0..steps).map(|step| of_step(lists, step)).collect();
        all.iter().map(|heads| heads.iter().map(of_head).collect()).collect()
    };
    // A head's last list, then what other lists have besides, the more often the earlier.
    let beside = |others: &dyn Fn(usize, usize, usize) -> Vec<Vec<u32>>| -> Vec<Vec<Vec<Vec<u32>>>> {
        let of = |layer: usize, head: usize, step: usize| {
            let Some(last) = step.checked_sub(1) else { return Vec::new() };
            let mut all = list(&own[layer][head][last], k);
            let mut more: Vec<u32> = others(layer, head, step).concat();
            more.retain(|block| !all.contains(block) && (*block as usize) < extents.near(step));
            more.sort_unstable();
            let mut counted: Vec<(usize, u32)> =
                more.chunk_by(|a, b| a == b).map(|same| (same.len(), same[0])).collect();
            counted.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
            all.extend(counted.into_iter().map(|(_, block)| block));
            all
        };
        let of_head = |layer: usize, head: usize| (0..steps).map(|step| of(layer, head, step)).collect();
        let of_layer = |layer: usize| (0..extents.kv_heads).map(|head| of_head(layer, head)).collect();
        (0..layers.len()).map(of_layer).collect()
    };
    let heads = 0..extents.kv_heads;
    let lists = best(&own, k, 0);
    let guesses = [
        Guess { name: "its last list", blocks: best(&own, k, 1) },
        Guess { name: "its 1.5 k best of the last step", blocks: best(&own, k * 3 / 2, 1) },
        Guess { name: "its 2 k best of the last step", blocks: best(&own, 2 * k, 1) },
        Guess {
            name: "last lists of the layer's other heads",
            blocks: beside(&|layer, head, step| {
                let others = heads.clone().filter(|other| *other != head);
                others.map(|other| list(&own[layer][other][step - 1], k)).collect()
            }),
        },
        Guess {
            name: "lists of the layer before, this step",
            blocks: beside(&|layer, _, step| {
                let of =
                    |before: usize| heads.clone().map(|head| list(&own[before][head][step], k)).collect();
                layer.checked_sub(1).map_or_else(Vec::new, of)
            }),
        },
        Guess { name: "query of the layer before, k best", blocks: best(&query_before, k, 0) },
        Guess { name: "query from two layers before, k best", blocks: best(&two, k, 0) },
        Guess { name: "query from the layer before, k best", blocks: best(&near, k, 0) },
        Guess { name: "the same, 1.5 k best", blocks: best(&near, k * 3 / 2, 0) },
        Guess { name: "the same, 2 k best", blocks: best(&near, 2 * k, 0) },
        Guess { name: "query from behind its attention, k best", blocks: best(&behind, k, 0) },
        Guess { name: "the same, 1.5 k best", blocks: best(&behind, k * 3 / 2, 0) },
    ];
    println!(
        "{path}: {} layers, {} lists of {steps} steps, k={k} block={block} local={local}; queries made again are off \
         by {worst:.4} of their norm at the most",
        layers.len(),
        layers.len() * extents.kv_heads
    );
    println!("blocks of a step and KV head: wanted; fetched late and ahead; share of late ones that is gone");
    println!("slots  guess                                     wanted  in it    late   ahead   gone");
    for share in [6, 8, 12, 16] {
        let slots = (k + 1) * share / 4;
        let alone = simulate(&lists, None, slots);
        let row = |name: &str, sums: Sums| {
            println!(
                "{slots:5}  {name:40}  {:6.2}  {:5.3}  {:6.3}  {:6.3}  {:5.3}",
                sums.wanted,
                sums.guessed,
                sums.late,
                sums.ahead,
                1.0 - sums.late / alone.late
            );
        };
        row("none", alone);
        guesses.iter().for_each(|guess| row(guess.name, simulate(&lists, Some(guess), slots)));
    }
    Ok(())
}
