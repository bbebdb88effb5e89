//! What codes of keys and values do to a layer's attention, with no model in the loop.
//!
//! A layer's queries, keys and values are those of a real run; a scheme's are what its codes stand for
//! ([`Restored`]). Of each query and head, s_t = q·k_t and p = softmax(s/√D) over the tokens that it sees:
//!
//! | measure | what it is |
//! | --- | --- |
//! | [`Sample::logit`] | mean over the tokens of abs(q·k − q·k^), not scaled |
//! | [`Sample::offsets`] | the same with the query turned to 50 distances from each key |
//! | [`Sample::divergence`] | KL(p ‖ p^), nats |
//! | [`Sample::overlap`] | the share of the ten largest s that are among the ten largest s^ |
//! | [`Sample::output`] | the distance of Σ p^·v^ from Σ p·v over the latter's norm |
//! | [`Sample::values`] | the same of Σ p·v^ |
//!
//! Tokens that steps read as they were ([`Coded`](crate::kv::restored::Coded)) have no error in any but
//! `offsets`, which is of the codes alone.
//!
//! # Distances
//! RoPE turns a key at position s by R_s, and keys come so. With R_−s each error is brought back, e = R_−s
//! (k^ − k), and each query likewise, q = R_−t q_t; a query at distance Δ from a key is off by abs(q·R_−Δ e).
//! Δ are 50 numbers, evenly spaced from −1024 to 1024, both included.

mod rotation;
mod summary;
#[cfg(test)]
mod tests;

pub use summary::{Figure, Summary, summarize};

use crate::attention::oracle::softmax;
use crate::kv::restored::{Original, Restored, Side};
use crate::kv::workload::norm;
use crate::kv::{Geometry, Rope};
use half::f16;
use rayon::prelude::*;
use rotation::Turns;
use serde::Serialize;

/// Distances between query and key.
pub const OFFSETS: usize = 50;
/// The largest of them.
pub const FURTHEST: f64 = 1024.0;
/// Keys that are compared at all of them, at most, evenly spread.
const MOST_KEYS: usize = 2048;
/// Tokens whose order is compared.
pub const TOP: usize = 10;

/// What a layer's attention had.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// Its heads.
    pub geometry: Geometry,
    /// Keys and values.
    pub original: Original<'a>,
    /// Those that ask, [query tokens, q_heads, head_dim], turned by RoPE and not scaled.
    pub queries: &'a [f16],
    /// The token that each is of, \[query tokens\]: it sees the tokens up to its own.
    pub positions: &'a [usize],
    /// How keys and queries were turned; none if that is not known, and then `offsets` is not measured.
    pub rope: Option<&'a Rope>,
}

/// A query of one head.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// The token that asks.
    pub token: usize,
    /// The query head.
    pub q_head: usize,
    /// See the [module](self).
    pub logit: f64,
    /// None where RoPE is not known, or no key has codes.
    pub offsets: Option<f64>,
    /// See the [module](self).
    pub divergence: f64,
    /// See the [module](self).
    pub overlap: f64,
    /// See the [module](self).
    pub output: f64,
    /// See the [module](self).
    pub values: f64,
}

/// A layer without quantization: what every scheme is held against.
#[derive(Debug)]
pub struct Exact<'a> {
    layer: Layer<'a>,
    tokens: usize,
    /// Of each KV head [tokens, head_dim].
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    /// [query tokens, q_heads, head_dim].
    queries: Vec<f32>,
    turns: Option<Turns>,
    /// [query tokens, q_heads].
    rows: Vec<Row>,
}

/// A query of one head, exactly.
#[derive(Debug)]
struct Row {
    token: usize,
    q_head: usize,
    /// Its KV head.
    head: usize,
    /// s_t, not scaled.
    products: Vec<f32>,
    top: Vec<usize>,
    output: Vec<f64>,
}

/// What codes change in a layer.
struct Errors {
    /// k^ − k of each KV head, [tokens, head_dim].
    keys: Vec<Vec<f32>>,
    /// v^ − v.
    values: Vec<Vec<f32>>,
    /// k^ − k of the keys that `offsets` are of, turned back; none where it is not measured.
    spread: Option<Vec<Vec<f32>>>,
}

/// a·b, in eight sums.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, last_a), (b, last_b)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0f32; 8];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + last_a.iter().zip(last_b).map(|(a, b)| a * b).sum::<f32>()
}

/// The [`TOP`] largest, or all if there are fewer: of equals the first.
fn largest(products: &[f32]) -> Vec<usize> {
    let mut top: Vec<usize> = Vec::with_capacity(TOP + 1);
    for (at, product) in products.iter().enumerate() {
        if top.len() == TOP && top.last().is_some_and(|last| *product <= products[*last]) {
            continue;
        }
        let place = top.partition_point(|other| products[*other] >= *product);
        top.insert(place, at);
        top.truncate(TOP);
    }
    top
}

/// Adds Σ w_t·v_t over as many tokens as there are weights.
fn add(output: &mut [f64], weights: &[f64], values: &[f32]) {
    for (weight, row) in weights.iter().zip(values.chunks_exact(output.len())) {
        output.iter_mut().zip(row).for_each(|(o, v)| *o += weight * f64::from(*v));
    }
}

/// The distance of two outputs over the norm of the first; 0 where they are equal.
fn apart(exact: &[f64], found: &[f64]) -> f64 {
    let error = norm(exact.iter().zip(found).map(|(a, b)| a - b));
    if error == 0.0 { 0.0 } else { error / norm(exact.iter().copied()) }
}

