//! Arguments, the report's shape, the peers' rows, what is left out, and pictures. No figure is asserted:
//! figures are the machine's.

use super::accuracy::uniform_matrix;
use super::device::{Bench, Expected};
use super::int8::{Arguments, PEERS_OPTION};
use super::operations::{CEILINGS, Ceiling, Operation};
use super::peers::{Found, read};
use super::report::{Libraries, Place, Report, Row, Subject};
use super::sizes::{PAPER, Sizes};
use super::testing::{parse, peer_that_writes, refusal, report, timing, written};
use super::{int8, launch, plot_data, summary};
use crate::cli::environment::utc;
use crate::cli::picture;
use crate::cli::timing::{Repetition, Timing, on_device, on_host};
use host::int8::{Matrix, Variant, cpu};
use host::{Buffer, Device, Stream};
use simt::emu::EmuOptions;

#[test]
fn sizes_are_the_papers_the_largest_or_a_list() {
    let sizes = |text: &str| text.parse::<Sizes>();
    let paper = sizes("paper").unwrap().0;
    assert_eq!(paper.iter().map(|m| (m.tokens, m.channels)).collect::<Vec<_>>(), PAPER);
    assert_eq!(sizes("largest").unwrap().0, [Matrix::new(131072, 8192).unwrap()]);
    assert_eq!(
        sizes("3x5, 7X9,2×1").unwrap().0,
        [(3, 5), (7, 9), (2, 1)].map(|(t, d)| Matrix::new(t, d).unwrap())
    );
    for bad in ["", "12", "3x", "ax4", "3x4x5", "-1x4", "paper,3x4"] {
        let error = sizes(bad).unwrap_err();
        assert!(error.contains("is no size") && error.contains("1024x64"), "{bad}: {error}");
    }
    assert!(sizes("0x4").unwrap_err().contains("no element"));
}

#[test]
fn arguments_have_defaults_and_say_what_is_wrong() {
    let defaults: Arguments = parse(&[]).unwrap();
    assert_eq!(defaults.sizes.0.len(), 10);
    assert_eq!(defaults.dtype.len(), 1);
    assert_eq!(defaults.cpu_paper_limit, 1 << 26);
    assert!(!defaults.peers && !defaults.no_cpu);
    let given: Arguments = parse(&["--dtype", "f16,bf16", "--no-cpu", "--seconds-per-row", "1.5"]).unwrap();
    assert_eq!(given.dtype.len(), 2);
    assert!(given.no_cpu);
    assert_eq!(given.seconds_per_row, 1.5);
    let wrong = refusal::<Arguments>;
    assert!(wrong(&["--dtype", "f64"]).contains("one of f32, f16, bf16"));
    assert!(wrong(&["--seconds-per-row=-1"]).contains("number of seconds"));
    assert!(wrong(&["--seconds-per-row", "NaN"]).contains("number of seconds"));
    assert!(wrong(&["--backend", "tpu"]).contains("cuda"));
}

#[test]
fn bytes_are_those_of_the_peers_formula() {
    let matrix = Matrix::new(33, 8).unwrap();
    let n = 33 * 8;
    let total = |operation: Operation, element| operation.traffic(matrix, element).total();
    assert_eq!(total(Operation::Copy, 4), 8 * n);
    assert_eq!(total(Operation::Scales, 2), 2 * n + 32);
    assert_eq!(total(Operation::Quantize, 4), 5 * n + 32);
    assert_eq!(total(Operation::Dequantize, 2), 3 * n + 32);
    assert_eq!(total(Operation::ScalesQuantize, 4), 9 * n + 64);
    assert_eq!(total(Operation::BlockQuantize, 4), 5 * n + 32 * 3, "three blocks of 16 tokens");
    let passes = Operation::ScalesQuantize.passes(matrix, 4);
    assert_eq!(passes.iter().map(|pass| pass.total()).sum::<u64>(), 9 * n + 64);
}

