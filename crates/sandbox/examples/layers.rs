//! Prints where a layer begins to pay, and what a reset costs by each way:
//! `cargo run -p drillyard-sandbox --example layers CACHE_DIR [N] [without-groups]` (see `latency` for the last).

use std::io::Write;
use std::time::{Duration, Instant};

use camino::Utf8PathBuf;
use drillyard_sandbox::{Call, Image, ImageStore, Pool, Recipe, SandboxConfig, Setup};

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}

async fn lease(pool: &Pool, setup: &Setup, n: usize) -> Result<f64, Box<dyn std::error::Error>> {
    pool.lease(setup).await?.close().await;
    let mut times = Vec::new();
    for _ in 0..n {
        while pool.ready() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let started = Instant::now();
        let sandbox = pool.lease(setup).await?;
        times.push(started.elapsed());
        sandbox.close().await;
    }
    Ok(median(times))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let cache_dir = args.next().ok_or("which directory for the cache?")?;
    let n = args.next().map_or(Ok(40), |n| n.parse())?;
    let config = SandboxConfig {
        control_groups: args.next().as_deref() != Some("without-groups"),
        ..SandboxConfig::default()
    };
    let mut out = std::io::stdout().lock();
    let plain = Pool::start(config.clone()).await?;
    let layered = Pool::start(SandboxConfig {
        cache_dir: Some(cache_dir.clone().into()),
        ..config.clone()
    })
    .await?;
    writeln!(out, "files  KiB each  unpacked ms  layer ms")?;
    for (files, size) in [
        (1, 1),
        (10, 1),
        (50, 1),
        (100, 1),
        (200, 1),
        (1000, 1),
        (1, 1 << 10),
        (1, 2 << 10),
        (1, 4 << 10),
        (1, 16 << 10),
    ] {
        let setup =
            Setup::new((0..files).map(|f| (format!("d{}/f{f}", f % 7), vec![f as u8; size << 10])));
        let unpacked = lease(&plain, &setup, n).await?;
        // A command makes it a layer whatever its size.
        let on_layer = lease(&layered, &setup.then([":"]), n).await?;
        writeln!(out, "{files:5}  {size:8}  {unpacked:11.2}  {on_layer:8.2}")?;
    }
    let mut saves = (Vec::new(), Vec::new(), Vec::new());
    let setup = Setup::default().then([":"]);
    let mut sandbox = layered.lease(&setup).await?;
    for k in 0..n {
        sandbox
            .call(Call::shell(format!(
                "for i in {{1..100}}; do echo {k} > f$i; done"
            )))
            .await?;
        let started = Instant::now();
        let saved = sandbox.save().await?;
        saves.0.push(started.elapsed());
        let started = Instant::now();
        sandbox.restore_saved(&saved).await?;
        saves.1.push(started.elapsed());
        sandbox
            .call(Call::shell("for i in {1..100}; do echo x > f$i; done"))
            .await?;
        let started = Instant::now();
        sandbox.reset().await?;
        saves.2.push(started.elapsed());
        sandbox.close().await;
        sandbox = layered.lease(&setup).await?;
    }
    writeln!(
        out,
        "100 files: save {:.2} ms, restore {:.2} ms, reset to it {:.2} ms",
        median(saves.0),
        median(saves.1),
        median(saves.2)
    )?;
    sandbox.close().await;

    // A sandbox made for the occasion, on either kind of image.
    let dir = Utf8PathBuf::from(&cache_dir);
    let recipe = "name = \"slice\"\nfrom = \"host-slice\"\npackages = [\"bash\", \"cat\"]";
    let image = ImageStore::open(dir)?
        .build(&Recipe::parse(recipe)?, &config, &mut |_| {})
        .await?;
    for (name, image) in [("host", Image::Host), ("rootfs", image.image())] {
        let pool = Pool::start(SandboxConfig {
            image,
            pool_size: 0,
            ..config.clone()
        })
        .await?;
        let mut times = Vec::new();
        for _ in 0..2 * n {
            let started = Instant::now();
            let sandbox = pool.lease(&Setup::default()).await?;
            times.push(started.elapsed());
            sandbox.close().await;
        }
        writeln!(out, "create, image {name}: {:.2} ms", median(times))?;
    }
    Ok(())
}
