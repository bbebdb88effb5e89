//! How long launches take.

/// How long the launches of a kernel took on a GPU, one after another.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTimes {
    /// The kernel's entry.
    pub kernel: &'static str,
    /// Microseconds of each launch, in the order in which they were put into their stream.
    pub microseconds: Vec<f32>,
}

/// Brings the launches of each kernel together; kernels stay in the order of their first launches.
#[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
pub(crate) fn by_kernel(launches: impl IntoIterator<Item = (&'static str, f32)>) -> Vec<KernelTimes> {
    let mut kernels: Vec<KernelTimes> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for (kernel, microseconds) in launches {
        let place = *places.entry(kernel).or_insert_with(|| {
            kernels.push(KernelTimes { kernel, microseconds: Vec::new() });
            kernels.len() - 1
        });
        kernels[place].microseconds.push(microseconds);
    }
    kernels
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use super::{KernelTimes, by_kernel};

    #[test]
    fn launches_of_a_kernel_come_together_in_their_order() {
        let times = by_kernel([("b", 3.0), ("a", 1.0), ("b", 2.0), ("b", 5.0)]);
        let expected = [("b", vec![3.0, 2.0, 5.0]), ("a", vec![1.0])];
        assert_eq!(times, expected.map(|(kernel, microseconds)| KernelTimes { kernel, microseconds }));
        assert_eq!(by_kernel([]), []);
    }
}
