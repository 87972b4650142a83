//! `drillyard import`: trajectories that another harness recorded.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_interop::{Format, ImportOptions, import, write_problems};
use drillyard_lake::{Writer, WriterOptions};
use drillyard_schema::StageRunId;
use drillyard_schema::table::Timestamp;
use drillyard_stage::exit::{INPUT, NOTHING_TO_DO, OK, OUTPUT, USAGE};
use drillyard_stage::{Failure, Outcome, Stage, visible_line};
use serde_json::json;

use crate::context::{Context, Run, absolute, output};

/// Imports `path`, or what the pipeline names.
pub(crate) async fn run(context: &Context, path: Option<&Utf8Path>) -> Result<u8, Failure> {
    let path = path.unwrap_or(&context.pipeline.import.path);
    if path.as_str().is_empty() {
        return Err(Failure::new(USAGE, "nothing to import").hint(
            "name a file or folder: make import IMPORT=path PIPELINE=pipelines/imported.toml",
        ));
    }
    let path = absolute(path)?;
    let content = content_hash(&path)?;
    let run = context.run(
        &context.pipeline.name,
        &[
            "import",
            path.as_str(),
            &content,
            &context.pipeline.import.format,
        ],
    )?;
    let stage = ImportStage {
        context,
        run: run.clone(),
        path,
        content,
    };
    let record = context.runner.run(&stage, &run.run_id).await?;
    context.set_current(&run)?;
    let mut text = format!(
        "import {}\n",
        if record.skipped {
            "was up to date"
        } else {
            "is done"
        }
    );
    for (name, value) in record.figures.as_object().into_iter().flatten() {
        let _ = writeln!(
            text,
            "  {:<24} {}",
            name.replace('_', " "),
            drillyard_report::inline(value)
        );
    }
    text.push_str("next: make qa train with the same PIPELINE\n");
    context
        .ui
        .text(&text)
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}

/// Hash over the names and contents of what would be imported.
fn content_hash(path: &Utf8Path) -> Result<String, Failure> {
    fn visit(path: &Utf8Path, hasher: &mut blake3::Hasher) -> Result<(), Failure> {
        let failed = |e: std::io::Error| {
            Failure::new(INPUT, format!("{path}: {e}")).hint("name an existing file or folder")
        };
        if path.is_dir() {
            let mut entries = path
                .read_dir_utf8()
                .map_err(failed)?
                .collect::<Result<Vec<_>, _>>()
                .map_err(failed)?;
            entries.sort_by(|a, b| a.path().cmp(b.path()));
            for entry in entries {
                visit(entry.path(), hasher)?;
            }
        } else {
            let content = std::fs::read(path).map_err(failed)?;
            hasher.update(path.as_str().as_bytes());
            hasher.update(&(content.len() as u64).to_le_bytes());
            hasher.update(&content);
        }
        Ok(())
    }
    let mut hasher = blake3::Hasher::new();
    visit(path, &mut hasher)?;
    Ok(hasher.finalize().to_hex()[..32].to_owned())
}

struct ImportStage<'a> {
    context: &'a Context,
    run: Run,
    path: Utf8PathBuf,
    content: String,
}

impl Stage for ImportStage<'_> {
    const NAME: &'static str = "import";
    const VERSION: i32 = 1;

    fn inputs(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            ("path".to_owned(), self.path.to_string()),
            ("content".to_owned(), self.content.clone()),
            (
                "format".to_owned(),
                self.context.pipeline.import.format.clone(),
            ),
        ])
    }

    async fn run(&self, _stage_run: &StageRunId) -> Result<Outcome, Failure> {
        let wanted = &self.context.pipeline.import.format;
        let format = if wanted.is_empty() {
            None
        } else {
            Some(
                wanted
                    .parse::<Format>()
                    .map_err(|e| Failure::new(USAGE, format!("import.format: {e}")))?,
            )
        };
        let options = ImportOptions {
            run_id: self.run.run_id.clone(),
            run_date: self.run.run_date.clone(),
            imported_at: Timestamp(chrono::Utc::now().timestamp_micros()),
            format,
            policy: None,
        };
        let mut imported =
            import(&self.path, options).map_err(|e| Failure::from_error(INPUT, &e))?;
        let unwritten = |e: drillyard_lake::LakeError| Failure::from_error(OUTPUT, &e);
        let journal = self.context.dir("journal")?.join(self.run.run_id.as_str());
        // What an import that was cut off left in its journal is in the lake after this.
        let (writer, recovered) = Writer::start(
            self.context.lake.clone(),
            WriterOptions::new(journal, self.run.run_id.as_str(), "0"),
        )
        .await
        .map_err(unwritten)?;
        let mut known: std::collections::BTreeSet<_> = recovered
            .finished
            .into_iter()
            .map(|b| b.episode.episode_id)
            .collect();
        let snapshot = self.context.lake.snapshot().await.map_err(unwritten)?;
        let filter = drillyard_lake::Filter::run(&self.run.run_id);
        let earlier: Vec<drillyard_schema::table::EpisodeRow> =
            snapshot.read(&filter).await.map_err(unwritten)?;
        known.extend(earlier.into_iter().map(|e| e.episode_id));
        let bar = self.context.ui.bar("import", 0);
        let mut episodes = known.len() as u64;
        while let Some(bundle) = imported.next() {
            if !known.insert(bundle.episode.episode_id.clone()) {
                continue;
            }
            writer.submit(bundle).await.map_err(unwritten)?;
            episodes += 1;
            bar.set_total(episodes);
            bar.set(episodes, format!("{} set aside", imported.problems().len()));
        }
        writer.finish().await.map_err(unwritten)?;
        bar.finish(format!(
            "{episodes} episodes from {} files, {} records set aside",
            imported.files().len(),
            imported.problems().len()
        ));
        for problem in imported.problems().iter().take(20) {
            let record = problem
                .record
                .as_deref()
                .map_or_else(String::new, |r| format!(", record {r}"));
            let problem = format!("set aside: {}{record}: {}", problem.file, problem.reason);
            self.context.ui.warn(visible_line(&problem));
        }
        let list = self
            .context
            .dir("reports")?
            .join(format!("{}-problems.jsonl", self.run.run_id));
        if !imported.problems().is_empty() {
            let file = std::fs::File::create(&list).map_err(|e| output(&list, &e))?;
            write_problems(imported.problems(), file)
                .map_err(|e| Failure::from_error(OUTPUT, &e))?;
            self.context
                .ui
                .note(format!("           every record set aside is in {list}"));
        }
        if episodes == 0 {
            return Err(Failure::new(
                NOTHING_TO_DO,
                format!("{}: no record could be imported", self.path),
            ));
        }
        let figures = json!({ "episodes": episodes, "files": imported.files().len(), "records_set_aside": imported.problems().len() });
        Ok(Outcome {
            read: BTreeMap::new(),
            written: json!({ "episodes": episodes }),
            figures,
        })
    }
}