#[test]
fn each_operation_stands_beside_the_nearest_mix() {
    let matrix = Matrix::new(4096, 256).unwrap();
    let nearest = |operation: Operation, element| Ceiling::nearest(operation.traffic(matrix, element)).kernel;
    for element in [2, 4] {
        assert_eq!(nearest(Operation::Scales, element), "read_four");
        assert_eq!(nearest(Operation::Quantize, element), "narrow_four");
        assert_eq!(nearest(Operation::Dequantize, element), "widen_four");
        assert_eq!(nearest(Operation::Copy, element), "copy_four");
    }
    assert_eq!(nearest(Operation::BlockQuantize, 4), "narrow_four");
    assert_eq!(nearest(Operation::BlockDequantize, 4), "widen_four");
    // With 2-byte elements the scales of blocks bring the mix, 2 to 1.25, nearer to a copy's.
    assert_eq!(nearest(Operation::BlockQuantize, 2), "copy_four");
    assert_eq!(nearest(Operation::BlockDequantize, 2), "copy_four");
    for ceiling in CEILINGS {
        for (element, matrix) in [(4, matrix), (2, matrix), (2, Matrix::new(3, 5).unwrap())] {
            let vectors = ceiling.vectors(matrix, element);
            let keys = (matrix.elements() * element) as u64;
            let (source, target) = match ceiling.operation {
                "widen" => (matrix.elements() as u64, keys),
                "narrow" => (keys, matrix.elements() as u64),
                _ => (keys, keys),
            };
            assert!(vectors * ceiling.reads <= source, "{} reads outside", ceiling.kernel);
            assert!(vectors * ceiling.writes <= target, "{} writes outside", ceiling.kernel);
        }
    }
    assert_eq!(CEILINGS[1].vectors(matrix, 4) * 20, 5 * matrix.elements() as u64, "f32: the same bytes");
}

#[test]
fn percentiles_are_of_one_call() {
    let timing = Timing::new((1..=100).rev().map(f64::from).collect(), 10);
    assert_eq!((timing.median_us, timing.p10_us, timing.p90_us), (5.1, 1.1, 9.1));
    assert_eq!((timing.calls, timing.replays), (10, 100));
    assert!(Timing::new(Vec::new(), 1).median_us.is_nan());
}

#[test]
fn repetitions_stay_within_their_limits() {
    let mut calls = 0;
    let repetition = Repetition { seconds: 0.0, least: 3, most: 5 };
    let timing = on_host(repetition, || calls += 1);
    assert_eq!((timing.replays, calls), (3, 4), "one to warm up");

    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let mut counter = Buffer::<u32>::zeroed(&device, 4).unwrap();
    let mut seen = Vec::new();
    // SAFETY: the buffer lives to the end of the test.
    let timing = unsafe {
        on_device(&stream, 3, repetition, |stream, call| {
            seen.push(call);
            stream.fill_u32(&mut counter, .., call as u32)
        })
    }
    .unwrap();
    assert_eq!(seen, [0, 1, 2], "recorded once, replayed often");
    assert_eq!((timing.calls, timing.replays), (3, 3));
    assert_eq!(counter.to_vec().unwrap(), [2; 4]);
}

/// What a GPU does besides, on the emulator: ceilings, and several sets in turns.
#[test]
fn ceilings_and_sets_leave_results_as_they_are() {
    let device = Device::cpu(EmuOptions::default());
    for (tokens, channels) in [(40, 12), (17, 5)] {
        let matrix = Matrix::new(tokens, channels).unwrap();
        let subject = Subject { matrix, dtype: "f32", element: 4 };
        let keys: Vec<f32> = uniform_matrix(1, matrix.elements());
        let repetition = Repetition { seconds: 0.0, least: 1, most: 1 };
        let mut bench = Bench::with_sets(&device, subject, &keys, repetition, 3).unwrap();
        let ceilings = bench.ceilings().unwrap();
        let mut names: Vec<&str> = ceilings.iter().map(|row| row.op.as_str()).collect();
        names.dedup(); // several access patterns each
        assert_eq!(names, ["copy", "read", "narrow", "widen", "copy"]);
        assert_eq!(ceilings[0].peer, "cuda driver");
        assert_eq!(ceilings[0].calls, 3, "every set once");

        let (mut scales, mut codes) = (vec![0.0; channels], vec![0; keys.len()]);
        let mut restored = keys.clone();
        cpu::column_scales(&keys, matrix, &mut scales);
        cpu::quantize(&keys, matrix, &scales, &mut codes);
        cpu::dequantize(&codes, matrix, &scales, &mut restored);
        let expected = Expected { scales: &scales, codes: &codes, restored: &restored };
        let rows = bench.columns(&[Variant::Rows], expected).unwrap();
        assert_eq!(rows.len(), 4);
        for row in &rows {
            assert_eq!(row.verified, Some(true), "{row:?}");
            assert_eq!(row.sets, Some(3));
            let fraction = row.roofline_us.unwrap() / row.median_us;
            assert_eq!(row.fraction, Some(fraction));
        }
        assert_eq!(rows[1].roofline.as_deref(), Some("narrow_four"));
        assert_eq!(rows[3].roofline.as_deref(), Some("read_four + narrow_four"));

        // One wrong bit anywhere is seen.
        codes[matrix.elements() - 1] ^= 1;
        let wrong = Expected { scales: &scales, codes: &codes, restored: &restored };
        let rows = bench.columns(&[Variant::Rows], wrong).unwrap();
        let verified: Vec<Option<bool>> = rows.iter().map(|row| row.verified).collect();
        assert_eq!(verified, [Some(true), Some(false), Some(true), Some(false)]);
    }
}

