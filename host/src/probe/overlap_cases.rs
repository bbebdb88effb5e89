//! The cases of launches that overlap.

use super::Samples;
use crate::check::{Case, CaseError, OutputBuffer, poisoned};
use crate::{Buffer, Device, NodeId, Stream};
use kernels_gpu::mix;
use kernels_gpu::probe::overlaps;
use simt::LaunchShape;

pub(super) fn cases(samples: Samples) -> Vec<Case> {
    // Elements and links: one block; all blocks of two links fit a GPU at once; one link is more than a GPU
    // holds.
    let mut sizes = vec![(100, 64), if samples == Samples::SMALL { (1_000, 16) } else { (20_000, 64) }];
    if samples.patterns > Samples::QUICK.patterns {
        sizes.push((600_001, 16));
    }
    let mut cases = Vec::new();
    for (n, links) in sizes {
        for mixed in [false, true] {
            let between = if mixed { " with other work between" } else { "" };
            let label = format!("n={n} links={links}{between}");
            let run = move |device: &Device| -> Result<_, CaseError> {
                let stream = Stream::new(device)?;
                let mut relay = Relay::new(device, &stream, n)?;
                relay.links(&stream, links, mixed)?;
                stream.synchronize()?;
                relay.outputs()
            };
            cases.push(case(label, n, run));

            let label = format!("n={n} links={links}{between}, in a graph");
            let run = move |device: &Device| -> Result<_, CaseError> {
                let stream = Stream::new(device)?;
                let mut relay = Relay::new(device, &stream, n)?;
                let (graph, node) = stream.capture(|stream| {
                    relay.links(stream, links, mixed)?;
                    let node = relay.node(stream, links)?;
                    relay.links(stream, links, mixed)?;
                    Ok(node)
                })?;
                let mut exec = graph.instantiate()?;
                // Launches, the graph twice, a link of it changed, launches again: all in the stream's order.
                relay.links(&stream, links, mixed)?;
                for step in [links, links + 1] {
                    let (kernel, shape) = (overlaps::link::kernel(), relay.shape());
                    // SAFETY: as in `Relay::node`; the link reads and writes what it did as captured.
                    unsafe {
                        exec.update(node, &kernel, shape, relay.arguments(links, step))?;
                        exec.launch(&stream)?;
                        exec.launch(&stream)?;
                    }
                }
                relay.links(&stream, links, mixed)?;
                stream.synchronize()?;
                relay.outputs()
            };
            cases.push(case(label, n, run));
        }
    }
    cases
}

fn case(
    label: String,
    n: u32,
    run: impl Fn(&Device) -> Result<Vec<OutputBuffer>, CaseError> + Send + Sync + 'static,
) -> Case {
    let case = Case::new(overlaps::link::kernel().info(), label, run);
    let case = case.and(overlaps::link_in_order::kernel().info());
    if n <= 100 { case.race_checked() } else { case }
}

/// What the links of a chain write in turns, `n` elements each, and what other work between them writes.
struct Relay {
    n: u32,
    first: Buffer<u32>,
    second: Buffer<u32>,
    aside: Buffer<u32>,
}

impl Relay {
    fn new(device: &Device, stream: &Stream, n: u32) -> Result<Self, CaseError> {
        let words: Vec<u32> = (0..n).map(|i| mix(i.into()) as u32).collect();
        Ok(Relay {
            n,
            first: Buffer::from_slice(device, &words)?,
            second: poisoned(stream, n as usize)?,
            aside: Buffer::from_slice(device, &words)?,
        })
    }

    fn shape(&self) -> LaunchShape {
        LaunchShape::new(self.n.div_ceil(overlaps::THREADS), overlaps::THREADS)
    }

    /// The arguments of link number `link`, which computes `step`.
    fn arguments(&mut self, link: u32, step: u32) -> overlaps::link::Args {
        let (from, to) = match link % 2 {
            0 => (self.first.global(), self.second.global_mut()),
            _ => (self.second.global(), self.first.global_mut()),
        };
        overlaps::link::Args { from, to, n: self.n, step }
    }

    /// `links` links, an even number. With `mixed`, now and then one is in order, or there is other work
    /// between two: a copy of what the one wrote and the next reads, a fill of a part of that.
    fn links(&mut self, stream: &Stream, links: u32, mixed: bool) -> crate::Result<()> {
        let shape = self.shape();
        for link in 0..links {
            let in_order = mixed && link % 8 == 3;
            let kernel = if in_order { overlaps::link_in_order::kernel() } else { overlaps::link::kernel() };
            // SAFETY: both buffers have `n` elements, the stream keeps the links apart, and its user the
            // buffers alive.
            unsafe { stream.launch(&kernel, shape, self.arguments(link, link)) }?;
            let written = if link % 2 == 0 { &mut self.second } else { &mut self.first };
            if mixed && link % 16 == 5 {
                stream.copy(written, .., &mut self.aside, 0)?;
            }
            if mixed && link % 16 == 10 {
                stream.fill_u32(written, ..self.n as usize / 2, link)?;
            }
        }
        Ok(())
    }

    /// Link number `link`, as a node of the graph that is captured.
    fn node(&mut self, stream: &Stream, link: u32) -> crate::Result<NodeId> {
        let shape = self.shape();
        // SAFETY: both buffers have `n` elements, the stream keeps the links apart, and its user the buffers
        // alive.
        unsafe { stream.launch_node(&overlaps::link::kernel(), shape, self.arguments(link, link)) }
    }

    fn outputs(&self) -> Result<Vec<OutputBuffer>, CaseError> {
        Ok(vec![
            OutputBuffer::download("first", &self.first)?,
            OutputBuffer::download("second", &self.second)?,
            OutputBuffer::download("aside", &self.aside)?,
        ])
    }
}
