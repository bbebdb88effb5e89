//! Other libraries on the same GPU: a Python script measures them, its rows join ours.

use super::record::{Peers, Skipped};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A row as a script writes it.
pub trait PeerRow: DeserializeOwned {
    /// Fields without which it is none.
    const REQUIRED: &'static [&'static str];
}

/// What the script wrote. Fields that are not known here are left alone.
#[derive(Deserialize)]
#[serde(default, bound(deserialize = "L: Default + Deserialize<'de>"))]
struct Written<L> {
    rows: Vec<serde_json::Value>,
    skipped: Vec<String>,
    errors: Vec<String>,
    #[serde(flatten)]
    about: Peers<L>,
}

impl<L: Default> Default for Written<L> {
    fn default() -> Self {
        Written { rows: Vec::new(), skipped: Vec::new(), errors: Vec::new(), about: Peers::default() }
    }
}

/// Rows and remarks of the peers.
pub struct Found<R, L> {
    /// Their rows.
    pub rows: Vec<R>,
    /// What they did not measure.
    pub skipped: Vec<Skipped>,
    /// What they are.
    pub about: Option<Peers<L>>,
}

impl<R, L> Found<R, L> {
    fn nothing() -> Self {
        Found { rows: Vec::new(), skipped: Vec::new(), about: None }
    }

    fn failed(reason: String) -> Self {
        Found { skipped: vec![remark(reason)], ..Found::nothing() }
    }
}

/// About the peers as a whole.
fn remark(reason: String) -> Skipped {
    Skipped { what: "peers".into(), reason }
}

/// A script, and how it is run.
pub struct Script<'a> {
    /// The Python that runs it.
    pub python: &'a str,
    /// Where it is.
    pub path: &'a Path,
    /// Seconds after which it is ended.
    pub seconds: f64,
    /// The command's option that gives it more.
    pub option: &'static str,
}

impl Script<'_> {
    /// Runs it, `--json` and a file behind `arguments`, and reads what it wrote. A failure is a remark, not
    /// an error: our own rows stand without it.
    pub fn run<R, L>(&self, arguments: &[(&str, String)]) -> Found<R, L>
    where
        R: PeerRow,
        L: Default + DeserializeOwned,
    {
        if !self.path.is_file() {
            return Found::failed(format!(
                "there is no {}; run from the repository's root or name it with --peers-script",
                self.path.display()
            ));
        }
        // Reasons go into records, which do not name folders of one machine.
        let script = self.path.file_name().unwrap_or_default().display();
        let folder = match tempfile::tempdir() {
            Ok(folder) => folder,
            Err(error) => return Found::failed(format!("no temporary folder: {error}")),
        };
        let (json, log) = (folder.path().join("peers.json"), folder.path().join("peers.log"));
        let mut command = Command::new(self.python);
        command.arg(self.path).args(arguments.iter().flat_map(|(name, value)| [*name, value.as_str()]));
        command.args([OsString::from("--json"), json.clone().into()]);
        let status = match within(&mut command, &log, self.seconds) {
            Ok(status) => status,
            Err(error) => {
                return Found::failed(format!("cannot run {}: {error}; name it with --python", self.python));
            }
        };
        let mut found = match std::fs::read_to_string(&json) {
            Ok(text) => read(&text, self.option),
            Err(_) => Found::nothing(),
        };
        let reason = match status {
            Some(status) if status.success() => return found,
            Some(status) => {
                let said = std::fs::read(&log).unwrap_or_default();
                let said = String::from_utf8_lossy(&said);
                let last =
                    said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
                format!("{script} ended with {status}: {}", last.trim())
            }
            None => format!("{script} was not done after {:.0} s; give {} more", self.seconds, self.option),
        };
        found.skipped.push(remark(reason));
        found
    }
}

/// Runs a command, what it says going to `log`; `None` if it had to be ended.
fn within(command: &mut Command, log: &Path, seconds: f64) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 1e6));
    let log = File::create(log)?;
    let out = log.try_clone()?;
    let mut child = command.stdin(Stdio::null()).stdout(out).stderr(log).spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What a report of the script holds. Rows that it lists as skipped and gives no reason for had no time left,
