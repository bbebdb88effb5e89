//! `ferrokv bench schemes`: speed where there is no model, the quality that `compare` finds, and what is
//! listed as not measured.

mod common;

use common::{Folder, ferrokv, json, refused, succeed, text, words};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::synthetic::{self, Packing};
use serde_json::Value;
use std::fs;
use std::process::{Command, Output};

fn tiny(folder: &Folder) -> String {
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model");
    fs::write(folder.path("tiny.gguf"), synthetic::file(&model).to_bytes()).expect("written");
    folder.text("tiny.gguf")
}

/// Runs the command in a folder above which nothing was fetched.
fn elsewhere(folder: &Folder, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferrokv"))
        .args(arguments)
        .env("CUDA_LAZY_DRIVER", "/nonexistent/libcuda.so.1")
        .current_dir(folder.path(""))
        .output()
        .expect("the command starts")
}

fn rows(report: &Value) -> &Vec<Value> {
    report["rows"].as_array().expect("rows")
}

fn row<'a>(report: &'a Value, kv: &str) -> &'a Value {
    rows(report).iter().find(|row| row["kv"] == kv).unwrap_or_else(|| panic!("no {kv} in {report}"))
}

/// What was not measured, and why.
fn skipped(report: &Value) -> Vec<(&str, &str)> {
    let lines = report["skipped"].as_array().expect("a list").iter();
    lines.map(|row| (row["what"].as_str().expect("what"), row["reason"].as_str().expect("why"))).collect()
}

const STEPS: [&str; 8] =
    ["--backend", "cpu", "--shapes", "4/2/64", "--contexts", "200", "--seconds-per-row", "0"];

#[test]
fn without_a_model_there_is_speed_alone() {
    let folder = Folder::new();
    let kv = ["--kv", "gtq/k=4/v=4,gtq-blocks,int8-int4", "--commit", "0123abc"];
    let files = ["--json", "schemes.json", "--plot", "schemes"];
    let line = [&["bench", "schemes"][..], &STEPS, &kv, &files].concat();
    let output = elsewhere(&folder, &line);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("4/2/64 200") && table.contains("./setup --model"), "{table}");
    assert!(!table.contains("perplexity"), "{table}");

    let report = json(&folder.text("schemes.json"));
    assert_eq!(
        (&report["command"], &report["environment"]["commit"]),
        (&"bench schemes".into(), &"0123abc".into())
    );
    assert!(report["model"].is_null(), "{report}");
    // By bytes: dense was not named, and is there.
    let names: Vec<&str> = rows(&report).iter().map(|row| row["kv"].as_str().expect("a name")).collect();
    assert_eq!(names.len(), 4, "{names:?}");
    for row in rows(&report) {
        assert!(row["quality"].is_null(), "{row}");
        let steps = row["speed"].as_array().expect("steps");
        assert_eq!(steps.len(), 1, "{row}");
        let step = &steps[0];
        assert_eq!((&step["on_slices"], &step["context"]), (&true.into(), &200.into()));
        assert!(step["median_us"].as_f64() > Some(0.0) && step["dense_ratio"].as_f64() > Some(0.0), "{row}");
        assert!(step["memory"]["device"].as_u64() > Some(0), "{row}");
    }
    let dense = &row(&report, "dense")["speed"][0];
    assert_eq!((&dense["dense_ratio"], &dense["verified"]), (&1.0.into(), &true.into()));
    // Keys and values of 64 channels in f16, each token in each head.
    assert_eq!(dense["cache_bytes"], 200 * 2 * 256);
    let not_measured = skipped(&report);
    let (what, why) = not_measured[0];
    assert_eq!(what, "quality of every scheme");
    assert!(why.contains("SmolLM2") && why.contains("./setup --model"), "{why}");
    for name in ["schemes.svg", "schemes.png"] {
        assert!(folder.path(name).metadata().expect("a picture").len() > 1000, "{name}");
    }
}

