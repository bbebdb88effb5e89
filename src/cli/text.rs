//! Numbers with their units.

use host::kv::workload::Figure;

/// `196,608`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i != 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `2.3 MiB`.
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    for next in units {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") }
}

/// `12.3 µs`.
pub fn seconds(s: f64) -> String {
    match s {
        s if s < 1e-3 => format!("{:.1} µs", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// The same of microseconds.
pub fn microseconds(us: f64) -> String {
    seconds(us * 1e-6)
}

/// `0.00394`: three or four digits, however small.
pub fn error(x: f64) -> String {
    match x {
        0.0 => "0".into(),
        x if x.abs() < 1e-3 || x.abs() >= 1e5 => format!("{x:.3e}"),
        x if x.abs() < 1.0 => format!("{x:.5}"),
        x => format!("{x:.3}"),
    }
}

/// A workload's figure with its unit.
pub fn figure(figure: &Figure) -> String {
    match figure {
        Figure::Count(count) if count.fract() == 0.0 => self::count(*count as u64),
        Figure::Count(mean) => format!("{mean:.4}"),
        Figure::Bytes(bytes) => self::bytes(*bytes),
        Figure::Error(None) => "none".into(),
        Figure::Error(Some(error)) => self::error(*error),
        Figure::Text(text) => text.clone(),
    }
}

/// `1 tensor`, `2 tensors`.
pub fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{} {what}s", count(n as u64)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 12, 999, 1000, 1234567].map(count), ["0", "12", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0, 1023, 1024, 1 << 20, u64::MAX].map(bytes),
            ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "16777216.0 TiB"]
        );
        assert_eq!([0.0, 1.25e-5, 0.0125, 2.0].map(seconds), ["0.0 µs", "12.5 µs", "12.50 ms", "2.00 s"]);
        assert_eq!([0.0, 1.5e-7, 0.125, 3.0].map(error), ["0", "1.500e-7", "0.12500", "3.000"]);
        assert_eq!([plural(1, "tensor"), plural(0, "tensor")], ["1 tensor", "0 tensors"]);
    }
}
