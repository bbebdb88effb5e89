//! Planted bugs: for every kind of mistake that the emulator claims to catch, a kernel that makes it and the
//! same kernel without it. The broken one must give exactly the fault below, at its own line and thread; the
//! fixed one must pass in both modes with the right output.
//!
//! | file | the mistake | what it gives | default mode | race-check mode |
//! |---|---|---|---|---|
//! | `bounds` | one element past a global or shared array, read or written | `OutOfBounds` | yes | yes |
//! | `matrices` | outside of a matrix, a row or a slice, in the array or not | `OutsideMatrix` | yes | yes |
//! | `alignment` | a vector that does not start at a multiple of its size | `Misaligned` | yes | yes |
//! | `block_race` | no barrier between a write and a read, or too weak a one | `Race` | passes | yes |
//! | `block_race` | … where the reader comes first | `Uninitialized` | yes | yes |
//! | `block_race` | no barrier between setting a word and atomics on it | `Race` | passes | yes |
//! | `warp_race` | no warp barrier between lanes that exchange through memory | `Race` | passes | yes |
//! | `divergent_barrier` | threads that leave, barriers at two places | `DivergentBarrier` | yes | yes |
//! | `unwritten_shared` | a read, vector or atomic, of unwritten bytes | `Uninitialized` | yes | yes |
//! | `shuffle_mask` | a caller that its mask does not name | `LaneNotInMask` | yes | yes |
//! | `shuffle_mask` | a named lane that returned, never was, or waits elsewhere | `LaneMissing` | yes | yes |
//! | `active_lanes` | lanes that were together, taken for a branch | `LaneMissing` | by order | by order |
//! | `active_lanes` | which lanes are together decides | `OrderDependence` | with `orders` | with `orders` |
//! | `shuffle_source` | a shuffle that reads a lane outside its mask | `ShuffleSource` | yes | yes |
//! | `shuffle_source` | a group width that no GPU has | `ShuffleWidth` | yes | yes |
//! | `block_overlap` | two blocks on one output, or on each other's input | `Race` | passes | yes |
//! | `missing_fence` | a last-block reduction without a fence before its atomic | `Race` | passes | yes |
//! | `narrow_scope` | atomics of block scope by two blocks | `AtomicScope` | passes | yes |
//! | `tail` | a last vector that crosses the end | `OutOfBounds` | yes | yes |
//! | `tail` | a tail that no thread takes | found by comparing with the oracle | – | – |
//! | `shared_size` | a shared layout larger than the launch's shared memory | `SharedTooSmall` | yes | yes |
//! | `async_copies` | a read before the wait, or of a group never closed | `CopyUnderWay` | yes | yes |
//! | `async_copies` | no barrier between the wait and another lane's read | `Race` | passes | yes |
//! | `mbarriers` | one that is not there, or is used as a number | `NoMbarrier` and others | yes | yes |
//! | `mbarriers` | an arrival or a copy that does not come | `EndlessWait` | yes | yes |
//! | `mbarriers` | a write behind the arrival, an `init` that nobody is shown | `Race` | passes | yes |
//! | `bulk_copies` | a use before the wait | `CopyUnderWay` | yes | yes |
//! | `bulk_copies` | a wrong size or place, more bytes than expected | `BulkSize` and others | yes | yes |
//! | `bulk_copies` | a thread or a block that ends before its copy | `BulkLeft` | yes | yes |
//! | `bulk_copies` | a use by who has not waited, a tile filled again too early | `Race` | passes | yes |
//! | `bulk_copies` | a source that is written too early | `CopySource` | passes | yes |
//! | `bulk_copies` | a plain write or an `init` without a fence for copies | `NoProxyFence` | passes | yes |
//! | `products` | sums used early, products left behind, warps that part | `Products` | yes | yes |
//! | `products` | an operand of a wrong place | `Misaligned` and others | yes | yes |
//! | `products` | an operand that is written too early | `CopySource` | passes | yes |
//! | `products` | plain stores to an operand without a fence | `NoProxyFence` | passes | yes |
//! | `tiles` | a map that is none, not acquired or of another rank, a wrong place | `Tile` | yes | yes |
//! | `tiles` | a box used or changed early, not shown, or of two blocks | `Race` and others | passes | yes |
//! | `clusters` | no such rank, a block that is not there | `ClusterRank` and others | yes | yes |
//! | `clusters` | … where the order of blocks hides it | `ClusterEnded` | passes | yes |
//! | `clusters` | none comes, an arrival too many | `ClusterBarrier`, `ClusterArrival` | yes | yes |
//! | `clusters` | stored to another's memory, a fence of one's own | `NoProxyFence` | passes | yes |
//! | `clusters` | another block's element, no barrier of the cluster in between | `Race` | passes | yes |
//! | `late_wait` | a kernel that is to wait for the launch before, a path without | `NoWait` | yes | yes |
//! | `waits` | a lock kept, a circle, no room, a fault that others wait for | `EndlessWait` | yes | yes |
//! | `panics` | an assertion, an index, a division by zero | `Panic` | yes | yes |
//!
//! `orders` holds what schedules promise, `runner` what the launch itself promises: which fault is reported,
//! and that threads that a fault leaves parked are unwound.

mod active_lanes;
mod alignment;
mod async_copies;
mod block_overlap;
mod block_race;
mod bounds;
mod bulk_copies;
mod clusters;
mod divergent_barrier;
mod late_wait;
mod matrices;
mod mbarriers;
mod missing_fence;
mod narrow_scope;
mod orders;
mod panics;
#[expect(clippy::if_same_then_else, reason = "the bug is that warps go through different ones")]
mod products;
mod runner;
mod shared_size;
mod shuffle_mask;
mod shuffle_source;
mod support;
mod tail;
mod tiles;
mod unwritten_shared;
mod waits;
mod warp_race;