#[test]
fn quality_is_what_compare_finds_on_the_same_windows() {
    let folder = Folder::new();
    let (path, words) = (tiny(&folder), words(&folder, 2000));
    let (report, compared) = (folder.text("schemes.json"), folder.text("compare.json"));
    let kv = "gtq/k=2/v=2/recent=0/sink=0";
    let of_text =
        ["--model", &path, "--text", &words, "--context", "64", "--windows", "3", "--backend", "cpu"];
    let schemes = format!("{kv},certified,vecinfer");
    let line = ["bench", "schemes", "--only", "quality", "--kv", &schemes, "--json", &report];
    let table = succeed(&[&line[..], &of_text].concat());
    assert!(table.contains("3 windows of 64 tokens") && table.contains("95 %"), "{table}");
    let line = ["compare", "--json", &compared];
    let pair = format!("dense,{kv}");
    succeed(&[&line[..], &of_text, &["--kv", &pair]].concat());

    let (report, compared) = (json(&report), json(&compared));
    let quality = &row(&report, kv)["quality"];
    for (name, value) in quality["beside"].as_object().expect("figures") {
        assert_eq!(value, &compared["summary"][name], "{name}");
    }
    assert!(quality["beside"]["kl"].as_f64() > Some(0.0), "{quality}");
    assert_eq!(quality["windows"].as_array().map(Vec::len), Some(3));
    // Two layers of two KV heads, 63 tokens: 128 bytes of keys and 128 of values.
    let dense = &row(&report, "dense")["quality"];
    assert!(dense["beside"].is_null() && dense["step_bytes"].as_f64() >= Some(256.0), "{dense}");
    assert_eq!(dense["perplexity"], quality["beside"]["perplexity"][0]);
    assert_eq!(quality["perplexity"], quality["beside"]["perplexity"][1]);
    // A scheme that states bounds has them in the record.
    let certified = &row(&report, "certified")["quality"]["report"];
    assert!(certified["bounded_heads"].as_u64() > Some(0), "{certified}");
    // What needs a file has none.
    assert!(row(&report, "vecinfer")["quality"].is_null());
    let not_measured = skipped(&report);
    let line = not_measured.iter().find(|(what, _)| *what == "quality of vecinfer");
    assert!(line.is_some_and(|(_, why)| why.contains("calibrate")), "{not_measured:?}");
    assert!(table.contains("quality of vecinfer"), "{table}");
    assert!(rows(&report).iter().all(|row| row["speed"].as_array().is_some_and(Vec::is_empty)));
}

#[test]
fn without_time_everything_is_listed() {
    let folder = Folder::new();
    let (path, words, report) = (tiny(&folder), words(&folder, 2000), folder.text("schemes.json"));
    let of_text = ["--model", &path, "--text", &words, "--context", "64", "--windows", "3", "--seconds", "0"];
    succeed(&[&["bench", "schemes", "--kv", "gtq", "--json", &report][..], &STEPS, &of_text].concat());
    let report = json(&report);
    assert!(rows(&report).iter().all(|row| row["quality"].is_null()));
    let found: Vec<&str> = skipped(&report)
        .into_iter()
        .filter(|(_, why)| why.contains("no time left"))
        .map(|(what, _)| what)
        .collect();
    assert_eq!(found, ["4/2/64 f16 batch 1 context 200", "quality in 3 of 3 windows"]);
}

#[test]
fn bad_input_is_refused_before_anything_is_measured() {
    let folder = Folder::new();
    let (path, words) = (tiny(&folder), words(&folder, 200));
    let run = |more: &[&'static str]| -> Vec<&str> { [&["bench", "schemes"], more].concat() };
    refused(&run(&["--kv", "gtqq"]), &["no KV scheme 'gtqq'", "gtq-blocks"]);
    refused(&run(&["--model", "missing.gguf"]), &["missing.gguf"]);
    let of_text = ["--model", &path, "--text", &words, "--backend", "cpu"];
    refused(&[&["bench", "schemes", "--windows", "1", "--context", "1024"][..], &of_text].concat(), &["512"]);
    // A file that is given has to go with the model.
    fs::write(folder.path("no.safetensors"), "none").expect("written");
    let kv = format!("vecinfer/codes={}", folder.text("no.safetensors"));
    let line =
        [&["bench", "schemes", "--kv", &kv, "--windows", "1", "--context", "64"][..], &of_text].concat();
    refused(&line, &["no.safetensors"]);
    // Nothing but quality, and no model.
    let output = elsewhere(&folder, &["bench", "schemes", "--only", "quality"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("./setup --model"), "{}", text(&output.stderr));
    assert_eq!(ferrokv(&["bench", "schemes", "--only", "size"]).status.code(), Some(2));
}
