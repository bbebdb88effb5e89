//! A step on the cache.

use super::super::{Attended, Near, StepHandles, StepPlan};
use super::{CacheElement, CacheError, Result, TieredCache};
use crate::{Buffer, Stream};

impl<E: CacheElement> TieredCache<E> {
    /// Attends to everything that the sequences have: rows 0 to `plan.problem().sequences` of the cache, empty ones included.
    /// `queries` is [sequences, q_heads, head_dim].
    ///
    /// It allocates nothing, waits for nothing, and can be captured, together with appends. What it reads from host memory
    /// comes into the scratch on the way; the bits of output and certificates are the same whatever is there.
    ///
    /// # Errors
    /// [`CacheError::Plan`], [`CacheError::Length`], and nothing is launched; [`crate::Error::WrongDevice`]; what the launches
    /// report.
    pub fn attend(
        &mut self,
        stream: &Stream,
        plan: &mut StepPlan<E>,
        queries: &Buffer<E>,
        out: &mut Attended,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the cache")?;
        stream.device().check_same(queries.device(), "the buffer of queries")?;
        stream.device().check_same(out.output.device(), "the output")?;
        stream.device().check_same(out.lse.device(), "the buffer of log-sums")?;
        stream.device().check_same(out.certificates.device(), "the buffer of certificates")?;
        let problem = plan.problem();
        let blocks = problem.max_tokens.div_ceil(super::BLOCK_TOKENS);
        let same = [
            ("number of KV heads", problem.kv_heads, self.shape.kv_heads),
            ("head_dim", problem.head_dim, self.shape.head_dim),
            ("number of blocks a sequence", blocks, self.shape.max_blocks),
            // Fewer would do, as long as all sequences are in the first rows.
            ("number of sequences", problem.sequences, self.covering(problem.sequences)),
        ];
        for (what, plan, cache) in same {
            if plan != cache {
                return Err(CacheError::Plan { what, plan, cache }.into());
            }
        }
        let heads = problem.sequences as usize * problem.q_heads as usize;
        let dim = problem.head_dim as usize;
        for (what, got, expected) in [
            ("the buffer of queries", queries.len(), heads * dim),
            ("the output", out.output.len(), heads * dim),
            ("the buffer of log-sums", out.lse.len(), heads),
            ("the buffer of certificates", out.certificates.len(), heads),
        ] {
            if got != expected {
                return Err(CacheError::Length { what, got, expected: expected.to_string() }.into());
            }
        }
        let rows = problem.sequences as usize;
        let handles = StepHandles {
            queries: queries.global(),
            tiles: self.tiles.global(),
            annotations: self.annotations.global(),
            table: self.table.global_range(..rows * self.shape.max_blocks as usize)?,
            lengths: self.lengths.global_range(..rows)?,
            keys: self.keys.global(),
            values: self.values.global(),
            near: Near {
                tiles: self.near.global_mut(),
                directory: self.directory.global_mut(),
                scratch: self.scratch,
            },
        };
        // SAFETY: everything is the cache's own and made for these extents; lengths stay below limits, whose blocks are in the
        // table, and a block that is full was quantized in this stream. Dropping a buffer, or the cache, waits for the device.
        unsafe { plan.run(stream, &handles, out) }
    }

    /// As many sequences as a plan must have that has `planned`.
    fn covering(&self, planned: u32) -> u32 {
        let used = self.book.live().last().map_or(0, |row| row + 1);
        if planned < used || planned > self.extents.sequences { self.extents.sequences } else { planned }
    }
}
