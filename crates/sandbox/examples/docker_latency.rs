//! Prints what calls cost in a container, beside the engine's own `exec`:
//! `cargo run -p drillyard-sandbox --example docker_latency [N]`. The engine is that of DOCKER_HOST, or a usual one.

use std::io::Write;
use std::time::{Duration, Instant};

use bollard::Docker;
use bollard::exec::{CreateExecOptions, StartExecResults};
use drillyard_sandbox::{Call, Pool, SandboxConfig, Setup};
use futures::StreamExt;

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
    let mut out = std::io::stdout().lock();
    let started = Instant::now();
    let pool = Pool::start(SandboxConfig {
        backend: "docker".into(),
        pool_size: 2,
        ..SandboxConfig::default()
    })
    .await?;
    writeln!(
        out,
        "{}pool started in {:?}",
        pool.limits(),
        started.elapsed()
    )?;
    let setup = Setup::new([("in.csv", &b"a,b\n1,2\n"[..])]);

    let (mut lease, mut close) = (Vec::new(), Vec::new());
    for _ in 0..n.min(20) {
        while pool.ready() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let started = Instant::now();
        let sandbox = pool.lease(&setup).await?;
        lease.push(started.elapsed());
        let started = Instant::now();
        sandbox.close().await;
        close.push(started.elapsed());
    }
    line(&mut out, "docker_lease", lease)?;
    line(&mut out, "docker_close", close)?;
    while pool.ready() < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut sandbox = pool.lease(&setup).await?;
    while pool.ready() < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let exec = Call::Exec {
        argv: vec!["/bin/true".into()],
        stdin: Vec::new(),
        timeout: None,
    };
    let read = Call::ReadFile {
        path: "in.csv".into(),
        max_bytes: 1000,
    };
    for (name, call) in [
        ("docker_call_true", exec),
        ("docker_call_shell", Call::shell(":")),
        ("docker_call_read_file", read),
    ] {
        let mut times = Vec::new();
        for _ in 0..n {
            let started = Instant::now();
            sandbox.call(call.clone()).await?;
            times.push(started.elapsed());
        }
        line(&mut out, name, times)?;
    }

    // What the same would cost by the engine's own means, in the same container.
    let api = Docker::connect_with_defaults()?.negotiate_version().await?;
    let own = format!("drillyard-{}-", std::process::id());
    let all = api
        .list_containers(None::<bollard::query_parameters::ListContainersOptions>)
        .await?;
    let id = all
        .into_iter()
        .find(|c| c.names.iter().flatten().any(|name| name.contains(&own)))
        .and_then(|c| c.id)
        .ok_or("the container is not listed")?;
    let mut times = Vec::new();
    for _ in 0..n.min(50) {
        let started = Instant::now();
        let options = CreateExecOptions {
            cmd: Some(vec!["/bin/true"]),
            attach_stdout: Some(true),
            ..CreateExecOptions::default()
        };
        let exec = api.create_exec(&id, options).await?;
        if let StartExecResults::Attached { mut output, .. } =
            api.start_exec(&exec.id, None).await?
        {
            while output.next().await.is_some() {}
        }
        api.inspect_exec(&exec.id).await?;
        times.push(started.elapsed());
    }
    line(&mut out, "docker_exec_true", times)?;
    sandbox.close().await;
    Ok(())
}
