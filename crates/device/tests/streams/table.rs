//! The tables of `docs/emulator.md`.

use crate::case::{Case, Found};
use crate::{events, graphs, legal, missed, overlap, pinned};
use simt::emu::STREAM_CHECK_VARIABLE;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

const BEGIN: &str = "<!-- streams: made by crates/device/tests/streams/table.rs -->\n";
const END: &str = "<!-- end of streams -->\n";

/// Set to write the tables in the place of comparing them.
const WRITE: &str = "FERROKV_WRITE_TABLES";

fn cases() -> impl Iterator<Item = &'static Case> {
    let all = [events::CASES, pinned::CASES, graphs::CASES, overlap::CASES, missed::CASES, legal::CASES];
    all.into_iter().flatten()
}

fn tables() -> String {
    let (mut mistakes, mut legal) = (String::new(), String::new());
    for case in cases() {
        let found = match case.found {
            Found::As(words, _) => words.to_owned(),
            Found::Panic(words, _) => format!("{words}; a panic"),
            Found::Missed(reason) => format!("missed: {reason}"),
            Found::Legal => {
                writeln!(legal, "| {} |", case.mistake).expect("a string takes it");
                continue;
            }
        };
        writeln!(mistakes, "| {} | {found} |", case.mistake).expect("a string takes it");
    }
    format!("| mistake | found as |\n|---|---|\n{mistakes}\n| legal |\n|---|\n{legal}")
}

#[test]
fn the_tables_in_the_docs_are_those_of_the_cases() {
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
fn every_mistake_is_told_apart() {
    let mut names: Vec<&str> = cases().map(|case| case.mistake).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn the_variable_turns_the_check_on() {
    // With the variable the cases of the other process expect their mistakes to be found by default, too.
    for value in ["0", "1"] {
        let status = Command::new(std::env::current_exe().expect("a test knows its program"))
            .args(["events::tests::copy_then_launch", "--exact"])
            .env(STREAM_CHECK_VARIABLE, value)
            .status();
        assert!(status.expect("the test runs again").success(), "{value}");
    }
}
