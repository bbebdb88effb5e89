//! Arguments, the report's shape, the peers' rows and pictures, on the emulator. No time is asserted.

use super::super::peers::{Found, read};
use super::super::testing::{parse, peer_that_writes, refusal, report, written};
use super::arguments::{Arguments, Shape};
use super::report::{BlockOrder, Libraries, Row, Subject, set_ratios};
use super::{compared, peers, picture, run, subjects, summary};

#[test]
fn what_cannot_be_measured_is_refused_with_what_can() {
    let refused = [
        (["--shapes", "32x8"], "QUERY_HEADS/KV_HEADS/HEAD_DIM"),
        (["--shapes", "32/8/80"], "there are 64, 96, 128 and 256"),
        (["--shapes", "33/8/128"], "no multiple"),
        (["--contexts", "0"], "no number"),
        (["--contexts", "8G"], "K and M may follow"),
        (["--dtype", "f32"], "f16, bf16"),
        (["--blocks", "sorted"], "shuffled, in-order"),
        (["--query-scale", "0"], "no number above 0"),
    ];
    for (line, part) in refused {
        let error = refusal::<Arguments>(&line);
        assert!(error.contains(part), "{error}");
    }
    for (scheme, part) in [
        ("fast", "there is no KV scheme 'fast'; there is dense, int8"),
        ("certified:loose", "its presets are sound, paper, strict, fast"),
    ] {
        let error = run(&parse(&["--kv", scheme, "--backend", "cpu"]).unwrap()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let arguments: Arguments = parse(&["--contexts", "1000,8K,1m"]).unwrap();
    assert_eq!(arguments.contexts, [1000, 8192, 1 << 20]);
}

#[test]
fn bytes_are_those_of_the_formula() {
    let shape: Shape = "32/8/128".parse().unwrap();
    let subject = Subject { shape, batch: 2, context: 1000, dtype: "f16", blocks: BlockOrder::Shuffled };
    // Keys and values of 8 heads; queries and outputs of 32.
    assert_eq!(subject.cache_bytes(), 2 * 1000 * 8 * 128 * 2 * 2);
    assert_eq!(subject.bytes(), subject.cache_bytes() + 2 * 2 * 32 * 128 * 2);
}

#[test]
fn a_run_without_a_gpu_measures_the_emulator_and_compares() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (json, prefix) = (path("report.json"), path("plot"));
    let line = [
        "--backend",
        "cpu",
        "--shapes",
        "4/2/64,3/1/96",
        "--batches",
        "1,2",
        "--contexts",
        "100,200,1M",
        "--dtype",
        "f16,bf16",
        "--seconds-per-row",
        "0",
        "--kv",
        "dense,int8-int4,certified:strict",
        "--cold",
        "--commit",
        "0123abc",
        "--json",
        &json,
        "--plot",
        &prefix,
    ];
    run(&parse(&line).unwrap()).unwrap();
    let written = written(&json);
    assert_eq!(written["environment"]["commit"], "0123abc");
    let rows = written["rows"].as_array().unwrap();
    let of = |scheme: &str| rows.iter().filter(|row| row["scheme"] == scheme).collect::<Vec<_>>();
    assert_eq!(["dense", "int8-int4", "certified:strict"].map(|scheme| of(scheme).len()), [16, 8, 8]);
    let fact = |row: &serde_json::Value, name: &str, kind: &str| {
        let facts = row["facts"].as_array().unwrap();
        let fact = facts.iter().find(|fact| fact["name"] == name).unwrap_or_else(|| panic!("{name}: {row}"));
        fact["value"][kind].clone()
    };
    let bytes = |row, name| fact(row, name, "bytes").as_u64().unwrap();
    for row in rows {
        assert_eq!((&row["op"], &row["emulator"]), (&"decode".into(), &true.into()));
        assert_eq!(row["verified"], true, "{row}");
        let part = row["error_of_bound"].as_f64().unwrap();
        assert!(part > 1e-5 && part <= 1.0, "{row}");
        assert!(row["dense_ratio"].as_f64().unwrap() > 0.0, "{row}");
    }
    for row in of("int8-int4") {
        let (tokens, batch) = (row["context"].as_u64().unwrap(), row["batch"].as_u64().unwrap());
        assert_eq!(["keys", "values"].map(|name| fact(row, name, "count")), [0.0, 0.0]);
        // The full blocks of 2 heads, quantized; the others' tokens, keys and values.
        let (blocks, rest) = (tokens / 16, tokens % 16);
        assert_eq!(bytes(row, "quantized"), batch * 2 * blocks * 32 * 64);
        assert_eq!(bytes(row, "promoted"), batch * 2 * 16 * u64::from(rest != 0) * 64 * 4);
        let positive = |name| fact(row, name, "error").as_f64() > Some(0.0);
        assert!(positive("E_key") && positive("E_val"), "{row}");
    }
    let annotation = size_of::<host::certified::Annotation>() as u64;
    for row in of("certified:strict") {
        assert_eq!(fact(row, "originals", "text"), "host");
        let (tokens, batch) = (row["context"].as_u64().unwrap(), row["batch"].as_u64().unwrap());
        assert_eq!(bytes(row, "quantized"), batch * 2 * (tokens / 16) * (32 * 64 + annotation));
        assert!(fact(row, "keys", "count").as_f64() > Some(0.0), "{row}");
        let read = ["quantized", "promoted", "dense"].map(|part| bytes(row, part));
        assert_eq!(row["cache_bytes"], read.iter().sum::<u64>());
    }
    let refused = written["skipped"].as_array().unwrap();
    // The GPU, what is too long for the emulator, and heads that there are no quantized kernels for.
    assert_eq!(refused.len(), 1 + 2 * 2 * 2 + 2 * 8);
    let certified: Vec<_> =
        refused.iter().filter(|line| line["what"].as_str().unwrap().contains("certified")).collect();
    assert_eq!(certified.len(), 8);
    assert!(certified.iter().all(|line| line["reason"].as_str().unwrap().contains("head_dim 96")));
    for name in ["plot-4-2-64-f16.svg", "plot-3-1-96-bf16.png"] {
        assert!(folder.path().join(name).metadata().unwrap().len() > 1000, "{name}");
    }
}

#[test]
fn blocks_lie_as_asked_and_make_rows_of_their_own() {
    use super::caches::{Caches, Material};
    let device = host::Device::cpu(simt::emu::EmuOptions::default());
    let shape: Shape = "4/2/64".parse().unwrap();
    let blocks = |blocks| {
        let subject = Subject { shape, batch: 3, context: 100, dtype: "f16", blocks };
        Caches::<half::f16>::new(&device, subject, 1, Material::Normal(3.0))
            .unwrap()
            .input
            .table
            .blocks()
            .to_vec()
            .unwrap()
    };
    let in_order: Vec<u32> = (0..21).collect();
    let mut shuffled = blocks(BlockOrder::Shuffled);
    assert_eq!(blocks(BlockOrder::InOrder), in_order);
    assert_ne!(shuffled, in_order);
    shuffled.sort_unstable();
    assert_eq!(shuffled, in_order);

    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json").display().to_string();
    let line = ["--backend", "cpu", "--shapes", "4/2/64", "--batches", "1", "--contexts", "100"];
    let more = ["--blocks", "shuffled,in-order", "--seconds-per-row", "0", "--json", &json];
    run(&parse(&[&line[..], &more].concat()).unwrap()).unwrap();
    let written = written(&json);
    let rows = written["rows"].as_array().unwrap();
    let of = |scheme: &str| -> Vec<_> {
        rows.iter().filter(|row| row["scheme"] == scheme).map(|row| row["blocks"].as_str()).collect()
    };
    for scheme in ["dense", "int8-int4", "certified"] {
        assert_eq!(of(scheme), [None, Some("in-order")]);
    }
    assert!(rows.iter().all(|row| row["verified"] == true), "{rows:?}");
}

#[test]
fn without_time_everything_is_listed_as_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json").display().to_string();
    let line =
        ["--backend", "cpu", "--shapes", "4/2/64", "--contexts", "16", "--seconds", "0", "--json", &json];
    run(&parse(&line).unwrap()).unwrap();
    let written = written(&json);
    assert!(written["rows"].as_array().unwrap().is_empty());
    assert!(written["skipped"][1]["reason"].as_str().unwrap().contains("no time left"));
}

