//! How long kernels take, by generator: the table of `--time`.

use crate::cli::table::{Align, Table};
use crate::cli::text;
use host::Device;
use host::check::{self, Case, LOSS, ROUNDS, Report, Times, TimesError};
use indicatif::ProgressBar;

/// Times the cases that went well in every report, whose cases these are in their order.
pub(super) fn measure(
    cases: &[Case],
    reports: &[&Report],
    devices: &[(&str, &Device)],
    bar: &ProgressBar,
) -> Result<Times, TimesError> {
    let is_good = |at: usize| {
        let mut found = reports.iter().map(|report| report.cases.get(at));
        found.all(|case| case.is_some_and(|case| case.outcome.is_good()))
    };
    let good = cases.iter().enumerate().filter(|(at, _)| is_good(*at)).map(|(_, case)| case);
    check::time_cases(good, devices, |case| {
        bar.set_message(format!("timing {} {}", case.kernels().first().unwrap_or(&""), case.label()));
        bar.inc(1);
    })
}

/// The table, and below it the geometric mean.
pub(super) fn table(times: &Times) -> String {
    let names: Vec<&str> = times.generators.iter().map(String::as_str).collect();
    let of_each: Vec<String> = names.iter().map(|name| format!("µs {name}")).collect();
    let compared = match names[..] {
        [first, second] => Some((first, second, format!("{second}/{first}"))),
        _ => None,
    };
    let mut columns = vec![("kernel", Align::Left), ("launches", Align::Right)];
    columns.extend(of_each.iter().map(|name| (&**name, Align::Right)));
    columns.extend(compared.iter().map(|(_, _, ratio)| (&**ratio, Align::Right)));
    let mut table = Table::new(&columns);
    for kernel in &times.kernels {
        let mut row = vec![kernel.kernel.clone(), text::count(kernel.launches)];
        row.extend(kernel.microseconds.iter().map(|sum| format!("{sum:.1}")));
        row.extend(compared.iter().map(|_| kernel.ratio.map_or("-".into(), |ratio| format!("{ratio:.3}"))));
        table.row(row);
    }
    let mut out = format!(
        "time on the GPU, of each launch the fastest of {ROUNDS} runs; some 2 µs of each are the launching\n\n"
    );
    out += &table.render();
    if let (Some((first, second, _)), Some(ratio)) = (&compared, times.ratio) {
        out += &format!(
            "\n{second}'s time over {first}'s: {ratio:.4} in the geometric mean of {}; {} by more than {:.0} %\n",
            text::plural(times.kernels.iter().filter(|kernel| kernel.ratio.is_some()).count(), "kernel"),
            match times.losers.len() {
                1 => "1 loses".into(),
                losers => format!("{} lose", text::count(losers as u64)),
            },
            100.0 * LOSS,
        );
    }
    if times.unpaired != 0 {
        let count = text::count(times.unpaired);
        out += &format!("\nlaunches left out, as not every run of their case had them: {count}\n");
    }
    if !times.untimed.is_empty() {
        let kernels = times.untimed.join(", ");
        out += &format!("\nno launch timed (those in captured graphs are not) of: {kernels}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::check::TimedKernel;

    fn times(generators: &[&str], ratio: Option<f64>) -> Times {
        let kernel = TimedKernel {
            kernel: "int8_rows".into(),
            launches: 1234,
            microseconds: vec![10.04, 12.5][..generators.len()].to_vec(),
            ratio,
        };
        Times {
            generators: generators.iter().map(|&name| name.to_owned()).collect(),
            kernels: vec![kernel],
            ratio,
            losers: ratio.iter().map(|_| "int8_rows".to_owned()).collect(),
            unpaired: 0,
            untimed: Vec::new(),
        }
    }

    #[test]
    fn two_generators_are_compared() {
        let text = table(&times(&["llvm", "nvvm"], Some(1.25)));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[2..],
            [
                "  kernel     launches  µs llvm  µs nvvm  nvvm/llvm",
                "  int8_rows     1,234     10.0     12.5      1.250",
                "",
                "nvvm's time over llvm's: 1.2500 in the geometric mean of 1 kernel; 1 loses by more than 3 %",
            ]
        );
    }

    #[test]
    fn one_is_not_and_what_is_left_out_is_said() {
        let text = table(&Times { unpaired: 2, untimed: vec!["k".into()], ..times(&["llvm"], None) });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2..4], ["  kernel     launches  µs llvm", "  int8_rows     1,234     10.0"]);
        assert!(text.contains("had them: 2\n"), "{text}");
        assert!(text.ends_with("are not) of: k\n"), "{text}");
    }
}
