//! The tables of `docs/emulator.md`.

use crate::case::{Case, Found, categories};
use crate::tools::{Record, TOOLS};
use std::path::PathBuf;

const BEGIN: &str = "<!-- recall: made by crates/recall/src/table.rs -->\n";
const END: &str = "<!-- end of recall -->\n";

/// Set to write the tables in the place of comparing them.
const WRITE: &str = "FERROKV_WRITE_TABLES";

fn cases() -> impl Iterator<Item = &'static Case> {
    categories().into_iter().flat_map(|(_, cases)| cases)
}

fn tables(record: &Record) -> String {
    let mut lines = by_category();
    lines.extend(by_tool(record));
    for (category, cases) in categories().into_iter().filter(|(category, _)| *category != "legal") {
        lines.push(format!("\n**{category}**\n"));
        lines.push(format!("| mistake | found with | as | {} |", TOOLS.join(" | ")));
        lines.push("|---|---|---|---|---|---|---|".into());
        for case in cases {
            let (with, what) = match case.found {
                Found::In(mode, kind, ..) | Found::OfLaunch(mode, kind) | Found::OfThread(mode, kind, _) => {
                    (mode.words(), format!("`{kind}`"))
                }
                Found::Missed(reason) => ("missed", reason.to_string()),
                Found::Legal | Found::Refused(..) => continue,
            };
            let tools = TOOLS.map(|tool| cell(record, case, tool)).join(" | ");
            lines.push(format!("| {} | {with} | {what} | {tools} |", case.mistake));
        }
    }
    lines.join("\n") + "\n"
}

/// What the emulator finds.
fn by_category() -> Vec<String> {
    let mut lines: Vec<String> = vec![
        "| category | bugs | found | missed | programs without a bug | false alarms |".into(),
        "|---|---|---|---|---|---|".into(),
    ];
    let mut sums = [0; 5];
    for (category, cases) in categories() {
        let missed = cases.iter().filter(|case| matches!(case.found, Found::Missed(_))).count();
        let bugs = cases.iter().filter(|case| case.has_bug()).count();
        let refused = cases.iter().filter(|case| case.is_refused()).count();
        let row = [bugs, bugs - missed, missed, cases.len(), refused];
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        let [bugs, found, missed, clean, refused] = row;
        lines.push(format!("| {category} | {bugs} | {found} | {missed} | {clean} | {refused} |"));
    }
    let [bugs, found, missed, clean, refused] = sums;
    lines.push(format!("| **all** | {bugs} | {found} | {missed} | {clean} | {refused} |"));
    lines
}

/// What the tools find, beside it; and their false alarms.
fn by_tool(record: &Record) -> Vec<String> {
    let alarms = |case: &Case, bug, tool: &str| record.run(case, bug, tool).is_some_and(|run| run.alarms > 0);
    let launched = |case: &&Case| record.run(case, false, TOOLS[0]).is_some();
    let bugs: Vec<&Case> = cases().filter(|case| case.has_bug()).collect();
    let clean: Vec<&Case> = cases().filter(launched).collect();
    let emulator = bugs.iter().filter(|case| !matches!(case.found, Found::Missed(_))).count();
    let refused: Vec<&Case> = cases().filter(|case| case.is_refused()).collect();
    let count = |cases: &[&Case], bug: bool, tools: &[&str]| {
        let raised = |case: &&&Case| tools.iter().any(|tool| alarms(case, bug, tool));
        cases.iter().filter(raised).count()
    };
    let row = |name: &str, found: usize, bugs: usize, wrong: usize, clean: usize| {
        format!("| {name} | {found} of {bugs} | {wrong} of {clean} |")
    };
    let links: Vec<String> = (1..)
        .zip(&record.files)
        .map(|(n, file)| {
            let name = if record.files.len() > 1 { format!("record {n}") } else { "record".into() };
            format!("[{name}]({file})")
        })
        .collect();
    let on_gpu: Vec<&Case> = bugs.iter().copied().filter(launched).collect();
    let of_tools = |name: &str, tools: &[&str]| {
        row(name, count(&on_gpu, true, tools), on_gpu.len(), count(&clean, false, tools), clean.len())
    };
    let mut lines = vec![
        format!("\n*{}:\n{}.*\n", record.by, links.join(",\n")),
        "| | bugs found | programs without a bug it objects to |".into(),
        "|---|---|---|".into(),
        row("the emulator", emulator, bugs.len(), refused.len(), cases().count()),
    ];
    lines.extend(TOOLS.map(|tool| of_tools(tool, &[tool])));
    lines.push(of_tools("all four tools", &TOOLS));
    lines.push("\n| program without a bug | tool | what it says |\n|---|---|---|".into());
    for case in refused {
        let Found::Refused(kind, reason) = case.found else { continue };
        lines.push(format!("| {} | the emulator | `{kind}`: {reason} |", case.mistake));
    }
    for case in &clean {
        for tool in TOOLS.iter().filter(|tool| alarms(case, false, tool)) {
            let first = record.run(case, false, tool).map(|run| run.first).unwrap_or_default();
            let twin = if case.has_bug() { "without: " } else { "" };
            lines.push(format!("| {twin}{} | {tool} | {first} |", case.mistake));
        }
    }
    lines
}

/// What a tool made of the bug.
fn cell(record: &Record, case: &Case, tool: &str) -> &'static str {
    match record.run(case, true, tool) {
        None if !case.fits_a_gpu() => "no launch",
        None => "new",
        Some(run) if run.alarms > 0 => "found",
        Some(run) if run.hung => "hangs",
        Some(_) => "–",
    }
}

#[test]
fn the_table_in_the_docs_is_that_of_the_cases() {
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let path = docs.join("emulator.md");
    let page = std::fs::read_to_string(&path).expect("docs/emulator.md");
    let (head, rest) = page.split_once(BEGIN).expect("the page marks where the tables begin");
    let (found, tail) = rest.split_once(END).expect("the page marks where the tables end");
    let expected = tables(&Record::read(&docs));
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, format!("{head}{BEGIN}{expected}{END}{tail}"))
            .expect("the page can be written");
    } else {
        assert_eq!(found, expected, "run this test with {WRITE}=1 to write the tables");
    }
}

#[test]
fn every_case_has_its_own_name() {
    let mut names: Vec<&str> = cases().map(|case| case.name).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}
