//! A case as data: the seed of its values, and what shrinking has done to each of them.
//!
//! A value is drawn anew each time, from the case's seed and the value's number, and the steps of its slot
//! are taken again. So a case can be handed to another process, and a value whose strategy depends on values
//! before it follows them when they shrink: of an array that gets shorter, the first elements stay.

use crate::show;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, Reason, RngAlgorithm, TestRng, TestRunner};
use simt::random::mixed;
use std::fmt::Debug;
use std::sync::LazyLock;

/// A step of shrinking, as proptest has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// To a simpler value.
    Simplify,
    /// Back, or to another simpler value.
    Complicate,
}

/// An element of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// Which of the drawn elements it is.
    pub from: u32,
    /// Whether it is as simple as its strategy has it.
    pub simple: bool,
    /// Else the steps it has gone.
    pub steps: Vec<Step>,
}

impl Item {
    pub fn drawn(from: usize) -> Self {
        Item { from: from as u32, simple: false, steps: Vec::new() }
    }
}

/// What shrinking has done to one value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The steps of a value that is no array.
    pub steps: Vec<Step>,
    /// The elements of an array; those behind its end are as they were drawn.
    pub items: Vec<Item>,
}

/// A case: everything that decides its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub seed: u64,
    pub slots: Vec<Slot>,
}

impl Case {
    pub fn new(seed: u64) -> Self {
        Case { seed, slots: Vec::new() }
    }

    /// In one line.
    pub fn encoded(&self) -> String {
        let steps = |steps: &[Step]| -> String {
            steps.iter().map(|step| if *step == Step::Simplify { 's' } else { 'c' }).collect()
        };
        let item = |item: &Item| {
            format!("{}{}{}", item.from, if item.simple { "z" } else { "" }, steps(&item.steps))
        };
        let mut text = format!("{:x}", self.seed);
        for slot in &self.slots {
            let items: Vec<String> = slot.items.iter().map(item).collect();
            text += &format!(" {},{}", steps(&slot.steps), items.join(","));
        }
        text
    }

    /// Reads what [`encoded`](Self::encoded) wrote.
    pub fn decoded(text: &str) -> Option<Case> {
        let steps = |text: &str| -> Option<Vec<Step>> {
            let step = |c| match c {
                's' => Some(Step::Simplify),
                'c' => Some(Step::Complicate),
                _ => None,
            };
            text.chars().map(step).collect()
        };
        let item = |text: &str| {
            let (from, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
            let simple = rest.starts_with('z');
            Some(Item { from: from.parse().ok()?, simple, steps: steps(rest.trim_start_matches('z'))? })
        };
        let mut words = text.trim_end().split(' ');
        let seed = u64::from_str_radix(words.next()?, 16).ok()?;
        let slot = |word: &str| {
            let (own, items) = word.split_once(',')?;
            let items = items.split(',').filter(|text| !text.is_empty()).map(item);
            Some(Slot { steps: steps(own)?, items: items.collect::<Option<_>>()? })
        };
        Some(Case { seed, slots: words.map(slot).collect::<Option<_>>()? })
    }
}

/// What is known of a value once it is drawn.
#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    /// The parameter.
    pub name: &'static str,
    /// The value in short form, if that was asked for.
    pub shown: String,
    /// Of an array, its length.
    pub len: Option<usize>,
    /// Whether the last step that its slot asks for was one.
    pub stepped: bool,
}

/// The values of one case, drawn one after another. `#[simt::test]` makes the calls.
#[derive(Debug)]
pub struct Draws<'c> {
    case: &'c Case,
    drawn: Vec<Drawn>,
    show: bool,
}

impl<'c> Draws<'c> {
    pub(crate) fn new(case: &'c Case, show: bool) -> Self {
        Draws { case, drawn: Vec::new(), show }
    }

    pub(crate) fn into_drawn(self) -> Vec<Drawn> {
        self.drawn
    }

    /// The next value, of the parameter `name`.
    ///
    /// # Errors
    /// What the strategy gives as its reason for having no value.
    pub fn draw<S: Source>(&mut self, name: &'static str, source: S) -> Result<S::Value, Reason> {
        static UNTOUCHED: Slot = Slot { steps: Vec::new(), items: Vec::new() };
        let number = self.drawn.len();
        let slot = self.case.slots.get(number).unwrap_or(&UNTOUCHED);
        let Value { value, len, stepped } = source.value(mixed(self.case.seed, number as u64), slot)?;
        let shown = if self.show { show::value(&value) } else { String::new() };
        self.drawn.push(Drawn { name, shown, len, stepped });
        Ok(value)
    }
}

/// A value and what came of the steps to it.
#[derive(Debug)]
#[doc(hidden)]
pub struct Value<V> {
    value: V,
    len: Option<usize>,
    stepped: bool,
}

/// What a parameter's values come from: a strategy of proptest, or an [`array()`].
pub trait Source {
    /// Its values.
    type Value: Debug + 'static;

    /// The value of a seed, after the steps of a slot.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn value(&self, seed: u64, slot: &Slot) -> Result<Value<Self::Value>, Reason>;
}

