//! Options of schemes, and their values.

use super::{Error, Result};
use std::fmt;

/// A setting of a scheme.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptionSpec {
    /// The name.
    pub name: &'static str,
    /// What it sets, with its unit.
    pub about: &'static str,
    /// What it may be.
    pub kind: Kind,
}

/// What an option's value may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A whole number between two, both included.
    Count(u64, u64),
    /// A number between two, both included; `inf` if the upper one is infinite.
    Number(f64, f64),
    /// `on` or `off`.
    Switch,
    /// One of some words.
    Word(&'static [&'static str]),
    /// A file: the last option, and one at most, since a path may have `/` in it.
    File,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Count(least, most) if *most == u64::from(u32::MAX) => {
                write!(f, "a whole number from {least} up")
            }
            Kind::Count(least, most) => write!(f, "a whole number from {least} to {most}"),
            Kind::Number(least, most) if *most == f64::INFINITY => {
                write!(f, "a number from {least} up, or inf")
            }
            Kind::Number(least, most) => write!(f, "a number from {least} to {most}"),
            Kind::Switch => f.write_str("on or off"),
            Kind::Word(words) => write!(f, "one of {}", words.join(", ")),
            Kind::File => f.write_str("a file"),
        }
    }
}

/// An option's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Of [`Kind::Count`].
    Count(u64),
    /// Of [`Kind::Number`].
    Number(f64),
    /// Of [`Kind::Switch`].
    Switch(bool),
    /// Of [`Kind::Word`].
    Word(&'static str),
    /// Of [`Kind::File`].
    File(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Count(count) => write!(f, "{count}"),
            Value::Number(number) => write!(f, "{number}"),
            Value::Switch(on) => f.write_str(if *on { "on" } else { "off" }),
            Value::Word(word) => f.write_str(word),
            Value::File(path) => f.write_str(path),
        }
    }
}

impl OptionSpec {
    /// The value that a text says.
    ///
    /// # Errors
    /// [`Error`] with what it may be.
    pub(super) fn parse(&self, scheme: &'static str, text: &str) -> Result<Value> {
        let value = match self.kind {
            Kind::Count(least, most) => {
                text.parse().ok().filter(|n| (least..=most).contains(n)).map(Value::Count)
            }
            Kind::Number(least, most) => {
                text.parse().ok().filter(|x| (least..=most).contains(x)).map(Value::Number)
            }
            Kind::Switch => match text {
                "on" => Some(Value::Switch(true)),
                "off" => Some(Value::Switch(false)),
                _ => None,
            },
            Kind::Word(words) => words.iter().find(|word| **word == text).map(|word| Value::Word(word)),
            Kind::File => (!text.is_empty()).then(|| Value::File(text.to_owned())),
        };
        let expected = || self.kind.to_string();
        value.ok_or_else(|| Error::Value {
            scheme,
            option: self.name,
            value: text.to_owned(),
            expected: expected(),
        })
    }
}
