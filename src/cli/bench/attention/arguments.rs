//! The command line.

use super::super::seconds;
use super::report::BlockOrder;
use crate::cli::backend::BackendArguments;
use crate::cli::output::ReportArguments;
use crate::cli::scheme;
use crate::cli::tokens::count;
use clap::builder::ArgPredicate;
use host::attention::dense::Problem;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

const LONG: &str = "\
Times decode attention, one query token a sequence: our kernels beside what memory alone takes and, asked for, \
PyTorch's backends.

Caches are paged. Blocks lie shuffled over the pool, as in one that has long been in use, or with --blocks in-order one \
behind the other, as other libraries' caches do and those of a fresh pool. On the GPU each row is the median over replays of a captured graph, whose \
calls take turns over as many caches as keep the GPU's own cache out. Of every row outputs are compared with the formula \
in f64 within a bound that is derived, and on small caches every bit with the emulator's. It ends within --seconds, \
with a report: what there was no time for is listed.

Steps ask queries of their own, each as like the one before as a model's are (a cosine of 0.84, measured on the sample \
cache). Originals that a scheme keeps besides what it stores are in the GPU's memory, as with a scratch that holds \
all that is used; with --cold or --scratch they are in host memory. A scheme whose steps have several stages is timed up to each of them.

With --trace attention is over captured keys and values: windows of a model's context joined to longer ones, each with the \
positions that it had. Of every head the error and the bound are then compared with the formula.

Exit codes: 0 all that was compared is right; 1 some is not, an error above its certificate included (the report is written and says which); 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv bench attention --shapes 32/8/128 --contexts 8K,128K
  ferrokv bench attention --kv dense,certified:strict --query-scale 5
  ferrokv bench attention --kv int8-int4 --blocks shuffled,in-order --batches 8
  ferrokv bench attention --trace a.safetensors,b.safetensors --scratch 0.1
  ferrokv bench attention --peers --seconds 300 --json attention.json --plot attention";

/// Times decode attention: our kernels beside what memory alone takes and, asked for, PyTorch's backends.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Query heads / KV heads / head_dim, separated by commas.
    #[arg(long, value_name = "LIST", default_value = "32/8/128,28/4/128", value_delimiter = ',')]
    #[arg(default_value_if("trace", ArgPredicate::IsPresent, None), conflicts_with = "trace")]
    pub shapes: Vec<Shape>,
    /// Sequences at once, separated by commas.
    #[arg(long, value_name = "LIST", default_value = "1,8", value_delimiter = ',', value_parser = count)]
    #[arg(default_value_if("trace", ArgPredicate::IsPresent, None))]
    pub batches: Vec<u32>,
    /// Tokens of each sequence, separated by commas; K is 1024.
    #[arg(long, value_name = "LIST", default_value = "8K,16K,32K,64K,128K,256K,512K", value_delimiter = ',',
          value_parser = count)]
    #[arg(default_value_if("trace", ArgPredicate::IsPresent, None))]
    pub contexts: Vec<u32>,
    /// Element types of the cache: f16, bf16, separated by commas.
    #[arg(long, value_name = "TYPES", default_value = "f16", value_delimiter = ',', value_parser = ["f16", "bf16"])]
    #[arg(conflicts_with = "trace")]
    pub dtype: Vec<String>,
    /// Where the blocks of the caches lie in their pools, separated by commas.
    #[arg(long, value_name = "ORDERS", default_value = "shuffled", value_delimiter = ',', value_enum)]
    pub blocks: Vec<BlockOrder>,
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "dense,int8-int4,certified")]
    #[arg(help = scheme::short("KV schemes"))]
    #[arg(long_help = scheme::long("KV schemes"))]
    pub kv: Vec<String>,
    /// Keep originals that a scheme has besides what it stores in page-locked host memory, with no scratch:
    /// what it uses of them comes over the bus in every step.
    #[arg(long)]
    pub cold: bool,
    /// The same with a scratch on the GPU for the originals of this share of the blocks: those that steps
    /// have used of late.
    #[arg(long, value_name = "SHARE", conflicts_with = "cold", value_parser = share)]
    pub scratch: Option<f64>,
    /// What queries are multiplied by, which as keys and values are about N(0, 1): attention is flat at 1 and
    /// narrow at 10.
    #[arg(long, value_name = "X", default_value_t = 3.0, value_parser = scale, conflicts_with = "trace")]
    pub query_scale: f32,
    /// Keys, values and queries of real runs in place of made-up ones: files of `ferrokv capture`, whose
    /// tokens are joined in their order. Each layer is a sequence, unless --batches says of how many, and
    /// steps ask the last queries of the last file, back and forth, each of the tokens up to its own.
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub trace: Vec<PathBuf>,
    /// Of a trace, these layers only, by number.
    #[arg(long, value_name = "N", value_delimiter = ',', requires = "trace")]
    pub layers: Vec<u32>,
    /// Of a trace, how many of the last query tokens are asked.
    #[arg(long, value_name = "N", default_value_t = 33, value_parser = clap::value_parser!(u16).range(2..))]
    pub queries: u16,
    #[command(flatten)]
    pub backend: BackendArguments,
    /// Measure PyTorch's backends beside: needs a python3 with PyTorch, and a GPU.
    #[arg(long)]
    pub peers: bool,
    /// The script that measures them.
    #[arg(long, value_name = "FILE", default_value = "benches/peers/attention.py")]
    pub peers_script: PathBuf,
    /// The Python that runs the script.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub python: String,
    /// Seconds in which everything is to end; with --peers they come first and may take 60 in 100.
    #[arg(long, value_name = "S", default_value_t = 120.0, value_parser = seconds)]
    pub seconds: f64,
    /// Seconds of repetitions a row.
    #[arg(long, value_name = "S", default_value_t = 0.2, value_parser = seconds)]
    pub seconds_per_row: f64,
    /// Draw PREFIX-SHAPE-DTYPE for each shape and type, as .svg and .png (replaced if they exist).
    #[arg(long, value_name = "PREFIX")]
    pub plot: Option<PathBuf>,
    /// The commit to name in the report.
    #[arg(long, value_name = "HASH")]
    pub commit: Option<String>,
    #[command(flatten)]
    pub report: ReportArguments,
}

/// A part of a whole.
pub fn share(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|x| (0.0..=1.0).contains(x));
    number.ok_or_else(|| format!("'{text}' is no share; give a number from 0 to 1"))
}

/// What queries may be multiplied by.
pub fn scale(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|x| *x > 0.0 && *x <= 1000.0);
    number.ok_or_else(|| format!("'{text}' is no number above 0, 1000 at most"))
}

/// Heads that attention is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a row.
    pub head_dim: u32,
}

impl Shape {
    /// One query token in each of `batch` sequences of `context` tokens.
    pub fn problem(self, batch: u32, context: u32) -> Problem {
        let Shape { q_heads, kv_heads, head_dim } = self;
        Problem { sequences: batch, q_heads, kv_heads, head_dim, query_tokens: 1, max_tokens: context }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.q_heads, self.kv_heads, self.head_dim)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Vec<u32> = text.split('/').map_while(|part| part.trim().parse().ok()).collect();
        let &[q_heads, kv_heads, head_dim] = numbers.as_slice() else {
            return Err(format!(
                "'{text}' is no shape; write QUERY_HEADS/KV_HEADS/HEAD_DIM, for instance 32/8/128"
            ));
        };
        let shape = Shape { q_heads, kv_heads, head_dim };
        match shape.problem(1, 1).checked() {
            Ok(_) => Ok(shape),
            Err(error) => Err(error.to_string()),
        }
    }
}
