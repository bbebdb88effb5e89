//! `ferrokv bench model` with a tiny model of random weights: a row a scheme and context, and what it
//! refuses.

mod common;

use common::{Folder, ferrokv, json, refused, text};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::synthetic::{self, Packing};
use std::fs;

fn tiny(folder: &Folder) -> String {
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model");
    fs::write(folder.path("tiny.gguf"), synthetic::file(&model).to_bytes()).expect("written");
    folder.text("tiny.gguf")
}

#[test]
fn a_row_says_what_a_step_read() {
    let folder = Folder::new();
    let (path, report) = (tiny(&folder), folder.text("model.json"));
    let options = ["--kv", "dense,int8,certified", "--contexts", "64,1K", "--steps", "3", "--backend", "cpu"];
    let output = ferrokv(&[&["bench", "model", "--model", &path, "--json", &report], &options[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let tables = text(&output.stdout);
    assert!(tables.contains("int8") && tables.contains("not measured"), "{tables}");

    let report = json(&report);
    let rows = report["rows"].as_array().expect("rows");
    let names: Vec<&str> = rows.iter().map(|row| row["kv"].as_str().expect("a name")).collect();
    assert_eq!(names, ["dense", "int8", "certified"]);
    // Two layers, two KV heads of 64, the last step with 64 tokens: full blocks in 16, 10 and 8 bits with
    // annotations.
    let tokens = |row: usize| rows[row]["kv_bytes"].as_u64().expect("bytes");
    assert_eq!([tokens(0), tokens(1), tokens(2)], [64 * 1024, 64 * 640, 64 * 512 + 4 * 2 * 2 * 48]);
    for row in rows {
        assert!(row["median_us"].as_f64().expect("a time") > 0.0 && row["read_us"].is_null(), "{row}");
        assert_eq!(row["weight_bytes"], rows[0]["weight_bytes"]);
        assert_eq!(row["cache_f16_bytes"], 64 * 1024);
    }
    assert_eq!(rows[2]["report"]["heads"], 3 * 2 * 4, "steps, layers and query heads");
    assert!(rows[0]["report"].is_null() && rows[0]["times_dense"] == 1.0);
    // The model's context is 512 tokens.
    let skipped = report["skipped"].as_array().expect("a list");
    assert_eq!(skipped.len(), 3);
    assert!(skipped[0]["reason"].as_str().expect("why").contains("512"), "{skipped:?}");
}

/// Prompts have rows of their own, beside steps or alone; a scheme that needs a file of this model's is given
/// none.
#[test]
fn a_prompt_has_a_row_too() {
    let folder = Folder::new();
    let (path, report) = (tiny(&folder), folder.text("model.json"));
    let options = ["--kv", "dense,int8,vecinfer", "--prompt", "100,1K", "--backend", "cpu"];
    let output = ferrokv(&[&["bench", "model", "--model", &path, "--json", &report], &options[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let tables = text(&output.stdout);
    assert!(
        tables.contains("prompts, in chunks of up to 64 tokens") && !tables.contains("bytes take"),
        "{tables}"
    );

    let report = json(&report);
    assert!(report["rows"].as_array().expect("a list").is_empty());
    assert!(report["made_up"].as_array().expect("a list").is_empty());
    let prompts = report["prompts"].as_array().expect("rows");
    let names: Vec<&str> = prompts.iter().map(|row| row["kv"].as_str().expect("a name")).collect();
    assert_eq!(names, ["dense", "int8"]);
    for row in prompts {
        assert_eq!(row["tokens"], 100);
        assert!(row["median_us"].as_f64().expect("a time") > 0.0 && row["times_dense"].is_number(), "{row}");
    }
    assert_eq!((&prompts[0]["times_dense"], &prompts[0]["cache_of_f16"]), (&1.0.into(), &1.0.into()));
    let reason = |what: &str| -> String {
        let skipped = report["skipped"].as_array().expect("a list").iter();
        let mut of = skipped.filter(|skipped| skipped["what"] == what);
        of.next().expect(what)["reason"].as_str().expect("why").into()
    };
    assert!(reason("vecinfer, a prompt of 100").contains("ferrokv calibrate --scheme vecinfer"));
    assert!(reason("dense, a prompt of 1K").contains("512"));
}

fn run<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [&["bench", "model", "--backend", "cpu"], options].concat()
}

#[test]
fn bad_input_is_refused_in_a_line() {
    let folder = Folder::new();
    let path = tiny(&folder);
    refused(&run(&["--model", &path, "--kv", "dense,vector"]), &["no KV scheme 'vector'", "int8"]);
    refused(&run(&["--model", "missing.gguf"]), &["missing.gguf"]);
    // What the command line itself refuses comes with a hint below it.
    for (options, words) in [
        (["--contexts", "0"], "'0' is no number from 1"),
        (["--synthetic", "llama-9"], "there are llama-3.1-8b, qwen2.5-7b"),
        (["--key-scale", "nan"], "'nan' is no number from 0 to 1000"),
    ] {
        let output = ferrokv(&run(&options));
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
}
