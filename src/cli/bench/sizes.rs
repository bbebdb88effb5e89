//! Which matrices are measured.

use host::int8::Matrix;
use std::str::FromStr;

/// The paper's ten sizes, in its order: tokens, channels.
pub const PAPER: [(usize, usize); 10] = [
    (1024, 64),
    (2048, 128),
    (16384, 256),
    (65536, 256),
    (131072, 256),
    (131072, 1024),
    (131072, 2048),
    (131072, 4096),
    (131072, 8192),
    (262144, 128),
];

/// A list of matrices, as the command line names it.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes(pub Vec<Matrix>);

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let matrix = |&(tokens, channels): &(usize, usize)| {
            Matrix::new(tokens, channels).map_err(|error| error.to_string())
        };
        let largest = PAPER.iter().max_by_key(|(tokens, channels)| tokens * channels);
        match text {
            "paper" => PAPER.iter().map(matrix).collect::<Result<_, _>>().map(Sizes),
            "largest" => largest.into_iter().map(matrix).collect::<Result<_, _>>().map(Sizes),
            list => list
                .split(',')
                .map(|size| {
                    let pair = size.split_once(['x', 'X', '×']);
                    let number = |text: &str| text.trim().parse::<usize>().ok();
                    let pair = pair.and_then(|(tokens, channels)| Some((number(tokens)?, number(channels)?)));
                    matrix(&pair.ok_or_else(|| {
                        format!("'{size}' is no size; write TOKENSxCHANNELS, for instance 1024x64, or paper or largest")
                    })?)
                })
                .collect::<Result<_, _>>()
                .map(Sizes),
        }
    }
}
