//! Irregular kernels over a graph, after the patterns of the Indigo suite: atomic, guard, bounds, sync and
//! race bugs, and combinations. The graph is a ring with chords in rows of neighbours (CSR).

#[cfg(not(target_arch = "nvptx64"))]
use crate::Machine;
#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use ferrokv_device::Result;
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, thread};
#[cfg(not(target_arch = "nvptx64"))]
use simt::{Kernel, LaunchShape};

#[cfg(not(target_arch = "nvptx64"))]
const VERTICES: usize = 70;

/// Where each vertex' neighbours begin, and the neighbours.
#[cfg(not(target_arch = "nvptx64"))]
fn graph() -> (Vec<u32>, Vec<u32>) {
    let (mut rows, mut neighbours) = (vec![0], Vec::new());
    for v in 0..VERTICES {
        let chords = if v % 3 == 0 { vec![1, 7, 12] } else { vec![1, 7] };
        neighbours.extend(chords.into_iter().map(|step| ((v + step) % VERTICES) as u32));
        rows.push(neighbours.len() as u32);
    }
    (rows, neighbours)
}

const fn layout() -> (Shared<u32>, Shared<u32>) {
    let mut plan = SharedPlan::new();
    (plan.array(16), plan.array(64))
}

#[cfg(not(target_arch = "nvptx64"))]
fn shape() -> LaunchShape {
    LaunchShape::new(3, 32)
}

#[kernel]
fn pull(rows: Global<u32>, neighbours: Global<u32>, x: Global<u32>, y: GlobalMut<u32>, n: u32, bug: u32) {
    let v = thread::index_1d();
    if v < n as usize + bug as usize {
        let end = rows.load(v + 1); // BUG: one vertex too many
        let mut best = 0;
        for e in rows.load(v)..end {
            best = best.max(x.load(neighbours.load(e as usize) as usize));
        }
        y.store(v, best);
    }
}

#[kernel(args = pull)]
fn push(rows: Global<u32>, neighbours: Global<u32>, x: Global<u32>, y: GlobalMut<u32>, n: u32, bug: u32) {
    let v = thread::index_1d();
    if v >= n as usize {
        return;
    }
    for e in rows.load(v)..rows.load(v + 1) {
        let to = neighbours.load(e as usize) as usize;
        if bug != 0 {
            y.store(to, y.load(to) + x.load(v)); // BUG: no atomic
        } else {
            y.atomic_add(to, x.load(v));
        }
    }
}

#[kernel(args = pull)]
fn count_edges(
    rows: Global<u32>,
    neighbours: Global<u32>,
    x: Global<u32>,
    y: GlobalMut<u32>,
    n: u32,
    bug: u32,
) {
    let v = thread::index_1d();
    if v >= n as usize {
        return;
    }
    for e in rows.load(v)..rows.load(v + 1) {
        let to = neighbours.load(e as usize) as usize;
        if x.load(v) < x.load(to) {
            if bug != 0 && v == 41 {
                y.store(0, y.load(0) + 1); // BUG: one path without the atomic
            } else {
                y.atomic_add(0, 1);
            }
        }
    }
}

#[kernel(args = pull)]
fn guarded_max(
    rows: Global<u32>,
    neighbours: Global<u32>,
    x: Global<u32>,
    y: GlobalMut<u32>,
    n: u32,
    bug: u32,
) {
    let v = thread::index_1d();
    if v < n as usize {
        let value = x.load(v) + rows.load(v + 1) + neighbours.load(v);
        let largest = if bug != 0 { y.load(0) } else { 0 }; // BUG: the guard is a plain load
        if value > largest {
            y.atomic_max(0, value);
        }
    }
}

#[kernel(args = pull)]
fn mark_neighbours(
    rows: Global<u32>,
    neighbours: Global<u32>,
    x: Global<u32>,
    y: GlobalMut<u32>,
    n: u32,
    bug: u32,
) {
    let v = thread::index_1d();
    if v >= n as usize || x.load(v).is_multiple_of(2) {
        return;
    }
    for e in rows.load(v)..rows.load(v + 1) {
        let to = neighbours.load(e as usize) as usize;
        if bug != 0 {
            let word = y.atomic_or(to / 32, 0);
            y.atomic_exchange(to / 32, word | 1 << (to % 32)); // BUG: two atomics for one
        } else {
            y.atomic_or(to / 32, 1 << (to % 32));
        }
    }
}

#[kernel(args = pull)]
fn hook(rows: Global<u32>, neighbours: Global<u32>, x: Global<u32>, y: GlobalMut<u32>, n: u32, bug: u32) {
    // Each vertex hands its value to its neighbours; the smallest stays.
    let v = thread::index_1d();
    if v >= n as usize {
        return;
    }
    for e in rows.load(v)..rows.load(v + 1) {
        let to = neighbours.load(e as usize) as usize;
        if bug != 0 {
            y.store(to, x.load(v)); // BUG: several hook one vertex
        } else {
            y.atomic_min(to, x.load(v));
        }
    }
}

#[kernel(args = pull)]
fn row_end(rows: Global<u32>, neighbours: Global<u32>, x: Global<u32>, y: GlobalMut<u32>, n: u32, bug: u32) {
    let v = thread::index_1d();
    if v < n as usize {
        let mut sum = 0;
        for e in rows.load(v)..rows.load(v + 1) + bug {
            sum += x.load(neighbours.load(e as usize) as usize); // BUG: past the last row
        }
        y.store(v, sum);
    }
}