#[test]
fn dates_are_right_around_leap_days() {
    assert_eq!(utc(0), "1970-01-01T00:00:00Z");
    assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
    assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
    assert_eq!(utc(1_709_251_199), "2024-02-29T23:59:59Z");
    assert_eq!(utc(1_767_225_600), "2026-01-01T00:00:00Z");
}

const PEERS: &str = r#"{
  "schema": 1, "device": "A GPU", "torch": "2.9", "triton": "3.5", "l2_bytes": 1, "seconds": 3.5,
  "checks": [{"peer": "torch eager", "within_bound": true}],
  "rows": [
    {"peer": "torch.compile", "op": "quantize", "tokens": 64, "channels": 32, "dtype": "f32", "bytes": 10368,
     "median_us": 8.0, "p10_us": 7.5, "p90_us": 9.0, "gb_per_s": 1.3, "calls": 4, "replays": 20, "later": [1]},
    {"peer": "triton", "op": "block_quantize", "tokens": 64, "channels": 32, "dtype": "f32", "bytes": 1,
     "median_us": 8.0, "block_tokens": 16, "config": "(128, 4)"},
    {"peer": "triton", "op": "quantize", "tokens": 64}
  ],
  "skipped": ["triton scales 64x32 f32"],
  "errors": ["torch eager scales 64x32 f32: RuntimeError: no"]
}"#;

fn ours(op: Operation, variant: &str, place: Place, median_us: f64) -> Row {
    let subject = Subject { matrix: Matrix::new(64, 32).unwrap(), dtype: "f32", element: 4 };
    Row::of(place, variant, subject, op, timing(median_us))
}

fn peers() -> Found<Row, Libraries> {
    read(PEERS, PEERS_OPTION)
}

#[test]
fn peers_rows_are_merged_and_their_failures_reported() {
    let found = peers();
    assert_eq!(found.rows.len(), 2);
    assert_eq!(found.rows[0].by(), "torch.compile");
    assert_eq!(found.rows[0].place, Place::Gpu);
    assert_eq!(found.rows[1].config.as_deref(), Some("(128, 4)"));
    let reasons: Vec<&str> = found.skipped.iter().map(|skipped| skipped.reason.as_str()).collect();
    assert_eq!(reasons, ["a row has no channels", "no time left (--peers-seconds)", "RuntimeError: no"]);
    assert_eq!(found.skipped[2].what, "torch eager scales 64x32 f32");
    assert_eq!(found.about.unwrap().libraries.triton.as_deref(), Some("3.5"));
}

#[test]
fn peers_are_asked_for_the_sizes_and_types_of_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let asked = "--sizes 4x4,6x2 --dtype f32,f16 --block-tokens 16 --budget-s 7 --json";
    let script = peer_that_writes(folder.path(), PEERS, asked);
    let line =
        ["--sizes", "4x4,6x2", "--dtype", "f32,f16", "--peers-seconds", "7", "--peers-script", &script];
    let found = int8::peers(&parse(&[&line[..], &["--python", "sh"]].concat()).unwrap());
    assert_eq!(found.rows.len(), 2, "{:?}", found.skipped);
}

#[test]
fn a_peer_stands_beside_the_fastest_of_ours_that_does_the_same() {
    let theirs = peers().rows;
    let rows = [
        ours(Operation::Quantize, "naive", Place::Gpu, 6.0),
        ours(Operation::Quantize, "rows", Place::Gpu, 4.0),
        ours(Operation::Quantize, "simd", Place::Cpu, 1.0),
        ours(Operation::BlockQuantize, "fused", Place::Gpu, 2.0),
    ];
    let all: Vec<&Row> = rows.iter().chain(&theirs).collect();
    assert_eq!(summary::rival(&all, &theirs[0]).unwrap().by(), "rows");
    assert_eq!(summary::rival(&all, &theirs[1]).unwrap().by(), "fused");
    let other = Row { block_tokens: Some(64), ..theirs[1].clone() };
    assert!(summary::rival(&all, &other).is_none(), "another block size is another task");
    let text = summary::side_by_side(&all);
    assert!(text.contains("torch.compile") && text.contains("2.00"), "{text}");
    assert!(text.contains("fused") && text.contains("4.00"), "{text}");
}

