//! Records of `ferrokv bench model`, read for their times and bytes.

use super::Error;
use super::traffic::{Cell, Place};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const COMMAND: &str = "bench model";
/// The layout that is read.
const SCHEMA: u64 = 1;

/// What some records say of one model on one device.
#[derive(Debug)]
pub struct Measured {
    /// What the model is called.
    pub model: String,
    /// What the device is called.
    pub device: String,
    /// The device's memory, where it is known.
    pub memory_bytes: Option<u64>,
    /// How fast the memory was read in the records, at most, in 10^12 bytes a second.
    pub read_tb_per_s: Option<f64>,
    /// The files.
    pub files: Vec<PathBuf>,
    /// The commits that they name, each once.
    pub commits: Vec<String>,
    /// Every row.
    pub cells: Vec<Cell>,
    /// How many of these moved bytes over the bus besides.
    pub over_the_bus: usize,
}

impl Measured {
    /// Reads the files and puts them together.
    ///
    /// # Errors
    /// A file that is something else, a row that makes no sense; two models or two devices.
    pub fn read(files: &[PathBuf]) -> Result<Measured, Error> {
        let mut all: Option<Measured> = None;
        for path in files {
            let text = fs::read(path).map_err(|source| Error::Unread { path: path.clone(), source })?;
            let one = parse(path, &text)?;
            all = Some(match all {
                None => one,
                Some(before) => before.join(one)?,
            });
        }
        all.ok_or(Error::NoFile)
    }

    fn join(mut self, other: Measured) -> Result<Measured, Error> {
        let weights = |of: &Measured| of.cells.first().map(|cell| cell.weight_bytes.to_string());
        for (what, ours, theirs) in [
            ("device", Some(self.device.clone()), Some(other.device.clone())),
            ("model", Some(self.model.clone()), Some(other.model.clone())),
            ("weight_bytes", weights(&self), weights(&other)),
        ] {
            // A record without rows has no weights to differ.
            if let Some((ours, theirs)) = ours.zip(theirs).filter(|(ours, theirs)| ours != theirs) {
                let [first, second] = [&self, &other].map(|of| of.files[0].clone());
                return Err(Error::Mixed { what, first, ours, second, theirs });
            }
        }
        self.memory_bytes = self.memory_bytes.or(other.memory_bytes);
        self.read_tb_per_s = self.read_tb_per_s.into_iter().chain(other.read_tb_per_s).reduce(f64::max);
        self.files.extend(other.files);
        for commit in other.commits {
            if !self.commits.contains(&commit) {
                self.commits.push(commit);
            }
        }
        self.cells.extend(other.cells);
        self.over_the_bus += other.over_the_bus;
        Ok(self)
    }

    /// Schemes in the order of the rows, each once.
    pub fn schemes(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for cell in &self.cells {
            if !names.contains(&cell.kv) {
                names.push(cell.kv.clone());
            }
        }
        names
    }
}

/// A record under inspection.
struct Reader<'a> {
    path: &'a Path,
}

impl Reader<'_> {
    fn not_a_record(&self, reason: impl Into<String>) -> Error {
        Error::NotARecord { path: self.path.to_owned(), reason: reason.into() }
    }

    /// `field` of a row or of the whole record, which must be what `read` takes.
    fn field<T>(
        &self,
        of: &Value,
        row: Option<usize>,
        field: &'static str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<T, Error> {
        read(&of[field]).ok_or_else(|| Error::Field {
            path: self.path.to_owned(),
            place: row.map_or_else(String::new, |row| format!(" of row {}", row + 1)),
            field,
            found: shown(of.get(field)),
            expected,
        })
    }

    fn cell(&self, row: &Value, number: usize) -> Result<Cell, Error> {
        if !row.is_object() {
            return Err(self.not_a_record(format!("row {} is {}", number + 1, shown(Some(row)))));
        }
        let count = |value: &Value| u32::try_from(value.as_u64()?).ok().filter(|n| *n > 0);
        let bytes = |value: &Value| value.as_u64().filter(|n| *n > 0);
        let at = Some(number);
        let batch = match row.get("batch") {
            // Records without it have one sequence.
            None => 1,
            Some(_) => self.field(row, at, "batch", "a number of sequences from 1 up", count)?,
        };
        let time = |value: &Value| value.as_f64().filter(|us| us.is_finite() && *us > 0.0);
        let name = |value: &Value| value.as_str().filter(|name| !name.is_empty()).map(str::to_owned);
        Ok(Cell {
            kv: self.field(row, at, "kv", "a KV scheme", name)?,
            place: Place {
                context: self.field(row, at, "context", "a number of tokens from 1 up", count)?,
                batch,
            },
            weight_bytes: self.field(row, at, "weight_bytes", "a number of bytes from 1 up", bytes)?,
            kv_bytes: self.field(row, at, "kv_bytes", "a number of bytes from 1 up", bytes)?,
            us: self.field(row, at, "median_us", "a time above 0 in microseconds", time)?,
        })
    }
}

