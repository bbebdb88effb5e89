//! Aligned tables for a terminal.

/// Which side a column's cells lean to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A table under construction.
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new(columns: &[(&str, Align)]) -> Self {
        let columns = columns.iter().map(|(name, align)| ((*name).to_owned(), *align)).collect();
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row, one cell a column; missing ones are empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> = cells.into_iter().collect();
        row.resize(self.columns.len(), String::new());
        self.rows.push(row);
    }

    /// The lines, the header first, each ending in a line feed.
    pub fn render(&self) -> String {
        let header: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let lines = || std::iter::once(&header).chain(&self.rows);
        let width = |column: usize| lines().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut text = String::new();
        for row in lines() {
            let mut line = String::new();
            for ((cell, width), (_, align)) in row.iter().zip(&widths).zip(&self.columns) {
                let padding = " ".repeat(width - cell.chars().count());
                let (before, after) = if *align == Align::Left { ("", &*padding) } else { (&*padding, "") };
                line += &format!("  {before}{cell}{after}");
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_line_up_by_characters() {
        let mut table = Table::new(&[("name", Align::Left), ("time", Align::Right), ("note", Align::Left)]);
        table.row(["a".into(), "1 µs".into(), "x".into()]);
        table.row(["longer".into(), "12345 s".into()]);
        assert_eq!(table.render(), "  name       time  note\n  a          1 µs  x\n  longer  12345 s\n");
    }
}
