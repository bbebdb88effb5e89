//! `ferrokv regime` over the records of this repository: constants, maps, and what it refuses.

mod common;

use common::{Folder, ferrokv, json, refused, succeed, text};
use serde_json::Value;
use std::fs;

/// 11 rows of dense and 22 of others, of one to eight sequences.
const RECORD: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/docs/results/bench-model/h100/2026-11-24-dbb6f94-batches.json");
/// The one of which the documents have map and constants.
const SHOWN: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/docs/results/bench-model/h100/2026-11-27-d26e3cc-batches.json");
/// Two rows of dense, one sequence.
const OTHER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/docs/results/bench-model/h100/2026-11-23-d7bc390-llama-3.1-8b.json"
);

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The record with one change.
fn changed(folder: &Folder, name: &str, change: impl Fn(&mut Value)) -> String {
    let mut record = json(RECORD);
    change(&mut record);
    fs::write(folder.path(name), record.to_string()).expect("written");
    folder.text(name)
}

fn keep(record: &mut Value, wanted: impl Fn(&Value) -> bool) {
    record["rows"].as_array_mut().expect("rows").retain(wanted);
}

#[test]
fn a_record_is_fitted() {
    let folder = Folder::new();
    let path = folder.text("fit.json");
    let tables = succeed(&["regime", "fit", RECORD, "--json", &path]);
    for word in ["NVIDIA H100", "paper: t = ", "rows: t = ", "c1 of gather:production", "held out", "best"] {
        assert!(tables.contains(word), "'{word}' is not in: {tables}");
    }
    let report = json(&path);
    assert_eq!((&report["command"], &report["best"]), (&"regime fit".into(), &"rows".into()));
    let (paper, rows) = (&report["fits"][0], &report["fits"][1]);
    assert_eq!((&paper["fails"], &rows["fails"]), (&true.into(), &true.into()));
    // The constants give back the record: bytes over β, and the fixed times, of every row.
    let measured = json(RECORD);
    for (row, cell) in
        measured["rows"].as_array().expect("rows").iter().zip(rows["cells"].as_array().expect("cells"))
    {
        let batch = number(&row["batch"]);
        let bytes = number(&row["weight_bytes"]) + number(&row["kv_bytes"]);
        let c1 = rows["c1_us"].as_array().expect("c1").iter().find(|of| of[0] == row["kv"]);
        let us = bytes / (1e6 * number(&rows["beta_tb_per_s"]["value"]))
            + number(&rows["c0_us"]["value"])
            + (batch - 1.0) * number(&rows["row_us"]["value"])
            + c1.map_or(0.0, |of| number(&of[1]["value"]));
        assert!((us / number(&cell["predicted_us"]) - 1.0).abs() < 1e-9, "{row}: {us}");
        assert!((us / number(&row["median_us"]) - 1.0).abs() < 0.05, "{row}: {us}");
        assert!(number(&cell["held_out_error"]).abs() < 0.07, "{cell}");
        assert_eq!(cell["speedup"].is_null(), row["kv"] == "dense");
        if row["kv"] != "dense" {
            let ratio = number(&cell["speedup"]["measured"]) / number(&row["times_dense"]);
            assert!((ratio - 1.0).abs() < 1e-9, "{cell}");
        }
    }

    let one = json_of(&["regime", "fit", RECORD, "--kv", "gather:assured", "--json", "-"]);
    assert_eq!(
        one["fits"][1]["c1_us"].as_array().map(|all| (all.len(), &all[0][0])),
        Some((1, &"gather".into()))
    );
    let other = json_of(&["regime", "fit", OTHER, "--json", "-"]);
    assert_eq!(other["fits"].as_array().map(Vec::len), Some(1), "no batches, no rows");
    let twice = json_of(&["regime", "fit", RECORD, RECORD, "--json", "-"]);
    let close = |a: &Value, b: &Value| (number(a) / number(b) - 1.0).abs() < 1e-9;
    assert!(close(&twice["fits"][1]["beta_tb_per_s"]["value"], &rows["beta_tb_per_s"]["value"]));
    // A cell that is there twice is held out twice: the error stays.
    assert!(close(&twice["fits"][1]["worst_held_out"], &rows["worst_held_out"]));
}

