//! What a benchmark ran on.

use ferrokv::Generated;
use host::{Device, DeviceInfo};
use serde::Serialize;
use std::time::{SystemTime, UNIX_EPOCH};

/// The machine and the program.
#[derive(Clone, Debug, Serialize)]
pub struct Environment {
    /// The program's version.
    pub version: &'static str,
    /// Its commit, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// When, in UTC.
    pub date: String,
    /// Digits that change with the PTX that ran.
    pub ptx: &'static str,
    /// The code generator that made it.
    pub codegen: &'static str,
    /// The compiler of the PTX.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_compiler: Option<&'static str>,
    /// The processor's name.
    pub cpu: String,
    /// Threads that work in parallel.
    pub threads: usize,
    /// The GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
}

/// What is known of the GPU.
#[derive(Clone, Debug, Serialize)]
pub struct Gpu {
    /// What it is called.
    pub name: String,
    /// The newest CUDA version that its driver serves: 12080 for 12.8.
    pub driver: Option<u32>,
    /// As PTX targets write it.
    pub compute_capability: Option<u32>,
    /// How many.
    pub multiprocessors: u32,
    /// Second-level cache.
    pub l2_bytes: Option<u64>,
    /// Device memory.
    pub memory_bytes: Option<u64>,
    /// By the memory's clock and bus, in 10^9 bytes a second.
    pub datasheet_gb_per_s: Option<f64>,
}

impl From<&DeviceInfo> for Gpu {
    fn from(info: &DeviceInfo) -> Self {
        Gpu {
            name: info.name.clone(),
            driver: info.driver_version,
            compute_capability: info.compute_capability,
            multiprocessors: info.multiprocessors,
            l2_bytes: info.l2_bytes,
            memory_bytes: info.memory_bytes,
            datasheet_gb_per_s: info.memory_bandwidth.map(|bytes| bytes as f64 * 1e-9),
        }
    }
}

impl Environment {
    /// Of this machine, now, with these kernels.
    pub fn here(gpu: Option<&Device>, kernels: Generated, commit: Option<&str>) -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Environment {
            version: env!("CARGO_PKG_VERSION"),
            commit: commit.or(option_env!("FERROKV_COMMIT")).map(str::to_string),
            date: utc(seconds),
            ptx: kernels.fingerprint,
            codegen: kernels.name,
            device_compiler: ferrokv::embedded::DEVICE_COMPILER,
            cpu: cpu_name(),
            threads: rayon::current_num_threads(),
            gpu: gpu.map(|device| Gpu::from(device.info())),
        }
    }

    /// One line for a person.
    pub fn line(&self) -> String {
        let cpu = format!("{} ({} threads)", self.cpu, self.threads);
        match &self.gpu {
            Some(gpu) => format!(
                "{}, {} SMs, {} MiB L2, CUDA {}.{} · {cpu}",
                gpu.name,
                gpu.multiprocessors,
                gpu.l2_bytes.unwrap_or(0) >> 20,
                gpu.driver.unwrap_or(0) / 1000,
                gpu.driver.unwrap_or(0) % 1000 / 10
            ),
            None => cpu,
        }
    }
}

fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// Bytes of memory that new buffers may take, where the system says.
pub fn free_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// `2031-01-02T03:04:05Z` of seconds since 1970.
pub fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86400, seconds % 86400);
    // Years that begin in March end with the leap day; 400 of them are 146097 days.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}
