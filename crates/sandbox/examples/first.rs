//! A pool, a sandbox, a call, and what it did: `make helpers && cargo run -p drillyard-sandbox --example first`.

use std::io::Write;

use drillyard_sandbox::{Call, Pool, SandboxConfig, Setup};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout();
    let pool = Pool::start(SandboxConfig::default()).await?;
    writeln!(out, "{}", pool.limits())?;

    let setup = Setup::new([("in.csv", &b"name,count\nape,3\nbee,5\n"[..])]);
    let mut sandbox = pool.lease(&setup).await?;
    let call = Call::shell(
        "cut -d, -f2 in.csv | tail -n +2 | paste -sd+ | tee sum.txt; rm -rf /usr 2>/dev/null; id",
    );
    let result = sandbox.call(call).await?;
    write!(out, "{}", String::from_utf8_lossy(&result.stdout))?;
    writeln!(out, "{} in {:?}", result.why(), result.wall)?;
    for file in &result.files_changed {
        writeln!(out, "{:?} {}", file.change, file.path)?;
    }

    let snapshot = sandbox.snapshot().await?;
    let mut branch = pool.branch(&snapshot).await?;
    let result = branch.call(Call::shell("cat sum.txt")).await?;
    write!(
        out,
        "in a branch: {}",
        String::from_utf8_lossy(&result.stdout)
    )?;
    branch.close().await;
    sandbox.close().await;
    Ok(())
}
