//! Opening tables and appending rows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use deltalake::{DeltaTable, DeltaTableError};
use drillyard_schema::table::to_batch;
use drillyard_schema::{Row, Table};
use futures::TryStreamExt;
use tokio::sync::Mutex;

use crate::delta::{Place, is_conflict, last_txn};
use crate::error::LakeError;
use crate::faults::crash_point;
use crate::files::{NewFile, sorted};
use crate::snapshot::Snapshot;

/// How often an append starts over when others change the table itself meanwhile.
const ATTEMPTS: u32 = 20;

/// A transaction number of an application: an append whose number is not above the last committed one is skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Txn {
    /// Who appends, such as a run's shard.
    pub app: String,
    /// Rises with each append.
    pub version: i64,
}

/// The tables under one folder. Clones share their state.
#[derive(Clone)]
pub struct Lake {
    inner: Arc<Inner>,
}

struct Inner {
    root: Utf8PathBuf,
    /// Loaded tables; within this process, appends to the same table wait for each other.
    tables: BTreeMap<Table, Mutex<Option<DeltaTable>>>,
}

impl std::fmt::Debug for Lake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lake")
            .field("root", &self.inner.root)
            .finish_non_exhaustive()
    }
}

impl Lake {
    /// Opens the lake in `root`, which is made where it is missing; tables are made at their first append.
    ///
    /// # Errors
    /// A folder that can't be made or is not one.
    pub async fn open(root: &Utf8Path) -> Result<Self, LakeError> {
        fs_err::tokio::create_dir_all(root)
            .await
            .map_err(|e| LakeError::writing(root, e))?;
        let root = root
            .canonicalize_utf8()
            .map_err(|e| LakeError::reading(root, e))?;
        let tables = Table::ALL
            .iter()
            .map(|table| (*table, Mutex::new(None)))
            .collect();
        Ok(Self {
            inner: Arc::new(Inner { root, tables }),
        })
    }

    /// The lake's folder, from the root.
    pub fn root(&self) -> &Utf8Path {
        &self.inner.root
    }

    /// Appends rows in one commit, sorted, and returns the table's new version. None where there is nothing to do: no rows, or the
    /// transaction is in already. Rows are on disk when this returns; after an error none of them is visible.
    ///
    /// # Errors
    /// Rows that don't fit, a full disk, a table that can't be written or is of a newer Drillyard.
    pub async fn append<R: Row>(
        &self,
        rows: &[R],
        txn: Option<Txn>,
    ) -> Result<Option<i64>, LakeError> {
        if rows.is_empty() {
            return Ok(None);
        }
        let place = Place::new(self.root(), R::TABLE);
        let batch = sorted(R::TABLE, &to_batch(rows)?)?;
        let mut slot = self.slot(R::TABLE).lock().await;
        let mut files: Option<Vec<NewFile>> = None;
        let mut attempt = 0;
        let version = loop {
            attempt += 1;
            let delta = match current(&place, &mut slot).await? {
                Some(delta) => delta,
                None => slot.insert(place.create().await?),
            };
            if let Some(txn) = &txn
                && last_txn(delta, &txn.app)
                    .await
                    .map_err(|e| place.error(&e))?
                    .is_some_and(|last| last >= txn.version)
            {
                let files = files.unwrap_or_default();
                // Perhaps by ourselves, in an attempt that seemed to fail.
                if let Some(version) = landed(&place, &files).await? {
                    break version;
                }
                place.discard(&files);
                // Whoever committed it may have been killed before it was on disk.
                place.sync_whole_log().await?;
                return Ok(None);
            }
            let committed = match place.widen(delta).await {
                // The next attempt sees the wider table.
                Ok(true) => continue,
                Ok(false) => {
                    let files = match &files {
                        Some(files) => files,
                        None => files.insert(place.write_files(delta, &batch).await?),
                    };
                    crash_point("mid_append");
                    place.commit_files(delta, files, txn.as_ref()).await
                }
                Err(error) => Err(error),
            };
            match committed {
                Ok(version) => break version,
                Err(error) if is_conflict(&error) && attempt < ATTEMPTS => {
                    tokio::time::sleep(Duration::from_millis(10 * u64::from(attempt))).await;
                }
                Err(error) => {
                    *slot = None;
                    let files = files.unwrap_or_default();
                    // An error after the commit landed is none.
                    if let Some(version) = landed(&place, &files).await? {
                        break version;
                    }
                    place.discard(&files);
                    return Err(place.error(&error));
                }
            }
        };
        place.sync_log(version).await?;
        Ok(Some(version))
    }

