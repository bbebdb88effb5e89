//! `gather` on the command line: what every command makes of it.

mod common;

use common::{Folder, SAMPLE, ferrokv, json, refused, succeed, text};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::synthetic::{self, Packing};
use std::fs;

#[test]
fn commands_know_it() {
    let folder = Folder::new();
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model");
    fs::write(folder.path("tiny.gguf"), synthetic::file(&model).to_bytes()).expect("written");
    let (model, report) = (folder.text("tiny.gguf"), folder.text("report.json"));
    let help = succeed(&["generate", "--help"]);
    for word in ["gather", "assured", "production", "/k=", "/block=", "/local="] {
        assert!(help.contains(word), "{word}: {help}");
    }
    assert!(
        succeed(&["kernels", "--system", "gather", "--backend", "cpu"]).contains("gather_select_f16_128_1")
    );

    let generate = ["generate", "tok", "--model", &model, "--max-tokens", "3", "--backend", "cpu"];
    let output = ferrokv(&[&generate[..], &["--kv", "gather:production", "--json", &report]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(json(&report)["kv"], "gather:production");

    let prompt = "tok ".repeat(60);
    let audited = ["generate", &prompt, "--model", &model, "--max-tokens", "3", "--backend", "cpu"];
    let kv = ["--kv", "gather/k=1/block=16/local=1/audit=1", "--json", &report];
    let output = ferrokv(&[&audited[..], &kv].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(json(&report).to_string().contains("\"audited\":{"), "{}", json(&report));

    let line = ["--kv", "dense,gather/k=1/block=16/local=1", "--backend", "cpu", "--json", &report];
    let bench = ["bench", "attention", "--shapes", "4/2/64", "--batches", "2", "--contexts", "90"];
    succeed(&[&bench[..], &["--seconds-per-row", "0"], &line].concat());
    let rows = json(&report)["rows"].as_array().expect("rows").clone();
    let row = rows.iter().find(|row| row["scheme"] == "gather/k=1/block=16/local=1").expect("its row");
    assert!(row["relative_error"][0].as_f64() > Some(1e-3), "something is left out: {row}");

    let options = ["--model", &model, "--contexts", "64", "--steps", "3"];
    succeed(&[&["bench", "model"][..], &options, &line].concat());
    assert_eq!(json(&report)["rows"][1]["kv"], "gather/k=1/block=16/local=1");
}

/// A real cache: the more blocks a step reads, the nearer it is to exact attention.
#[test]
fn more_blocks_are_nearer() {
    let worst = |scheme: &str| -> f64 {
        let line = ["attend", SAMPLE, "--layers", "7", "--queries", "1", "--kv", scheme, "--json"];
        let report: serde_json::Value = serde_json::from_str(&succeed(&line)).expect("JSON");
        let rows = report["layers"][0]["rows"].as_array().expect("rows").clone();
        let number = |row: &serde_json::Value, what: &str| row[what].as_f64().expect("a number");
        rows.iter().map(|row| number(row, "error") / number(row, "output_norm")).sum::<f64>()
    };
    let [few, more, all] =
        ["gather/k=1/block=16/local=1", "gather/k=8/block=16/local=1", "gather"].map(worst);
    assert!(few > more && more > 100.0 * all, "{few} {more} {all}");
}

#[test]
fn settings_that_there_are_not_are_refused() {
    let refuse = |scheme: &str, words: &[&str]| refused(&["attend", SAMPLE, "--kv", scheme], words);
    refuse("gather/k=0", &["k is a whole number from 1 up"]);
    refuse("gather/block=8", &["block is one of 16, 32, 64, 128"]);
    refuse("gather/policy=mean", &["no option 'policy'", "k, block, local"]);
    refuse("gather/score=median", &["score is one of bounds, mean"]);
    refuse("gather/bounds=4", &["bounds is one of 8, 16"]);
    refuse("gather/bounds=8/score=mean", &["bounds=8 does not go with score=mean", "leave bounds out"]);
    refuse("gather/staging=64/list=query", &["list=query does not go with staging"]);
    refuse("gather:certified/score=mean", &["score=mean does not go with :certified"]);
    refuse("gather:nothing", &["no preset 'nothing'", "assured, production, quest, window, certified"]);
    refuse("gather:window/k=3", &["gather:window reads no distant block"]);
}
