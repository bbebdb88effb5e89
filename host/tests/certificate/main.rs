//! The theorem of docs/certificate.md, against f64: in exact arithmetic over adversarial weights and values,
//! end to end with quantized keys and values, the rounding analysis against a model of the tensor core's
//! sums, and what the kernels evaluate of it in f32.

mod carried;
mod exact;
mod judge;
mod likely;
mod quantized;
mod rounding;
mod teeth;

use simt::random::SplitMix64;

/// Numbers from a seed.
struct Random(SplitMix64);

impl Random {
    fn new(seed: u64) -> Self {
        Random(SplitMix64(seed))
    }
    fn bits(&mut self) -> u64 {
        self.0.word()
    }
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * 2f64.powi(-53)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
    fn row(&mut self, dim: usize, size: f64) -> Vec<f64> {
        (0..dim).map(|_| size * self.normal()).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

fn minus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

fn mean(weights: &[f64], values: &[Vec<f64>]) -> Vec<f64> {
    let total: f64 = weights.iter().sum();
    (0..values[0].len())
        .map(|c| weights.iter().zip(values).map(|(w, v)| w * v[c]).sum::<f64>() / total)
        .collect()
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// What the certificate knows of a block.
#[derive(Clone)]
struct Block {
    tail: bool,
    rho: f64,
    delta: f64,
    nu: f64,
    eta: f64,
}

fn tv_max(alpha: f64, x: f64) -> f64 {
    if x == 0.0 {
        return 0.0;
    }
    let (c, k) = (1.0 - alpha * (1.0 - (-x).exp()), x.exp() - (-x).exp());
    let u = alpha.min(((c * x.exp()).sqrt() - c) / k);
    u * (x.exp() / (c + k * u) - 1.0)
}

/// (1a), (1b), (1c), (1d) and E_val, for an output of this norm.
fn certificate(blocks: &[Block], output: f64) -> ([f64; 4], f64) {
    let sum = |f: &dyn Fn(&Block) -> f64| blocks.iter().map(f).sum::<f64>();
    let largest =
        |f: &dyn Fn(&Block) -> bool| blocks.iter().filter(|b| f(b)).map(|b| b.delta).fold(0.0, f64::max);
    let nu = blocks.iter().map(|b| b.nu).fold(0.0, f64::max);
    let e_val = sum(&|b| b.rho * b.eta);
    let a1 = sum(&|b| b.rho * b.delta.exp_m1());
    let a2 = sum(&|b| b.rho * b.delta.exp_m1() * b.nu);
    let a3 = sum(&|b| -b.rho * (-b.delta).exp_m1());
    let over = |x: f64| if a3 < 1.0 { x / (1.0 - a3) } else { f64::INFINITY };
    let identity = over(a1 * (output + e_val) + a2);
    let alpha = sum(&|b| if b.tail { b.rho } else { 0.0 });
    let all = 2.0 * nu * (largest(&|_| true) / 2.0).tanh();
    let tail = tv_max(alpha, largest(&|b| b.tail)) + (largest(&|b| !b.tail) / 2.0).tanh();
    let [by_quantized, growth, spread] = parts_of_1d(blocks, output);
    let split = over(by_quantized + growth * spread);
    ([identity, all, 2.0 * nu * tail, split], e_val)
}

/// A1 R + A2 over T, G, and S.
fn parts_of_1d(blocks: &[Block], output: f64) -> [f64; 3] {
    let sum = |f: &dyn Fn(&Block) -> f64| blocks.iter().map(f).sum::<f64>();
    let e_val = sum(&|b| b.rho * b.eta);
    let by_quantized =
        sum(&|b| if b.tail { b.rho * b.delta.exp_m1() * (output + e_val + b.nu) } else { 0.0 });
    let growth = sum(&|b| if b.tail { 0.0 } else { b.rho * b.delta.exp_m1().powi(2) }).sqrt();
    let least = (output - e_val).max(0.0);
    let spread = (sum(&|b| b.rho * b.nu * b.nu) - least * least).max(0.0).sqrt();
    [by_quantized, growth, spread]
}

fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

/// The nearest f16, ties to even.
fn f16(x: f64) -> f64 {
    if x == 0.0 {
        return x;
    }
    let step = 2f64.powi(exponent(x).max(-14) - 10);
    (x / step).round_ties_even() * step
}

fn f16_up(x: f64) -> f64 {
    let near = f16(x);
    if near >= x { near } else { near + 2f64.powi(exponent(x).max(-14) - 10) }
}

impl Random {
    /// Between two numbers, their logarithms evenly.
    fn within(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.unit())
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.bits().is_multiple_of(n)
    }
}
