//! `ferrokv generate` with a tiny model of random weights: its text is that of the library, and what it
//! refuses.

mod common;

use common::{Folder, ferrokv, json, refused, succeed, text};
use ferrokv::host::Device;
use ferrokv::host::dense::DenseCache;
use ferrokv::host::kv::KvCache;
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::forward::Runner;
use ferrokv::host::model::gguf::write::Writer;
use ferrokv::host::model::kernels::Choice;
use ferrokv::host::model::synthetic::{self, Packing};
use ferrokv::host::model::{Model, ModelConfig};
use ferrokv::simt::emu::EmuOptions;
use std::fs;

fn tiny() -> Writer {
    synthetic::file(
        &synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1).expect("a model"),
    )
}

fn write(folder: &Folder, name: &str, writer: &Writer) -> String {
    fs::write(folder.path(name), writer.to_bytes()).expect("written");
    folder.text(name)
}

/// Tokens that follow a prompt, up to `count`, greedily; the cache at the end holds all but the last.
fn expected(path: &str, prompt: &str, count: usize) -> (Vec<u32>, String, u64) {
    let model = Model::open(path).expect("a model");
    let tokenizer = model.tokenizer().expect("a tokenizer");
    let mut prompt = tokenizer.encode(prompt).expect("tokens");
    prompt.splice(0..0, tokenizer.bos());
    let device = Device::cpu(EmuOptions::default());
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let mut cache = DenseCache::new(&device, (&model.config).into(), prompt.len() + count).expect("a cache");
    let mut tokens = vec![runner.prefill(&prompt, &mut cache, Choice::Greedy).expect("a token")];
    while tokens.len() < count && !tokenizer.is_end(tokens[tokens.len() - 1]) {
        tokens.push(runner.step(tokens[tokens.len() - 1], &mut cache, Choice::Greedy).expect("a token"));
    }
    (tokens.clone(), tokenizer.decode(&tokens).expect("text"), cache.bytes())
}

#[test]
fn the_text_is_the_librarys_and_the_record_has_every_step() {
    let folder = Folder::new();
    let path = write(&folder, "tiny.gguf", &tiny());
    let prompt = "the thing and the other ".repeat(6);
    let (tokens, expected, bytes) = expected(&path, &prompt, 12);
    let report = folder.text("record.json");
    let output = ferrokv(&["generate", &prompt, "--model", &path, "--max-tokens", "12", "--json", &report]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), format!("{expected}\n"));
    let status = text(&output.stderr);
    assert!(status.lines().count() == 1 && status.contains("prompt tokens in"), "{status}");
    assert!(status.contains("12 tokens, ") && status.contains("KV dense: "), "{status}");

    let report = json(&report);
    assert_eq!((&report["kv"], &report["finish"]), (&"dense".into(), &"max-tokens".into()));
    assert!(report["error"].is_null(), "{report}");
    let steps = report["steps"].as_array().expect("steps");
    let found: Vec<u64> = steps.iter().map(|step| step["token"].as_u64().expect("a token")).collect();
    assert_eq!(found, tokens.iter().map(|&token| u64::from(token)).collect::<Vec<_>>());
    let joined: String = steps.iter().map(|step| step["text"].as_str().expect("text")).collect();
    assert!(report["text"].as_str().expect("text").starts_with(&joined));
    assert_eq!(report["kv_bytes"], bytes);
    let read = report["prompt_tokens"].as_array().expect("tokens").len();
    assert!(read > 64, "{read} tokens: more than a chunk");
    // All but the last token went into the cache, 1024 bytes each.
    assert_eq!(bytes, (read as u64 + 11) * 1024);
}

