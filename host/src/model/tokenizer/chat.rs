//! Chats in ChatML: `<|im_start|>role`, a line feed, the message, `<|im_end|>`, a line feed.

use super::Tokenizer;
use crate::model::Result;
use crate::model::gguf::{Gguf, Value};

const TEMPLATE: &str = "tokenizer.chat_template";
const START: &str = "<|im_start|>";
const END: &str = "<|im_end|>";

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The frame of the conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// As the template spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// What somebody said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who.
    pub role: Role,
    /// What.
    pub content: String,
}

impl Message {
    /// What the person said.
    pub fn user(content: impl Into<String>) -> Self {
        Message { role: Role::User, content: content.into() }
    }
}

/// The template as far as a prompt needs it.
#[derive(Debug)]
pub(super) struct ChatMl {
    start: u32,
    end: u32,
    /// The message that the template puts first where there is no system message.
    system: Option<String>,
}

impl ChatMl {
    /// Reads a file's template; the error says what there is instead.
    pub fn from_gguf(file: &Gguf, id: impl Fn(&str) -> Option<u32>) -> std::result::Result<ChatMl, String> {
        let Some(template) = file.get(TEMPLATE).and_then(Value::as_str) else {
            return Err("no chat template".into());
        };
        if !(template.contains(START) && template.contains(END)) {
            let beginning: String =
                template.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(60).collect();
            return Err(format!("a chat template of another kind ('{beginning}…')"));
        }
        match (id(START), id(END)) {
            (Some(start), Some(end)) => Ok(ChatMl { start, end, system: default_system(template) }),
            _ => Err(format!("a ChatML template, but no control tokens {START} and {END}")),
        }
    }

    pub fn prompt(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let system =
            self.system.as_ref().filter(|_| messages.first().is_none_or(|first| first.role != Role::System));
        let system = system.map(|content| Message { role: Role::System, content: content.clone() });
        for message in system.iter().chain(messages) {
            ids.push(self.start);
            ids.extend(tokenizer.encode(&format!("{}\n{}", message.role.name(), message.content))?);
            ids.push(self.end);
            ids.extend(tokenizer.encode("\n")?);
        }
        ids.push(self.start);
        ids.extend(tokenizer.encode(&format!("{}\n", Role::Assistant.name()))?);
        Ok(ids)
    }
}

/// The system message that stands whole in the template, its line feeds as they are or as `\n`.
fn default_system(template: &str) -> Option<String> {
    let turn = |after: &str| -> Option<String> {
        let after = after.strip_prefix("system")?;
        let content = after.strip_prefix('\n').or_else(|| after.strip_prefix("\\n"))?;
        let content = &content[..content.find(END)?];
        // A quote or a brace: the template goes on with an expression.
        (!content.contains(['\'', '"', '{', '}'])).then(|| content.replace("\\n", "\n"))
    };
    template.split(START).skip(1).find_map(turn)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_system_message_is_the_one_that_is_written_out() {
        let smollm = "{% if loop.first %}{{ '<|im_start|>system\nYou are X<|im_end|>\n' }}{% endif %}";
        assert_eq!(default_system(smollm).as_deref(), Some("You are X"));
        let qwen = "{{- '<|im_start|>system\\n' }}{{- messages[0]['content'] + '<|im_end|>' }}{% else %}\
                    {{- '<|im_start|>system\\nYou are Y.\\nHelp.<|im_end|>\\n' }}";
        assert_eq!(default_system(qwen).as_deref(), Some("You are Y.\nHelp."));
        assert_eq!(default_system("{{'<|im_start|>' + message['role']}}<|im_end|>"), None);
        assert_eq!(default_system("<|im_start|>system\nno end"), None);
    }
}