fn json_of(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeed(arguments)).expect("JSON")
}

#[test]
fn the_documents_show_what_the_commands_write() {
    let docs = |path: &str| format!("{}/docs/{path}", env!("CARGO_MANIFEST_DIR"));
    let folder = Folder::new();
    let picture = folder.text("map.svg");
    succeed(&["regime", "plot", SHOWN, "-o", &picture]);
    let drawn = fs::read_to_string(&picture).expect("the picture");
    let kept = fs::read_to_string(docs("regime-h100.svg")).expect("the picture of the documents");
    assert!(drawn == kept, "docs/regime-h100.svg is not what `ferrokv regime plot` draws from its record");
    let fit = json_of(&["regime", "fit", SHOWN, "--json", "-"]);
    let kept = json(&docs("results/regime-fit/h100/2026-11-27-d26e3cc-batches.json"));
    alike(&fit["fits"], &kept["fits"]);
    for (part, project) in [("", None), ("-c0", Some("c0=0")), ("-c0-c1", Some("c0=0,c1=0"))] {
        let options = ["--contexts", "128K,1M", "--batches", "1,4,8", "-o", &picture, "--json", "-"];
        let project = project.map_or_else(Vec::new, |project| vec!["--project", project]);
        let map = json_of(&[&["regime", "plot", SHOWN], &options[..], &project].concat());
        let kept = json(&docs(&format!("results/regime-plot/h100/2026-11-27-d26e3cc-batches{part}.json")));
        for field in ["fit", "projections", "squares"] {
            alike(&map[field], &kept[field]);
        }
    }
}

/// The same but for the last bits of numbers.
fn alike(a: &Value, b: &Value) {
    match (a, b) {
        (Value::Object(one), Value::Object(other)) => {
            assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
            one.iter().for_each(|(key, value)| alike(value, &other[key]));
        }
        (Value::Array(one), Value::Array(other)) => {
            assert_eq!(one.len(), other.len());
            one.iter().zip(other).for_each(|(a, b)| alike(a, b));
        }
        (Value::Number(_), Value::Number(_)) => {
            assert!((number(a) - number(b)).abs() <= 1e-7 * number(b).abs().max(1e-3), "{a} and {b}");
        }
        _ => assert_eq!(a, b),
    }
}

#[test]
fn maps_are_drawn_and_projected() {
    let folder = Folder::new();
    let (svg, png) = (folder.text("map.svg"), folder.text("map.png"));
    let plot = |options: &[&str]| json_of(&[&["regime", "plot", RECORD, "--json", "-"], options].concat());
    let map = plot(&["-o", &svg]);
    assert_eq!((&map["kv"], map["squares"].as_array().map(Vec::len)), (&"gather".into(), Some(7)));
    assert!(fs::read_to_string(&svg).expect("the picture").contains("measured 5.00"));
    // 8K, 32K and 128K tokens, one to eight sequences, but for what memory does not hold.
    let squares: Vec<&Value> = map["squares"]
        .as_array()
        .expect("rows")
        .iter()
        .flat_map(|r| r.as_array().expect("squares"))
        .collect();
    assert_eq!((squares.len(), squares.iter().filter(|s| !s["measured"].is_null()).count()), (56, 11));
    assert!(squares.iter().any(|square| square["too_large"] == true));

    let production = ["-o", &png, "--kv", "gather:production", "--contexts", "1M", "--batches", "8"];
    let with = |project: &str| {
        let map = plot(&[&production[..], &["--project", project]].concat());
        number(&map["squares"][0][0]["speedup"])
    };
    assert!(with("c0=0,c1=0") > with("c0=0") && with("c0=0") > with("beta=1000"));
    assert!(fs::read(&png).expect("the picture").starts_with(b"\x89PNG"));
    assert_eq!(folder.names().len(), 2, "nothing else is left: {:?}", folder.names());
}

