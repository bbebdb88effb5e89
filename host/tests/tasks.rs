//! Tasks over long texts: made by rule, the same every time, of the length asked for, and solvable from what
//! they say.

use host::eval::needle::{self, Setting};
use host::eval::prompt::Prompt;
use host::eval::ruler::{self, Source, Subtask};
use host::eval::{Error, decoder};
use host::kv::{KvCache, Selection};
use host::model::config::Architecture;
use host::model::forward::Runner;
use host::model::gguf::Gguf;
use host::model::synthetic::{self, Packing};
use host::model::text::Corpus;
use host::model::{Model, ModelConfig, Tokenizer};
use simt::emu::EmuOptions;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

fn model(context: usize) -> Model {
    let config = ModelConfig { context, ..synthetic::tiny(Architecture::Llama) };
    let model = synthetic::model(config, Packing::Q4_1, 3).expect("a model");
    let file = Gguf::from_bytes("tiny.gguf", synthetic::file(&model).to_bytes()).expect("a file");
    Model::from_gguf(&file).expect("a model")
}

/// Sentences of many different words.
fn corpus() -> Corpus {
    let parts = [
        "ba", "cor", "del", "fin", "gam", "hol", "jun", "lor", "mis", "nar", "pel", "quo", "ser", "tav",
        "wim",
    ];
    let mut state = 1u32;
    let mut next = |n: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as usize % n
    };
    let mut text = String::new();
    for i in 0..20_000 {
        (0..2 + next(2)).for_each(|_| text += parts[next(parts.len())]);
        text += if i % 11 == 10 { ". " } else { " " };
    }
    Corpus::new("made up", text)
}

fn text(tokenizer: &Tokenizer, prompt: &Prompt) -> String {
    tokenizer.decode(&[&prompt.context[..], &prompt.steps].concat()).expect("text")
}

/// What stands between two marks, the first time.
fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let text = text.split_once(before).unwrap_or_else(|| panic!("no '{before}' in {text}")).1;
    text.split_once(after).unwrap_or_else(|| panic!("no '{after}' in {text}")).0
}

#[test]
fn keys_are_where_they_should_be() {
    let (model, corpus) = (model(4096), corpus());
    let tokenizer = model.tokenizer().expect("a tokenizer");
    for (length, depth) in [(1500, 0.0), (1500, 1.0), (3000, 0.5)] {
        let setting = Setting { length, depth, distractors: 5, seed: 7, trial: 2 };
        let task = needle::Task::new(tokenizer, &corpus, setting).expect("a task");
        assert_eq!(task, needle::Task::new(tokenizer, &corpus, setting).expect("a task"));
        let taken = task.prompt.tokens() + task.answer.len();
        assert!(taken <= length && taken + 200 > length, "{taken} of {length} tokens");
        assert!(task.capacity() <= length + 1);
        let text = text(tokenizer, &task.prompt);
        let (haystack, question) = text.rsplit_once("What is").expect("a question");
        let name = between(question, "the pass key of the ", "?");
        assert_eq!(between(haystack, &format!("pass key of the {name} is "), "."), task.key);
        assert!(question.ends_with(&format!("The pass key of the {name} is")), "{question}");
        assert_eq!(tokenizer.decode(&task.answer).expect("text"), format!(" {}", task.key));
        assert_eq!(haystack.matches("The pass key of the").count(), 6);
        let keys: BTreeSet<&str> = haystack.split(" is ").skip(1).map(|rest| &rest[..5]).collect();
        assert_eq!(keys.len(), 6, "keys differ");
        let at = haystack.find(&format!("of the {name} is")).expect("there") as f64 / haystack.len() as f64;
        assert!((at - depth).abs() < 0.15, "at {at} of the text for {depth}");
        let other = needle::Task::new(tokenizer, &corpus, Setting { trial: 3, ..setting }).expect("a task");
        assert_ne!(other.key, task.key);
        // All of the text is read in chunks, and no more than the question decoded.
        let steps = tokenizer.decode(&task.prompt.steps).expect("text");
        assert!(steps.contains("It is in the text above") && !steps.contains(&task.key), "{steps}");
    }
    let short = needle::Task::new(
        tokenizer,
        &corpus,
        Setting { length: 100, depth: 0.0, distractors: 5, seed: 7, trial: 0 },
    );
    assert!(matches!(short, Err(Error::TooShort { found: 100, .. })), "{short:?}");
}

fn counts<'a>(words: impl Iterator<Item = &'a str>) -> Vec<(usize, &'a str)> {
    let mut counts = BTreeMap::<&str, usize>::new();
    words.for_each(|word| *counts.entry(word).or_default() += 1);
    let mut counts: Vec<_> = counts.into_iter().map(|(word, count)| (count, word)).collect();
    counts.sort_by(|a, b| b.cmp(a));
    counts
}

/// Answers by reading the prompt as a person would.
fn solve(subtask: Subtask, text: &str) -> Vec<String> {
    match subtask {
        Subtask::VariableTracking => {
            let value = between(text, "assigned the value ", " in the text");
            let mut known: Vec<String> = Vec::new();
            for assignment in text.split("VAR ").skip(1).collect::<Vec<_>>().join("VAR ").split('.') {
                let Some((name, from)) = assignment.split_once(" = ") else { continue };
                let name = &name[name.len() - 5..];
                if from == value || known.iter().any(|known| from.ends_with(known.as_str())) {
                    known.push(name.to_owned());
                }
            }
            known
        }
        Subtask::CommonWords => {
            let list = between(text, "1. ", "\n\n");
            let words = list.split(' ').filter(|word| word.bytes().all(|b| b.is_ascii_lowercase()));
            counts(words).into_iter().take(10).map(|(_, word)| word.to_owned()).collect()
        }
        Subtask::FrequentWords => {
            let coded = text.rsplit_once("\n\n").expect("a question").0;
            let words = coded
                .split_whitespace()
                .filter(|word| word.len() == 6 && word.bytes().all(|b| b.is_ascii_lowercase()));
            counts(words).into_iter().take(3).map(|(_, word)| word.to_owned()).collect()
        }
        _ => {
            let (haystack, question) = text.rsplit_once("special magic number").expect("a question");
            let names = question.trim_start_matches('s');
            let names = between(names, " for ", " mentioned");
            let mut found = Vec::new();
            for name in names.split(", ") {
                let mark = format!("special magic numbers for {name} is: ");
                found.extend(haystack.split(&mark).skip(1).map(|rest| rest[..7].to_owned()));
            }
            found
        }
    }
}

