//! GGUF out: version 3, for small files of our own and for tests of what reads them.

use super::parse::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC};
use super::{Array, TensorType, Value};

/// A file under construction, in memory.
#[derive(Clone, Debug)]
pub struct Writer {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<u64>, TensorType, Vec<u8>)>,
}

impl Default for Writer {
    fn default() -> Self {
        Writer::new()
    }
}

impl Writer {
    /// An empty file.
    pub fn new() -> Self {
        Writer { metadata: Vec::new(), tensors: Vec::new() }
    }

    /// Adds a value, or replaces the key's.
    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        match self.metadata.iter_mut().find(|(other, _)| other == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
        self
    }

    /// Removes a key.
    pub fn unset(&mut self, key: &str) -> &mut Self {
        self.metadata.retain(|(other, _)| other != key);
        self
    }

    /// Adds a tensor, or replaces the one of that name: extents with the row length first, and its packed
    /// bytes.
    pub fn tensor(&mut self, name: &str, dims: &[u64], tensor_type: TensorType, bytes: Vec<u8>) -> &mut Self {
        self.remove_tensor(name);
        self.tensors.push((name.to_owned(), dims.to_vec(), tensor_type, bytes));
        self
    }

    /// Removes a tensor.
    pub fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|(other, ..)| other != name);
        self
    }

    /// The file's bytes. What is written is not checked: a test may want a wrong file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let alignment = self.metadata.iter().find_map(|(key, value)| match value {
            Value::U32(alignment) if key == ALIGNMENT_KEY && *alignment != 0 => Some(*alignment as usize),
            _ => None,
        });
        let alignment = alignment.unwrap_or(DEFAULT_ALIGNMENT as usize);
        let mut out = MAGIC.to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            out.extend(value_id(value).to_le_bytes());
            put_value(&mut out, value);
        }
        let mut offset = 0usize;
        for (name, dims, tensor_type, bytes) in &self.tensors {
            string(&mut out, name);
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor_type.id().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + bytes.len()).next_multiple_of(alignment);
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(alignment), 0);
            out.extend(bytes);
        }
        out
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn value_id(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

fn array_id(array: &Array) -> u32 {
    match array {
        Array::U8(_) => 0,
        Array::I8(_) => 1,
        Array::U16(_) => 2,
        Array::I16(_) => 3,
        Array::U32(_) => 4,
        Array::I32(_) => 5,
        Array::F32(_) => 6,
        Array::Bool(_) => 7,
        Array::String(_) => 8,
        Array::Array(_) => 9,
        Array::U64(_) => 10,
        Array::I64(_) => 11,
        Array::F64(_) => 12,
    }
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(x) => out.push(*x),
        Value::I8(x) => out.extend(x.to_le_bytes()),
        Value::U16(x) => out.extend(x.to_le_bytes()),
        Value::I16(x) => out.extend(x.to_le_bytes()),
        Value::U32(x) => out.extend(x.to_le_bytes()),
        Value::I32(x) => out.extend(x.to_le_bytes()),
        Value::F32(x) => out.extend(x.to_le_bytes()),
        Value::Bool(x) => out.push(u8::from(*x)),
        Value::String(x) => string(out, x),
        Value::Array(x) => put_array(out, x),
        Value::U64(x) => out.extend(x.to_le_bytes()),
        Value::I64(x) => out.extend(x.to_le_bytes()),
        Value::F64(x) => out.extend(x.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend(array_id(array).to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(x) => out.extend(x),
        Array::I8(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U16(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I16(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U32(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I32(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::F32(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::Bool(x) => out.extend(x.iter().map(|x| u8::from(*x))),
        Array::String(x) => x.iter().for_each(|x| string(out, x)),
        Array::Array(x) => x.iter().for_each(|x| put_array(out, x)),
        Array::U64(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I64(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::F64(x) => x.iter().for_each(|x| out.extend(x.to_le_bytes())),
    }
}
