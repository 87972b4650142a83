//! Outputs too large for a row, kept by content beside the lake.

use camino::Utf8Path;
use drillyard_schema::table::Artifact;

use crate::error::AgentError;

/// Keeps `content` under `dir` and says where. Equal contents share one file, so writing one twice does nothing.
pub(crate) fn keep(dir: &Utf8Path, name: &str, content: &[u8]) -> Result<Artifact, AgentError> {
    let hash = blake3::hash(content).to_hex().to_string();
    let folder = dir.join(&hash[..2]);
    let path = folder.join(&hash);
    let failed = |source| AgentError::Artifact {
        path: path.to_string(),
        source,
    };
    if !path.exists() {
        fs_err::create_dir_all(&folder).map_err(failed)?;
        // Written beside and renamed: a reader sees the whole content or none.
        let partial = folder.join(format!("{hash}.{}.partial", std::process::id()));
        fs_err::write(&partial, content).map_err(failed)?;
        fs_err::rename(&partial, &path).map_err(failed)?;
    }
    Ok(Artifact {
        path: name.to_owned(),
        uri: path.to_string(),
        blake3: hash,
        size_bytes: content.len() as i64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_contents_share_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let dir = Utf8Path::from_path(dir.path()).unwrap();
        let a = keep(dir, "stdout", b"much").unwrap();
        let b = keep(dir, "stderr", b"much").unwrap();
        assert_eq!(a.uri, b.uri);
        assert_eq!(fs_err::read(&a.uri).unwrap(), b"much");
        let files: Vec<_> = fs_err::read_dir(Utf8Path::new(&a.uri).parent().unwrap())
            .unwrap()
            .collect();
        assert_eq!(files.len(), 1);
    }
}