impl<S: Strategy> Source for S
where
    S::Value: 'static,
{
    type Value = S::Value;

    #[allow(private_interfaces)]
    fn value(&self, seed: u64, slot: &Slot) -> Result<Value<S::Value>, Reason> {
        let mut tree = self.new_tree(&mut runner(seed))?;
        let stepped = take(&mut tree, &slot.steps);
        Ok(Value { value: tree.current(), len: None, stepped })
    }
}

/// `len` elements, each from `element`. A failing one shrinks by elements that do not matter, to the front,
/// and by the elements that do.
///
/// Where it stands beside a length, `#[draw(sizes(1..=1000))] n: usize, #[draw(array(n, bits()))] x:
/// Vec<f32>`, the two shrink together.
pub fn array<S: Strategy>(len: usize, element: S) -> Array<S> {
    Array { len, element }
}

/// See [`array()`].
#[derive(Clone, Debug)]
pub struct Array<S> {
    len: usize,
    element: S,
}

/// How often a value is made simpler to get at the simplest.
const SIMPLIFICATIONS: usize = 100;

impl<S: Strategy> Source for Array<S>
where
    S::Value: 'static,
{
    type Value = Vec<S::Value>;

    #[allow(private_interfaces)]
    fn value(&self, seed: u64, slot: &Slot) -> Result<Value<Vec<S::Value>>, Reason> {
        let mut stepped = true;
        let element = |at: usize| {
            let item = slot.items.get(at);
            let from = item.map_or(at as u64, |item| u64::from(item.from));
            let mut tree = self.element.new_tree(&mut runner(mixed(seed, from)))?;
            match item {
                Some(Item { simple: true, .. }) => {
                    let _ = (0..SIMPLIFICATIONS).take_while(|_| tree.simplify()).count();
                }
                Some(Item { steps, .. }) => stepped &= take(&mut tree, steps),
                None => {}
            }
            Ok(tree.current())
        };
        let value: Result<Vec<S::Value>, Reason> = (0..self.len).map(element).collect();
        Ok(Value { value: value?, len: Some(self.len), stepped })
    }
}

/// Takes the steps, and says whether the last one was one.
fn take(tree: &mut impl ValueTree, steps: &[Step]) -> bool {
    let step = |_, step: &Step| match step {
        Step::Simplify => tree.simplify(),
        Step::Complicate => tree.complicate(),
    };
    steps.iter().fold(true, step)
}

/// What a strategy draws from.
pub(crate) fn runner(seed: u64) -> TestRunner {
    // The default reads the environment each time.
    static CONFIG: LazyLock<Config> =
        LazyLock::new(|| Config { failure_persistence: None, ..Config::default() });
    // A generator by exclusive or must not start at 0.
    let words = [mixed(seed, 1), mixed(seed, 2) | 1];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    TestRunner::new_with_rng(CONFIG.clone(), TestRng::from_seed(RngAlgorithm::XorShift, &bytes))
}

/// Any number.
pub(crate) fn random(runner: &mut TestRunner) -> u64 {
    // A strategy of numbers without a bound always has one.
    proptest::num::u64::ANY.new_tree(runner).map_or(0, |tree| tree.current())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bits;

    #[test]
    fn a_case_is_one_line_and_back() {
        use Step::{Complicate, Simplify};
        let item = Item { from: 7, simple: false, steps: vec![Simplify, Complicate] };
        let slots = vec![
            Slot::default(),
            Slot { steps: vec![Simplify, Simplify, Complicate], items: vec![] },
            Slot { steps: vec![], items: vec![item, Item { from: 0, simple: true, steps: vec![] }] },
        ];
        let case = Case { seed: 0xfedc_ba98_7654_3210, slots };
        assert_eq!(case.encoded(), "fedcba9876543210 , ssc, ,7sc,0z");
        assert_eq!(Case::decoded(&case.encoded()), Some(case));
        assert_eq!(Case::decoded("0"), Some(Case::new(0)));
        for wrong in ["", "x", "0 s", "0 t,", "0 ,z", "0 ,1q"] {
            assert_eq!(Case::decoded(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_shorter_array_keeps_its_first_elements() {
        let drawn = |len, case: &Case| Draws::new(case, false).draw("x", array(len, bits::<u32>())).unwrap();
        let mut case = Case::new(5);
        let long = drawn(100, &case);
        assert_eq!(drawn(10, &case), long[..10]);
        assert_ne!(drawn(100, &Case::new(6)), long);
        // Other elements in front, one of them simple.
        let (mut first, second) = (Item::drawn(90), Item::drawn(80));
        first.simple = true;
        case.slots.push(Slot { steps: vec![], items: vec![first, second] });
        assert_eq!(drawn(3, &case), [0, long[80], long[2]]);
    }

    #[test]
    fn a_step_that_is_none_is_told() {
        let case = Case { seed: 1, slots: vec![Slot { steps: vec![Step::Simplify; 9], items: vec![] }] };
        let mut draws = Draws::new(&case, true);
        assert_eq!(draws.draw("n", bits::<u8>()).unwrap(), 0);
        let drawn = draws.into_drawn();
        assert!(!drawn[0].stepped && drawn[0].shown == "0" && drawn[0].name == "n");
    }
}
