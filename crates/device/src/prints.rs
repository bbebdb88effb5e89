//! Lines that a GPU's kernels have printed: read from the ring, put together with the texts of the PTX.

use crate::sites::{Site, Value, dim, filled, numbered};
use simt::emu::{Place, ThreadId, interned};
use simt::on_device::lines::{COUNT, HEAD_BYTES, KINDS, RECORD_WORDS, VALUES};
use simt::print::{Line, Printed};
use std::collections::HashMap;

/// Ahead of a site, in a line of its own.
const SITE: &str = "// simt.print ";
/// 64-bit words of a record.
const RECORD: usize = RECORD_WORDS / 2;

/// Reads the lines of a ring, each once.
pub(crate) struct Reader {
    ptx: &'static str,
    /// The PTX's places that print, from the first line on.
    sites: Option<HashMap<u32, Site<'static>>>,
    /// The number of the next line.
    next: u64,
    lost: u64,
}

impl Reader {
    /// Of a ring of a program of this PTX.
    pub(crate) fn new(ptx: &'static str) -> Self {
        Reader { ptx, sites: None, next: 0, lost: 0 }
    }

    /// How many lines have been read.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The lines that are there and have not been read, and at their end how many were lost. `word` is what
    /// the ring has in a 64-bit word.
    ///
    /// A kernel that runs may have taken a number and not written its line; then that line and those behind
    /// it are left for the next time, unless all kernels are `stopped`: then the line never comes.
    pub(crate) fn read(&mut self, word: impl Fn(usize) -> u64, stopped: bool) -> Vec<Printed> {
        let mut printed = Vec::new();
        let (first, mut behind) = (self.next, self.next);
        for number in first..first + COUNT {
            let at = HEAD_BYTES / 8 + (number % COUNT) as usize * RECORD;
            if word(at) == number + 1 {
                let mut record = [0; RECORD_WORDS];
                for (i, pair) in record.chunks_exact_mut(2).enumerate() {
                    let both = word(at + i);
                    (pair[0], pair[1]) = (both as u32, (both >> 32) as u32);
                }
                printed.push(Printed::Line(self.line(&record)));
                behind = number + 1;
            } else if !stopped {
                break;
            }
        }
        self.next = behind;
        let lost = word(1);
        if lost > self.lost {
            printed.push(Printed::Lost { lines: lost - self.lost });
            self.lost = lost;
        }
        printed
    }

    fn line(&mut self, record: &[u32; RECORD_WORDS]) -> Line {
        let sites = self.sites.get_or_insert_with(|| numbered(self.ptx, SITE).collect());
        let thread = ThreadId { block: dim(&record[3..]), thread: dim(&record[6..]) };
        let kinds = u64::from(record[KINDS]) | u64::from(record[KINDS + 1]) << 32;
        let values: Vec<Value> = (0..VALUES).map(|i| Value::of(kinds, i, &record[KINDS + 2..])).collect();
        match sites.get(&record[2]) {
            Some(Site { entry, place, message }) => {
                Line { kernel: interned(entry), thread, place: *place, text: filled(message, &values) }
            }
            None => {
                let text = format!("line at site {}, which the PTX of this program does not list", record[2]);
                Line { kernel: "?", thread, place: Place { file: "?", line: 0, column: 0 }, text }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use simt::on_device::Kind;

    // A text may end in a space.
    const PTX: &str = "\
.entry scale()
{
\t// simt.site 1 scale src/lib.rs:7:9 no
\t// simt.print 1 scale src/lib.rs:8:9 {0} of {7:#x} 
\t// simt.print 2 scale src/lib.rs:9:9 ";

    struct Ring(Vec<u64>);

    impl Ring {
        fn new() -> Self {
            Ring(vec![0; HEAD_BYTES / 8 + COUNT as usize * RECORD])
        }

        /// What a kernel's thread writes.
        fn put(&mut self, number: u64, site: u64, value: u64) {
            let at = HEAD_BYTES / 8 + (number % COUNT) as usize * RECORD;
            let kinds = Kind::Unsigned as u64 | (Kind::Signed8 as u64) << 56;
            // Site and block; thread.
            let words = [number + 1, site | 4 << 32, 5 | 6 << 32, 7 | 8 << 32, 9, kinds, value];
            self.0[at..at + 7].copy_from_slice(&words);
            self.0[at + 13] = -1_i64 as u64;
        }

        fn read(&self, reader: &mut Reader, stopped: bool) -> Vec<String> {
            reader.read(|at| self.0[at], stopped).iter().map(Printed::to_string).collect()
        }
    }

    #[test]
    fn a_record_is_a_line_of_its_thread() {
        let (mut ring, mut reader) = (Ring::new(), Reader::new(PTX));
        assert!(ring.read(&mut reader, false).is_empty());
        ring.put(0, 1, 12);
        ring.put(1, 2, 0);
        ring.put(2, 3, 0);
        let thread = "block (4,5,6) thread (7,8,9)";
        let said = ring.read(&mut reader, false);
        assert_eq!(said[0], format!("kernel scale, {thread}: 12 of 0xff "));
        assert_eq!(said[1], format!("kernel scale, {thread}: "));
        assert!(said[2].ends_with("line at site 3, which the PTX of this program does not list"), "{said:?}");
        assert!(ring.read(&mut reader, false).is_empty());
    }

    #[test]
    fn a_line_that_is_not_there_yet_holds_up_those_behind_it_while_a_kernel_may_write_it() {
        let (mut ring, mut reader) = (Ring::new(), Reader::new(PTX));
        [0, 1, 3].into_iter().for_each(|number| ring.put(number, 1, number));
        assert_eq!(ring.read(&mut reader, false).len(), 2);
        assert_eq!((ring.read(&mut reader, false).len(), reader.next()), (0, 2));
        ring.put(2, 1, 2);
        assert_eq!((ring.read(&mut reader, false).len(), reader.next()), (2, 4));
        ring.put(6, 1, 6);
        assert_eq!((ring.read(&mut reader, true).len(), reader.next()), (1, 7));
    }

    #[test]
    fn the_ring_begins_again_and_what_found_no_room_is_said_once() {
        let (mut ring, mut reader) = (Ring::new(), Reader::new(PTX));
        (0..COUNT).for_each(|number| ring.put(number, 1, number));
        ring.0[1] = 7;
        let said = ring.read(&mut reader, false);
        assert_eq!(said.len() as u64, COUNT + 1);
        assert_eq!(said.last().unwrap(), "7 more lines of kernels found no room and are lost");
        ring.put(COUNT, 1, 0);
        ring.0[1] = 9;
        let said = ring.read(&mut reader, false);
        assert!(said[0].ends_with(": 0 of 0xff ") && said[1].starts_with("2 more"), "{said:?}");
        assert!(ring.read(&mut reader, true).is_empty());
    }
}
