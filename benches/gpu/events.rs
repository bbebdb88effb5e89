//! CUDA events as criterion's measurement: the time that a stream takes, without the host's.

use criterion::Throughput;
use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use host::{Device, Event, Stream};
use std::rc::Rc;

/// The time between two events of a stream, in nanoseconds.
///
/// What is measured must put its work into this stream, and need not wait for it: the events do, once for all
/// repetitions of a sample.
pub struct EventTime {
    device: Device,
    stream: Rc<Stream>,
}

impl EventTime {
    /// Measures `stream`.
    pub fn new(stream: &Rc<Stream>) -> Self {
        EventTime { device: stream.device().clone(), stream: Rc::clone(stream) }
    }

    fn record(&self) -> Event {
        let event = Event::new(&self.device).expect("an event");
        self.stream.record(&event).expect("an event is recorded");
        event
    }
}

impl Measurement for EventTime {
    type Intermediate = Event;
    type Value = f64;

    fn start(&self) -> Event {
        self.record()
    }

    fn end(&self, start: Event) -> f64 {
        self.record().elapsed_ms(&start).expect("what is measured runs") * 1e6
    }

    fn add(&self, a: &f64, b: &f64) -> f64 {
        a + b
    }

    fn zero(&self) -> f64 {
        0.0
    }

    fn to_f64(&self, value: &f64) -> f64 {
        *value
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &Nanoseconds
    }
}

/// Nanoseconds as criterion writes those of the clock.
struct Nanoseconds;

impl ValueFormatter for Nanoseconds {
    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_values(typical, values)
    }

    fn scale_throughputs(&self, typical: f64, throughput: &Throughput, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_throughputs(typical, throughput, values)
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_for_machines(values)
    }
}
