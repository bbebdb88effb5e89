//! A picture: measures by bytes, a line for each scheme over its bits.

use super::measure::Row;
use crate::cli::chart::{Chart, Line, Panel, Point};
use host::eval::diagnosis::Figure;

/// Divergence and error by the bytes of a key, and the output's error by those of both.
pub fn chart(title: String, rows: &[Row]) -> Chart {
    let mut families: Vec<&str> = Vec::new();
    for row in rows {
        if !families.contains(&row.family.as_str()) {
            families.push(&row.family);
        }
    }
    let panel = |x_title: &str, y_title: &str, x: fn(&Row) -> f64, y: fn(&Row) -> Figure| {
        let line = |family: &&str| {
            let own = rows.iter().filter(|row| row.family == *family);
            let point = |row| {
                let Figure { mean, interval } = y(row);
                Point { x: x(row), y: mean, interval: interval.map(|i| (i.low, i.high)) }
            };
            let mut points: Vec<Point> = own.map(point).collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            Line { name: family.to_string(), points }
        };
        Panel {
            x_title: x_title.into(),
            y_title: y_title.into(),
            labels: Vec::new(),
            logarithmic: true,
            zero: None,
            lines: families.iter().map(line).collect(),
        }
    };
    let key = "bytes of a key, a token and KV head";
    let both = "bytes of a key and a value";
    Chart {
        title,
        panels: vec![
            panel(key, "KL of the softmax, nats", |row| row.key_bytes, |row| row.summary.divergence),
            panel(key, "error of a logit, not scaled", |row| row.key_bytes, |row| row.summary.logit),
            panel(
                both,
                "error of the output, relative",
                |row| row.key_bytes + row.value_bytes,
                |row| row.summary.output,
            ),
        ],
    }
}
