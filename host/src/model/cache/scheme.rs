//! The names of the schemes.

use super::{CertifiedCache, DenseCache, Error, Geometry, Int8Cache, KvCache, Result};
use crate::Device;
use crate::certified::Policy;
use std::fmt;
use std::str::FromStr;

/// A way to keep keys and values, by the name that commands take.
///
/// ```
/// use host::model::cache::Scheme;
///
/// let scheme: Scheme = "certified:strict".parse()?;
/// assert_eq!(scheme.to_string(), "certified:strict");
/// assert!("certified:loose".parse::<Scheme>().is_err());
/// # Ok::<(), host::model::cache::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// f16, exact attention.
    Dense,
    /// INT8 with a scale for 16 tokens of a channel, restored for attention.
    Int8,
    /// INT8 keys and INT4 values, and nothing known of the error.
    Naive,
    /// The same with a bound on every head's error, and the originals for what is over its budget: by a preset of [`Policy`].
    Certified(&'static str),
}

impl Scheme {
    /// What each is, for a command's help: name and description.
    pub const DESCRIPTIONS: [(&'static str, &'static str); 4] = [
        ("dense", "keys and values in f16, exact attention"),
        ("int8", "keys and values in 8 bits, restored for attention"),
        ("naive-int8-int4", "keys in 8 bits, values in 4, nothing known of the error"),
        ("certified[:PRESET]", "the same with a bound on every head's error, and exact fallback"),
    ];

    /// An empty cache of this scheme for up to `capacity` tokens.
    ///
    /// # Errors
    /// As the caches' own.
    pub fn open(self, device: &Device, geometry: Geometry, capacity: usize) -> Result<Box<dyn KvCache>> {
        let quantized = |policy| {
            Ok(Box::new(CertifiedCache::new(device, geometry, capacity, policy)?) as Box<dyn KvCache>)
        };
        match self {
            Scheme::Dense => Ok(Box::new(DenseCache::new(device, geometry, capacity)?)),
            Scheme::Int8 => Ok(Box::new(Int8Cache::new(device, geometry, capacity)?)),
            Scheme::Naive => quantized(Policy::BARE),
            Scheme::Certified(preset) => quantized(Policy::preset(preset).unwrap_or_default()),
        }
    }
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let unknown = || {
            let presets = Policy::PRESETS.join(", ");
            let names = Scheme::DESCRIPTIONS.map(|(name, _)| name).join(", ");
            Error::Scheme { name: name.to_string(), names: format!("{names}, with PRESET one of {presets}") }
        };
        match name.split_once(':') {
            None if name == "dense" => Ok(Scheme::Dense),
            None if name == "int8" => Ok(Scheme::Int8),
            None if name == "naive-int8-int4" => Ok(Scheme::Naive),
            None if name == "certified" => Ok(Scheme::Certified(Policy::PRESETS[0])),
            Some(("certified", preset)) => {
                let known = Policy::PRESETS.into_iter().find(|known| *known == preset);
                known.map(Scheme::Certified).ok_or_else(unknown)
            }
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::Dense => f.write_str("dense"),
            Scheme::Int8 => f.write_str("int8"),
            Scheme::Naive => f.write_str("naive-int8-int4"),
            Scheme::Certified(preset) if *preset == Policy::PRESETS[0] => f.write_str("certified"),
            Scheme::Certified(preset) => write!(f, "certified:{preset}"),
        }
    }
}