#[test]
fn bad_input_is_refused_in_a_line() {
    let folder = Folder::new();
    let fit = |record: &str, words: &[&str]| refused(&["regime", "fit", record], words);
    fit("missing.json", &["missing.json", "bench model --json"]);
    fit(&folder.text(""), &["cannot read"]);
    fs::write(folder.path("text"), "no JSON").expect("written");
    fit(&folder.text("text"), &["text is no record", "bench model --json"]);
    let attention = changed(&folder, "attention", |record| record["command"] = "bench attention".into());
    fit(&attention, &["attention is no record", "`ferrokv bench attention`"]);
    let zero = changed(&folder, "zero", |record| record["rows"][4]["median_us"] = 0.into());
    fit(&zero, &["zero: median_us of row 5 is 0", "measure again"]);
    let null = changed(&folder, "null", |record| record["rows"][0]["kv_bytes"] = Value::Null);
    fit(&null, &["null: kv_bytes of row 1 is null"]);
    let sparse = changed(&folder, "sparse", |record| keep(record, |row| row["kv"] != "dense"));
    fit(&sparse, &["'dense'", "--kv dense"]);
    let empty = changed(&folder, "empty", |record| keep(record, |_| false));
    fit(&empty, &["'dense'"]);
    let one =
        changed(&folder, "one", |record| keep(record, |row| row["batch"] == 1 && row["context"] == 8192));
    fit(&one, &["'paper'", "1 row of dense for 2 constants", "bench model"]);
    let alike = changed(&folder, "alike", |record| {
        keep(record, |row| row["batch"] == 1 && row["context"] == 8192);
        let again = record["rows"][0].clone();
        record["rows"].as_array_mut().expect("rows").push(again);
    });
    fit(&alike, &["alike", "two contexts"]);
    let backwards = changed(&folder, "backwards", |record| {
        keep(record, |row| row["batch"] == 1 && row["context"] != 32_768);
        record["rows"][0]["median_us"] = 1e6.into();
    });
    fit(&backwards, &["take no more time", "longer contexts"]);
    let gpu = changed(&folder, "gpu", |record| record["environment"]["gpu"]["name"] = "another GPU".into());
    refused(&["regime", "fit", RECORD, &gpu], &["NVIDIA H100", "another GPU", "one by one"]);
    let model = changed(&folder, "model", |record| record["model"] = "another".into());
    refused(&["regime", "fit", RECORD, &model], &["model", "another", "one by one"]);
    refused(&["regime", "fit", RECORD, "--kv", "int8"], &["'int8'", "dense, gather, gather:production"]);
    refused(&["regime", "fit", &zero, "--json", &zero], &["is the input"]);

    let plot = |options: &[&str], words: &[&str]| refused(&[&["regime", "plot"], options].concat(), words);
    let svg = folder.text("map.svg");
    plot(&[RECORD, "-o", &folder.text("map.pdf")], &["map.pdf", ".svg or .png"]);
    plot(&[RECORD, "-o", &folder.text("no/map.svg")], &["cannot write to", "folder that exists"]);
    plot(&[RECORD, "-o", &svg, "--json", &svg], &["one path"]);
    plot(&[OTHER, "-o", &svg, "--fit", "rows"], &["'rows'", "2 rows of dense for 3 constants"]);
    plot(&[RECORD, "-o", &svg, "--fit", "paper", "--project", "r=0"], &["'paper'", "--fit rows"]);
    let dense = changed(&folder, "dense", |record| keep(record, |row| row["kv"] == "dense"));
    plot(&[&dense, "-o", &svg], &["another KV scheme than 'dense'", "bench model"]);
    let unknown = changed(&folder, "unknown", |record| {
        keep(record, |row| row["kv"] == "dense" || (row["kv"] == "gather" && row["context"] == 8192));
        for row in record["rows"].as_array_mut().expect("rows") {
            if row["kv"] == "gather" {
                row["kv"] = "of-tomorrow".into();
            }
        }
    });
    plot(&[&unknown, "-o", &svg], &["'of-tomorrow'", "--contexts"]);
    assert!(!folder.path("map.svg").exists());
    // What the command line itself refuses comes with a hint below it.
    for (option, value, words) in [
        ("--project", "c2=0", "'c2=0' is not NAME=VALUE"),
        ("--project", "beta=0", "beta in TB/s above 0"),
        ("--contexts", "8K..", "is no number from 1"),
        (
            "--batches",
            "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25",
            "25 values are more",
        ),
    ] {
        let output = ferrokv(&["regime", "plot", RECORD, "-o", &svg, option, value]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
}