    /// The last committed transaction number of `app` in a table.
    ///
    /// # Errors
    /// A table that can't be read.
    pub async fn last_txn(&self, table: Table, app: &str) -> Result<Option<i64>, LakeError> {
        let place = Place::new(self.root(), table);
        let mut slot = self.slot(table).lock().await;
        match current(&place, &mut slot).await? {
            Some(delta) => last_txn(delta, app).await.map_err(|e| place.error(&e)),
            None => Ok(None),
        }
    }

    /// The latest version of every table. Whatever `runs` and `episodes` list, the other tables hold the rows of.
    ///
    /// # Errors
    /// A table that can't be read or is of a newer Drillyard.
    pub async fn snapshot(&self) -> Result<Snapshot, LakeError> {
        // Writers commit these two last, so they are read first.
        let first = [Table::Runs, Table::Episodes];
        let others = Table::ALL
            .iter()
            .copied()
            .filter(|table| !first.contains(table));
        let mut tables = Vec::new();
        for table in first.into_iter().chain(others) {
            let place = Place::new(self.root(), table);
            let mut slot = self.slot(table).lock().await;
            if let Some(delta) = current(&place, &mut slot).await? {
                tables.push((place, delta.clone()));
            }
        }
        Snapshot::of(self.root(), tables).await
    }

    /// The tables named at the versions named; the others are absent.
    ///
    /// # Errors
    /// An unknown table, or a version that is not there.
    pub async fn snapshot_at(
        &self,
        versions: &BTreeMap<String, i64>,
    ) -> Result<Snapshot, LakeError> {
        let mut tables = Vec::new();
        for (name, version) in versions {
            let gone = |message: &str| LakeError::NoVersion {
                table: name.clone(),
                version: *version,
                path: self.root().to_owned(),
                message: message.to_owned(),
            };
            let table = Table::ALL
                .iter()
                .copied()
                .find(|table| table.name() == name);
            let place = Place::new(
                self.root(),
                table.ok_or_else(|| gone("no table is called so"))?,
            );
            let delta = place
                .load(Some(*version))
                .await?
                .ok_or_else(|| gone("the table does not exist"))?;
            tables.push((place, delta));
        }
        Snapshot::of(self.root(), tables).await
    }

    fn slot(&self, table: Table) -> &Mutex<Option<DeltaTable>> {
        // Every table has a slot from the start.
        &self.inner.tables[&table]
    }
}

/// The table at its latest version, or None where it does not exist.
async fn current<'a>(
    place: &Place,
    slot: &'a mut Option<DeltaTable>,
) -> Result<Option<&'a mut DeltaTable>, LakeError> {
    let updated = match slot.as_mut() {
        // The library does not notice that a table was removed.
        Some(delta) => place.exists() && delta.update_state().await.is_ok(),
        None => false,
    };
    if !updated {
        *slot = place.load(None).await?;
    }
    if let Some(delta) = slot.as_ref() {
        place.check_version(delta)?;
    }
    Ok(slot.as_mut())
}

/// The version that lists these files, if one does.
async fn landed(place: &Place, files: &[NewFile]) -> Result<Option<i64>, LakeError> {
    let Some(first) = files.first() else {
        return Ok(None);
    };
    let Some(delta) = place.load(None).await? else {
        return Ok(None);
    };
    let failed = |e: DeltaTableError| place.error(&e);
    let state = delta.snapshot().map_err(failed)?;
    let files: Vec<_> = state
        .snapshot()
        .file_views(delta.log_store().as_ref(), None)
        .try_collect()
        .await
        .map_err(failed)?;
    let listed = files
        .iter()
        .any(|file| file.object_store_path().as_ref() == first.path || file.path() == first.path);
    Ok(listed.then(|| i64::try_from(state.version()).unwrap_or(i64::MAX)))
}