#[test]
fn tasks_say_what_their_answers_are() {
    let (model, corpus) = (model(4096), corpus());
    let tokenizer = model.tokenizer().expect("a tokenizer");
    let source = Source { tokenizer, corpus: &corpus, seed: 11 };
    for subtask in Subtask::ALL {
        for (length, trial) in [(2000, 0), (4000, 1)] {
            let task = source.task(subtask, length, trial).expect("a task");
            assert_eq!(task, source.task(subtask, length, trial).expect("a task"), "{}", subtask.name());
            assert_ne!(task.expected, source.task(subtask, length, trial + 7).expect("a task").expected);
            assert!(
                task.capacity() <= length && task.capacity() + 250 > length,
                "{}: {}",
                subtask.name(),
                task.capacity()
            );
            let text = text(tokenizer, &task.prompt);
            let sorted = |answers: &[String]| answers.iter().cloned().collect::<BTreeSet<_>>();
            assert_eq!(sorted(&solve(subtask, &text)), sorted(&task.expected), "{}: {text}", subtask.name());
            let number = match subtask {
                Subtask::Single | Subtask::MultiKey => 1,
                Subtask::MultiValue | Subtask::MultiQuery => 4,
                Subtask::VariableTracking => 5,
                Subtask::CommonWords => 10,
                Subtask::FrequentWords => 3,
            };
            assert_eq!(task.expected.len(), number);
            assert_eq!(task.score(&task.expected.join(" and ").to_uppercase()), 1.0);
            assert_eq!(task.score(&task.expected[0]), 1.0 / number as f64);
            assert_eq!(task.score("nothing of it"), 0.0);
        }
        let short = source.task(subtask, 200, 0);
        assert!(matches!(short, Err(Error::TooShort { .. })), "{short:?}");
    }
    let poor = Corpus::new("poor", "the one text with few words ".repeat(900));
    let few = Source { corpus: &poor, ..source }.task(Subtask::CommonWords, 2000, 0);
    assert!(matches!(few, Err(Error::FewWords { .. })), "{few:?}");
}

/// The score by force is the product of what every step gives the key; what the model writes is its greedy
/// text.
#[test]
fn trials_run_over_any_scheme() {
    let (model, corpus) = (model(1024), corpus());
    let tokenizer = model.tokenizer().expect("a tokenizer");
    let device = host::Device::cpu(EmuOptions::default());
    let mut runner = Runner::new(&model, &device).expect("a runner");
    let setting = Setting { length: 700, depth: 0.5, distractors: 2, seed: 1, trial: 0 };
    let task = needle::Task::new(tokenizer, &corpus, setting).expect("a task");
    let select = |name: &str| name.parse::<Selection>().expect("a scheme");
    let open = |scheme: &Selection| -> Result<Box<dyn KvCache>, Error> {
        let cache = scheme.open(&device, (&model.config).into(), None, task.capacity());
        cache.map_err(|error| host::model::forward::Error::from(error).into())
    };
    let mut results = Vec::new();
    for scheme in ["dense", "int8-int4"].map(select) {
        let mut work = 0;
        let mut watch = |done| {
            work += done;
            ControlFlow::Continue(())
        };
        let scored =
            needle::run(&mut runner, tokenizer, &task, || open(&scheme), &mut watch).expect("a score");
        assert!(scored.log_probability < 0.0 && !scored.hit, "noise finds no key: {scored:?}");
        // A miss takes a second run.
        assert!(work > task.work() && work < 3 * task.work(), "{work} of {}", task.work());
        results.push(scored.log_probability);
    }
    assert_ne!(results[0], results[1]);
    // All of prompt and key in one call of the pass.
    let all = [&task.prompt.context[..], &task.prompt.steps, &task.answer].concat();
    let mut cache = open(&select("dense")).expect("a cache");
    let logits = runner.logits(&all, &mut *cache).expect("logits");
    let first = all.len() - task.answer.len();
    let expected: f64 = (first..all.len())
        .map(|i| {
            let row = &logits[(i - 1) * model.config.vocab..i * model.config.vocab];
            let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
            host::model::oracle::log_probability(&row, all[i])
        })
        .sum();
    assert!((expected - results[0]).abs() < 1e-3 * expected.abs(), "{expected}, {}", results[0]);

    let source = Source { tokenizer, corpus: &corpus, seed: 1 };
    let task = source.task(Subtask::Single, 700, 0).expect("a task");
    let mut cache =
        select("dense").open(&device, (&model.config).into(), None, task.capacity()).expect("a cache");
    let scored =
        ruler::run(&mut runner, tokenizer, &task, &mut *cache, &mut decoder::unwatched).expect("a score");
    assert_eq!(scored.score, task.score(&scored.text));
    let mut cache =
        select("dense").open(&device, (&model.config).into(), None, task.capacity()).expect("a cache");
    let stopped = ruler::run(&mut runner, tokenizer, &task, &mut *cache, &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(Error::Stopped)));
}
