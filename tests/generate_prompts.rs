//! `ferrokv generate --prompts`: several texts side by side, each as it would be among others.

mod common;

use common::{Folder, ferrokv, json, refused, succeed, text};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::synthetic::{self, Packing};
use serde_json::Value;
use std::fs;

fn model(folder: &Folder) -> String {
    let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model");
    fs::write(folder.path("tiny.gguf"), synthetic::file(&model).to_bytes()).expect("written");
    folder.text("tiny.gguf")
}

fn prompts(folder: &Folder, lines: &[&str]) -> String {
    fs::write(folder.path("prompts.txt"), lines.join("\n")).expect("written");
    folder.text("prompts.txt")
}

/// Tokens of each text.
fn tokens(report: &Value) -> Vec<Vec<u64>> {
    let texts = report["texts"].as_array().expect("texts");
    let steps = |text: &Value| text["steps"].as_array().expect("steps").clone();
    texts
        .iter()
        .map(|text| steps(text).iter().map(|step| step["token"].as_u64().expect("a token")).collect())
        .collect()
}

/// Five lines over room for two and for four: what a line gets follows from the room alone, not from who is
/// beside it; a line alone is what `generate` makes of it.
#[test]
fn a_line_gets_what_it_gets_whoever_is_beside_it() {
    let folder = Folder::new();
    let (model, report) = (model(&folder), folder.text("report.json"));
    let lines =
        ["the thing and the other", "", "tok", "a b c d e f g h i j k l m n o p", "x", "the end of it"];
    let drawn = ["--temperature", "1.5", "--seed", "3", "--max-tokens", "24", "--backend", "cpu"];
    for kv in ["dense", "certified", "int8"] {
        let run = |lines: &[&str], sequences: &str| {
            let file = prompts(&folder, lines);
            let own = ["generate", "--prompts", &file, "--model", &model, "--kv", kv, "--json", &report];
            let out = ferrokv(&[&own[..], &["--sequences", sequences], &drawn].concat());
            assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
            (json(&report), text(&out.stdout))
        };
        let (all, shown) = run(&lines, "2");
        let all_tokens = tokens(&all);
        assert_eq!((all_tokens.len(), &all["sequences"], &all["kv"]), (5, &2.into(), &kv.into()));
        for (text, tokens) in all["texts"].as_array().expect("texts").iter().zip(&all_tokens) {
            assert!(
                text["finish"] == "max-tokens" && tokens.len() == 24 || text["finish"] == "end",
                "{text}"
            );
        }
        // In the order of the lines, each behind its number.
        let places: Vec<_> = (1..=5).map(|n| shown.find(&format!("[{n}] ")).expect("shown")).collect();
        assert!(places.is_sorted(), "{shown}");
        // The last lines gone: the first get the same, in a cache of the same extents.
        let (fewer, _) = run(&lines[..4], "2");
        assert_eq!(fewer["capacity"], all["capacity"]);
        assert_eq!(tokens(&fewer), all_tokens[..3], "{kv}");
        let (alone, _) = run(&lines[..1], "2");
        let one = ["generate", lines[0], "--model", &model, "--kv", kv, "--json", &report];
        succeed(&[&one[..], &drawn].concat());
        let steps = json(&report)["steps"].as_array().expect("steps").clone();
        let expected: Vec<u64> = steps.iter().map(|step| step["token"].as_u64().expect("a token")).collect();
        assert_eq!(tokens(&alone), [expected], "{kv}");
    }
}

#[test]
fn files_of_prompts_that_are_refused() {
    let folder = Folder::new();
    let model = model(&folder);
    let with =
        |file: &str, words: &[&str]| refused(&["generate", "--prompts", file, "--model", &model], words);
    with(&folder.text("none.txt"), &["none.txt", "a prompt a line"]);
    with(&prompts(&folder, &["", "   "]), &["prompts.txt has no prompts"]);
    fs::write(folder.path("bytes.txt"), [0xff, 0xfe, b'\n']).expect("written");
    with(&folder.text("bytes.txt"), &["bytes.txt", "UTF-8"]);
    let file = prompts(&folder, &["tok"]);
    let over = ["generate", "--prompts", &file, "--model", &model, "--json", &file];
    assert_eq!(ferrokv(&over).status.code(), Some(2));
    assert_eq!(fs::read_to_string(folder.path("prompts.txt")).expect("still there"), "tok");
    let long = "the thing ".repeat(400);
    with(&prompts(&folder, &["tok", &long]), &["context"]);
    let file = prompts(&folder, &["tok"]);
    for arguments in [
        &["generate", "tok", "--prompts", &file][..],
        &["generate"],
        &["generate", "tok", "--sequences", "2"],
        &["generate", "--prompts", &file, "--sequences", "1"],
    ] {
        let out = ferrokv(&[arguments, &["--model", &model]].concat());
        assert_eq!(out.status.code(), Some(2), "{arguments:?}: {}", text(&out.stderr));
    }
}
