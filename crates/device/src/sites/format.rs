//! A format that is known at run time only: what the standard library's formatting makes of it.

use std::fmt::{Binary, Debug, Display, LowerExp, LowerHex, Octal, UpperExp, UpperHex};

/// `[[fill]< ^ >][+][#][0][width][.precision][? x X b o e E]`.
pub(super) struct Format {
    fill: char,
    align: Option<char>,
    plus: bool,
    alternate: bool,
    zeros: bool,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

/// `x` by one trait, with sign and precision, and without a width.
macro_rules! plain {
    ($format:expr, $x:expr, $kind:literal) => {
        match ($format.plus, $format.precision) {
            (false, None) => format!(concat!("{:", $kind, "}"), $x),
            (true, None) => format!(concat!("{:+", $kind, "}"), $x),
            (false, Some(precision)) => format!(concat!("{:.*", $kind, "}"), precision, $x),
            (true, Some(precision)) => format!(concat!("{:+.*", $kind, "}"), precision, $x),
        }
    };
}

impl Format {
    pub(super) fn read(format: &str) -> Self {
        let mut rest = format;
        let mut begin = format.chars();
        let is_align = |c: &char| ['<', '^', '>'].contains(c);
        let (mut fill, mut align) = (' ', None);
        match (begin.next(), begin.next().filter(is_align)) {
            (Some(c), Some(found)) => {
                (fill, align) = (c, Some(found));
                rest = begin.as_str();
            }
            (Some(c), None) if is_align(&c) => {
                align = Some(c);
                rest = &rest[1..];
            }
            _ => {}
        }
        let mut flag = |flag: char| {
            let found = rest.strip_prefix(flag);
            rest = found.unwrap_or(rest);
            found.is_some()
        };
        let (plus, alternate, zeros) = (flag('+'), flag('#'), flag('0'));
        let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (width, rest) = rest.split_at(digits(rest));
        let (precision, rest) = match rest.strip_prefix('.') {
            Some(rest) => {
                let (precision, rest) = rest.split_at(digits(rest));
                (precision.parse().ok(), rest)
            }
            None => (None, rest),
        };
        let (width, kind) = (width.parse().unwrap_or(0), rest.chars().next());
        Format { fill, align, plus, alternate, zeros, width, precision, kind }
    }

    pub(super) fn whole(
        &self,
        x: impl Display + LowerHex + UpperHex + Binary + Octal + LowerExp + UpperExp,
    ) -> String {
        let (prefix, number) = match self.kind {
            Some('x') => ("0x", plain!(self, x, "x")),
            Some('X') => ("0x", plain!(self, x, "X")),
            Some('b') => ("0b", plain!(self, x, "b")),
            Some('o') => ("0o", plain!(self, x, "o")),
            Some('e') => ("", plain!(self, x, "e")),
            Some('E') => ("", plain!(self, x, "E")),
            _ => ("", plain!(self, x, "")),
        };
        self.number(if self.alternate { prefix } else { "" }, &number)
    }

    pub(super) fn float(&self, x: impl Display + Debug + LowerExp + UpperExp) -> String {
        let number = match self.kind {
            Some('?') => plain!(self, x, "?"),
            Some('e') => plain!(self, x, "e"),
            Some('E') => plain!(self, x, "E"),
            _ => plain!(self, x, ""),
        };
        self.number("", &number)
    }

    pub(super) fn truth(&self, x: bool) -> String {
        self.padded(&plain!(self, x, ""), '<')
    }

    pub(super) fn character(&self, x: char) -> String {
        // Between quotes it has no width.
        if self.kind == Some('?') { format!("{x:?}") } else { self.padded(&plain!(self, x, ""), '<') }
    }

    /// A number in its width: zeros stand behind sign and prefix, whatever the alignment.
    fn number(&self, prefix: &str, number: &str) -> String {
        let (sign, digits) = number.split_at(usize::from(number.starts_with(['-', '+'])));
        if self.zeros {
            let width = self.width.saturating_sub(prefix.len() + sign.len());
            return format!("{sign}{prefix}{digits:0>width$}");
        }
        self.padded(&format!("{sign}{prefix}{digits}"), '>')
    }

    fn padded(&self, text: &str, usual: char) -> String {
        let missing = self.width.saturating_sub(text.chars().count());
        let before = match self.align.unwrap_or(usual) {
            '<' => 0,
            '^' => missing / 2,
            _ => missing,
        };
        let fill = |count| std::iter::repeat_n(self.fill, count).collect::<String>();
        fill(before) + text + &fill(missing - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds every format of the list against the standard library's own, for values of one sort.
    macro_rules! same {
        ($how:ident, $x:expr, $($format:literal)*) => {$(
            let own = Format::read($format).$how($x);
            assert_eq!(own, format!(concat!("{:", $format, "}"), $x), "{} as {}", stringify!($x), $format);
        )*};
    }

    macro_rules! whole {
        ($($x:expr),*) => {$(
            same!(whole, $x, "" "?" "x" "X" "b" "o" "e" "E" "5" "05" "<5" "^6" ">5" "*<7" "-^8" "+" "+6" "+06"
                "#x" "#X" "#010b" "#10o" "<#10x" "*^+12" "0<5" "^08x" "+#x" ".2e" "+12.1e");
        )*};
    }

    #[test]
    fn whole_numbers() {
        whole!(0u8, 255u8, 7u16, 1234567u32, u64::MAX, -1i8, 100i8, -300i16, -5i32, 5i32, i64::MIN);
    }

    macro_rules! floats {
        ($($x:expr),*) => {$(
            same!(float, $x, "" "?" "e" "E" "9" "09" "<9" "^9" "*>9" ".2" "9.2" "09.3" "-^12.1" "+" "+9.2" "+09.2"
                "9?" ".1?" "<9.2?" "012.4e" ">12.2E" ".0");
        )*};
    }

    #[test]
    fn floats() {
        floats!(0f32, -0.0f32, 1.5f32, 0.1f32, -3.75f32, 1e20f32, f32::MIN_POSITIVE, f32::NAN, f32::INFINITY);
        floats!(f32::NEG_INFINITY, 0.1f64, -1e-300f64, 12345.678f64, f64::NAN);
    }

    #[test]
    fn truth_and_characters() {
        for x in [true, false] {
            same!(truth, x, "" "?" "7" "^7" ">7" "*<7" "07" ".2");
        }
        same!(character, 'n', "" "?" "5" "^5" ">5?" "_<5");
        same!(character, 'ü', "" "?" "3");
    }
}
