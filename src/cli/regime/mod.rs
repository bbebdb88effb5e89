//! `ferrokv regime`: what a step of decoding takes, from the bytes that it reads, and where a scheme pays.

mod bytes;
mod fit;
mod judged;
mod least_squares;
mod map;
mod plot;
mod record;
mod traffic;

use super::failure::{CommandError, Failure};
use super::scheme::DENSE;
use super::text;
use clap::Subcommand;
use host::kv::Selection;
use judged::Judged;
use record::Measured;
use std::path::PathBuf;
use traffic::{Form, Unfit};

const LONG: &str = "\
What a step of decoding takes, from the bytes that it reads, and where a KV scheme pays: from records of `ferrokv bench \
model --json`, of one model on one device. No GPU is needed.

The model is that of Alsufi and Scott (Attention Pays Its Bill, 2026): t = (W + B·A)/β + c0, and + c1 for schemes but \
`dense`. W are the weights' bytes, A those that a step reads of a sequence's cache, B sequences; β is the bandwidth that a \
step reaches, c0 what every step takes besides, c1 what the scheme takes besides. β and c0 are fitted on rows of `dense` \
alone, c1 on the scheme's.

Exit codes: 0 done; 2 bad input.";

/// What a step of decoding takes, from the bytes that it reads, and where a KV scheme pays.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Fit(fit::Arguments),
    Plot(Box<plot::Arguments>),
}

/// Why there is no fit or no map.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No file was given.
    #[error("no record was given; make one with `ferrokv bench model --json FILE`")]
    NoFile,
    /// A file that cannot be read.
    #[error("cannot read {}: {source}; make a record with `ferrokv bench model --json FILE`", path.display())]
    Unread {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file that holds something else.
    #[error(
        "{} is no record of `ferrokv bench model`: {reason}; make one with `ferrokv bench model --json FILE`",
        path.display()
    )]
    NotARecord {
        /// The file.
        path: PathBuf,
        /// What it is.
        reason: String,
    },
    /// A value that makes no sense.
    #[error(
        "{}: {field}{place} is {found}, and must be {expected}; correct it or measure again with `ferrokv bench model`",
        path.display()
    )]
    Field {
        /// The file.
        path: PathBuf,
        /// Which row, if it is of one.
        place: String,
        /// The field.
        field: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        expected: &'static str,
    },
    /// Two models or two devices.
    #[error(
        "{} and {} do not go together: their {what} is {ours} and {theirs}; fit them one by one",
        first.display(), second.display()
    )]
    Mixed {
        /// What differs.
        what: &'static str,
        /// A file.
        first: PathBuf,
        /// Its value.
        ours: String,
        /// The other file.
        second: PathBuf,
        /// Its value.
        theirs: String,
    },
    /// A scheme that was not measured.
    #[error("no row has the KV scheme '{kv}'; there are {names}")]
    NoScheme {
        /// The scheme.
        kv: String,
        /// Those of the rows.
        names: String,
    },
    /// Nothing that a scheme is measured against.
    #[error(
        "no row has the KV scheme '{DENSE}', on which β and c0 are fitted; measure it with --kv {DENSE},…"
    )]
    NoDense,
    /// Too few rows, or rows that do not tell the constants apart.
    #[error("the form '{form}' cannot be fitted: {reason}")]
    Unfit {
        /// The form.
        form: &'static str,
        /// Why not, and what would help.
        reason: String,
    },
    /// Other schemes than dense are missing.
    #[error(
        "no row has another KV scheme than '{DENSE}'; measure one with `ferrokv bench model --kv {DENSE},gather`"
    )]
    NoOther,
    /// The bytes at contexts that were not measured are not known.
    #[error(
        "what '{kv}' reads at other contexts is not known: the scheme's own count is not that of the rows, which are \
         of one context; measure it at two with `ferrokv bench model --contexts`"
    )]
    Bytes {
        /// The scheme.
        kv: String,
    },
    /// A constant that the form does not have.
    #[error("the form '{form}' has no constant r to project; leave r out of --project, or give --fit rows")]
    NoRows {
        /// The form.
        form: &'static str,
    },
    /// Constants that leave no time to a step.
    #[error(
        "with {what} a step of '{kv}' takes {us} µs at {context} tokens and batch {batch}; measure more rows, or \
         project other values"
    )]
    NoTime {
        /// The constants.
        what: String,
        /// The scheme.
        kv: String,
        /// What a step would take.
        us: f64,
        /// Where.
        context: u32,
        /// Likewise.
        batch: u32,
    },
}

impl CommandError for Error {}

impl Error {
    fn unfit(form: Form, why: Unfit) -> Self {
        let reason = match why {
            Unfit::Few { found, needed } => format!(
                "{} of {DENSE} for {needed} constants; measure more contexts and batches with `ferrokv bench model`",
                text::plural(found, "row")
            ),
            Unfit::Alike => format!(
                "rows of {DENSE} are alike in what tells its constants apart; measure two contexts, and for 'rows' \
                 two batches as well"
            ),
            Unfit::NotPhysical => {
                format!("rows of {DENSE} that read more take no more time; measure longer contexts")
            }
        };
        Error::Unfit { form: form.name(), reason }
    }
}

/// Every form that the rows allow, with the schemes that were asked for, or all but dense.
///
/// # Errors
/// A scheme that was not measured, or too few rows for any form.
fn fits(measured: &Measured, asked: &[String]) -> Result<(Vec<String>, Vec<Judged>), Error> {
    let names = measured.schemes();
    // `gather:assured` is `gather`, as records have it.
    let asked: Vec<String> = asked
        .iter()
        .map(|kv| kv.parse::<Selection>().map_or_else(|_| kv.clone(), |known| known.to_string()))
        .collect();
    if !names.iter().any(|name| name == DENSE) {
        return Err(Error::NoDense);
    }
    if let Some(kv) = asked.iter().find(|kv| !names.contains(kv)) {
        return Err(Error::NoScheme { kv: kv.clone(), names: names.join(", ") });
    }
    let wanted = |name: &&String| *name != DENSE && (asked.is_empty() || asked.contains(name));
    let schemes: Vec<String> = names.iter().filter(wanted).cloned().collect();
    let mut fits = Vec::new();
    for form in Form::ALL {
        match Judged::new(form, &measured.cells, &schemes) {
            Ok(judged) => fits.push(judged),
            // Rows that the larger form wants may not be there; without the smaller one there is nothing.
            Err(why) if form == Form::Paper => return Err(Error::unfit(form, why)),
            Err(_) => {}
        }
    }
    Ok((schemes, fits))
}

/// Runs the command.
///
/// # Errors
/// Bad input.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Fit(arguments) => fit::run(arguments),
        What::Plot(arguments) => plot::run(arguments),
    }
}