const PEERS: &str = r#"{"torch": "2.9", "cudnn": 91002, "device": "GPU", "checks": [{"within_bound": true}], "rows": [
    {"peer": "torch cudnn", "op": "decode", "dtype": "f16", "batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 64,
     "context": 8192, "bytes": 100, "median_us": 30.0, "gb_per_s": 3.0, "config": "gqa", "unknown": 1},
    {"peer": "torch cudnn", "op": "decode", "dtype": "f16", "batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 64,
     "context": 8192, "bytes": 100, "median_us": 20.0, "gb_per_s": 5.0, "config": "rows"},
    {"peer": "torch", "op": "read", "dtype": "f16", "batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 64,
     "context": 8192, "bytes": 100, "median_us": 10.0},
    {"peer": "torch flash", "op": "decode"}],
    "skipped": ["torch math decode x: only up to 5"], "errors": ["torch efficient decode x: RuntimeError: no"]}"#;

fn ours(median_us: f64) -> Row {
    Row {
        peer: "ferrokv".into(),
        op: "decode".into(),
        scheme: Some("dense".into()),
        dtype: "f16".into(),
        batch: 1,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 64,
        context: 8192,
        median_us,
        ..Row::default()
    }
}

fn theirs() -> Found<Row, Libraries> {
    read(PEERS, peers::OPTION)
}

