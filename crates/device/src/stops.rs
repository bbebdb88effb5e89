//! Why a grid stopped: the record that a kernel's `assert!` or `panic!` leaves, and the sites of a PTX text.
//!
//! Sites are comments, `// simt.site NUMBER ENTRY FILE:LINE:COLUMN MESSAGE`, with `{0:x}` in the message for
//! the first value in base 16 ([`simt::on_device`] has the record, `ptx-build` the numbers).

use half::{bf16, f16};
use simt::Dim3;
use simt::emu::{Fault, FaultKind, Place, Schedule, ThreadId, interned};
use simt::on_device::{Kind, RECORD_WORDS};
use std::fmt::{Binary, Debug, Display, LowerHex, Octal, UpperHex};

/// Ahead of a site, in a line of its own.
const SITE: &str = "// simt.site ";
/// The record is there.
const WRITTEN: u32 = 2;

/// The fault that a record tells of, in a program of this PTX; nothing if no thread has written one.
pub(crate) fn fault(record: &[u32; RECORD_WORDS], ptx: &str) -> Option<Fault> {
    if record[0] != WRITTEN {
        return None;
    }
    let dim = |at: usize| Dim3 { x: record[at], y: record[at + 1], z: record[at + 2] };
    let thread = Some(ThreadId { block: dim(2), thread: dim(5) });
    let values: Vec<Value> = (0..4)
        .map(|i| {
            let word = u64::from(record[10 + 2 * i]) | u64::from(record[11 + 2 * i]) << 32;
            Value { kind: record[8] >> (8 * i) & 0xff, word }
        })
        .collect();
    let schedule = Schedule::Parallel;
    let number = record[1].to_string();
    let site = ptx.lines().filter_map(|line| line.trim().strip_prefix(SITE)).find_map(|site| {
        let (found, rest) = site.split_once(' ')?;
        (found == number).then_some(rest)
    });
    let Some((entry, at, message)) = site.and_then(parts) else {
        let message = format!("at site {number}, which the PTX of this program does not list");
        return Some(Fault {
            kernel: "?",
            thread,
            place: None,
            kind: FaultKind::Panic { message },
            schedule,
        });
    };
    let kind = FaultKind::Panic { message: filled(message, &values) };
    Some(Fault { kernel: interned(entry), thread, place: Some(at), kind, schedule })
}

/// Entry, place and message of a site.
fn parts(site: &str) -> Option<(&str, Place, &str)> {
    let (entry, rest) = site.split_once(' ')?;
    let (at, message) = rest.split_once(' ').unwrap_or((rest, ""));
    let mut numbers = at.rsplitn(3, ':');
    let column = numbers.next()?.parse().ok()?;
    let line = numbers.next()?.parse().ok()?;
    Some((entry, Place { file: interned(numbers.next()?), line, column }, message))
}

/// A value of a message.
struct Value {
    kind: u32,
    word: u64,
}

/// The message with its values in place.
fn filled(message: &str, values: &[Value]) -> String {
    let mut text = String::new();
    let mut rest = message;
    while let Some(at) = rest.find(['{', '}', '\\']) {
        let (before, from) = rest.split_at(at);
        text.push_str(before);
        let taken = if let Some(c) = from.strip_prefix("\\u{").and_then(|code| {
            let (code, _) = code.split_once('}')?;
            Some((char::from_u32(u32::from_str_radix(code, 16).ok()?)?, code.len() + 4))
        }) {
            text.push(c.0);
            c.1
        } else if from.starts_with("{{") || from.starts_with("}}") || from.starts_with("\\\\") {
            text.push_str(&from[..1]);
            2
        } else {
            let end = from.find('}').unwrap_or(from.len() - 1);
            let (index, format) =
                from[1.min(end)..end].split_once(':').unwrap_or((&from[1.min(end)..end], ""));
            match index.parse::<usize>().ok().and_then(|index| values.get(index)) {
                Some(value) => text.push_str(&value.text(format)),
                None => text.push_str(&from[..=end]),
            }
            end + 1
        };
        rest = &from[taken..];
    }
    text + rest
}

impl Value {
    /// It in a format: `[#][0][width][.precision][? x X b o]`.
    fn text(&self, format: &str) -> String {
        let format = Format::read(format);
        let kind = Kind::ALL.get(self.kind as usize).copied().unwrap_or(Kind::None);
        match kind {
            Kind::None => "?".to_owned(),
            Kind::Unsigned => format.whole(self.word),
            Kind::Signed => format.whole(self.word as i32),
            Kind::Signed64 => format.whole(self.word as i64),
            Kind::F32 => format.float(f32::from_bits(self.word as u32)),
            Kind::F64 => format.float(f64::from_bits(self.word)),
            Kind::F16 => format.float(f16::from_bits(self.word as u16)),
            Kind::Bf16 => format.float(bf16::from_bits(self.word as u16)),
            Kind::Bool => format.other(self.word != 0),
            Kind::Char => format.other(char::from_u32(self.word as u32).unwrap_or('\u{fffd}')),
        }
    }
}

