//! The command line.

use camino::Utf8PathBuf;
use clap::{Parser, Subcommand, ValueEnum};

/// Drill LLM agents in sandboxes, keep every episode, judge with SQL, train offline, measure.
#[derive(Debug, Parser)]
#[command(name = "drillyard", version, max_term_width = 110)]
pub(crate) struct Args {
    /// The pipeline file.
    #[arg(long, global = true, default_value = "pipelines/quickstart.toml")]
    pub pipeline: Utf8PathBuf,
    /// Override one setting of the pipeline, such as train.lr=1e-4 (repeatable).
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Run nothing in sandboxes unless every configured limit holds on this host (as sandbox.require_limits does).
    #[arg(long, global = true)]
    pub require_limits: bool,
    /// Only warnings and errors on standard error.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Print the resolved pipeline and stop.
    #[arg(long, global = true)]
    pub dry_run: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run episodes in sandboxes; they land in the lake.
    Rollout(ShardArgs),
    /// Read recorded trajectories into the lake.
    Import {
        /// A file or folder; the pipeline's import.path when left out.
        path: Option<Utf8PathBuf>,
    },
    /// Judge episodes with the rules under sql/.
    Qa,
    /// Compute rewards, returns, advantages, weights and pairs.
    Credit,
    /// Credit, training, evaluation on held-out tasks, report card.
    Train,
    /// Evaluate base and candidate on held-out tasks.
    Eval,
    /// Print the last report card.
    Report {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Ask the lake: a query, a file, or a shell with history.
    Sql(SqlArgs),
    /// Run an episode's recorded calls again in a fresh sandbox and show where they differ. Ends with 0 if none does, with 13 if one does.
    Replay(ReplayArgs),
    /// New episodes that go on from a step of a recorded one.
    Branch(BranchArgs),
    /// Several nights in a row, each from the champion.
    Nights {
        /// How many.
        #[arg(default_value_t = 3)]
        n: u32,
    },
    /// The negative control: the same training on permuted outcomes.
    Control,
    /// Make the embedded base model again.
    Base,
    /// Show which sandbox limits hold on this host, and how.
    Limits,
    /// Root file systems for sandboxes: list, import, build, verify, remove.
    Image {
        /// What to do.
        #[command(subcommand)]
        command: ImageCommand,
    },
    /// Figures as JSON lines, each beside its baseline.
    Bench,
}

/// What is done with images.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// The images in the yard.
    List,
    /// Bring in a directory, a tar, or what `docker save`, `docker export` or an OCI tool wrote.
    Import {
        /// The directory or archive.
        path: Utf8PathBuf,
        /// What to call it; the file's name by default.
        #[arg(long)]
        name: Option<String>,
    },
    /// Build one from a recipe (crates/sandbox/README.md tells its keys).
    Build {
        /// The recipe, a TOML file.
        recipe: Utf8PathBuf,
    },
    /// Check that an image's files still are what its digest says.
    Verify {
        /// Its name or the beginning of its digest.
        image: String,
    },
    /// Remove an image.
    Remove {
        /// Its name or the beginning of its digest.
        image: String,
    },
}

/// Which part of the work list to do.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct ShardArgs {
    /// This shard's share of the work, as k/n with k from 0. Array jobs set it by themselves (JOB_COMPLETION_INDEX, SLURM_ARRAY_TASK_ID).
    #[arg(long, value_parser = parse_shard, value_name = "K/N")]
    pub shard: Option<(u32, u32)>,
}

fn parse_shard(text: &str) -> Result<(u32, u32), String> {
    let (k, n) = text.split_once('/').ok_or("expected K/N, such as 0/4")?;
    let k = k.parse::<u32>().map_err(|e| e.to_string())?;
    let n = n.parse::<u32>().map_err(|e| e.to_string())?;
    if k >= n {
        return Err(format!("shard {k} of {n}: K must be below N"));
    }
    Ok((k, n))
}

/// What `drillyard replay` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    /// The episode's id, or the beginning of it.
    pub episode: String,
    /// The last step whose calls are run.
    #[arg(long, value_name = "STEP")]
    pub until: Option<u32>,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
}

/// What `drillyard branch` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct BranchArgs {
    /// The episode's id, or the beginning of it.
    pub episode: String,
    /// The step at which it is left: the first one that is taken anew.
    #[arg(long, value_name = "STEP")]
    pub at: u32,
    /// How many new episodes.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub n: u32,
}

/// What `drillyard sql` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct SqlArgs {
    /// The query; a shell starts when neither this nor --file is given.
    pub query: Option<String>,
    /// Read the query from a file.
    #[arg(long, short)]
    pub file: Option<Utf8PathBuf>,
    /// How rows are printed.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
    /// Write to a file instead of standard output.
    #[arg(long, short)]
    pub output: Option<Utf8PathBuf>,
    /// Rows shown in a table at most; 0 means all.
    #[arg(long, default_value_t = 100)]
    pub limit: usize,
}

/// How rows are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// Comma-separated, with a header.
    Csv,
    /// One JSON object a line.
    Json,
    /// A Parquet file (needs --output).
    Parquet,
}
