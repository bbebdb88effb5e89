//! The commands: each a module with its arguments and a `run`.

mod attend;
mod backend;
mod bench;
mod calibrate;
mod capture;
mod captured;
mod chart;
mod check;
mod compare;
mod dequantize;
mod diagnose;
mod doctor;
mod environment;
mod eval;
mod failure;
mod generate;
mod heat_map;
mod interrupt;
mod kernels;
mod layers;
mod memory;
mod model;
mod new;
mod output;
mod picture;
mod progress;
mod prove;
mod quantize;
mod regime;
mod scheme;
mod squares;
mod subject;
mod table;
mod text;
mod timing;
mod tokens;
mod trials;

use clap::{Parser, Subcommand};
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;

const ABOUT: &str = "\
Quantize KV caches with kernels that give the same bits on the GPU and on the CPU.

A kernel is one Rust function. It runs on an NVIDIA GPU as PTX and on the CPU under an emulator of the GPU's \
execution model; this program measures both and compares every bit. It needs no GPU: what needs one says so.

Exit codes: 0 all is well; 1 a comparison failed (bits differ, or a strict check found something missing); \
2 bad input, or something that could not be done (one line on stderr says what and the way out).";

const EXAMPLES: &str = "\
Examples:
  ferrokv doctor                                          what this machine has and what is missing
  ferrokv quantize assets/kv-smollm2.safetensors          measure every kernel on a real KV cache
  ferrokv quantize cache.safetensors -o cache.q.safetensors --granularity block
  ferrokv dequantize cache.q.safetensors -o back.safetensors
  ferrokv attend assets/kv-smollm2.safetensors            attention, each head's bound beside its true error
  ferrokv check                                           every kernel on emulator and GPU, bit by bit
  ferrokv prove --cache assets/kv-smollm2.safetensors     certificates against errors, over caches of every kind
  ferrokv bench int8 --sizes largest --plot bench         every kernel beside the memory's ceiling
  ferrokv kernels                                         registers and shared memory of every kernel
  ferrokv model                                           what a model file holds, and how it tokenizes
  ferrokv generate --chat \"Why is the sky blue?\"         a language model on one of the caches
  ferrokv eval ppl --kv certified --context 512..4096     what a KV scheme does to perplexity
  ferrokv compare --kv dense,certified                    two schemes on the same text, step by step
  ferrokv capture -o kv.safetensors                       queries, keys and values of a real run, for attend
  ferrokv regime fit model.json                           what a step of decoding takes, from its bytes
  ferrokv diagnose assets/kv-smollm2.safetensors          what codes do to logits and softmax, by bytes
  ferrokv new my-kernels                                  a crate with a kernel of one's own, and its test";

#[derive(Parser)]
#[command(name = "ferrokv", version, about = "Quantized KV caches in Rust: the same bits on GPU and CPU")]
#[command(long_about = ABOUT, after_long_help = EXAMPLES, propagate_version = true)]
struct Cli {
    /// Say more on stderr: -v what is opened and loaded, -vv everything.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Attend(Box<attend::Arguments>),
    Quantize(quantize::Arguments),
    Dequantize(dequantize::Arguments),
    Bench(bench::Arguments),
    Check(check::Arguments),
    Prove(prove::Arguments),
    Doctor(doctor::Arguments),
    Kernels(kernels::Arguments),
    Model(model::Arguments),
    Generate(Box<generate::Arguments>),
    Eval(eval::Arguments),
    Compare(Box<compare::Arguments>),
    Diagnose(Box<diagnose::Arguments>),
    Capture(Box<capture::Arguments>),
    Calibrate(Box<calibrate::Arguments>),
    Regime(Box<regime::Arguments>),
    New(new::Arguments),
}

/// Parses the command line, runs the command and turns its outcome into an exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = match cli.verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .init();
    let outcome = match &cli.command {
        Command::Attend(arguments) => attend::run(arguments),
        Command::Quantize(arguments) => quantize::run(arguments),
        Command::Dequantize(arguments) => dequantize::run(arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::Check(arguments) => check::run(arguments),
        Command::Prove(arguments) => prove::run(arguments),
        Command::Doctor(arguments) => doctor::run(arguments),
        Command::Kernels(arguments) => kernels::run(arguments),
        Command::Model(arguments) => model::run(arguments),
        Command::Generate(arguments) => generate::run(arguments),
        Command::Eval(arguments) => eval::run(arguments),
        Command::Compare(arguments) => compare::run(arguments),
        Command::Diagnose(arguments) => diagnose::run(arguments),
        Command::Capture(arguments) => capture::run(arguments),
        Command::Calibrate(arguments) => calibrate::run(arguments),
        Command::Regime(arguments) => regime::run(arguments),
        Command::New(arguments) => new::run(arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
