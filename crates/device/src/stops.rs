//! Why a grid stopped: the record that a kernel's `assert!` or `panic!` leaves.

use crate::sites::{Site, Value, dim, filled, numbered};
use simt::emu::{Fault, FaultKind, Schedule, ThreadId, interned};
use simt::on_device::RECORD_WORDS;

/// Ahead of a site, in a line of its own.
const SITE: &str = "// simt.site ";
/// The record is there.
const WRITTEN: u32 = 2;

/// The fault that a record tells of, in a program of this PTX; nothing if no thread has written one.
pub(crate) fn fault(record: &[u32; RECORD_WORDS], ptx: &str) -> Option<Fault> {
    if record[0] != WRITTEN {
        return None;
    }
    let thread = Some(ThreadId { block: dim(&record[2..]), thread: dim(&record[5..]) });
    let kinds = u64::from(record[8]);
    let values: Vec<Value> = (0..4).map(|i| Value::of(kinds, i, &record[10..])).collect();
    let schedule = Schedule::Parallel;
    let site = numbered(ptx, SITE).find(|(number, _)| *number == record[1]);
    let Some((_, Site { entry, place, message })) = site else {
        let message = format!("at site {}, which the PTX of this program does not list", record[1]);
        return Some(Fault {
            kernel: "?",
            thread,
            place: None,
            kind: FaultKind::Panic { message },
            schedule,
        });
    };
    let kind = FaultKind::Panic { message: filled(message, &values) };
    Some(Fault { kernel: interned(entry), thread, place: Some(place), kind, schedule })
}

#[cfg(test)]
mod tests {
    use super::*;
    use simt::on_device::Kind;

    const PTX: &str = "\
.entry scale()
{
\t// simt.site 1 scale src/lib.rs:7:9 no\\u{a}more \\\\ {{}}
\t// simt.site 12 scale_f16 C:\\x.rs:70:91 {0} of {1:#06x}, {2:.2}, {3:?}
}
";

    fn record(site: u32, values: [(Kind, u64); 4]) -> [u32; RECORD_WORDS] {
        let mut record = [0; RECORD_WORDS];
        record[..8].copy_from_slice(&[2, site, 3, 4, 5, 6, 7, 8]);
        for (i, (kind, word)) in values.into_iter().enumerate() {
            record[8] |= (kind as u32) << (8 * i);
            (record[10 + 2 * i], record[11 + 2 * i]) = (word as u32, (word >> 32) as u32);
        }
        record
    }

    #[test]
    fn a_record_is_the_emulators_fault() {
        let none = [(Kind::None, 0); 4];
        assert_eq!(fault(&[0; RECORD_WORDS], PTX), None);
        let mut early = record(1, none);
        early[0] = 1;
        assert_eq!(fault(&early, PTX), None);
        let found = fault(&record(1, none), PTX).unwrap();
        assert_eq!(
            found.to_string(),
            "kernel scale, block (3,4,5) thread (6,7,8), at src/lib.rs:7:9: the kernel panicked: no\nmore \\ {}"
        );
        let values = [
            (Kind::Signed, -3_i64 as u64),
            (Kind::Unsigned, 255),
            (Kind::F32, 1.5_f32.to_bits().into()),
            (Kind::Char, 'x'.into()),
        ];
        let found = fault(&record(12, values), PTX).unwrap();
        assert_eq!((found.kernel, found.place.unwrap().line), ("scale_f16", 70));
        assert_eq!(found.kind, FaultKind::Panic { message: "-3 of 0x00ff, 1.50, 'x'".into() });
        let unknown = fault(&record(2, none), PTX).unwrap();
        assert!(unknown.to_string().contains("at site 2"), "{unknown}");
    }
}
