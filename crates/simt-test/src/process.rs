//! Cases on the GPU run in a process of their own: a kernel that goes astray there takes its context with it,
//! and nothing else. The process is this test's program once more, told to run this test alone.
//!
//! The parent writes a case to the child's input, a line each, and reads a line that begins with [`MARK`]
//! from its output; what the test harness prints in between is passed over. After a fault the child is ended,
//! and the next case gets a fresh one.

use crate::draws::Case;
use crate::failure::GpuError;
use ferrokv_device::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Tells the program that it is the process for the GPU, and for which test.
pub(crate) const CHILD: &str = "SIMT_TEST_CHILD";
/// Begins every line of an answer.
const MARK: &str = "@simt-test ";
/// How many lines of other output an error shows.
const LINES: usize = 3;

/// The process of one test, started when a case needs it.
pub(crate) struct Process {
    site: &'static str,
    /// The test's name to the harness.
    test: String,
    seconds: u64,
    running: Option<Running>,
}

struct Running {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    pub fn new(site: &'static str, test: &str, seconds: u64) -> Self {
        Process { site, test: test.to_string(), seconds, running: None }
    }

    fn start(&self) -> std::io::Result<Running> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--exact", &self.test, "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(CHILD, self.site)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let missing = || std::io::Error::other("it has no input or output");
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = child.stdout.take().ok_or_else(missing)?;
        let (send, lines) = channel();
        // Ends when the child's output does.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Running { child, input, lines })
    }

    /// Runs the case and returns the contents of its outputs.
    pub fn run(&mut self, case: &Case) -> Result<Vec<Vec<u8>>, GpuError> {
        let mut running = match self.running.take() {
            Some(running) => running,
            None => self.start().map_err(GpuError::Start)?,
        };
        // A child that is gone is found so below.
        let _ = writeln!(running.input, "{}", case.encoded()).and_then(|()| running.input.flush());
        let mut said = Vec::new();
        let answer = loop {
            match running.lines.recv_timeout(Duration::from_secs(self.seconds)) {
                Ok(line) => match line.find(MARK) {
                    Some(at) => break line[at + MARK.len()..].to_string(),
                    None => said.push(line),
                },
                Err(RecvTimeoutError::Timeout) => {
                    return Err(GpuError::Silent { seconds: self.seconds });
                }
                Err(RecvTimeoutError::Disconnected) => return Err(running.ended(said)),
            }
        };
        match parse(&answer) {
            Some(Ok(outputs)) => {
                self.running = Some(running);
                Ok(outputs)
            }
            Some(Err((code, message))) => Err(GpuError::Fault { code, message }),
            None => Err(GpuError::Answer { answer }),
        }
    }
}

impl Running {
    /// What became of a child whose output has ended.
    fn ended(&mut self, said: Vec<String>) -> GpuError {
        match self.child.wait() {
            Ok(status) if status.success() => {
                let first = said.len().saturating_sub(LINES);
                GpuError::Answer { answer: format!("it said `{}`", said[first..].join(" / ")) }
            }
            Ok(status) => GpuError::Ended { status: status.to_string() },
            Err(error) => GpuError::Ended { status: error.to_string() },
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself; whether or not, nothing is left of it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

type Answer = Result<Vec<Vec<u8>>, (Option<u32>, String)>;

fn parse(answer: &str) -> Option<Answer> {
    let (kind, rest) = answer.split_once(' ')?;
    match kind {
        "ok" => rest.split(',').filter(|text| !text.is_empty()).map(unhex).collect::<Option<_>>().map(Ok),
        "error" => {
            let (code, message) = rest.split_once(' ')?;
            Some(Err((code.parse().ok(), message.to_string())))
        }
        _ => None,
    }
}

/// Every output begins with `:`, so that one without elements is seen.
fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |x: u8| DIGITS[usize::from(x & 15)] as char;
    std::iter::once(':').chain(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)])).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix(':')?.as_bytes();
    let digit = |c: u8| (c as char).to_digit(16).map(|x| x as u8);
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    };
    digits.chunks(2).map(byte).collect()
}

/// The child's side: answers cases until there are no more. After a fault it is given none, and ended.
pub(crate) fn serve(mut run: impl FnMut(&Case) -> Result<Vec<Vec<u8>>, Error>) {
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let answer = match Case::decoded(&line) {
            Some(case) => run(&case),
            // The parent is this program: only another version of it writes what this one cannot read.
            None => break,
        };
        let text = match answer {
            Ok(outputs) => {
                let outputs: Vec<String> = outputs.iter().map(|bytes| hex(bytes)).collect();
                format!("ok {}", outputs.join(","))
            }
            Err(error) => {
                let code = match &error {
                    Error::Cuda { code, .. } => code.to_string(),
                    _ => "-".to_string(),
                };
                format!("error {code} {}", error.to_string().replace('\n', " "))
            }
        };
        let mut output = std::io::stdout().lock();
        // A parent that is gone reads nothing; the next line of input then is none.
        let _ = writeln!(output, "\n{MARK}{text}").and_then(|()| output.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_written() {
        let outputs = vec![vec![0, 255, 16], vec![], vec![7]];
        let text: Vec<String> = outputs.iter().map(|bytes| hex(bytes)).collect();
        assert_eq!(text, [":00ff10", ":", ":07"]);
        assert_eq!(parse(&format!("ok {}", text.join(","))), Some(Ok(outputs)));
        assert_eq!(parse("ok "), Some(Ok(vec![])));
        assert_eq!(parse("error 700 it is gone"), Some(Err((Some(700), "it is gone".to_string()))));
        assert_eq!(parse("error - refused"), Some(Err((None, "refused".to_string()))));
        for wrong in ["ok", "ok 00", "ok :0", "ok :0g", "else x"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
