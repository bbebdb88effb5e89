//! `ferrokv eval` with a tiny model of random weights: figures are those of the oracle, and an interrupted
//! run goes on.

mod common;

use common::{Folder, SAMPLE, ferrokv, json, refused, succeed, text, words};
use ferrokv::host::model::config::Architecture;
use ferrokv::host::model::oracle::{DenseKeyValues, KeyValues, Oracle};
use ferrokv::host::model::synthetic::{self, Packing};
use ferrokv::host::model::text::Corpus;
use ferrokv::host::model::{Error as ModelError, Model, ModelConfig, fetched};
use half::f16;
use serde_json::Value;
use std::fs;
use std::io::Write;

fn model(folder: &Folder, layers: usize) -> String {
    model_with(folder, layers, 512)
}

fn model_with(folder: &Folder, layers: usize, context: usize) -> String {
    let config = ModelConfig { layers, context, ..synthetic::tiny(Architecture::Llama) };
    let model = synthetic::model(config, Packing::Q4_1, 1).expect("a model");
    fs::write(folder.path("tiny.gguf"), synthetic::file(&model).to_bytes()).expect("written");
    folder.text("tiny.gguf")
}

fn array<'a>(value: &'a Value, name: &str) -> &'a Vec<Value> {
    value[name].as_array().expect("an array")
}

fn number(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {value}"))
}

#[test]
fn perplexity_is_the_oracles_over_the_second_half() {
    let folder = Folder::new();
    let (path, words) = (model(&folder, 2), words(&folder, 2000));
    let (report, plot) = (folder.text("ppl.json"), folder.text("ppl"));
    let out = succeed(&[
        "eval",
        "ppl",
        "--model",
        &path,
        "--text",
        &words,
        "--context",
        "33..64",
        "--windows",
        "3",
        "--json",
        &report,
        "--plot",
        &plot,
        "--backend",
        "cpu",
    ]);
    assert!(out.contains("perplexity") && out.contains("dense") && out.contains("seed 20260425"), "{out}");
    let report = json(&report);
    assert_eq!((&report["command"], &report["complete"]), (&"eval ppl".into(), &true.into()));
    let model = Model::open(&path).expect("a model");
    let tokenizer = model.tokenizer().expect("a tokenizer");
    let corpus = Corpus::open(&words).expect("the text");
    let oracle = Oracle::new(&model);
    let (trials, rows) = (array(&report, "trials"), array(&report["summary"], "rows"));
    assert_eq!((trials.len(), rows.len()), (18, 6));
    for (context, rows) in [33, 64].into_iter().zip(rows.chunks(3)) {
        let windows = corpus.windows(tokenizer, context, 3).expect("windows");
        let mut sum = 0.0;
        for (i, window) in windows.iter().enumerate() {
            let trial = trials
                .iter()
                .find(|trial| {
                    number(trial, "context") == context as f64 && number(trial, "window") == i as f64
                })
                .expect("a trial");
            // Of token i + 1 given those to i: the second half's are the last.
            let logs = oracle.log_probabilities(&window.tokens).expect("logits");
            let half = &logs[context / 2 - 1..];
            let expected = -half.iter().sum::<f64>() / half.len() as f64;
            assert!((number(trial, "nll") - expected).abs() < 5e-3, "{trial}: {expected}");
            assert_eq!(number(trial, "decoded"), (context - context / 2) as f64);
            assert_eq!(number(trial, "kv_tokens"), (context - 1) as f64);
            sum += number(trial, "nll");
        }
        let (dense, codes, certified) = (&rows[0], &rows[1], &rows[2]);
        assert!((number(dense, "perplexity") - (sum / 3.0).exp()).abs() < 1e-9 * (sum / 3.0).exp());
        assert_eq!((number(dense, "delta"), number(dense, "ratio")), (0.0, 1.0));
        assert_eq!(number(dense, "kv_bytes_per_token"), 1024.0);
        // Quantizing does something, and not much; what the scheme knows of it stands beside.
        for row in [codes, certified] {
            let delta = number(row, "delta");
            assert!(delta != 0.0 && delta.abs() < 0.2, "{row}");
            assert!((number(row, "ratio") - delta.exp()).abs() < 1e-12);
            let interval = &row["delta_interval"];
            assert!(number(interval, "low") <= delta && delta <= number(interval, "high"), "{row}");
        }
        assert_eq!((&codes["kv"], &certified["kv"]), (&"int8-int4".into(), &"certified".into()));
        assert!(codes["report"].is_null());
        // Two layers of four heads, in every step of three windows.
        let heads = 2 * 4 * 3 * (context - context / 2);
        assert_eq!(number(&certified["report"], "heads"), heads as f64);
    }
    let svg = fs::read_to_string(folder.path("ppl.svg")).expect("a picture");
    assert!(svg.contains("perplexity") && svg.contains("dense"));
    assert!(fs::read(folder.path("ppl.png")).expect("a picture").starts_with(b"\x89PNG"));
}