#[test]
fn the_fastest_form_of_each_peer_stands_beside_ours() {
    let found = theirs();
    assert_eq!(found.rows.len(), 3);
    assert_eq!(found.about.unwrap().libraries.cudnn, Some(91002));
    let reasons: Vec<&str> = found.skipped.iter().map(|skipped| skipped.reason.as_str()).collect();
    assert_eq!(reasons, ["a row has no dtype", "only up to 5", "RuntimeError: no"]);
    let mine = ours(10.0);
    let decode = found.rows.iter().filter(|row| row.op == "decode");
    let rows: Vec<&Row> = decode.chain([&mine]).collect();
    let text = summary::side_by_side(&rows);
    assert_eq!(text.lines().count(), 3, "an empty line, the heads, one peer: {text}");
    assert!(text.contains("rows") && text.contains("2.00"), "{text}");
    assert!(summary::side_by_side(&[&mine]).is_empty());
}

#[test]
fn peers_are_asked_for_what_the_command_measures() {
    let folder = tempfile::tempdir().unwrap();
    let asked = "--shapes 4/2/64,3/1/96 --batches 1,8 --contexts 8192 --dtype f16,bf16 --seconds 20 --json";
    let script = peer_that_writes(folder.path(), PEERS, asked);
    let line =
        ["--shapes", "4/2/64,3/1/96", "--contexts", "8K", "--dtype", "f16,bf16", "--peers-script", &script];
    let found = {
        let arguments = parse(&[&line[..], &["--python", "sh"]].concat()).unwrap();
        peers::run(&arguments, &subjects(&arguments), 30.0)
    };
    assert_eq!(found.rows.len(), 3, "{:?}", found.skipped);
}

#[test]
fn a_wrong_output_fails_the_command_and_names_its_row() {
    let right = Row { verified: Some(true), ..ours(1.0) };
    assert!(compared(&[ours(1.0), right.clone()]).is_ok());
    let wrong = Row { verified: Some(false), ..ours(1.0) };
    let error = compared(&[right, wrong]).unwrap_err().to_string();
    assert!(
        error.starts_with("1 of 2 compared rows are wrong: dense 4/2/64 f16 batch 1 context 8192"),
        "{error}"
    );
}

#[test]
fn an_error_above_its_bound_is_wrong() {
    use super::caches::{Caches, Material};
    use host::kv::workload::{Judged, Opening, Originals};
    let device = host::Device::cpu(simt::emu::EmuOptions::default());
    let shape: Shape = "4/2/64".parse().unwrap();
    let subject = Subject { shape, batch: 2, context: 70, dtype: "f16", blocks: BlockOrder::Shuffled };
    let caches = Caches::<half::f16>::new(&device, subject, 1, Material::Normal(3.0)).unwrap();
    for name in ["dense", "certified"] {
        let selection = name.parse().unwrap();
        let input = caches.input.clone().into();
        let opening = Opening { input, selection: &selection, originals: Originals::Device, layer: None };
        let workload = (selection.scheme().workload)(&opening).unwrap();
        let mut outcome = workload.outcome().unwrap();
        let judged = caches.judge(&*workload, &outcome);
        assert!(judged.len() == 4 && judged.iter().all(Judged::holds), "{name}: {judged:?}");
        // The last row, in one element by twice what the norm of its error may be.
        let bound = judged[3].bound.unwrap();
        outcome.output[7 * 64 + 5] += (2.0 * bound + judged[3].error) as f32;
        let holds = |outcome: &host::kv::workload::Outcome| {
            caches.judge(&*workload, outcome).iter().map(Judged::holds).collect::<Vec<_>>()
        };
        assert_eq!(holds(&outcome), [true, true, true, false], "{name}");
        outcome.output[0] = f32::NAN;
        assert_eq!(holds(&outcome), [false, true, true, false], "{name}");
    }
}