struct Format {
    alternate: bool,
    zeros: bool,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Format {
    fn read(format: &str) -> Self {
        let (alternate, rest) = format.strip_prefix('#').map_or((false, format), |rest| (true, rest));
        let (zeros, rest) = rest.strip_prefix('0').map_or((false, rest), |rest| (true, rest));
        let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (width, rest) = rest.split_at(digits(rest));
        let (precision, rest) = match rest.strip_prefix('.') {
            Some(rest) => {
                let (precision, rest) = rest.split_at(digits(rest));
                (precision.parse().ok(), rest)
            }
            None => (None, rest),
        };
        Format { alternate, zeros, width: width.parse().unwrap_or(0), precision, kind: rest.chars().next() }
    }

    fn whole(&self, x: impl Display + LowerHex + UpperHex + Binary + Octal) -> String {
        let (prefix, digits) = match self.kind {
            Some('x') => ("0x", format!("{x:x}")),
            Some('X') => ("0x", format!("{x:X}")),
            Some('b') => ("0b", format!("{x:b}")),
            Some('o') => ("0o", format!("{x:o}")),
            _ => ("", x.to_string()),
        };
        self.padded(if self.alternate { prefix } else { "" }, &digits)
    }

    fn float(&self, x: impl Display + Debug) -> String {
        let text = match (self.kind, self.precision) {
            (Some('?'), None) => format!("{x:?}"),
            (Some('?'), Some(precision)) => format!("{x:.precision$?}"),
            (_, None) => x.to_string(),
            (_, Some(precision)) => format!("{x:.precision$}"),
        };
        self.padded("", &text)
    }

    /// A number in its width: zeros stand behind sign and prefix.
    fn padded(&self, prefix: &str, number: &str) -> String {
        let (sign, digits) = number.split_at(usize::from(number.starts_with('-')));
        let width = self.width.saturating_sub(prefix.len() + sign.len());
        if self.zeros {
            format!("{sign}{prefix}{digits:0>width$}")
        } else {
            format!("{:>width$}", format!("{sign}{prefix}{digits}"), width = self.width)
        }
    }

    fn other(&self, x: impl Display + Debug) -> String {
        let width = self.width;
        if self.kind == Some('?') { format!("{x:width$?}") } else { format!("{x:width$}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn formats_are_those_of_the_standard_library() {
        let text = |kind, word, format: &str| Value { kind: kind as u32, word }.text(format);
        let f64s = |x: f64, format: &str| text(Kind::F64, x.to_bits(), format);
        assert_eq!(f64s(1.0, ""), format!("{}", 1.0));
        assert_eq!(f64s(1.0, "?"), format!("{:?}", 1.0));
        assert_eq!(f64s(0.1, "08.3"), format!("{:08.3}", 0.1));
        assert_eq!(f64s(f64::NAN, "5"), format!("{:5}", f64::NAN));
        assert_eq!(f64s(f64::NAN, "05"), format!("{:05}", f64::NAN));
        assert_eq!(text(Kind::F16, f16::from_f32(0.1).to_bits().into(), ""), f16::from_f32(0.1).to_string());
        assert_eq!(
            text(Kind::Bf16, bf16::from_f32(2.5).to_bits().into(), "?"),
            format!("{:?}", bf16::from_f32(2.5))
        );
        assert_eq!(f64s(f64::NEG_INFINITY, "08"), format!("{:08}", f64::NEG_INFINITY));
        assert_eq!(f64s(-0.5, "8.2?"), format!("{:8.2?}", -0.5));
        assert_eq!(f64s(-0.5, "08.2"), format!("{:08.2}", -0.5));
        assert_eq!(text(Kind::Unsigned, 10, "#08x"), format!("{:#08x}", 10));
        assert_eq!(text(Kind::Unsigned, 10, "#8b"), format!("{:#8b}", 10));
        assert_eq!(text(Kind::Unsigned, 10, "04b"), format!("{:04b}", 10));
        assert_eq!(text(Kind::Unsigned, 10, "#X"), format!("{:#X}", 10));
        assert_eq!(text(Kind::Unsigned, 10, "#o"), format!("{:#o}", 10));
        assert_eq!(text(Kind::Signed, -5_i64 as u64, "05"), format!("{:05}", -5));
        assert_eq!(text(Kind::Signed, -5_i64 as u64, "x"), format!("{:x}", -5));
        assert_eq!(text(Kind::Signed64, -5_i64 as u64, "x"), format!("{:x}", -5_i64));
        assert_eq!(text(Kind::Bool, 1, "?"), "true");
        assert_eq!(text(Kind::Char, 'n'.into(), ""), "n");
        // A record that nothing has written so.
        assert_eq!(text(Kind::None, 1, ""), "?");
        assert_eq!(Value { kind: 200, word: 1 }.text(""), "?");
    }

    #[test]
    fn a_text_that_is_no_message_stays_as_it_is() {
        assert_eq!(filled("{", &[]), "{");
        assert_eq!(filled("}", &[]), "}");
        assert_eq!(filled("\\", &[]), "\\");
        assert_eq!(filled("{7}", &[]), "{7}");
        assert_eq!(filled("\\u{zz}", &[]), "\\u{zz}");
    }
}
