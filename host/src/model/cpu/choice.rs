//! The next token from a slice of logits.

use crate::model::kernels::Choice;
use crate::model::linear::Result;
use kernels_gpu::model::random::draw;
use kernels_gpu::model::{nucleus_mass, order_key, sample_weight};

/// The token that a sequence's kernel chooses from `logits` at `position`; `number` is what its draws are
/// keyed by.
///
/// # Errors
/// Those of [`Choice::shape`].
pub fn choose(choice: Choice, logits: &[f32], position: u32, number: u32) -> Result<u32> {
    let shape = choice.shape(logits.len())?;
    let keys = logits.iter().enumerate().map(|(i, logit)| order_key(*logit, i as u32));
    let key = keys.max().unwrap_or(0);
    if key >> 32 == 0 {
        return Ok(0);
    }
    let best = !(key as u32);
    let Some(shape) = shape else { return Ok(best) };
    let largest = logits[best as usize];
    let weights: Vec<u32> =
        logits.iter().map(|logit| sample_weight(*logit, largest, shape.sharpness)).collect();
    let wanted = nucleus_mass(weights.iter().map(|weight| u64::from(*weight)).sum(), shape.top_p);
    let mut ordered = weights.clone();
    ordered.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0u64;
    let least = ordered.into_iter().find(|weight| {
        sum += u64::from(*weight);
        sum >= wanted
    });
    let least = least.unwrap_or(0);
    let inside = |weight: u32| if weight >= least { u64::from(weight) } else { 0 };
    let nucleus: u64 = weights.iter().map(|weight| inside(*weight)).sum();
    let random = draw(shape.seed, position, number);
    let pick = ((u128::from(random) * u128::from(nucleus)) >> 64) as u64;
    let mut sum = 0;
    let token = weights.iter().position(|weight| {
        sum += inside(*weight);
        pick < sum
    });
    Ok(token.map_or(best, |token| token as u32))
}
