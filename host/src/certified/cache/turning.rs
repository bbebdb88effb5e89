//! A token of each sequence from a product's output into the cache, in one launch.

use super::super::{Error, Layout};
use super::TieredCache;
use crate::Stream;
use crate::attention::dense;
use crate::attention::rope::{Pairing, check_rope};
use crate::kv::{self, Raw, Result};
use half::f16;
use kernels_gpu::certified::{turn_append, turn_launch};
use simt::Kernel;

/// Sequences of a launch: the grid's second extent.
const MAX_SEQUENCES: u32 = 65535;

/// The kernel that turns, appends and quantizes.
pub(in crate::certified) type TurnAppend = Kernel<turn_append::Args>;

/// The instance for a head_dim and a layout; none where there is none.
pub(in crate::certified) fn turn_append_kernel(head_dim: u32, layout: Layout) -> Option<TurnAppend> {
    match (head_dim, layout) {
        (64, Layout::Compact) => Some(turn_append::kernel::<64, f16>()),
        (128, Layout::Compact) => Some(turn_append::kernel::<128, f16>()),
        (64, Layout::Paper) => Some(turn_append::kernel::<64, f32>()),
        (128, Layout::Paper) => Some(turn_append::kernel::<128, f32>()),
        _ => None,
    }
}

impl TieredCache<f16> {
    /// Whether [`turn_and_append`](Self::turn_and_append) has a kernel for its heads and a grid for its
    /// sequences, and calls are launches.
    pub(in crate::certified) fn turns(&self, stream: &Stream) -> bool {
        let layout = self.geometry().layout();
        let fits = self.extents.sequences <= MAX_SEQUENCES;
        fits && !self.on_slices(stream) && turn_append_kernel(layout.head_dim, layout.kind).is_some()
    }

    /// [`append`](Self::append) of what a product gives, in one launch: the bits of [`Raw::rotate`] and
    /// `append` one after another. Positions are where the sequences end: behind a [`check`](Self::check)
    /// that has found something refused, they have to be made of the lengths anew.
    ///
    /// # Errors
    /// As `append`; [`crate::Error::WrongDevice`]; buffers that are too short; extents that cannot be
    /// rotated, and those of other heads than the cache's.
    pub(in crate::certified) fn turn_and_append(
        &mut self,
        stream: &Stream,
        heads: kv::Geometry,
        new: Raw<'_>,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the cache")?;
        new.check_device(stream)?;
        let (rope, geometry) = (new.shape(heads), self.geometry());
        let layout = geometry.layout();
        check_rope(rope).map_err(|error| Error::from(dense::Error::from(error)))?;
        let Some(kernel) = turn_append_kernel(layout.head_dim, layout.kind)
            .filter(|_| (rope.kv_heads, rope.head_dim) == (geometry.kv_heads(), geometry.head_dim()))
        else {
            return Err(Error::Geometry { kv_heads: rope.kv_heads, head_dim: rope.head_dim }.into());
        };
        self.make_room(stream)?;
        let sequences = self.extents.sequences as usize;
        let (query_width, kv_width) = (heads.query_width(), heads.kv_width());
        let (fresh_keys, fresh_values) = self.fresh()?;
        let (tiles, annotations) = self.quantized_mut();
        let [by_chance, seed] = geometry.rounding().words();
        let arguments = turn_append::Args {
            qkv: new.qkv.global_range(..sequences * (query_width + 2 * kv_width))?,
            positions: new.positions.global_range(..sequences)?,
            frequencies: new.frequencies.global_range(..new.rotary as usize / 2)?,
            queries: new.queries.global_range_mut(..sequences * query_width)?,
            table: self.table.global(),
            lengths: self.lengths.global_mut(),
            limits: self.limits.global_mut(),
            keys: self.keys.global_mut(),
            values: self.values.global_mut(),
            fresh_keys,
            fresh_values,
            slots: self.near.global_mut(),
            directory: self.directory.global_mut(),
            tiles,
            annotations,
            problems: self.problems.global_mut(),
            refusals: self.refusals[0].global_mut(),
            rope,
            shape: self.shape,
            scratch: self.scratch,
            interleaved: (new.pairing == Pairing::Interleaved) as u32,
            by_chance,
            seed,
        };
        // SAFETY: inputs are a row for each sequence, as just seen; a position below its limit has its block
        // in the table, whether the sequence ends there or not; pools, directory and refusals were made for
        // these extents. Dropping a buffer, or the cache, waits for the device.
        unsafe { stream.launch(&kernel, turn_launch(layout, rope, self.extents.sequences), arguments)? };
        if !stream.is_capturing() {
            self.count_appended();
        }
        Ok(())
    }
}
