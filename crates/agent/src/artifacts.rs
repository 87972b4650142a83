//! Files that belong to episodes and are too large for a row, kept by content beside the lake.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::table::Artifact;

use crate::error::AgentError;

/// Where a content lies in the folder `dir`.
pub(crate) fn place(dir: &Utf8Path, hash: &str) -> Utf8PathBuf {
    let folder = hash.get(..2).unwrap_or(hash);
    dir.join(folder).join(hash)
}

/// What a crash of the machine may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lasting {
    /// Nothing: on the disk before it is told of.
    Synced,
    /// The file, which can be made again by other means.
    Soon,
}

/// Keeps `content` under `dir` and says where. Equal contents share one file, so writing one twice does nothing.
pub(crate) fn keep(
    dir: &Utf8Path,
    name: &str,
    content: &[u8],
    lasting: Lasting,
) -> Result<Artifact, AgentError> {
    let hash = blake3::hash(content).to_hex().to_string();
    let path = place(dir, &hash);
    let size = content.len() as u64;
    // A file of another size was cut short by whoever wrote it.
    let is_there = fs_err::metadata(&path).is_ok_and(|file| file.len() == size);
    if !is_there {
        write(&path, content, lasting).map_err(|source| AgentError::Artifact {
            path: path.to_string(),
            source,
        })?;
    }
    Ok(Artifact {
        path: name.to_owned(),
        uri: path.to_string(),
        blake3: hash,
        size_bytes: content.len() as i64,
    })
}

/// Written under a name of its own and renamed: whoever reads sees the whole content or none, however many write it at once.
fn write(path: &Utf8Path, content: &[u8], lasting: Lasting) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs_err::create_dir_all(folder)?;
    let mut partial = tempfile::Builder::new()
        .prefix(path.file_name().unwrap_or_default())
        .suffix(".partial")
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    partial.write_all(content)?;
    if lasting == Lasting::Synced {
        partial.as_file().sync_all()?;
    }
    partial.persist(path).map_err(|error| error.error)?;
    if lasting == Lasting::Synced {
        fs_err::File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// [`keep`] where no other episode waits for the disk.
pub(crate) async fn keep_aside(
    dir: &Utf8Path,
    name: String,
    content: Vec<u8>,
    lasting: Lasting,
) -> Result<Artifact, AgentError> {
    let dir = dir.to_owned();
    tokio::task::spawn_blocking(move || keep(&dir, &name, &content, lasting))
        .await
        .unwrap_or_else(|error| Err(AgentError::Worker(error.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_contents_share_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let dir = Utf8Path::from_path(dir.path()).unwrap();
        let a = keep(dir, "stdout", b"much", Lasting::Synced).unwrap();
        let b = keep(dir, "stderr", b"much", Lasting::Soon).unwrap();
        assert_eq!(a.uri, b.uri);
        assert_eq!(fs_err::read(&a.uri).unwrap(), b"much");
        let files: Vec<_> = fs_err::read_dir(Utf8Path::new(&a.uri).parent().unwrap())
            .unwrap()
            .collect();
        assert_eq!(files.len(), 1);
    }

    #[test]
    fn many_write_the_same_content_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let dir = Utf8Path::from_path(dir.path()).unwrap();
        for round in 0..50 {
            let content = vec![round; 300_000];
            let kept = std::thread::scope(|scope| {
                let writers: Vec<_> = (0..8)
                    .map(|_| scope.spawn(|| keep(dir, "stdout", &content, Lasting::Soon)))
                    .collect();
                let kept = writers.into_iter().map(|writer| writer.join().unwrap());
                kept.collect::<Result<Vec<_>, _>>().unwrap()
            });
            assert_eq!(fs_err::read(&kept[0].uri).unwrap(), content);
        }
    }

    #[test]
    fn a_file_that_was_cut_short_is_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let dir = Utf8Path::from_path(dir.path()).unwrap();
        let kept = keep(dir, "stdout", b"much", Lasting::Synced).unwrap();
        fs_err::write(&kept.uri, b"mu").unwrap();
        keep(dir, "stdout", b"much", Lasting::Synced).unwrap();
        assert_eq!(fs_err::read(&kept.uri).unwrap(), b"much");
    }
}