#[test]
fn a_run_without_a_gpu_has_every_part() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (json, prefix) = (path("report.json"), path("plot"));
    let line = [
        "--backend",
        "cpu",
        "--sizes",
        "37x10,64x32",
        "--cpu-paper-limit",
        "400",
        "--seconds-per-row",
        "0",
        "--commit",
        "0123abc",
        "--json",
        &json,
        "--plot",
        &prefix,
    ];
    int8::run(&parse(&line).unwrap()).unwrap();

    let written = written(&json);
    assert_eq!(written["schema"], 1);
    assert_eq!(written["environment"]["commit"], "0123abc");
    assert!(written["environment"]["threads"].as_u64().unwrap() >= 1);
    let rows = written["rows"].as_array().unwrap();
    let count = |op: &str, place: &str, tokens: u64| {
        let is = |row: &&serde_json::Value| {
            row["op"] == op && row["place"] == place && row["tokens"].as_u64() == Some(tokens)
        };
        rows.iter().filter(is).count()
    };
    for tokens in [37, 64] {
        assert_eq!(count("quantize", "emulator", tokens), 6, "every variant");
        assert_eq!(count("dequantize", "emulator", tokens), 6);
        assert_eq!(count("block_quantize", "emulator", tokens), 1);
        assert_eq!(count("block_dequantize", "emulator", tokens), 1);
        assert_eq!(count("scales", "emulator", tokens), 1);
        assert_eq!(count("scales_quantize", "emulator", tokens), 1);
        assert_eq!(count("copy", "cpu", tokens), 1);
        assert_eq!(count("block_quantize", "cpu", tokens), 1);
    }
    assert_eq!(count("quantize", "cpu", 37), 2, "SIMD and the paper's loop");
    assert_eq!(count("quantize", "cpu", 64), 1, "over the limit");
    assert_eq!(count("quantize", "emulator", 4096), 1, "2^20 elements");
    for row in rows {
        assert_eq!(row["peer"], "ferrokv");
        assert!(row["median_us"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["bytes"].as_u64().unwrap() > 0, "{row}");
        let compared = row["place"] == "emulator" || row["variant"] == "paper";
        assert_eq!(row["verified"].as_bool(), compared.then_some(true), "{row}");
    }
    let skipped = written["skipped"].as_array().unwrap();
    let what: Vec<&str> = skipped.iter().map(|skipped| skipped["what"].as_str().unwrap()).collect();
    assert_eq!(what, ["gpu", "cpu paper 64 × 32 f32"]);
    assert!(skipped[1]["reason"].as_str().unwrap().contains("--cpu-paper-limit"));
    let accuracy = written["accuracy"].as_array().unwrap();
    assert_eq!(accuracy.len(), 4, "by column and by block");
    for found in accuracy {
        assert!(found["max_error"].as_f64().unwrap() <= found["bound"].as_f64().unwrap(), "{found}");
        assert!(found["bound_ratio"].as_f64().unwrap() <= 1.0, "{found}");
    }
    for name in ["plot-bandwidth.svg", "plot-bandwidth.png", "plot-time.svg", "plot-time.png"] {
        assert!(folder.path().join(name).metadata().unwrap().len() > 1000, "{name}");
    }
}

#[test]
fn without_the_cpus_rows_results_are_still_compared() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json").display().to_string();
    let line = [
        "--backend",
        "cpu",
        "--sizes",
        "5x3",
        "--no-cpu",
        "--seconds-per-row",
        "0",
        "--dtype",
        "bf16",
        "--json",
        &json,
    ];
    int8::run(&parse(&line).unwrap()).unwrap();
    let written = written(&json);
    let rows = written["rows"].as_array().unwrap();
    assert!(
        rows.iter()
            .all(|row| row["place"] == "emulator" && row["verified"] == true && row["dtype"] == "bf16")
    );
    assert_eq!(rows.iter().filter(|row| row["tokens"] == 5).count(), 1 + 6 * 2 + 1 + 2);
}

