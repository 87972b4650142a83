//! Keeps many sandboxes alive and prints what one costs: `cargo run -p drillyard-sandbox --example alive [N]`.

use std::io::Write;

use drillyard_sandbox::{Call, Pool, SandboxConfig, Setup};

fn available_kib() -> Result<u64, Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    Ok(line
        .ok_or("no MemAvailable")?
        .trim()
        .trim_end_matches(" kB")
        .parse()?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let n: usize = std::env::args().nth(1).map_or(Ok(256), |n| n.parse())?;
    let pool = Pool::start(SandboxConfig {
        pool_size: 0,
        ..SandboxConfig::default()
    })
    .await?;
    let before = available_kib()?;
    let started = std::time::Instant::now();
    let mut all = Vec::new();
    for _ in 0..n {
        all.push(pool.lease(&Setup::default()).await?);
    }
    let took = started.elapsed();
    let used = before.saturating_sub(available_kib()?);
    writeln!(
        std::io::stdout(),
        "{{\"name\":\"idle_sandbox\",\"mib\":{:.3},\"n\":{n},\"created_per_s\":{:.0}}}",
        used as f64 / 1024.0 / n as f64,
        n as f64 / took.as_secs_f64()
    )?;
    for sandbox in &mut all {
        sandbox.call(Call::shell("true")).await?;
    }
    Ok(())
}