/// of which `option` gives more.
pub fn read<R, L>(text: &str, option: &str) -> Found<R, L>
where
    R: PeerRow,
    L: Default + DeserializeOwned,
{
    let written: Written<L> = match serde_json::from_str(text) {
        Ok(written) => written,
        // The exit status says what happened.
        Err(_) if text.trim().is_empty() => return Found::nothing(),
        Err(error) => return Found::failed(format!("its report is no JSON that is known here: {error}")),
    };
    let mut found = Found { about: Some(written.about), ..Found::nothing() };
    for value in written.rows {
        if let Some(missing) = R::REQUIRED.iter().find(|field| value.get(**field).is_none()) {
            found.skipped.push(remark(format!("a row has no {missing}")));
            continue;
        }
        match serde_json::from_value(value) {
            Ok(row) => found.rows.push(row),
            Err(error) => found.skipped.push(remark(error.to_string())),
        }
    }
    let split = |line: &str| {
        let (what, reason) = line.split_once(": ")?;
        Some(Skipped { what: what.into(), reason: reason.into() })
    };
    let skipped = written.skipped.into_iter().map(|line| {
        split(&line).unwrap_or_else(|| Skipped { what: line, reason: format!("no time left ({option})") })
    });
    let errors = written.errors.into_iter().map(|line| split(&line).unwrap_or_else(|| remark(line)));
    found.skipped.extend(skipped.chain(errors));
    found
}

#[cfg(test)]
mod tests {
    use super::super::testing::peer_that_writes;
    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Row {
        peer: String,
        tokens: u32,
    }

    impl PeerRow for Row {
        const REQUIRED: &'static [&'static str] = &["peer", "tokens"];
    }

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default)]
    struct Libraries {
        triton: Option<String>,
    }

    const REPORT: &str = r#"{"schema": 1, "device": "A GPU", "torch": "2.9", "triton": "3.5", "seconds": 3.5,
        "checks": [{"within_bound": true}],
        "rows": [{"peer": "torch", "tokens": 64, "later": [1]}, {"peer": "torch"}, {"peer": "torch", "tokens": "many"}],
        "skipped": ["torch scales", "torch math: only up to 5"], "errors": ["torch flash: RuntimeError: no: why", "broken"]}"#;

    fn run(python: &str, path: &str, seconds: f64) -> Found<Row, Libraries> {
        let script = Script { python, path: Path::new(path), seconds, option: "--seconds" };
        script.run(&[("--sizes", "4x4,5x5".into()), ("--dtype", "f32".into())])
    }

    #[test]
    fn rows_are_read_and_the_rest_is_a_remark() {
        let found = read::<Row, Libraries>(REPORT, "--seconds");
        assert_eq!(found.rows, [Row { peer: "torch".into(), tokens: 64 }]);
        let remarks: Vec<(&str, &str)> =
            found.skipped.iter().map(|skipped| (skipped.what.as_str(), skipped.reason.as_str())).collect();
        assert_eq!(remarks[0], ("peers", "a row has no tokens"));
        assert_eq!(remarks[1].0, "peers");
        assert!(remarks[1].1.contains("expected u32"), "{remarks:?}");
        assert_eq!(
            remarks[2..],
            [
                ("torch scales", "no time left (--seconds)"),
                ("torch math", "only up to 5"),
                ("torch flash", "RuntimeError: no: why"),
                ("peers", "broken")
            ]
        );
        let about = found.about.unwrap();
        assert_eq!((about.torch.as_deref(), about.libraries.triton.as_deref()), (Some("2.9"), Some("3.5")));
        assert_eq!(
            (about.device.as_deref(), &about.checks[0]["within_bound"]),
            (Some("A GPU"), &true.into())
        );

        assert!(read::<Row, Libraries>("", "").skipped.is_empty(), "the exit status says what happened");
        assert!(read::<Row, Libraries>("{", "").skipped[0].reason.contains("no JSON"));
    }

    #[test]
    fn a_script_that_does_not_run_or_does_not_end_is_a_remark() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("peer.py").display().to_string();
        let reason = |python: &str, seconds: f64| {
            let found = run(python, &script, seconds);
            assert!(found.rows.is_empty());
            found.skipped.into_iter().map(|skipped| skipped.reason).collect::<Vec<_>>().join("; ")
        };
        assert!(reason("sh", 9.0).contains("--peers-script"));
        std::fs::write(&script, "echo 'one line' >&2; printf 'no PyTorch here \\377' >&2; exit 3\n").unwrap();
        let said = reason("sh", 9.0);
        assert!(said.starts_with("peer.py ended with") && said.contains(": no PyTorch here"), "{said}");
        assert!(reason("no-such-python", 9.0).contains("--python"));
        std::fs::write(&script, "while :; do sleep 1; done\n").unwrap();
        assert_eq!(reason("sh", 0.2), "peer.py was not done after 0 s; give --seconds more");
    }

    #[test]
    fn a_script_writes_what_it_is_asked_to_where_it_is_asked_to() {
        let folder = tempfile::tempdir().unwrap();
        let script = peer_that_writes(folder.path(), REPORT, "--sizes 4x4,5x5 --dtype f32 --json");
        let found = run("sh", &script, 30.0);
        assert_eq!(found.rows.len(), 1, "{:?}", found.skipped);
    }
}
