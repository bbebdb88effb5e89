//! The launch shapes that a device takes, checked before the backend sees them: so both refuse the same ones
//! in the same words.

use crate::error::{Error, Result};
use simt::{Dim3, KernelInfo, LaunchShape};

/// The most threads a block may have, on every GPU.
const BLOCK_THREADS: u32 = 1024;
/// The longest block along each axis.
const BLOCK: Dim3 = Dim3 { x: 1024, y: 1024, z: 64 };
/// The longest grid along each axis.
const GRID: Dim3 = Dim3 { x: 0x7fff_ffff, y: 65535, z: 65535 };

/// Refuses `shape` if no device takes it, the kernel does not, or it asks for more than `shared_bytes`.
#[inline]
pub(crate) fn check(info: &'static KernelInfo, shape: LaunchShape, shared_bytes: u32) -> Result<()> {
    let (grid, block) = (shape.grid, shape.block);
    let fits = grid.count() != 0
        && block.count() != 0
        && within(grid, GRID)
        && within(block, BLOCK)
        && block.count() <= u64::from(info.max_threads.min(BLOCK_THREADS))
        && grid.is_multiple_of(info.cluster)
        && shape.shared_bytes <= shared_bytes;
    if fits { Ok(()) } else { Err(refuse(info, shape, shared_bytes)) }
}

fn within(extent: Dim3, most: Dim3) -> bool {
    extent.x <= most.x && extent.y <= most.y && extent.z <= most.z
}

#[cold]
fn refuse(info: &'static KernelInfo, shape: LaunchShape, shared_bytes: u32) -> Error {
    let (grid, block) = (shape.grid, shape.block);
    let threads = block.count();
    let reason = if grid.count() == 0 {
        "the grid has no block (a dimension is 0)".to_string()
    } else if threads == 0 {
        "the block has no thread (a dimension is 0)".to_string()
    } else if !within(grid, GRID) {
        format!("a grid may be {GRID} at most")
    } else if !within(block, BLOCK) {
        format!("a block may be {BLOCK} at most")
    } else if threads > u64::from(BLOCK_THREADS) {
        format!("{threads} threads in a block; {BLOCK_THREADS} is the most")
    } else if threads > u64::from(info.max_threads) {
        format!("{threads} threads in a block; the kernel declares {} as its most", info.max_threads)
    } else if !grid.is_multiple_of(info.cluster) {
        format!("the grid is no multiple of the kernel's cluster {}", info.cluster)
    } else {
        format!(
            "{} bytes of shared memory; {shared_bytes} is the device's most: take another setting, or a device \
             that has more",
            shape.shared_bytes
        )
    };
    Error::Shape { kernel: info.name, shape, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    static INFO: KernelInfo = KernelInfo {
        name: "k",
        module: "m",
        file: "f",
        line: 1,
        max_threads: 256,
        overlaps: false,
        waits_late: false,
        min_sm: 0,
        only_sm: 0,
        cluster: Dim3 { x: 1, y: 1, z: 1 },
    };

    fn reason(shape: LaunchShape) -> Option<String> {
        reason_of(&INFO, shape)
    }

    fn reason_of(info: &'static KernelInfo, shape: LaunchShape) -> Option<String> {
        match check(info, shape, 1000) {
            Ok(()) => None,
            Err(Error::Shape { kernel: "k", shape: named, reason }) if named == shape => Some(reason),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn shapes_at_the_limits_pass_and_one_more_does_not() {
        assert_eq!(reason(LaunchShape::new((0x7fff_ffff, 65535, 65535), 256).shared(1000)), None);
        assert_eq!(reason(LaunchShape::new(1, (2, 2, 64))), None);
        let refused = [
            (LaunchShape::new((1, 0), 1), "no block"),
            (LaunchShape::new(1, (1, 1, 0)), "no thread"),
            (LaunchShape::new(0x8000_0000, 1), "a grid may be"),
            (LaunchShape::new((1, 65536), 1), "a grid may be"),
            (LaunchShape::new((1, 1, 65536), 1), "a grid may be"),
            (LaunchShape::new((u32::MAX, u32::MAX, u32::MAX), 1), "a grid may be"),
            (LaunchShape::new(1, (1, 1, 65)), "a block may be"),
            (LaunchShape::new(1, (u32::MAX, u32::MAX, u32::MAX)), "a block may be"),
            (LaunchShape::new(1, (1024, 1024, 64)), "1024 is the most"),
            (LaunchShape::new(1, u32::MAX), "a block may be"),
            (LaunchShape::new(1, 1025), "a block may be"),
            (LaunchShape::new(1, 257), "declares 256"),
            (LaunchShape::new(1, 1).shared(1001), "1000 is the device's most"),
        ];
        for (shape, part) in refused {
            let text = reason(shape).expect("refused");
            assert!(text.contains(part), "{shape:?}: {text}");
        }
    }

    #[test]
    fn a_grid_is_whole_clusters() {
        static CLUSTERED: KernelInfo = KernelInfo { cluster: Dim3 { x: 2, y: 1, z: 4 }, ..INFO };
        assert_eq!(reason_of(&CLUSTERED, LaunchShape::new((6, 3, 8), 256)), None);
        for grid in [(5, 3, 8), (6, 3, 6), (1, 1, 1)] {
            let text = reason_of(&CLUSTERED, LaunchShape::new(grid, 256)).expect("refused");
            assert!(text.contains("no multiple of the kernel's cluster (2,1,4)"), "{text}");
        }
    }
}
