//! What a cache takes, beside keys and values in f16.

use host::kv::KvCache;
use serde::Serialize;

/// Bytes of a cache, of all its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CacheMemory {
    /// In the device's memory.
    pub cache_bytes: u64,
    /// In the host's.
    pub cache_host_bytes: u64,
    /// What keys and values of these tokens take in f16.
    pub cache_f16_bytes: u64,
    /// `cache_bytes` over `cache_f16_bytes`.
    pub cache_of_f16: f64,
    /// The most that the device had of it while its tokens came as a prompt's do, where that is more.
    pub cache_prompt_bytes: Option<u64>,
}

impl CacheMemory {
    /// Of a cache as it is; `after_prompt` is what it took when its tokens were in.
    pub fn of(cache: &dyn KvCache, after_prompt: u64) -> Self {
        let cache_f16_bytes = cache.geometry().token_bytes() * cache.tokens() as u64;
        let cache_bytes = cache.bytes();
        CacheMemory {
            cache_bytes,
            cache_host_bytes: cache.host_bytes(),
            cache_f16_bytes,
            cache_of_f16: cache_bytes as f64 / cache_f16_bytes.max(1) as f64,
            cache_prompt_bytes: (after_prompt > cache_bytes).then_some(after_prompt),
        }
    }
}
