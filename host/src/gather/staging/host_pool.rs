//! A pool of cache blocks in the host's memory.

use super::words;
use super::words_mut;
use super::{Error, GatherElement, Result};
use crate::attention::BLOCK_TOKENS;
use crate::{Device, Pinned, Stream};
use simt::{Global, GlobalMut};

/// Keys and values of many sequences in blocks of 16 tokens, two arrays [blocks, kv_heads, 16, head_dim] of
/// page-locked host memory, which kernels reach over the bus.
#[derive(Debug)]
pub struct HostPool<E: GatherElement> {
    device: Device,
    keys: Pinned<E>,
    values: Pinned<E>,
    /// Elements of a block.
    block: usize,
}

impl<E: GatherElement> HostPool<E> {
    /// A pool of zeros.
    ///
    /// # Errors
    /// [`Error::Locked`].
    pub fn new(device: &Device, blocks: u32, kv_heads: u32, head_dim: u32) -> Result<Self> {
        let block = (BLOCK_TOKENS * kv_heads) as usize * head_dim as usize;
        let elements = block * blocks as usize;
        let refused = |source| Error::Locked { bytes: 2 * (elements * size_of::<E>()) as u64, source };
        let keys = Pinned::zeroed(device, elements).map_err(refused)?;
        let values = Pinned::zeroed(device, elements).map_err(refused)?;
        Ok(HostPool { device: device.clone(), keys, values, block })
    }

    /// Says so if the host has not so many bytes to lock, before any is.
    ///
    /// # Errors
    /// [`Error::HostMemory`].
    pub fn if_too_large(bytes: u64) -> Result<()> {
        match free_bytes().filter(|free| bytes > *free) {
            Some(free) => Err(Error::HostMemory { bytes, free }),
            None => Ok(()),
        }
    }

    /// The keys and the values, to be filled while no kernel touches them.
    pub fn both_mut(&mut self) -> [&mut [E]; 2] {
        [&mut self.keys, &mut self.values]
    }

    /// The keys and the values.
    pub fn both(&self) -> [&[E]; 2] {
        [&self.keys, &self.values]
    }

    /// Both for a kernel.
    pub(super) fn global(&self) -> [Global<E>; 2] {
        [self.keys.global(), self.values.global()]
    }

    /// Both for a kernel, as words.
    pub(super) fn words(&self) -> [Global<u32>; 2] {
        [words(self.keys.global()), words(self.values.global())]
    }

    /// Both for a kernel that writes, as words.
    pub(super) fn words_mut(&mut self) -> [GlobalMut<u32>; 2] {
        [words_mut(self.keys.global_mut()), words_mut(self.values.global_mut())]
    }

    /// Copies the keys and values of block `from` to block `to`. Waits for the stream.
    ///
    /// # Errors
    /// What the device reports.
    pub fn copy_block(&mut self, stream: &Stream, from: u32, to: u32) -> Result<()> {
        stream.synchronize()?;
        for buffer in [&mut self.keys, &mut self.values] {
            let from = from as usize * self.block;
            buffer.copy_within(from..from + self.block, to as usize * self.block);
        }
        Ok(())
    }
}

impl<E: GatherElement> Drop for HostPool<E> {
    fn drop(&mut self) {
        // Kernels may be using the memory. What they did wrong was somebody else's to ask.
        if let Err(error) = self.device.synchronize() {
            tracing::debug!(%error, "waiting for the device before its host memory goes");
        }
    }
}

/// Bytes that the host can still give out, if it says.
fn free_bytes() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let available = of_meminfo(&read("/proc/meminfo")?)?;
    // A container may have less.
    let number = |path: &str| read(path)?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max");
    let left = limit.map(|max| max.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    Some(left.map_or(available, |left| left.min(available)))
}

/// What Linux says is available, in bytes.
fn of_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn more_than_the_host_has_is_refused_before_any_is_locked() {
        let text = "MemTotal:        2048 kB\nMemFree:          100 kB\nMemAvailable:     1500 kB\n";
        assert_eq!(of_meminfo(text), Some(1500 * 1024));
        assert_eq!(of_meminfo("MemTotal: 5 kB"), None);
        assert!(HostPool::<f16>::if_too_large(0).is_ok());
        if free_bytes().is_some() {
            let error = HostPool::<f16>::if_too_large(u64::MAX).expect_err("too much").to_string();
            assert!(error.contains("18446744073709551615 bytes of host memory"), "{error}");
        }
    }
}