#[test]
fn bits_that_differ_fail_the_command_after_its_report() {
    let mut rows = vec![ours(Operation::Quantize, "rows", Place::Gpu, 1.0)];
    assert!(int8::compared(&rows).is_ok(), "nothing compared, nothing wrong");
    rows[0].verified = Some(true);
    assert!(int8::compared(&rows).is_ok());
    rows.push(Row { verified: Some(false), ..ours(Operation::Dequantize, "fused", Place::Gpu, 1.0) });
    let error = int8::compared(&rows).unwrap_err().to_string();
    assert!(
        error.starts_with("1 of 2 compared rows differ") && error.contains("fused dequantize at 64x32 f32")
    );
    assert!(summary::int8(&report("bench int8", rows)).contains("differ"));
}

#[test]
fn an_unwritable_place_is_found_before_the_work() {
    let line = ["--backend", "cpu", "--sizes", "largest", "--plot", "/no/such/folder/plot"];
    assert!(int8::run(&parse(&line).unwrap()).is_err());
    let line = ["--backend", "cpu", "--sizes", "largest", "--json", "/no/such/folder/report.json"];
    assert!(int8::run(&parse(&line).unwrap()).is_err());
}

/// Rows of a machine that does not exist, for the pictures.
fn invented() -> Report {
    let mut rows = Vec::new();
    for (tokens, channels) in PAPER {
        let matrix = Matrix::new(tokens, channels).unwrap();
        let subject = Subject { matrix, dtype: "f32", element: 4 };
        let mut add = |place, variant: &str, operation: Operation, share: f64, peak: f64| {
            let bytes = operation.traffic(matrix, 4).total() as f64;
            let memory = bytes / peak * 1e6;
            let median_us = memory / share + 2.0;
            let row = Row::of(place, variant, subject, operation, timing(median_us));
            let ceiling = if place == Place::Gpu { "narrow_four" } else { "parallel memcpy" };
            rows.push(row.beside(ceiling.into(), memory + 1.5));
        };
        for (operation, at_best) in [(Operation::Quantize, 0.96), (Operation::Dequantize, 0.94)] {
            for (index, variant) in Variant::ALL.iter().take(6).enumerate() {
                add(Place::Gpu, variant.name(), operation, at_best - 0.11 * (5 - index) as f64, 3.0e12);
            }
            add(Place::Cpu, "simd", operation, 0.9, 60e9);
            if matrix.elements() <= 1 << 26 {
                add(Place::Cpu, "paper", operation, 0.002, 60e9);
            }
        }
        add(Place::Gpu, "fused", Operation::BlockQuantize, 0.93, 3.0e12);
        add(Place::Gpu, "fused", Operation::BlockDequantize, 0.9, 3.0e12);
    }
    let mut report: Report = report("bench int8", rows);
    report.environment.cpu = "INVENTED TEST DATA".into();
    report
}

#[test]
fn pictures_show_every_line_on_a_machine_without_fonts() {
    let report = invented();
    // For looking at them.
    let keep = std::env::var_os("FERROKV_KEEP_PLOTS").map(std::path::PathBuf::from);
    for (name, chart) in [("bandwidth", plot_data::bandwidth(&report)), ("time", plot_data::time(&report))] {
        let svg = picture::svg(&chart).unwrap();
        assert!(svg.contains("INVENTED TEST DATA") && svg.contains("Dequantize"));
        for variant in ["naive", "tiled", "coarsened", "vectorized", "rows", "wide", "fused (block scales)"] {
            assert!(svg.contains(variant), "{name} has no {variant}");
        }
        let only_here = if name == "time" { "the paper&apos;s loop" } else { "memory alone" };
        assert!(svg.contains(only_here), "{name} has no {only_here}");
        let png = picture::png(&chart).unwrap();
        assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
        if let Some(folder) = &keep {
            std::fs::write(folder.join(format!("{name}.svg")), svg).unwrap();
            std::fs::write(folder.join(format!("{name}.png")), png).unwrap();
        }
    }
}

#[test]
fn a_picture_of_nothing_is_a_picture() {
    let empty = report("bench int8", Vec::new());
    for chart in [plot_data::bandwidth(&empty), plot_data::time(&empty)] {
        assert!(picture::svg(&chart).unwrap().contains("INT8"));
    }
}

#[test]
fn launch_costs_read_as_a_table() {
    let text = launch::table(launch::Costs {
        raw_ns: 2000.0,
        typed_ns: 2020.0,
        ratio: 1.01,
        graph_launches: 1000,
        graph_call_us: 12.0,
        graph_replay_us: 1500.0,
        single_launches_us: 2500.0,
    });
    assert!(text.contains("1.010 of the driver's call") && text.contains("graph of 1000 launches"), "{text}");
}
