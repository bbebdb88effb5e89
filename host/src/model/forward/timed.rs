//! How long a prompt takes, by the device's clock.

use super::{Result, Rows, Runner};
use crate::Event;
use crate::kv::KvCache;

impl Runner {
    /// Reads `tokens` into the cache's one sequence, behind those that it has, up to the logits after the
    /// last of them, and says how many milliseconds that took by the device's clock: with all that the host
    /// keeps the device waiting for between launches, and without the choice of a token.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn time_prompt(&mut self, tokens: &[u32], cache: &mut dyn KvCache) -> Result<f64> {
        let (start, end) = {
            let device = self.stream().device();
            (Event::new(device)?, Event::new(device)?)
        };
        self.stream().synchronize()?;
        self.stream().record(&start)?;
        self.pieces(0, tokens, Rows::Last, cache, |_| Ok(()))?;
        self.stream().record(&end)?;
        Ok(end.elapsed_ms(&start)?)
    }
}