#[test]
fn a_certified_text_says_what_is_known_of_it() {
    let folder = Folder::new();
    let path = write(&folder, "tiny.gguf", &tiny());
    let report = folder.text("record.json");
    let prompt = "the thing and the other ".repeat(3);
    let options = ["--kv", "certified:strict", "--max-tokens", "4", "--json", &report];
    let output = ferrokv(&[&["generate", &prompt, "--model", &path], &options[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let status = text(&output.stderr);
    assert!(status.contains("KV certified: ") && status.contains(" % of f16"), "{status}");
    assert!(
        status.contains("of the head's output in the median") && status.contains(" heads computed exactly"),
        "{status}"
    );

    let report = json(&report);
    assert_eq!(report["kv"], "certified:strict");
    assert!(report["kv_bytes"].as_u64() < report["kv_bytes_f16"].as_u64());
    let steps = report["steps"].as_array().expect("steps");
    assert!(steps[0]["report"].is_null(), "the prompt's token is exact");
    let heads = steps[1]["report"]["heads"].as_u64().expect("a step's heads");
    assert_eq!(heads, 2 * 4, "layers and query heads");
    assert_eq!(report["report"]["heads"], (steps.len() as u64 - 1) * heads);
    assert!(report["report"]["worst_bound"].as_f64().expect("a bound") > 0.0);
}

#[test]
fn draws_depend_on_the_seed_alone() {
    let folder = Folder::new();
    let path = write(&folder, "tiny.gguf", &tiny());
    let draw = |seed: &str| {
        let options = ["--max-tokens", "20", "--temperature", "3", "--top-p", "0.9", "--seed", seed];
        let out = succeed(&[&["generate", "the", "--model", &path, "--json", "-"], &options[..]].concat());
        // Nothing but the report is on stdout.
        let report: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        assert_eq!(report["seed"].to_string(), seed);
        report["text"].as_str().expect("text").to_owned()
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
}

#[test]
fn a_chat_is_put_in_the_models_template() {
    let folder = Folder::new();
    let path = write(&folder, "tiny.gguf", &tiny());
    let out = succeed(&["generate", "hi", "--model", &path, "--chat", "--max-tokens", "1", "--json", "-"]);
    let report: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let model = Model::open(&path).expect("a model");
    let message = ferrokv::host::model::tokenizer::Message::user("hi");
    let chat = model.tokenizer().expect("a tokenizer").chat(&[message]).expect("tokens");
    assert_eq!(report["prompt_tokens"], serde_json::json!(chat));
}

#[test]
fn a_text_ends_where_the_context_does() {
    let folder = Folder::new();
    let config = ModelConfig { context: 24, ..synthetic::tiny(Architecture::Llama) };
    let model = synthetic::model(config, Packing::Q4_1, 1).expect("a model");
    let path = write(&folder, "short.gguf", &synthetic::file(&model));
    let (tokens, _, _) = expected(&path, "xyz", 21);
    let out = succeed(&["generate", "xyz", "--model", &path, "--json", "-"]);
    let report: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    let read = report["prompt_tokens"].as_array().expect("tokens").len();
    assert_eq!((&report["finish"], &report["kv_tokens"]), (&"context".into(), &24.into()));
    let steps = report["steps"].as_array().expect("steps");
    assert_eq!(steps.len(), 24 - read + 1);
    assert_eq!(steps[0]["token"], tokens[0]);
}

#[test]
fn bad_input_is_refused_in_a_line() {
    let folder = Folder::new();
    let path = write(&folder, "tiny.gguf", &tiny());
    let with = |arguments: &[&str], words: &[&str]| {
        refused(&[&["generate", "--model", &path], arguments].concat(), words);
    };
    with(&[""], &["the prompt is empty"]);
    with(&["a", "--kv", "vector"], &["no KV scheme 'vector'", "there is dense", "certified"]);
    with(&["a", "--temperature", "-1"], &["temperature is -1", "above 0"]);
    with(&["a", "--temperature", "1", "--top-p", "1.5"], &["top-p is 1.5", "at most 1"]);
    with(&[&"x".repeat(513)], &["513 tokens", "context of 512"]);
    refused(&["generate", "a", "--model", &folder.text("none.gguf")], &["none.gguf", "./setup --model"]);
    let mut writer = tiny();
    let bare = write(&folder, "bare.gguf", writer.unset("tokenizer.ggml.model"));
    refused(&["generate", "a", "--model", &bare], &["has no tokenizer"]);
    let mut writer = tiny();
    let bare = write(&folder, "bare.gguf", writer.unset("tokenizer.chat_template"));
    refused(&["generate", "a", "--chat", "--model", &bare], &["no chat template", "--chat"]);
    let usage = succeed(&["generate", "--help"]);
    assert!(usage.contains("KV schemes:") && usage.contains("--temperature"), "{usage}");
}

/// A text that fails half-way leaves a record of what there was, with the failure's name.
#[cfg(target_os = "linux")]
#[test]
fn a_failure_keeps_what_there_is() {
    use std::process::Command;
    let folder = Folder::new();
    let path = write(&folder, "tiny.gguf", &tiny());
    let report = folder.text("record.json");
    let (tokens, whole, _) = expected(&path, "the thing", 12);
    let output = Command::new(env!("CARGO_BIN_EXE_ferrokv"))
        .args(["generate", "the thing", "--model", &path, "--max-tokens", "12", "--json", &report])
        .args(["--backend", "cpu"])
        // Nothing can be printed there.
        .stdout(fs::File::options().write(true).open("/dev/full").expect("the device"))
        .output()
        .expect("the command starts");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.lines().count() == 1 && error.contains("cannot write to stdout"), "{error}");

    let report = json(&report);
    assert_eq!(report["finish"], "failed");
    assert_eq!(error, format!("ferrokv: {}\n", report["error"].as_str().expect("an error")));
    let steps = report["steps"].as_array().expect("steps");
    let (last, before) = steps.split_last().expect("a step");
    // Up to the first that had something to print.
    assert!(before.iter().all(|step| step["text"] == "") && last["text"] != "", "{steps:?}");
    let found: Vec<u64> = steps.iter().map(|step| step["token"].as_u64().expect("a token")).collect();
    assert_eq!(found, tokens[..steps.len()].iter().map(|&token| u64::from(token)).collect::<Vec<_>>());
    assert!(whole.starts_with(report["text"].as_str().expect("text")) && steps.len() < tokens.len());
    assert!(report["kv_tokens"].as_u64() > Some(0) && report["prefill_seconds"].as_f64() > Some(0.0));
}

/// What was printed stays, and the record says how far the text came.
#[cfg(unix)]
#[test]
fn an_interruption_keeps_what_there_is() {
    use std::io::Read;
    use std::process::{Command, Stdio};
    let folder = Folder::new();
    // Minutes of text.
    let config = ModelConfig { context: 100_000, layers: 8, ..synthetic::tiny(Architecture::Llama) };
    let model = synthetic::model(config, Packing::Q4_1, 1).expect("a model");
    let path = write(&folder, "long.gguf", &synthetic::file(&model));
    let report = folder.text("record.json");
    let mut process = Command::new(env!("CARGO_BIN_EXE_ferrokv"))
        .args(["generate", "xyz", "--model", &path, "--max-tokens", "90000", "--json", &report])
        .args(["--backend", "cpu"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut first = [0];
    process.stdout.as_mut().expect("a pipe").read_exact(&mut first).expect("text");
    let pid = process.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
    let output = process.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("interrupted after"), "{}", text(&output.stderr));
    let report = json(&report);
    assert_eq!(report["finish"], "interrupted");
    let printed = [first.to_vec(), output.stdout].concat();
    assert_eq!(format!("{}\n", report["text"].as_str().expect("text")).as_bytes(), printed);
}