/// A record without what differs from run to run.
fn settled(path: &str) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                ["seconds", "date", "environment"].iter().for_each(|name| _ = map.remove(*name));
                map.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut value = json(path);
    strip(&mut value);
    value
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_goes_on_where_it_was() {
    use std::process::{Command, Stdio};
    let folder = Folder::new();
    let (path, words) = (model(&folder, 8), words(&folder, 40_000));
    let arguments = |report: &str| {
        [
            "eval",
            "ppl",
            "--model",
            &path,
            "--text",
            &words,
            "--context",
            "64",
            "--windows",
            "400",
            "--kv",
            "dense",
            "--json",
            report,
        ]
        .map(str::to_owned)
        .to_vec()
    };
    let (parts, whole) = (folder.text("parts.json"), folder.text("whole.json"));
    let mut process = Command::new(env!("CARGO_BIN_EXE_ferrokv"))
        .args(arguments(&parts))
        .args(["--backend", "cpu"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    // The first trial is written at once; the rest takes seconds.
    while !folder.path("parts.json").exists() {
        assert!(process.try_wait().expect("a state").is_none(), "it ended before its first trial");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert!(Command::new("kill").args(["-INT", &process.id().to_string()]).status().expect("kill").success());
    let output = process.wait_with_output().expect("an end");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{error}");
    assert!(error.contains("of 400 trials done") && error.contains("goes on from there"), "{error}");
    let part = json(&parts);
    let done = array(&part, "trials").len();
    assert!(part["complete"] == false && (1..400).contains(&done), "{done} trials");

    for report in [&parts, &whole] {
        let arguments = arguments(report);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(["--backend", "cpu"]).collect();
        let output = ferrokv(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    assert!(settled(&parts) == settled(&whole), "a run in two parts gives what one run gives");
    // With nothing left to do there is still a table.
    let arguments = arguments(&parts);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(["--backend", "cpu"]).collect();
    assert!(succeed(&arguments).contains("perplexity"));
}

#[test]
fn a_scheme_is_compared_with_itself_and_with_another() {
    let folder = Folder::new();
    let (path, words) = (model(&folder, 2), words(&folder, 1000));
    let of = |pair: &str| {
        let report = folder.text("compare.json");
        let plot = folder.text("compare");
        let fixed =
            ["compare", "--model", &path, "--text", &words, "--context", "64", "--windows", "2", "--fresh"];
        let out = succeed(
            &[&fixed[..], &["--kv", pair, "--json", &report, "--plot", &plot, "--backend", "cpu"]].concat(),
        );
        assert!(out.contains("same most likely token") && out.contains("KL, mean"), "{out}");
        assert!(folder.path("compare.svg").exists() && folder.path("compare.png").exists());
        json(&report)
    };
    let refused_pair = |pair: &str| {
        let fixed = ["compare", "--model", &path, "--text", &words, "--kv", pair];
        refused(&fixed, &["does not name two KV schemes"]);
    };
    refused_pair("dense,dense");
    refused_pair("dense");
    // Bit by bit the same: what quantizes nothing must differ in nothing.
    let same = of("int8-int4,dense");
    let other = of("dense,int8-int4");
    let (summary, trials) = (&other["summary"], array(&other, "trials"));
    assert!(number(summary, "kl") > 0.0 && number(summary, "kl_max") < 1.0, "{summary}");
    assert!(number(summary, "tv") > 0.0 && number(summary, "tv_max") < 0.5, "{summary}");
    assert_eq!(number(&summary["all"], "steps"), 64.0);
    assert!(number(&summary["decisive"], "share") >= number(&summary["all"], "share"), "{summary}");
    for (there, back) in trials.iter().zip(array(&same, "trials")) {
        for name in ["kl", "tv", "agrees", "margin"] {
            assert_eq!(array(there, name).len(), 32);
        }
        assert_eq!(there["tv"], back["tv"], "the total variation is symmetric");
        assert_eq!((&there["nll"][0], &there["nll"][1]), (&back["nll"][1], &back["nll"][0]));
        assert_ne!(there["kl"], back["kl"]);
    }
    let delta = number(summary, "delta");
    let ratio = summary["perplexity"][1].as_f64().expect("a number")
        / summary["perplexity"][0].as_f64().expect("one");
    assert!((ratio.ln() - delta).abs() < 1e-9, "{summary}");
}

/// What is captured is what the oracle has, rounded; `attend` reads it.
#[test]
fn a_capture_is_what_attention_had() {
    let folder = Folder::new();
    let (path, words) = (model(&folder, 2), words(&folder, 1000));
    let (out, report) = (folder.text("kv.safetensors"), folder.text("capture.json"));
    let fixed =
        ["capture", "--model", &path, "--text", &words, "--start", "10", "-o", &out, "--backend", "cpu"];
    succeed(
        &[
            &fixed[..],
            &["--tokens", "70", "--queries", "9", "--layers", "1", "--decode", "4", "--json", &report],
        ]
        .concat(),
    );
    let report = json(&report);
    let model = Model::open(&path).expect("a model");
    let tokenizer = model.tokenizer().expect("a tokenizer");
    let tokens = Corpus::open(&words).expect("the text").window(tokenizer, 10, 70).expect("a window").tokens;
    assert_eq!(report["token_ids"], serde_json::json!(tokens));
    let mut held = DenseKeyValues::new(&model.config);
    Oracle::new(&model).forward(&tokens, &mut held).expect("logits");

    let bytes = fs::read(&out).expect("a capture");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).expect("a header");
    let metadata = metadata.metadata().clone().expect("metadata");
    assert_eq!(metadata["query_first_position"], "61");
    let numbers = |name: &str| -> Vec<f64> {
        let data = file.tensor(name).expect("a tensor").data();
        data.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f64()).collect()
    };
    assert_eq!(file.names().len(), 3);
    assert_eq!(file.tensor("layer.01.query").expect("queries").shape(), [9, 4, 64]);
    for (part, name) in ["layer.01.key", "layer.01.value"].into_iter().enumerate() {
        assert_eq!(file.tensor(name).expect("a tensor").shape(), [70, 2, 64]);
        let found = numbers(name);
        let size = (found.iter().map(|x| x * x).sum::<f64>() / found.len() as f64).sqrt();
        for head in 0..2 {
            let expected = held.head(1, head);
            for (i, expected) in expected[part].iter().enumerate() {
                let found = found[(i / 64 * 2 + head) * 64 + i % 64];
                assert!((found - expected).abs() < 2e-2 * size, "{name} {i}: {found}, {expected}");
            }
        }
    }
    let attended = succeed(&["attend", &out, "--queries", "3", "--backend", "cpu"]);
    assert!(attended.contains("layer.01"), "{attended}");
    refused(&fixed, &["kv.safetensors exists", "--force"]);
    let forced = [&fixed[..], &["--force"]].concat();
    refused(&[&forced[..], &["--tokens", "5", "--queries", "6"]].concat(), &["--queries 6", "5 tokens"]);
    refused(&[&forced[..], &["--layers", "0,2"]].concat(), &["the layer to capture is 2"]);
    assert_eq!(fs::read(&out).expect("a capture"), bytes, "left as it was");
}

/// The sample in `assets` is what `assets/README.md` says made it: its first rows, bit for bit.
#[test]
fn the_sample_is_what_a_capture_gives() {
    for path in [fetched::model(), fetched::text("sotu")] {
        if let Err(ModelError::NotFetched { .. }) = path {
            let line =
                "the_sample_is_what_a_capture_gives: skipped, the model is not fetched (./setup --model)";
            // Past the test harness's capture, or nobody would see it.
            let _ = writeln!(std::io::stderr(), "{line}");
            return;
        }
        path.expect("a path");
    }
    let folder = Folder::new();
    let out = folder.text("kv.safetensors");
    let sample = fs::read(SAMPLE).expect("the sample");
    let sample = safetensors::SafeTensors::deserialize(&sample).expect("safetensors");
    let layers = ["00", "07", "15", "22", "29"];
    let (tokens, queries) = (64, 64);
    succeed(&[
        &["capture", "-o", &out, "--layers", &layers.join(","), "--start", "20001", "--backend", "cpu"][..],
        &["--tokens", &tokens.to_string()],
    ]
    .concat());
    let slice = fs::read(&out).expect("a capture");
    let slice = safetensors::SafeTensors::deserialize(&slice).expect("safetensors");
    assert_eq!((slice.len(), sample.len()), (3 * layers.len(), 3 * layers.len()));
    for layer in layers {
        for part in ["key", "value"] {
            let name = format!("layer.{layer}.{part}");
            let (found, whole) = (slice.tensor(&name).expect("a tensor"), sample.tensor(&name).expect("it"));
            assert_eq!((found.shape(), whole.shape()), (&[tokens, 3, 64][..], &[512, 3, 64][..]));
            assert!(whole.data().starts_with(found.data()), "{name}");
        }
        let name = format!("layer.{layer}.query");
        assert_eq!(sample.tensor(&name).expect("it").shape(), [queries, 9, 64]);
    }
}

#[test]
fn needles_and_tasks_are_recorded_trial_by_trial() {
    let folder = Folder::new();
    let (path, words) = (model_with(&folder, 1, 2048), words(&folder, 20_000));
    let (report, plot) = (folder.text("report.json"), folder.text("plot"));
    let run = |arguments: &[&str]| {
        let fixed =
            ["--model", &path, "--text", &words, "--json", &report, "--plot", &plot, "--backend", "cpu"];
        let out = succeed(&[&["eval"], arguments, &fixed].concat());
        let svg = fs::read_to_string(folder.path("plot.svg")).expect("a picture");
        fs::remove_file(folder.path("plot.svg")).expect("removed");
        (out, svg, json(&report))
    };
    let needles = [
        "niah",
        "--kv",
        "int8-int4",
        "--context",
        "700",
        "--depths",
        "2",
        "--trials",
        "1",
        "--distractors",
        "2",
    ];
    let (out, svg, found) = run(&needles);
    assert!(out.contains("McNemar") && out.contains("0/2"), "{out}");
    assert!(svg.contains("int8-int4") && svg.contains("100 %") && svg.contains("0/1"), "{svg}");
    let (trials, rows) = (array(&found, "trials"), array(&found["summary"], "rows"));
    assert_eq!((trials.len(), rows.len()), (4, 2));
    for (dense, codes) in trials.iter().step_by(2).zip(trials.iter().skip(1).step_by(2)) {
        assert_eq!((&dense["kv"], &codes["kv"]), (&"dense".into(), &"int8-int4".into()));
        assert_eq!((&dense["key"], &dense["depth"]), (&codes["key"], &codes["depth"]));
        assert!(
            number(dense, "log_probability") < -5.0 && dense["hit"] == false,
            "noise finds no key: {dense}"
        );
        assert_ne!(dense["log_probability"], codes["log_probability"]);
    }
    assert_eq!((number(&rows[1], "p"), number(&rows[1], "hit_rate")), (1.0, 0.0));
    // Wilson's interval of none of two.
    assert!((number(&rows[1]["hit_interval"], "high") - 0.6576).abs() < 1e-4, "{}", rows[1]);
    // More depths are added to those there are.
    let (_, _, more) = run(&[&needles[..5], &["--depths", "3"], &needles[7..]].concat());
    assert_eq!(array(&more, "trials").len(), 6);
    assert_eq!(array(&more, "trials")[..4], trials[..]);

    fs::remove_file(&report).expect("removed");
    let (out, svg, found) =
        run(&["ruler", "--kv", "dense", "--tasks", "fwe,single", "--context", "1200", "--trials", "1"]);
    assert!(
        out.contains("single") && out.contains("fwe") && !out.contains("cwe") && svg.contains("fwe"),
        "{out}"
    );
    let (trials, rows) = (array(&found, "trials"), array(&found["summary"], "rows"));
    let tasks: Vec<&Value> = rows.iter().map(|row| &row["task"]).collect();
    assert_eq!((trials.len(), tasks), (2, vec![&"single".into(), &"fwe".into(), &"all".into()]));
    for trial in trials {
        let text = trial["text"].as_str().expect("text");
        let expected = array(trial, "expected");
        let there =
            expected.iter().filter(|answer| text.contains(answer.as_str().expect("an answer"))).count();
        assert_eq!(number(trial, "score"), there as f64 / expected.len() as f64);
        assert!(number(trial, "tokens") <= 1200.0 - 32.0);
    }
    let short = ["eval", "ruler", "--model", &path, "--text", &words, "--backend", "cpu", "--kv", "dense"];
    refused(&[&short[..], &["--context", "100"]].concat(), &["the task needs at least", "has 100"]);
}

#[test]
fn bad_input_is_refused_in_a_line() {
    let folder = Folder::new();
    let (path, words) = (model(&folder, 1), words(&folder, 300));
    let report = folder.text("ppl.json");
    let with = |arguments: &[&str]| -> Vec<String> {
        let fixed = ["eval", "ppl", "--model", &path, "--text", &words, "--backend", "cpu"];
        fixed.iter().chain(arguments).map(|word| word.to_string()).collect()
    };
    let refuse = |arguments: &[&str], expected: &[&str]| {
        let arguments = with(arguments);
        refused(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    };
    refuse(&["--context", "513"], &["513 tokens", "context of 512"]);
    refuse(&["--context", "512", "--windows", "8"], &["words.txt", "512 are asked for", "a longer text"]);
    refuse(&["--context", "16", "--json", &folder.text("none/ppl.json")], &["none", "a folder that exists"]);
    fs::write(folder.path("other.txt"), "not JSON").expect("written");
    refuse(
        &["--context", "16", "--json", &folder.text("other.txt")],
        &["other.txt is no record of `ferrokv eval ppl`", "--fresh"],
    );
    let first = with(&["--context", "16", "--windows", "2", "--kv", "dense", "--json", &report]);
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    succeed(&first);
    let before = fs::read(&report).expect("a record");
    refuse(
        &["--context", "16", "--windows", "3", "--json", &report],
        &["windows 2", "this run has 3", "--fresh"],
    );
    assert_eq!(fs::read(&report).expect("a record"), before, "left as it was");
    let again = with(&["--context", "16", "--windows", "3", "--kv", "dense", "--json", &report, "--fresh"]);
    succeed(&again.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(array(&json(&report), "trials").len(), 3);
    refuse(&["--kv", "dense,nothing"], &["no KV scheme 'nothing'", "int8-int4"]);
}
