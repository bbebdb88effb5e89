//! How much an order of channels depends on what it was made from: `ferrokv calibrate` puts it into the file.
//!
//! Two orders of one model are held against each other block by block, by the bits that the parts have at 3
//! bits on average. What one of them costs where the other's text is read is the regret: the sum of
//! E|q|²·E|k|² times 4^−bits, over that of the text's own order.

use super::Result;
use super::allocation::{Quarters, Score, apart, cost, ranked};
use super::order::energies;
use crate::kv::calibration::{Material, Passed};
use half::f16;
use kernels_gpu::gtq::parts::{PARTS, bits};
use std::fmt;

/// The average that parts are told apart by.
const AVERAGE: u32 = 3;
/// Of a text, the share that is a short one.
const SHORT: usize = 4;

/// Two orders beside each other, over all layers and KV heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stability {
    /// Share of blocks in another part: mean, and of the head where it is largest.
    pub hamming: [f64; 2],
    /// Of blocks that are in the first part of either, the share that is in that of both: mean, and least.
    pub jaccard: [f64; 2],
    /// What the first order costs over the second text's own, less 1: mean, and most.
    pub regret: [f64; 2],
}

impl fmt::Display for Stability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stability { hamming, jaccard, regret } = self;
        write!(
            f,
            "{:.1} % of blocks in another part ({:.1} in the worst head), Jaccard of the first part {:.2} ({:.2}), \
             regret {:.1} % ({:.1})",
            100.0 * hamming[0],
            100.0 * hamming[1],
            jaccard[0],
            jaccard[1],
            100.0 * regret[0],
            100.0 * regret[1],
        )
    }
}

/// Those tokens of a material that are wanted.
fn only(material: &Material, wanted: impl Fn(usize) -> bool) -> Material {
    let tokens = material.tokens();
    let rows = |rows: &[f16]| -> Vec<f16> {
        let width = rows.len() / tokens.max(1);
        let kept = (0..tokens).filter(|token| wanted(*token));
        kept.flat_map(|token| &rows[token * width..][..width]).copied().collect()
    };
    let layers = material.layers.iter();
    let layers = layers.map(|layer| Passed {
        keys: rows(&layer.keys),
        values: Vec::new(),
        queries: rows(&layer.queries),
    });
    let place = |front: &usize| (0..*front).filter(|token| wanted(*token)).count();
    Material {
        geometry: material.geometry,
        rope: material.rope.clone(),
        layers: layers.collect(),
        fronts: material.fronts.iter().filter(|front| wanted(**front)).map(place).collect(),
    }
}

/// The order of one material where another is read.
///
/// # Errors
/// [`Error::HeadDim`](super::Error::HeadDim).
pub fn between(one: &Material, other: &Material) -> Result<Stability> {
    let mut sums = [0.0; 3];
    let (mut most, mut least, mut heads) = ([0.0f64; 2], 1.0f64, 0);
    for layer in 0..one.layers.len() {
        let ((_, one), (_, other)) = (energies(one, layer)?, energies(other, layer)?);
        for (one, other) in one.iter().zip(&other) {
            let of = |energies| {
                let mut given = vec![0; one.keys.len()];
                for (part, bits) in ranked(energies, PARTS).iter().zip(bits(AVERAGE)) {
                    part.iter().for_each(|block| given[*block] = bits);
                }
                given
            };
            let (a, b) = (of(one), of(other));
            let found = apart(&a, &b);
            let scores = Score::Product.of(other);
            let least_cost = cost(&scores, &b, &Quarters);
            // Of a head that no query asks, any order costs nothing.
            let regret = if least_cost > 0.0 { cost(&scores, &a, &Quarters) / least_cost - 1.0 } else { 0.0 };
            for (sum, value) in sums.iter_mut().zip([found.hamming, found.jaccard, regret]) {
                *sum += value;
            }
            most = [most[0].max(found.hamming), most[1].max(regret)];
            least = least.min(found.jaccard);
            heads += 1;
        }
    }
    let [hamming, jaccard, regret] = sums.map(|sum| sum / f64::from(heads.max(1)));
    Ok(Stability { hamming: [hamming, most[0]], jaccard: [jaccard, least], regret: [regret, most[1]] })
}

/// What a material says of itself: its first texts against its last ones, and the beginnings of its texts
/// against all of them. Of one text, or of an unknown number, the latter alone.
///
/// # Errors
/// [`Error::HeadDim`](super::Error::HeadDim).
pub fn found(material: &Material) -> Result<Vec<(&'static str, Stability)>> {
    let (tokens, fronts) = (material.tokens(), &material.fronts);
    let mut found = Vec::new();
    if fronts.len() > 1 {
        let middle = fronts[fronts.len() / 2];
        let (first, last) = (only(material, |token| token < middle), only(material, |token| token >= middle));
        found.push(("first_half_to_second", between(&first, &last)?));
    }
    let ends = fronts.iter().skip(1).copied().chain([tokens]);
    let texts: Vec<_> = fronts.iter().copied().zip(ends).collect();
    let texts = if texts.is_empty() { vec![(0, tokens)] } else { texts };
    let is_short = |token: usize| {
        texts.iter().any(|(front, end)| (*front..front + (end - front).div_ceil(SHORT)).contains(&token))
    };
    found.push(("first_quarter_to_all", between(&only(material, is_short), material)?));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::Geometry;

    fn material(seed: u64) -> Material {
        let geometry = Geometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64 };
        Material { fronts: vec![0, 100, 200, 300], ..Material::made_up(geometry, 400, seed) }
    }

    #[test]
    fn an_order_is_as_good_as_itself_and_no_better_than_the_texts_own() {
        let (one, other) = (material(1), material(2));
        let same = between(&one, &one).expect("an order");
        assert_eq!(same, Stability { hamming: [0.0; 2], jaccard: [1.0; 2], regret: [0.0; 2] });
        let found = between(&one, &other).expect("an order");
        // Independent energies: three of four blocks are elsewhere.
        assert!((0.5..0.95).contains(&found.hamming[0]) && found.hamming[1] >= found.hamming[0], "{found:?}");
        assert!(found.jaccard[0] < 0.4 && found.jaccard[1] <= found.jaccard[0], "{found:?}");
        assert!(found.regret[0] > 0.1 && found.regret[1] > found.regret[0], "{found:?}");
    }

    #[test]
    fn halves_and_beginnings_are_of_the_tokens_they_name() {
        let whole = material(3);
        let quarter = only(&whole, |token| token % 100 < 25);
        assert_eq!((quarter.tokens(), &quarter.fronts[..]), (100, &[0, 25, 50, 75][..]));
        let width = 4 * 64;
        assert_eq!(
            quarter.layers[1].queries[25 * width..26 * width],
            whole.layers[1].queries[100 * width..101 * width]
        );
        let names: Vec<_> = found(&whole).expect("orders").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["first_half_to_second", "first_quarter_to_all"]);
        // One text twice: the halves agree.
        let mut twice = only(&whole, |token| token < 200);
        let once = twice.clone();
        for (layer, own) in twice.layers.iter_mut().zip(&once.layers) {
            layer.keys.extend_from_slice(&own.keys);
            layer.queries.extend_from_slice(&own.queries);
        }
        twice.fronts.extend([200, 300]);
        let halves = found(&twice).expect("orders")[0].1;
        assert_eq!((halves.hamming, halves.regret), ([0.0; 2], [0.0; 2]));
        // A text that nobody has marked is one.
        let unmarked = Material { fronts: Vec::new(), ..whole };
        assert_eq!(found(&unmarked).expect("an order").len(), 1);
    }
}