fn scaled(products: &[f32], dim: usize) -> Vec<f64> {
    let scale = 1.0 / (dim as f64).sqrt();
    products.iter().map(|x| scale * f64::from(*x)).collect()
}

/// Rows [tokens, heads, dim] as numbers of each head, [tokens, dim].
fn by_head(numbers: impl Iterator<Item = f32>, heads: usize, dim: usize) -> Vec<Vec<f32>> {
    let mut split = vec![Vec::new(); heads];
    numbers.enumerate().for_each(|(at, x)| split[at / dim % heads].push(x));
    split
}

impl<'a> Exact<'a> {
    /// Attention of all queries.
    pub fn new(layer: Layer<'a>) -> Self {
        let Geometry { q_heads, kv_heads, head_dim: dim, .. } = layer.geometry;
        let split = |rows: &[f16]| by_head(rows.iter().map(|x| x.to_f32()), kv_heads, dim);
        let (keys, values) = (split(layer.original.keys), split(layer.original.values));
        let queries: Vec<f32> = layer.queries.iter().map(|x| x.to_f32()).collect();
        let rows = (0..layer.positions.len() * q_heads).into_par_iter().map(|at| {
            let (token, q_head) = (layer.positions[at / q_heads], at % q_heads);
            let head = q_head / (q_heads / kv_heads);
            let query = &queries[at * dim..][..dim];
            let seen = keys[head].chunks_exact(dim).take(token + 1);
            let products: Vec<f32> = seen.map(|key| dot(query, key)).collect();
            let (weights, _) = softmax(&scaled(&products, dim));
            let mut output = vec![0.0; dim];
            add(&mut output, &weights, &values[head]);
            Row { token, q_head, head, top: largest(&products), output, products }
        });
        let rows = rows.collect();
        let turns = layer.rope.map(|rope| Turns::new(rope, layer.positions, &queries, layer.geometry));
        let tokens = layer.original.keys.len() / (kv_heads * dim);
        Exact { layer, tokens, keys, values, queries, turns, rows }
    }

    /// What codes do to each query and head, [query tokens, q_heads].
    pub fn judge(&self, restored: &Restored) -> Vec<Sample> {
        let Geometry { kv_heads, head_dim: dim, .. } = self.layer.geometry;
        let errors = |side: &Side, exact: &[Vec<f32>]| -> Vec<Vec<f32>> {
            let less = |(found, exact): (Vec<f32>, &Vec<f32>)| {
                let mut less: Vec<f32> =
                    found.iter().zip(exact).map(|(found, exact)| found - exact).collect();
                let front = less.len().min(side.coded.front * dim);
                less[..front].fill(0.0);
                less
            };
            by_head(side.rows.iter().copied(), kv_heads, dim).into_iter().zip(exact).map(less).collect()
        };
        let keys = errors(&restored.keys, &self.keys);
        let (front, coded) = (restored.keys.coded.front, restored.keys.coded.of(self.tokens));
        let spread = self.turns.as_ref().filter(|_| coded > front).map(|turns| {
            let chosen: Vec<usize> = (front..coded).step_by((coded - front).div_ceil(MOST_KEYS)).collect();
            keys.iter().map(|errors| turns.back(errors, &chosen)).collect()
        });
        let errors = Errors { keys, values: errors(&restored.values, &self.values), spread };
        let rows = self.rows.par_iter().enumerate();
        rows.map(|(at, row)| self.sample(at, row, restored, &errors)).collect()
    }

    fn sample(&self, at: usize, row: &Row, restored: &Restored, errors: &Errors) -> Sample {
        let dim = self.layer.geometry.head_dim;
        let (query, seen) = (&self.queries[at * dim..][..dim], row.products.len());
        let of_codes = errors.keys[row.head].chunks_exact(dim).take(restored.keys.coded.of(seen));
        let mut moved: Vec<f32> = of_codes.map(|error| dot(query, error)).collect();
        moved.resize(seen, 0.0);
        let logit = moved.iter().map(|x| f64::from(x.abs())).sum::<f64>() / seen as f64;
        let offsets = errors.spread.as_ref().zip(self.turns.as_ref());

        let (logits, steps) = (scaled(&row.products, dim), scaled(&moved, dim));
        let (weights, sum) = softmax(&logits);
        let (found_weights, found_sum) =
            softmax(&logits.iter().zip(&steps).map(|(s, x)| s + x).collect::<Vec<_>>());
        // Σ p·(ln p − ln p^): each logarithm is a logit less the log-sum of all.
        let gained: f64 = weights.iter().zip(&steps).map(|(p, x)| p * x).sum();
        let found: Vec<f32> = row.products.iter().zip(&moved).map(|(s, x)| s + x).collect();
        let found = largest(&found);
        let both = row.top.iter().filter(|token| found.contains(token)).count();

        let coded = restored.values.coded.of(seen);
        let of_values = &errors.values[row.head];
        let mut values = row.output.clone();
        add(&mut values, &weights[..coded], of_values);
        let mut output = vec![0.0; dim];
        add(&mut output, &found_weights, &self.values[row.head]);
        add(&mut output, &found_weights[..coded], of_values);
        Sample {
            token: row.token,
            q_head: row.q_head,
            logit,
            offsets: offsets.map(|(errors, turns)| turns.error(at, &errors[row.head])),
            divergence: (found_sum - sum - gained).max(0.0),
            overlap: both as f64 / row.top.len() as f64,
            // Without an error in any product the sums are the same ones.
            output: apart(&row.output, &output),
            values: apart(&row.output, &values),
        }
    }
}