#[test]
fn rows_of_one_configuration_are_set_beside_each_other() {
    let mut rows = theirs().rows;
    let certified = Row { scheme: Some("certified".into()), ..ours(5.0) };
    rows.extend([ours(10.0), certified.clone(), Row { batch: 2, ..certified.clone() }]);
    set_ratios(&mut rows);
    let own = &rows[rows.len() - 3..];
    let figures: Vec<_> = own.iter().map(|row| (row.dense_ratio, row.peer_ratio)).collect();
    assert_eq!(figures, [(Some(1.0), Some(2.0)), (Some(2.0), Some(4.0)), (None, None)]);
    assert_eq!(own[1].fastest_peer.as_deref(), Some("torch cudnn"));
    // Blocks in order are beside dense attention over blocks in order.
    let in_order = |row: Row| Row { blocks: Some(BlockOrder::InOrder), ..row };
    rows.extend([in_order(ours(8.0)), in_order(certified)]);
    set_ratios(&mut rows);
    let last = &rows[rows.len() - 1];
    assert_eq!((last.dense_ratio, last.peer_ratio), (Some(1.6), Some(4.0)));
    assert!(rows.iter().filter(|row| row.peer != "ferrokv").all(|row| row.dense_ratio.is_none()));
}

#[test]
fn a_picture_has_a_panel_a_batch_and_a_line_for_each() {
    let mut rows = theirs().rows;
    rows.push(Row { gb_per_s: 7.0, bytes: 70, roofline_us: Some(5.0), ..ours(10.0) });
    rows.push(Row { batch: 8, gb_per_s: 7.0, ..ours(10.0) });
    rows.push(Row { batch: 8, gb_per_s: 8.0, blocks: Some(BlockOrder::InOrder), ..ours(9.0) });
    let report = report("bench attention", rows);
    let chart = picture::chart(&report, "4/2/64".parse().unwrap(), "f16");
    let names = |panel: usize| chart.panels[panel].series.iter().map(|s| s.name.as_str()).collect::<Vec<_>>();
    assert_eq!(names(0), ["reading alone", "dense", "PyTorch, cuDNN"]);
    assert_eq!(names(1), ["dense", "dense, blocks in order"]);
    let text = summary::tables(&report);
    assert!(text.contains("4/2/64 f16, batch 8") && text.contains("8K"), "{text}");
    assert!(text.contains("dense, in order"), "{text}");
}

/// Captures in place of made-up numbers: each layer a sequence, the scheme's own rows judged by the formula,
/// and what does not fit together is refused with its name.
#[test]
fn a_trace_is_captures_behind_each_other() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/kv-smollm2.safetensors");
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json").display().to_string();
    let twice = format!("{file},{file}");
    let line = |more: &[&str]| {
        let first = ["--trace", &twice, "--backend", "cpu", "--seconds-per-row", "0"];
        run(&parse::<Arguments>(&[&first, more].concat()).unwrap())
    };
    let asked = ["--queries", "5", "--scratch", "0.2", "--kv", "dense,certified", "--json", &json];
    line(&[&asked[..], &["--layers", "7,22", "--batches", "1,2", "--contexts", "90,600"]].concat()).unwrap();
    let rows = written(&json);
    let rows = rows["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8);
    for row in rows {
        assert_eq!([&row["q_heads"], &row["kv_heads"], &row["head_dim"]], [9, 3, 64]);
        assert_eq!(row["verified"], true, "{row}");
    }
    let refused = |more: &[&str]| line(&[&["--kv", "dense"], more].concat()).unwrap_err().to_string();
    for (more, part) in [
        (&["--contexts", "1100"][..], "the trace has 1024 tokens, and 1100 are asked for"),
        (&["--batches", "9"], "the trace has 5 layers, and 9 are asked for"),
        (&["--queries", "65"], "queries of 64 tokens, and --queries asks for 65"),
        (&["--layers", "3"], "layer 3"),
    ] {
        let error = refused(more);
        assert!(error.contains(part), "{error}");
    }
}
