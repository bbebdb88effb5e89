//! Metadata values.

use std::fmt;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// 8 bits, unsigned.
    U8(u8),
    /// 8 bits, signed.
    I8(i8),
    /// 16 bits, unsigned.
    U16(u16),
    /// 16 bits, signed.
    I16(i16),
    /// 32 bits, unsigned.
    U32(u32),
    /// 32 bits, signed.
    I32(i32),
    /// Single precision.
    F32(f32),
    /// One byte, 0 or 1.
    Bool(bool),
    /// UTF-8.
    String(String),
    /// Values of one type.
    Array(Array),
    /// 64 bits, unsigned.
    U64(u64),
    /// 64 bits, signed.
    I64(i64),
    /// Double precision.
    F64(f64),
}

/// An array of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// Of [`Value::U8`].
    U8(Vec<u8>),
    /// Of [`Value::I8`].
    I8(Vec<i8>),
    /// Of [`Value::U16`].
    U16(Vec<u16>),
    /// Of [`Value::I16`].
    I16(Vec<i16>),
    /// Of [`Value::U32`].
    U32(Vec<u32>),
    /// Of [`Value::I32`].
    I32(Vec<i32>),
    /// Of [`Value::F32`].
    F32(Vec<f32>),
    /// Of [`Value::Bool`].
    Bool(Vec<bool>),
    /// Of [`Value::String`].
    String(Vec<String>),
    /// Of arrays.
    Array(Vec<Array>),
    /// Of [`Value::U64`].
    U64(Vec<u64>),
    /// Of [`Value::I64`].
    I64(Vec<i64>),
    /// Of [`Value::F64`].
    F64(Vec<f64>),
}

impl Value {
    /// What it is called in messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::F32(_) => "f32",
            Value::Bool(_) => "bool",
            Value::String(_) => "string",
            Value::Array(array) => array.type_name(),
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F64(_) => "f64",
        }
    }

    /// An integer of any width that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(x) => Some(x.into()),
            Value::U16(x) => Some(x.into()),
            Value::U32(x) => Some(x.into()),
            Value::U64(x) => Some(x),
            Value::I8(x) => u64::try_from(x).ok(),
            Value::I16(x) => u64::try_from(x).ok(),
            Value::I32(x) => u64::try_from(x).ok(),
            Value::I64(x) => u64::try_from(x).ok(),
            _ => None,
        }
    }

    /// A float of any width.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(x) => Some(x.into()),
            Value::F64(x) => Some(x),
            _ => None,
        }
    }

    /// A truth value.
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(x) = *self { Some(x) } else { None }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        if let Value::String(x) = self { Some(x) } else { None }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&Array> {
        if let Value::Array(x) = self { Some(x) } else { None }
    }
}

impl Array {
    /// What it is called in messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "array of u8",
            Array::I8(_) => "array of i8",
            Array::U16(_) => "array of u16",
            Array::I16(_) => "array of i16",
            Array::U32(_) => "array of u32",
            Array::I32(_) => "array of i32",
            Array::F32(_) => "array of f32",
            Array::Bool(_) => "array of bool",
            Array::String(_) => "array of strings",
            Array::Array(_) => "array of arrays",
            Array::U64(_) => "array of u64",
            Array::I64(_) => "array of i64",
            Array::F64(_) => "array of f64",
        }
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(x) => x.len(),
            Array::I8(x) => x.len(),
            Array::U16(x) => x.len(),
            Array::I16(x) => x.len(),
            Array::U32(x) => x.len(),
            Array::I32(x) => x.len(),
            Array::F32(x) => x.len(),
            Array::Bool(x) => x.len(),
            Array::String(x) => x.len(),
            Array::Array(x) => x.len(),
            Array::U64(x) => x.len(),
            Array::I64(x) => x.len(),
            Array::F64(x) => x.len(),
        }
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Strings.
    pub fn as_strings(&self) -> Option<&[String]> {
        if let Array::String(x) = self { Some(x) } else { None }
    }

    /// Signed 32-bit integers.
    pub fn as_i32(&self) -> Option<&[i32]> {
        if let Array::I32(x) = self { Some(x) } else { None }
    }
}

/// Numbers and strings as they are, arrays as type and length.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(x) => x.fmt(f),
            Value::I8(x) => x.fmt(f),
            Value::U16(x) => x.fmt(f),
            Value::I16(x) => x.fmt(f),
            Value::U32(x) => x.fmt(f),
            Value::I32(x) => x.fmt(f),
            Value::F32(x) => x.fmt(f),
            Value::Bool(x) => x.fmt(f),
            Value::String(x) => x.fmt(f),
            Value::Array(x) => write!(f, "{} ({})", x.type_name(), x.len()),
            Value::U64(x) => x.fmt(f),
            Value::I64(x) => x.fmt(f),
            Value::F64(x) => x.fmt(f),
        }
    }
}