#[kernel(args = pull)]
fn block_sum(
    rows: Global<u32>,
    neighbours: Global<u32>,
    x: Global<u32>,
    y: GlobalMut<u32>,
    n: u32,
    bug: u32,
) {
    let (t, v) = (thread::thread_idx_x(), thread::index_1d());
    let (_, partial) = layout();
    let degree = if v < n as usize { rows.load(v + 1) - rows.load(v) } else { 0 };
    partial.store(t, degree);
    if bug == 0 {
        thread::sync_threads();
    }
    if t == thread::block_dim_x() - 1 {
        let mut sum = 0;
        for i in 0..thread::block_dim_x() {
            sum += partial.load(i); // BUG: no barrier behind the stores
        }
        y.store(thread::block_idx_x() as usize, sum + x.load(0) + neighbours.load(0));
    }
}

#[kernel(args = pull)]
fn degrees(rows: Global<u32>, neighbours: Global<u32>, x: Global<u32>, y: GlobalMut<u32>, n: u32, bug: u32) {
    // How many neighbours of the block's vertices have each value.
    let (t, v) = (thread::thread_idx_x(), thread::index_1d());
    let (bins, _) = layout();
    if t < 16 {
        bins.store(t, 0);
    }
    thread::sync_threads();
    if v < n as usize {
        for e in rows.load(v)..rows.load(v + 1) {
            let value = x.load(neighbours.load(e as usize) as usize);
            bins.atomic_add(if bug != 0 { value } else { value % 16 }, 1); // BUG: more values than bins
        }
    }
    thread::sync_threads();
    if t < 16 {
        y.atomic_add(t as usize, bins.load(t));
    }
}

#[kernel(args = pull)]
fn no_barrier_after_zero(
    rows: Global<u32>,
    neighbours: Global<u32>,
    x: Global<u32>,
    y: GlobalMut<u32>,
    n: u32,
    bug: u32,
) {
    let (t, v) = (thread::thread_idx_x(), thread::index_1d());
    let (bins, _) = layout();
    if t == 0 {
        bins.store(0, 0);
    }
    if bug == 0 {
        thread::sync_threads();
    }
    if v < n as usize {
        bins.atomic_max(0, x.load(v) + rows.load(v) + neighbours.load(v)); // BUG: the word may not be set yet
    }
    thread::sync_threads();
    if t == 0 {
        y.atomic_max(0, bins.load(0));
    }
}

#[kernel(args = pull)]
fn in_place(rows: Global<u32>, neighbours: Global<u32>, x: Global<u32>, y: GlobalMut<u32>, n: u32, bug: u32) {
    let v = thread::index_1d();
    if v >= n as usize {
        return;
    }
    let mut best = x.load(v);
    for e in rows.load(v)..rows.load(v + 1) {
        let to = neighbours.load(e as usize) as usize;
        best = best.max(if bug != 0 { y.load(to) } else { x.load(to) });
    }
    y.store(v, best); // BUG: others read it
}

#[cfg(not(target_arch = "nvptx64"))]
fn run(bug: u32, on: &Machine, kernel: Kernel<pull::Args>, shape: LaunchShape) -> Result<()> {
    let (rows, neighbours) = graph();
    let x: Vec<u32> = (0..VERTICES as u32).map(|v| v * 5 % 41).collect();
    let mut y = vec![0; VERTICES];
    let n = VERTICES as u32;
    let args = pull::Args {
        rows: on.read(&rows)?,
        neighbours: on.read(&neighbours)?,
        x: on.read(&x)?,
        y: on.write(&mut y)?,
        n,
        bug,
    };
    on.go(kernel, shape, args)
}

cases! { "indigo";
    pull: "bounds: a vertex too many", Found::In(Mode::Default, "OutOfBounds", "one vertex too many", (2, 6)),
        |bug, on| run(bug, on, pull::kernel(), shape());
    push: "atomic: a sum by load and store", Found::In(Mode::Races, "Race", "no atomic", (0, 5)),
        |bug, on| run(bug, on, push::kernel(), shape());
    count_edges: "atomic: one path without it", Found::In(Mode::Races, "Race", "one path without the atomic", (1, 9)),
        |bug, on| run(bug, on, count_edges::kernel(), shape());
    guarded_max: "guard: a plain load guards an atomic", Found::In(Mode::Races, "Race", "the guard is a plain load", (0, 1)),
        |bug, on| run(bug, on, guarded_max::kernel(), shape());
    mark_neighbours: "atomic: a read and a write for one update", Found::In(Mode::Orders, "OrderDependence", "two atomics for one", (2, 0)),
        |bug, on| run(bug, on, mark_neighbours::kernel(), shape());
    hook: "race: several write one vertex", Found::In(Mode::Races, "Race", "several hook one vertex", (0, 5)),
        |bug, on| run(bug, on, hook::kernel(), shape());
    row_end: "bounds: a row that ends too late", Found::In(Mode::Default, "OutOfBounds", "past the last row", (2, 5)),
        |bug, on| run(bug, on, row_end::kernel(), shape());
    block_sum: "sync: no barrier ahead of the sum", Found::In(Mode::Races, "Race", "no barrier behind the stores", (0, 31)),
        |bug, on| run(bug, on, block_sum::kernel(), shape().shared(320));
    degrees: "bounds and atomic: more values than bins", Found::In(Mode::Default, "OutOfBounds", "more values than bins", (0, 0)),
        |bug, on| run(bug, on, degrees::kernel(), shape().shared(320));
    no_barrier_after_zero: "sync and atomic: atomics on a word that is being set",
        Found::In(Mode::Races, "Race", "the word may not be set yet", (0, 1)),
        |bug, on| run(bug, on, no_barrier_after_zero::kernel(), shape().shared(320));
    in_place: "race: reads what others write", Found::In(Mode::Races, "Race", "others read it", (0, 1)),
        |bug, on| run(bug, on, in_place::kernel(), shape());
}
