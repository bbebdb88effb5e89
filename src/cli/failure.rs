//! How a command fails: one line, and an exit code.

use host::int8;
use host::int8::file;
use host::tensor_file;
use std::process::ExitCode;

/// Why a command did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] tensor_file::Error),
    /// A quantized file is wrong.
    #[error(transparent)]
    Quantized(#[from] file::Error),
    /// A plan or a launch failed.
    #[error(transparent)]
    Int8(#[from] int8::Error),
    /// A device failed.
    #[error(transparent)]
    Device(#[from] host::Error),
    /// A model cannot be opened or run.
    #[error(transparent)]
    Model(#[from] host::model::Error),
    /// A KV scheme, its options or its cache.
    #[error(transparent)]
    Scheme(#[from] host::kv::Error),
    /// A forward pass failed.
    #[error(transparent)]
    Forward(#[from] host::model::forward::Error),
    /// Golden bits cannot be read or written.
    #[error(transparent)]
    Golden(#[from] host::check::GoldenError),
    /// Kernels cannot be timed.
    #[error(transparent)]
    Times(#[from] host::check::TimesError),
    /// What a command says of its own.
    #[error("{0}")]
    Command(Box<dyn CommandError>),
    /// A measurement of a model has no result.
    #[error(transparent)]
    Measure(#[from] host::eval::Error),
    /// The file has nothing that can be quantized.
    #[error("{path} has no tensor to quantize: {reason}; F32, F16 or BF16 of rank 2 or more is needed")]
    NothingToDo {
        /// The file.
        path: String,
        /// What is there instead.
        reason: String,
    },
    /// A pattern that matches no tensor.
    #[error("no tensor of {path} matches '{pattern}'; it has {names}")]
    NoMatch {
        /// The file.
        path: String,
        /// The pattern.
        pattern: String,
        /// Some names.
        names: String,
    },
    /// A tensor that was asked for and cannot be quantized.
    #[error("tensor '{name}' cannot be quantized: {reason}; leave it out with --tensors")]
    Unsuitable {
        /// The tensor.
        name: String,
        /// Its type or shape, and what is accepted.
        reason: String,
    },
    /// Codes would be written that no kernel was compared with.
    #[error(
        "none of the chosen variants makes codes of granularity {granularity}, which -o is to write: leave out \
         --variant, or choose the granularity of the variants with --granularity"
    )]
    GranularityNotCompared {
        /// The granularity to be written.
        granularity: &'static str,
    },
    /// A NaN or an infinity.
    #[error(
        "tensor '{name}' has {value} at {index:?}; correct the source, or give --allow-nonfinite to saturate \
         (NaN becomes 0, an infinity the largest finite value)"
    )]
    NonFinite {
        /// The tensor.
        name: String,
        /// The value.
        value: f32,
        /// Its index, one number an axis.
        index: Vec<usize>,
    },
    /// A tensor that memory cannot hold.
    #[error("tensor '{name}' needs {bytes} bytes more than there are; choose fewer tensors with --tensors")]
    NoMemory {
        /// The tensor.
        name: String,
        /// What was asked for.
        bytes: usize,
    },
    /// A system that there is not.
    #[error("there is no system '{system}'; there are {names}")]
    UnknownSystem {
        /// What was asked for.
        system: String,
        /// What there is.
        names: String,
    },
    /// A filter that leaves nothing.
    #[error("no case matches '{filter}'; `ferrokv check --list` names them")]
    NoCase {
        /// The filter.
        filter: String,
    },
    /// Something that makes sense on a GPU only.
    #[error("{what} needs a GPU: {reason}")]
    NeedsGpu {
        /// The option.
        what: &'static str,
        /// Why there is none.
        reason: String,
    },
    /// Kernels of a code generator that the build left out.
    #[error(
        "no kernels of the code generator {name} are in this program, which has those of {built}; build it with \
         FERROKV_CODEGEN={build}"
    )]
    NotGenerated {
        /// The generator.
        name: &'static str,
        /// Those that are there.
        built: String,
        /// What to build with.
        build: String,
    },
    /// A comparison of code generators where one is to be chosen.
    #[error("--codegen names one code generator here; `ferrokv check` compares two")]
    OneGenerator,
    /// A list of code generators that is no comparison.
    #[error("--codegen {list}: name one code generator, or two different ones to compare them")]
    Generators {
        /// The list.
        list: String,
    },
    /// Two outputs of one name.
    #[error("{what} and {path} are one path; choose two")]
    SamePath {
        /// The other use.
        what: &'static str,
        /// The path.
        path: String,
    },
    /// A picture could not be drawn.
    #[error("cannot draw {path}: {reason}; give another path, or leave the picture out")]
    Plot {
        /// The picture.
        path: String,
        /// What the library says.
        reason: String,
    },
    /// A scheme whose calibration has nothing to draw.
    #[error("what {scheme} is calibrated for has no picture; leave --plot out")]
    NoPicture {
        /// The scheme.
        scheme: &'static str,
    },
    /// A path whose end does not say which kind of picture it is to be.
    #[error("{path} is neither SVG nor PNG by its name; let it end in .svg or .png")]
    PictureName {
        /// The path.
        path: String,
    },
    /// stdout could not be written.
    #[error("cannot write to stdout: {0}; write to a file instead")]
    Stdout(#[source] std::io::Error),
    /// What was compared differs.
    #[error("{0}")]
    Differs(String),
    /// `doctor --strict` found something missing.
    #[error("{0} missing; see the list above for how to get it")]
    Missing(String),
}

/// What a command says of its own: anything but what all of them meet.
pub trait CommandError: std::error::Error + Send + Sync + 'static {
    /// The exit code: 1 for a comparison that failed, 2 for bad input, 130 for Ctrl-C.
    fn exit_code(&self) -> u8 {
        2
    }
}

impl<E: CommandError> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Command(Box::new(error))
    }
}

impl Failure {
    fn exit_code(&self) -> u8 {
        match self {
            Failure::Differs(_) | Failure::Missing(_) => 1,
            Failure::Command(error) => error.exit_code(),
            _ => 2,
        }
    }

    /// Says it on stderr.
    pub fn report(&self) -> ExitCode {
        // A driver's text may have line ends; the promise is one line.
        let text = self.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        eprintln!("ferrokv: {text}");
        ExitCode::from(self.exit_code())
    }
}
