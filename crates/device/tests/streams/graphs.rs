//! Graphs: a launch of one is the work of its steps.

use crate::case::{Found, Given, cases, double, down, twice, up};
use ferrokv_device::{GraphExec, Result, Stream};
use simt::LaunchShape;

/// Launches the graph.
#[track_caller]
fn run(graph: &GraphExec, stream: &Stream) -> Result<()> {
    // SAFETY: what the graphs of these cases name outlives them, and the emulator runs it in this call.
    unsafe { graph.launch(stream) }
}

fn beside_its_input(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let (graph, ()) = given.a.capture(|stream| {
        stream.fill_u32(&mut z, .., 0)?;
        twice(stream, &y, &mut z) // SECOND
    })?;
    let graph = graph.instantiate()?;
    twice(&given.b, &x, &mut y)?; // FIRST
    if !bug {
        given.order(&given.b, &given.a)?;
    }
    run(&graph, &given.a)?;
    given.device.synchronize()
}

fn beside_a_user_of_its_output(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let (graph, ()) = given.a.capture(|stream| {
        twice(stream, &x, &mut y) // FIRST
    })?;
    let graph = graph.instantiate()?;
    run(&graph, &given.a)?;
    if !bug {
        given.order(&given.a, &given.b)?;
    }
    twice(&given.b, &y, &mut z)?; // SECOND
    given.device.synchronize()
}

fn two_instances(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y) = (given.buffer(3), given.buffer(0));
    let (graph, ()) = given.a.capture(|stream| {
        twice(stream, &x, &mut y) // FIRST AND SECOND
    })?;
    let graphs = [graph.instantiate()?, graph.instantiate()?];
    run(&graphs[0], &given.a)?;
    // Each instance waits for its own last run.
    run(&graphs[usize::from(bug)], &given.b)?;
    given.device.synchronize()
}

fn input_overwritten(given: &Given, bug: bool) -> Result<()> {
    let (mut from, mut x, mut to) = (given.pinned(3), given.buffer(0), given.pinned(0));
    let (graph, ()) = given.a.capture(|stream| {
        up(stream, &from, &mut x)?; // FIRST
        down(stream, &x, &mut to)
    })?;
    let graph = graph.instantiate()?;
    for _ in 0..2 {
        from.try_slice_mut()?.fill(7); // SECOND
        run(&graph, &given.a)?;
        if !bug {
            given.a.synchronize()?;
            assert_eq!(to.try_slice()?[1], 7);
        }
    }
    given.device.synchronize()
}

fn updated_to_another_buffer(given: &Given, bug: bool) -> Result<()> {
    let (x, mut y, mut z) = (given.buffer(3), given.buffer(0), given.buffer(0));
    let (kernel, shape) = (double::kernel(), LaunchShape::new(1, 64));
    let (x, y, z) = (x.global(), y.global_mut(), z.global_mut());
    let (graph, node) = given.a.capture(|stream| {
        // SAFETY: memory of 64 elements, of which each thread has its own.
        unsafe { stream.launch_node(&kernel, shape, double::Args { x, y, start: 0 }) }
    })?;
    let mut graph = graph.instantiate()?;
    if bug {
        // SAFETY: as above.
        unsafe {
            graph.update(node, &kernel, shape, double::Args { x, y: z, start: 0 })?; // SECOND
        }
    }
    // SAFETY: as above, and the emulator runs it in this call.
    unsafe {
        given.b.launch(&kernel, shape, double::Args { x, y: z, start: 0 })?; // FIRST
    }
    run(&graph, &given.a)?;
    given.device.synchronize()
}

fn a_step_that_was_not_waited_for(given: &Given, bug: bool) -> Result<()> {
    let (mut x, mut y) = (given.buffer(3), given.buffer(0));
    let (graph, ()) = given.a.capture(|stream| {
        stream.fill_u32(&mut x, .., 5)?;
        twice(stream, &x, &mut y) // FIRST
    })?;
    let graph = graph.instantiate()?;
    run(&graph, &given.a)?;
    given.order(&given.a, &given.b)?;
    run(&graph, &given.a)?;
    if !bug {
        given.order(&given.a, &given.b)?;
    }
    given.b.fill_u8(&mut y, 63.., 0)?; // SECOND
    given.device.synchronize()
}

cases! { "graphs";
    beside_its_input: "a graph beside a launch that writes its input", Found::As("a launch reads what a launch writes", 0..256);
    beside_a_user_of_its_output: "a launch reads what a graph on another stream writes", Found::As("a launch reads what a launch writes", 0..256);
    two_instances: "two instances of one graph on two streams", Found::As("a launch writes what a launch writes", 0..256);
    input_overwritten: "a graph's pinned input is filled again before the wait", Found::As("the host writes what a copy reads", 0..256);
    updated_to_another_buffer: "a graph's launch is updated to what another stream writes", Found::As("a launch writes what a launch writes", 0..256);
    a_step_that_was_not_waited_for: "the event lies between two runs of a graph, not behind the second", Found::As("a fill writes what a launch writes", 252..256);
}
