//! The table of `docs/emulator.md`.

use crate::case::{Found, categories};
use std::fmt::Write;
use std::path::PathBuf;

const BEGIN: &str = "<!-- recall: made by crates/recall/src/table.rs -->\n";
const END: &str = "<!-- end of recall -->\n";

/// Set to write the tables in the place of comparing them.
const WRITE: &str = "FERROKV_WRITE_TABLES";

fn tables() -> String {
    let mut text = String::new();
    let line = |text: &mut String, line: String| writeln!(text, "{line}").expect("a string takes it");
    line(&mut text, "| category | bugs | found | missed | programs without a bug | false alarms |".into());
    line(&mut text, "|---|---|---|---|---|---|".into());
    let mut sums = [0; 4];
    for (category, cases) in categories() {
        let missed = cases.iter().filter(|case| matches!(case.found, Found::Missed(_))).count();
        let bugs = cases.iter().filter(|case| !matches!(case.found, Found::Legal)).count();
        let row = [bugs, bugs - missed, missed, cases.len()];
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        let [bugs, found, missed, clean] = row;
        line(&mut text, format!("| {category} | {bugs} | {found} | {missed} | {clean} | 0 |"));
    }
    let [bugs, found, missed, clean] = sums;
    line(&mut text, format!("| **all** | {bugs} | {found} | {missed} | {clean} | 0 |"));
    for (category, cases) in categories().into_iter().filter(|(category, _)| *category != "legal") {
        line(&mut text, format!("\n**{category}**\n\n| mistake | found with | as |\n|---|---|---|"));
        for case in cases {
            let (with, what) = match case.found {
                Found::In(mode, kind, ..) | Found::OfLaunch(mode, kind) | Found::OfThread(mode, kind, _) => {
                    (mode.words(), format!("`{kind}`"))
                }
                Found::Missed(reason) => ("missed", reason.to_string()),
                Found::Legal => continue,
            };
            line(&mut text, format!("| {} | {with} | {what} |", case.mistake));
        }
    }
    text
}

#[test]
fn the_table_in_the_docs_is_that_of_the_cases() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/emulator.md");
    let page = std::fs::read_to_string(&path).expect("docs/emulator.md");
    let (head, rest) = page.split_once(BEGIN).expect("the page marks where the tables begin");
    let (found, tail) = rest.split_once(END).expect("the page marks where the tables end");
    let expected = tables();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, format!("{head}{BEGIN}{expected}{END}{tail}"))
            .expect("the page can be written");
    } else {
        assert_eq!(found, expected, "run this test with {WRITE}=1 to write the tables");
    }
}

#[test]
fn every_case_has_its_own_name() {
    let mut names: Vec<&str> =
        categories().into_iter().flat_map(|(_, cases)| cases).map(|c| c.name).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}
