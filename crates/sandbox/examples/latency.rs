//! Prints how long sandboxes and calls take on this machine:
//! `cargo run -p drillyard-sandbox --example latency [N] [without-groups]`.
//!
//! On a busy machine each wake-up waits for a scheduler tick; `chrt -f 50` shows the figures without it (real-time
//! processes cannot join version 1 cpu groups, hence `without-groups`).

use std::io::Write;
use std::time::{Duration, Instant};

use drillyard_sandbox::{Call, Pool, SandboxConfig, Setup};

fn line(out: &mut impl Write, name: &str, mut times: Vec<Duration>) -> std::io::Result<()> {
    times.sort();
    let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize].as_secs_f64() * 1e3;
    writeln!(
        out,
        "{{\"name\":\"{name}\",\"p50_ms\":{:.3},\"p99_ms\":{:.3},\"n\":{}}}",
        at(0.5),
        at(0.99),
        times.len()
    )
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let n: usize = std::env::args().nth(1).map_or(Ok(200), |n| n.parse())?;
    let control_groups = std::env::args().nth(2).as_deref() != Some("without-groups");
    let mut out = std::io::stdout().lock();
    let setup = Setup::new([("in.csv", &b"a,b\n1,2\n"[..])]);

    // Without a pool every lease makes a sandbox.
    let cold = Pool::start(SandboxConfig {
        pool_size: 0,
        control_groups,
        ..SandboxConfig::default()
    })
    .await?;
    write!(out, "{}", cold.limits())?;
    let (mut create, mut close) = (Vec::new(), Vec::new());
    for _ in 0..n {
        let started = Instant::now();
        let sandbox = cold.lease(&setup).await?;
        create.push(started.elapsed());
        let started = Instant::now();
        sandbox.close().await;
        close.push(started.elapsed());
    }
    line(&mut out, "sandbox_create", create)?;
    line(&mut out, "sandbox_close", close)?;
    drop(cold);

    let pool = Pool::start(SandboxConfig {
        control_groups,
        ..SandboxConfig::default()
    })
    .await?;
    let mut lease = Vec::new();
    for _ in 0..n {
        while pool.ready() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let started = Instant::now();
        let sandbox = pool.lease(&setup).await?;
        lease.push(started.elapsed());
        sandbox.close().await;
    }
    line(&mut out, "sandbox_lease", lease)?;

    let mut sandbox = pool.lease(&setup).await?;
    let shell = |command: &str| Call::shell(command);
    let exec = Call::Exec {
        argv: vec!["/bin/true".into()],
        stdin: Vec::new(),
        timeout: None,
    };
    for (name, call) in [
        ("tool_call_true", exec),
        ("tool_call_shell", shell(":")),
        ("tool_call_head", shell("head -n 2 in.csv")),
        (
            "tool_call_read_file",
            Call::ReadFile {
                path: "in.csv".into(),
                max_bytes: 1000,
            },
        ),
    ] {
        let mut times = Vec::new();
        for _ in 0..n {
            let started = Instant::now();
            sandbox.call(call.clone()).await?;
            times.push(started.elapsed());
        }
        line(&mut out, name, times)?;
    }
    let mut reset = Vec::new();
    for _ in 0..n.min(100) {
        sandbox
            .call(shell("for i in {1..100}; do echo $i > f$i; done"))
            .await?;
        let started = Instant::now();
        sandbox.reset().await?;
        reset.push(started.elapsed());
    }
    line(&mut out, "reset_100_files", reset)?;
    sandbox.close().await;
    Ok(())
}