/// A value for an error's line: what is long is named by its kind.
fn shown(value: Option<&Value>) -> String {
    match value {
        None => "missing".into(),
        Some(Value::Array(_)) => "a list".into(),
        Some(Value::Object(_)) => "an object".into(),
        Some(value) => value.to_string().chars().take(40).collect(),
    }
}

fn parse(path: &Path, text: &[u8]) -> Result<Measured, Error> {
    let reader = Reader { path };
    let record: Value =
        serde_json::from_slice(text).map_err(|error| reader.not_a_record(error.to_string()))?;
    if !record.is_object() {
        return Err(reader.not_a_record("it holds no object"));
    }
    match record["command"].as_str() {
        Some(COMMAND) => {}
        Some(command) => return Err(reader.not_a_record(format!("it is one of `ferrokv {command}`"))),
        None => return Err(reader.not_a_record("it names no command")),
    }
    let is_ours = |value: &Value| value.as_u64().filter(|schema| *schema == SCHEMA);
    reader.field(&record, None, "schema", "1, the layout that this program reads", is_ours)?;
    let name = |value: &Value| value.as_str().map(str::to_owned);
    let model = reader.field(&record, None, "model", "the model's name", name)?;
    let environment = reader
        .field(&record, None, "environment", "an object", |value| value.is_object().then(|| value.clone()))?;
    let gpu = &environment["gpu"];
    let device = match gpu.is_null() {
        true => reader.field(&environment, None, "cpu", "the processor's name", name)?,
        false => reader.field(gpu, None, "name", "the GPU's name", name)?,
    };
    let rows = reader.field(&record, None, "rows", "a list", |value| value.as_array().cloned())?;
    let cells: Vec<Cell> =
        rows.iter().enumerate().map(|(number, row)| reader.cell(row, number)).collect::<Result<_, _>>()?;
    let weights = cells.first().map(|cell| cell.weight_bytes);
    if let Some(other) = cells.iter().position(|cell| Some(cell.weight_bytes) != weights) {
        return Err(Error::Field {
            path: path.to_owned(),
            place: format!(" of row {}", other + 1),
            field: "weight_bytes",
            found: cells[other].weight_bytes.to_string(),
            expected: "what the rows before have, as of one model",
        });
    }
    let speed = record["read_gb_per_s"].as_f64().filter(|speed| speed.is_finite() && *speed > 0.0);
    Ok(Measured {
        model,
        device,
        memory_bytes: gpu["memory_bytes"].as_u64(),
        read_tb_per_s: speed.map(|gigabytes| gigabytes / 1e3),
        files: vec![path.to_owned()],
        commits: name(&environment["commit"]).into_iter().collect(),
        over_the_bus: rows.iter().filter(|row| row["bus_bytes"].as_u64().is_some_and(|n| n > 0)).count(),
        cells,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A record of two rows.
    fn record() -> Value {
        json!({
            "schema": 1,
            "command": "bench model",
            "environment": { "cpu": "a CPU", "commit": "abc", "gpu": { "name": "a GPU", "memory_bytes": 80 } },
            "model": "a model",
            "read_gb_per_s": 4600.0,
            "rows": [
                { "kv": "dense", "context": 64, "batch": 2, "median_us": 3.5, "weight_bytes": 5, "kv_bytes": 7 },
                { "kv": "gather", "context": 64, "median_us": 3, "weight_bytes": 5, "kv_bytes": 6, "bus_bytes": 1 },
            ],
        })
    }

    fn read(record: &Value) -> Result<Measured, Error> {
        parse(Path::new("r.json"), record.to_string().as_bytes())
    }

    #[test]
    fn a_record_is_read() {
        let found = read(&record()).expect("a record");
        assert_eq!((found.device.as_str(), found.model.as_str()), ("a GPU", "a model"));
        assert_eq!((found.memory_bytes, found.read_tb_per_s, found.over_the_bus), (Some(80), Some(4.6), 1));
        let places: Vec<Place> = found.cells.iter().map(|cell| cell.place).collect();
        assert_eq!(places, [Place { context: 64, batch: 2 }, Place { context: 64, batch: 1 }]);
        assert_eq!((found.cells[0].us, found.cells[0].bytes()), (3.5, 12.0));
        assert_eq!(
            (found.schemes(), found.commits),
            (vec!["dense".into(), "gather".into()], vec!["abc".into()])
        );
        let mut cpu = record();
        cpu["environment"]["gpu"] = Value::Null;
        assert_eq!(read(&cpu).expect("a record").device, "a CPU");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases: [(&str, Value, &[&str]); 13] = [
            ("/command", json!("eval ppl"), &["`ferrokv eval ppl`", "bench model --json"]),
            ("/command", json!(3), &["names no command"]),
            ("/schema", json!(2), &["schema", "2", "layout"]),
            ("/model", json!(null), &["model", "null"]),
            ("/environment", json!([]), &["environment", "a list"]),
            ("/environment/gpu/name", json!(7), &["name", "7"]),
            ("/rows", json!({}), &["rows", "an object", "a list"]),
            ("/rows/1", json!(5), &["row 2 is 5"]),
            ("/rows/1/median_us", json!(null), &["median_us of row 2", "null", "above 0"]),
            ("/rows/0/median_us", json!(0.0), &["median_us of row 1", "0.0"]),
            ("/rows/0/batch", json!(0), &["batch of row 1", "0", "1 up"]),
            ("/rows/1/kv_bytes", json!(-4), &["kv_bytes of row 2", "-4"]),
            ("/rows/1/weight_bytes", json!(6), &["weight_bytes of row 2", "one model"]),
        ];
        for (pointer, value, words) in cases {
            let mut wrong = record();
            *wrong.pointer_mut(pointer).expect(pointer) = value;
            let error = read(&wrong).expect_err(pointer).to_string();
            for word in ["r.json"].iter().chain(words) {
                assert!(error.contains(word), "{pointer}: '{word}' is not in: {error}");
            }
        }
        for text in ["", "[1]", "{\"command\":", "\u{0}"] {
            let error = parse(Path::new("r.json"), text.as_bytes()).expect_err(text).to_string();
            assert!(error.contains("r.json is no record of `ferrokv bench model`"), "{error}");
        }
        let mut missing = record();
        missing["rows"][0].as_object_mut().expect("a row").remove("context");
        let error = read(&missing).expect_err("no context").to_string();
        assert!(error.contains("context of row 1") && error.contains("missing"), "{error}");
    }

    #[test]
    fn records_of_one_model_and_device_go_together() {
        let both = read(&record()).expect("a record").join(read(&record()).expect("a record")).expect("both");
        assert_eq!((both.cells.len(), both.files.len(), both.commits.len()), (4, 2, 1));
        let weights =
            json!([{ "kv": "dense", "context": 1, "median_us": 1, "weight_bytes": 9, "kv_bytes": 1 }]);
        for (pointer, value, word) in [
            ("/environment/gpu/name", json!("another GPU"), "another GPU"),
            ("/model", json!("another model"), "another model"),
            ("/rows", weights, "weight_bytes"),
        ] {
            let mut other = record();
            *other.pointer_mut(pointer).expect(pointer) = value;
            let error = read(&record()).expect("a record").join(read(&other).expect("a record"));
            let error = error.expect_err(pointer).to_string();
            assert!(error.contains(word) && error.contains("one by one"), "{error}");
        }
    }
}
