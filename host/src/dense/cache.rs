//! Keys and values as they are, in f16.

use crate::Device;
use crate::kv::{Beside, Capacity, Geometry, PagedCache, Result, Sequences};

/// Nothing beside keys and values.
#[derive(Debug)]
pub struct Plain;

// SAFETY: it adds no launches.
unsafe impl Beside for Plain {
    const SCHEME: &'static str = "dense";
    type Layer = ();
}

/// A cache in f16 with exact attention.
pub type DenseCache = PagedCache<Plain>;

impl DenseCache {
    /// An empty cache: of `capacity` tokens of one sequence, or as many of several.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::kv::Error::Memory) if the device can never hold it; heads that there is no
    /// kernel for; out of memory.
    pub fn new(device: &Device, geometry: Geometry, capacity: impl Into<Capacity>) -> Result<Self> {
        let sequences = Sequences::new(device, geometry, capacity.into());
        sequences.fitting(|_, _| 0)?;
        PagedCache::open(sequences, Plain, |_| Ok(()))
    }
}
