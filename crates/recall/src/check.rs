//! How a case is tried on the emulator.

use crate::case::{Case, Found, Mode};
use crate::machine::Machine;
use ferrokv_device::Error;
use simt::emu::Fault;

/// Runs the bug and its twin.
pub fn check(case: &Case) {
    if let Found::Refused(kind, _) = case.found {
        return Mode::ALL.into_iter().for_each(|mode| is_refused(case, kind, mode));
    }
    for mode in Mode::ALL {
        if let Err(fault) = run(case, 0, mode) {
            panic!("false alarm on the twin of {} in mode {mode:?}: {fault}", case.name);
        }
    }
    for mode in Mode::ALL {
        let result = run(case, 1, mode);
        match (case.found, result) {
            (Found::In(by, kind, marker, at), Err(fault)) => {
                assert_eq!(by, mode, "{}: found in another mode: {fault}", case.name);
                check_fault(case, &fault, kind, marker, at);
                return;
            }
            (Found::OfLaunch(by, kind), Err(fault)) => {
                assert_eq!((by, kind, fault.thread), (mode, variant(&fault).as_str(), None), "{fault}");
                return;
            }
            (Found::OfThread(by, kind, at), Err(fault)) => {
                println!("{}: {fault}", case.name);
                assert_eq!((by, kind, fault.place), (mode, variant(&fault).as_str(), None), "{fault}");
                assert_eq!(fault.thread.map(|id| (id.block.x, id.thread.x)), Some(at), "{fault}");
                return;
            }
            (Found::In(by, ..) | Found::OfLaunch(by, _) | Found::OfThread(by, ..), Ok(())) => {
                assert!(by > mode, "{} is not found in mode {mode:?}", case.name);
            }
            (Found::Missed(_) | Found::Legal | Found::Refused(..), Err(fault)) => {
                panic!("{} is found in mode {mode:?}: {fault}", case.name)
            }
            (Found::Missed(_) | Found::Legal | Found::Refused(..), Ok(())) => {}
        }
    }
}

/// A false alarm that passes is to be taken out of the table.
fn is_refused(case: &Case, kind: &str, mode: Mode) {
    match run(case, 0, mode) {
        Err(fault) => assert_eq!(variant(&fault), kind, "{fault}"),
        Ok(()) => panic!("{} passes in mode {mode:?}", case.name),
    }
}

fn run(case: &Case, bug: u32, mode: Mode) -> Result<(), Box<Fault>> {
    match (case.run)(bug, &Machine::Emulator(mode.options())) {
        Ok(()) => Ok(()),
        Err(Error::Fault(fault)) => Err(fault),
        Err(other) => panic!("{} in mode {mode:?}: {other}", case.name),
    }
}

/// The name of what went wrong.
fn variant(fault: &Fault) -> String {
    let text = format!("{:?}", fault.kind);
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_string()
}

fn check_fault(case: &Case, fault: &Fault, kind: &str, marker: &str, (block, thread): (u32, u32)) {
    println!("{}: {fault}", case.name);
    assert_eq!(variant(fault), kind, "{fault}");
    let wanted = format!("// BUG: {marker}");
    let line = case.source.lines().position(|line| line.trim_end().ends_with(&wanted));
    let line = line.unwrap_or_else(|| panic!("no line ends in `{wanted}`")) as u32 + 1;
    assert_eq!(fault.place.map(|place| place.line), Some(line), "{fault}");
    let found = fault.thread.map(|id| (id.block.x, id.thread.x));
    assert_eq!(found, Some((block, thread)), "{fault}");
}
