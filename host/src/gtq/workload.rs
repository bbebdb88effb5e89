//! A step over keys in parts, in an order made from the input itself where no file is given.

use super::{GtqCache, Order, Settings, order};
use crate::kv::Result;
use crate::kv::workload::{Fact, Opening, Workload, through_cache_of};

/// Tokens that the order is made from, at least and at most.
const TOKENS: [usize; 2] = [1, 4096];

/// A workload through the cache.
pub(super) fn open(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    let of_itself = match opening.selection.file(order::OPTION) {
        Some(_) => None,
        None => Some(Order::of(&opening.f16()?.material(TOKENS)?)?),
    };
    let said = if of_itself.is_some() { "made from this input itself" } else { "from the file" };
    through_cache_of(opening, vec![Fact::text("order of channels", said)], |opening| {
        let settings = Settings::of(opening.selection);
        Ok(match &of_itself {
            Some(order) => Box::new(GtqCache::in_order(opening, settings, order)?),
            None => Box::new(GtqCache::in_order(opening, settings, &Order::open(opening)?)?),
        })
    })
}
