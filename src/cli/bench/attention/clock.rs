//! How much of the time that a benchmark may take is left, and whether a row fits into it.

use std::time::Instant;

/// Counts from the command's begin.
pub struct Clock {
    begin: Instant,
    /// What `--seconds` was given.
    seconds: f64,
    /// When the last row has to be done.
    end: f64,
    /// What rows have taken: bytes of caches, and seconds.
    taken: Vec<(u64, f64)>,
}

impl Clock {
    /// Rows may take a share of the seconds.
    pub fn new(begin: Instant, seconds: f64, share: f64) -> Self {
        Clock { begin, seconds, end: seconds * share, taken: Vec::new() }
    }

    /// Seconds since the begin.
    pub fn now(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }

    /// Whether a row over caches of so many bytes is done in time: it takes what the slowest row so far has
    /// taken, and longer in proportion if it has more bytes.
    pub fn has(&self, bytes: u64) -> bool {
        self.now() + expected(&self.taken, bytes) <= self.end
    }

    /// A row over caches of so many bytes took what has passed since `start`.
    pub fn took(&mut self, bytes: u64, start: f64) {
        self.taken.push((bytes, self.now() - start));
    }

    /// Why what does not fit is left out.
    pub fn reason(&self) -> String {
        format!("no time left (--seconds {})", self.seconds)
    }
}

fn expected(taken: &[(u64, f64)], bytes: u64) -> f64 {
    let scaled = taken.iter().map(|(of, seconds)| seconds * (bytes as f64 / (*of).max(1) as f64).max(1.0));
    scaled.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_expected_to_take_what_the_slowest_has_taken_for_its_bytes() {
        assert_eq!(expected(&[], 1 << 30), 0.0);
        let taken = [(100, 2.0), (400, 4.0)];
        assert_eq!([50, 100, 400, 800].map(|bytes| expected(&taken, bytes)), [4.0, 4.0, 8.0, 16.0]);
    }

    #[test]
    fn time_that_has_passed_is_not_there() {
        let mut clock = Clock::new(Instant::now(), 1000.0, 0.5);
        assert!(clock.has(1));
        clock.taken.push((1, 499.0));
        assert!(clock.has(1) && !clock.has(2));
        assert_eq!(clock.reason(), "no time left (--seconds 1000)");
        let start = clock.now();
        clock.took(7, start);
        assert!(clock.taken[1].0 == 7 && clock.taken[1].1 < 100.0);
        assert!(!Clock::new(Instant::now(), 0.0, 1.0).has(0));
    }
}
