//! Sites of a PTX text: where its kernels stop or print, and what they say.
//!
//! Sites are comments, `// simt.site NUMBER ENTRY FILE:LINE:COLUMN MESSAGE` where a grid stops and
//! `simt.print` where a thread prints, with `{0:x}` in the message for the first value in base 16
//! ([`simt::on_device`] has the records, `ptx-build` the numbers).

mod format;

use half::{bf16, f16};
use simt::Dim3;
use simt::emu::{Place, interned};
use simt::on_device::Kind;

/// A site.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    pub(crate) entry: &'a str,
    pub(crate) place: Place,
    pub(crate) message: &'a str,
}

/// The sites of a text, with their numbers: those whose comment begins so.
pub(crate) fn numbered<'a>(ptx: &'a str, comment: &'static str) -> impl Iterator<Item = (u32, Site<'a>)> {
    ptx.lines().filter_map(move |line| {
        let (number, site) = line.trim_start().strip_prefix(comment)?.split_once(' ')?;
        Some((number.parse().ok()?, parts(site)?))
    })
}

/// Entry, place and message of a site.
fn parts(site: &str) -> Option<Site<'_>> {
    let (entry, rest) = site.split_once(' ')?;
    let (at, message) = rest.split_once(' ').unwrap_or((rest, ""));
    let mut numbers = at.rsplitn(3, ':');
    let column = numbers.next()?.parse().ok()?;
    let line = numbers.next()?.parse().ok()?;
    let place = Place { file: interned(numbers.next()?), line, column };
    Some(Site { entry, place, message })
}

/// The index in a record's first three words.
pub(crate) fn dim(words: &[u32]) -> Dim3 {
    Dim3 { x: words[0], y: words[1], z: words[2] }
}

/// A value of a message.
pub(crate) struct Value {
    kind: u8,
    word: u64,
}

/// The message with its values in place.
pub(crate) fn filled(message: &str, values: &[Value]) -> String {
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
    /// Number `index` of a record's values, in two words each, by their kinds.
    pub(crate) fn of(kinds: u64, index: usize, words: &[u32]) -> Self {
        let word = u64::from(words[2 * index]) | u64::from(words[2 * index + 1]) << 32;
        Value { kind: (kinds >> (8 * index)) as u8, word }
    }

    /// It in a format, `[[fill]< ^ >][+][#][0][width][.precision][? x X b o e E]`, as [`std::fmt`] has it.
    fn text(&self, format: &str) -> String {
        let format = format::Format::read(format);
        let kind = Kind::ALL.get(usize::from(self.kind)).copied().unwrap_or(Kind::None);
        match kind {
            Kind::None => "?".to_owned(),
            Kind::Unsigned => format.whole(self.word),
            Kind::Signed8 => format.whole(self.word as i8),
            Kind::Signed16 => format.whole(self.word as i16),
            Kind::Signed => format.whole(self.word as i32),
            Kind::Signed64 => format.whole(self.word as i64),
            Kind::F32 => format.float(f32::from_bits(self.word as u32)),
            Kind::F64 => format.float(f64::from_bits(self.word)),
            Kind::F16 => format.float(f16::from_bits(self.word as u16).to_f32()),
            Kind::Bf16 => format.float(bf16::from_bits(self.word as u16).to_f32()),
            Kind::Bool => format.truth(self.word != 0),
            Kind::Char => format.character(char::from_u32(self.word as u32).unwrap_or('\u{fffd}')),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_those_of_the_standard_library() {
        let text = |kind, word, format: &str| Value { kind: kind as u8, word }.text(format);
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
        assert_eq!(text(Kind::Signed8, -5_i64 as u64, "x"), format!("{:x}", -5_i8));
        assert_eq!(text(Kind::Signed16, -5_i64 as u64, "x"), format!("{:x}", -5_i16));
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
