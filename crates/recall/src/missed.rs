//! Mistakes that the emulator does not see. A test that finds one of them fails, so that the table stays
//! true.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::Found;
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{Global, GlobalMut, kernel, thread};

#[kernel]
fn path_not_taken(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x() as usize;
    let at = if bug != 0 && x.load(t) == 77 { 0 } else { t };
    y.store(at, 1);
}

#[kernel]
fn wrapping_index(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    // 2^31 elements to a row: in 32 bits all rows begin at 0.
    let t = thread::thread_idx_x();
    let rows = if bug != 0 { 1u32 << 31 } else { 0 };
    let at = rows.wrapping_mul(2 * (t % 3)) + t;
    y.store(at as usize, x.load(t as usize));
}

/// Says in `x[2]` whether both blocks have seen something, which no order of their steps brings about. Each
/// notes that in `x[3 + block]`; the last one looks at both notes and clears them, as one note alone depends
/// on the order.
#[inline(always)]
fn noted(x: GlobalMut<u32>, seen: bool) {
    x.atomic_store(3 + thread::block_idx_x() as usize, seen as u32);
    if last(x) {
        if x.atomic_load(3) == 1 && x.atomic_load(4) == 1 {
            x.atomic_max(2, 1);
        }
        x.atomic_store(3, 0);
        x.atomic_store(4, 0);
    }
}

/// Whether the block is the second one here. It then knows all that the first did.
#[inline(always)]
fn last(x: GlobalMut<u32>) -> bool {
    thread::device_fence();
    let last = x.atomic_add(5, 1) == 1;
    thread::device_fence();
    last
}

#[kernel]
fn load_buffering(x: GlobalMut<u32>, bug: u32) {
    // Each looks at the other's word, then sets its own: load buffering. Both may see what the other set.
    let own = thread::block_idx_x() as usize;
    let seen = x.atomic_load(1 - own);
    if bug == 0 {
        thread::device_fence();
    }
    x.atomic_store(own, 1);
    noted(x, seen == 1);
}

#[kernel]
fn two_words_set_by_two(x: GlobalMut<u32>, bug: u32) {
    // Each sets its own word first, the other's behind it: the litmus test 2+2W. Both first ones may stay.
    let own = thread::block_idx_x() as usize;
    x.atomic_store(own, 1);
    if bug == 0 {
        thread::device_fence_sc();
    }
    x.atomic_store(1 - own, 2);
    if last(x) {
        if x.atomic_load(0) == 1 && x.atomic_load(1) == 1 {
            x.atomic_max(2, 1);
        }
        x.atomic_store(0, 0);
        x.atomic_store(1, 0);
    }
}

#[kernel]
fn message_set_again(x: GlobalMut<u32>, bug: u32) {
    // Block 0 sets a word and a flag; block 1 looks at the flag and sets the word again: the litmus test S.
    // If it sees the flag, the first value may stay all the same.
    let (word, flag, seen) = (0, 1, 3);
    if thread::block_idx_x() == 0 {
        x.atomic_store(word, 2);
        if bug == 0 {
            thread::device_fence();
        }
        x.atomic_store(flag, 1);
    } else {
        x.atomic_store(seen, x.atomic_load(flag));
        if bug == 0 {
            thread::device_fence();
        }
        x.atomic_store(word, 1);
    }
    if last(x) {
        if x.atomic_load(word) == 2 && x.atomic_load(seen) == 1 {
            x.atomic_max(2, 1);
        }
        x.atomic_store(word, 0);
        x.atomic_store(seen, 0);
    }
}

/// Without `#[simt::device]` its caller's line is not known.
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn meet() {
    thread::sync_threads();
}

#[kernel]
fn helper_last_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    // Where the CPU's code is optimised the two calls are one: nothing follows them that differs. All
    // profiles of the workspace optimise; without that the race check finds it.
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        y.store(t as usize, 1);
        meet();
    } else {
        y.store(t as usize, 2);
        meet();
    }
}

#[cfg(not(target_arch = "nvptx64"))]
const STORES: &str = "stores are never delayed";

/// Two blocks of one thread; `x[2]` is 0 unless something is seen that no order of steps brings about.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! two_threads {
    ($kernel:ident, $on:ident, $bug:ident) => {{
        let mut x = [0; 6];
        let args = $kernel::Args { x: $on.write(&mut x)?, bug: $bug };
        $on.go($kernel::kernel(), LaunchShape::new(2, 1), args)?;
        assert!($bug == 1 || x[2] == 0, "the fences bring about no order");
        Ok(())
    }};
}

#[cfg(not(target_arch = "nvptx64"))]
const PATHS: &str = "only paths that this input takes are run";

cases! { "missed";
    path_not_taken: "a race on a branch that no value takes", Found::Missed(PATHS), |bug, on| {
        let (x, mut y) = ([1; 64], [0; 64]);
        on.go(path_not_taken::kernel(), LaunchShape::new(1, 64),
            path_not_taken::Args { x: on.read(&x)?, y: on.write(&mut y)?, bug })
    };
    wrapping_index: "an index that wraps to a place in bounds",
        Found::Missed("the source asks for it; the place is in bounds"), |bug, on| {
            let (x, mut y) = ([1; 64], [0; 64]);
            on.go(wrapping_index::kernel(), LaunchShape::new(1, 64),
                wrapping_index::Args { x: on.read(&x)?, y: on.write(&mut y)?, bug })
        };
    load_buffering: "load buffering: two threads that look, then set",
        Found::Missed(STORES), |bug, on| two_threads!(load_buffering, on, bug);
    two_words_set_by_two: "2+2W: two words that two threads set, no fence",
        Found::Missed(STORES), |bug, on| two_threads!(two_words_set_by_two, on, bug);
    message_set_again: "S: a word that is set again behind its flag, no fence",
        Found::Missed(STORES), |bug, on| two_threads!(message_set_again, on, bug);
    helper_last_in_both_arms: "a barrier in a helper, last in both arms",
        Found::Missed("the CPU's compiler makes one call of two"), |bug, on| {
            let mut y = [0; 64];
            on.go(helper_last_in_both_arms::kernel(), LaunchShape::new(1, 64),
                helper_last_in_both_arms::Args { y: on.write(&mut y)?, bug })
        };
}
