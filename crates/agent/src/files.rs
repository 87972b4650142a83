//! What is known of the files an episode works on: its set-up, and the last state of each that a call changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drillyard_sandbox::{Change, ChangedFile, Kind};

/// Set-up files and changes.
#[derive(Debug, Default)]
pub(crate) struct Files {
    setup: Vec<(String, Arc<[u8]>)>,
    /// Changes that the sandbox a branch starts with holds already.
    base: BTreeMap<String, ChangedFile>,
    changes: BTreeMap<String, ChangedFile>,
    /// A call changed something that its list of changes does not tell.
    incomplete: bool,
}

impl Files {
    pub fn new(setup: Vec<(String, Arc<[u8]>)>) -> Self {
        Self {
            setup,
            ..Self::default()
        }
    }

    /// What a sandbox starts with.
    pub fn setup(&self) -> &[(String, Arc<[u8]>)] {
        &self.setup
    }

    /// What has to be done to a fresh sandbox to bring its files up to date.
    pub fn changes(&self) -> Vec<ChangedFile> {
        self.changes.values().cloned().collect()
    }

    /// From here on a fresh sandbox starts with everything so far, so that only what follows has to be done to it.
    pub fn rebase(&mut self) {
        self.base.append(&mut self.changes);
        self.incomplete = false;
    }

    /// Takes over a call's changes; `incomplete` where they do not tell everything.
    pub fn change(&mut self, changed: &[ChangedFile], incomplete: bool) {
        self.incomplete |= incomplete;
        for file in changed {
            self.changes.insert(file.path.clone(), file.clone());
        }
    }

    /// What can't be restored, if anything.
    pub fn lost(&self) -> Option<String> {
        if self.incomplete {
            return Some("a change".to_owned());
        }
        let file = self.changes.values().find(|file| is_lost(file))?;
        Some(match file.kind {
            Kind::Other => format!("the pipe or socket '{}'", file.path),
            _ => format!("the content of '{}' ({} bytes)", file.path, file.size),
        })
    }

    /// Goes on without what can't be restored: a sandbox that ended took it along.
    pub fn forget_lost(&mut self) {
        self.incomplete = false;
        self.changes.retain(|_, file| !is_lost(file));
    }

    /// A file's content; none where it does not exist or is not known.
    pub fn content(&self, path: &str) -> Option<&[u8]> {
        match self.changed(path) {
            Some(file) if file.change == Change::Deleted || file.kind != Kind::File => None,
            Some(file) => file.content.as_deref(),
            None => {
                let (_, content) = self.setup.iter().find(|(name, _)| name == path)?;
                Some(content)
            }
        }
    }

    fn changed(&self, path: &str) -> Option<&ChangedFile> {
        self.changes.get(path).or_else(|| self.base.get(path))
    }

    /// The texts in the work directory that calls have written and set-up did not bring.
    pub fn written_texts(&self) -> Vec<&str> {
        let is_setup = |path: &str| self.setup.iter().any(|(name, _)| name == path);
        let is_text = |file: &ChangedFile| {
            let content = file.content.as_deref().unwrap_or_default();
            !content.is_empty() && std::str::from_utf8(content).is_ok()
        };
        let paths: BTreeSet<&String> = self.base.keys().chain(self.changes.keys()).collect();
        paths
            .into_iter()
            .filter_map(|path| self.changed(path))
            .filter(|file| file.change != Change::Deleted && file.kind == Kind::File)
            .filter(|file| !file.path.starts_with('/') && !is_setup(&file.path) && is_text(file))
            .map(|file| file.path.as_str())
            .collect()
    }

    /// A file's permission bits.
    pub fn mode(&self, path: &str) -> u32 {
        self.changed(path).map_or(0o644, |file| file.mode)
    }
}

/// It can't be restored: its content is not there, or it is of no kind that is.
fn is_lost(file: &ChangedFile) -> bool {
    file.change != Change::Deleted && file.kind != Kind::Dir && file.content.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(path: &str, change: Change, content: Option<&[u8]>) -> ChangedFile {
        ChangedFile {
            path: path.to_owned(),
            change,
            kind: Kind::File,
            mode: 0o644,
            before_hash: None,
            after_hash: None,
            size: content.map_or(9, <[u8]>::len) as u64,
            content: content.map(<[u8]>::to_vec),
        }
    }

    #[test]
    fn the_last_change_counts() {
        let mut files = Files::new(vec![("in".to_owned(), Arc::from(&b"a"[..]))]);
        assert_eq!(files.content("in"), Some(&b"a"[..]));
        files.change(
            &[
                changed("in", Change::Deleted, None),
                changed("out", Change::Created, Some(b"1")),
            ],
            false,
        );
        assert_eq!(
            (files.content("in"), files.content("out")),
            (None, Some(&b"1"[..]))
        );
        files.change(&[changed("out", Change::Modified, Some(b"2"))], false);
        assert_eq!(files.content("out"), Some(&b"2"[..]));
        assert_eq!(files.changes().len(), 2);
        assert_eq!(files.lost(), None);
    }

    #[test]
    fn a_lost_content_is_named_until_the_file_is_known_again() {
        let mut files = Files::default();
        files.change(&[changed("big", Change::Created, None)], false);
        assert!(files.lost().unwrap().contains("'big'"));
        files.change(&[changed("big", Change::Deleted, None)], false);
        assert_eq!(files.lost(), None);
    }

    #[test]
    fn a_branch_starts_with_everything_so_far() {
        let mut files = Files::default();
        files.change(&[changed("big", Change::Created, None)], true);
        files.change(&[changed("out", Change::Created, Some(b"1"))], false);
        files.rebase();
        assert_eq!((files.lost(), files.changes().len()), (None, 0));
        assert_eq!(files.content("out"), Some(&b"1"[..]));
        assert_eq!(files.written_texts(), ["out"]);
        files.change(&[changed("out", Change::Deleted, None)], false);
        assert_eq!((files.content("out"), files.changes().len()), (None, 1));
        assert!(files.written_texts().is_empty());
    }

    #[test]
    fn a_loss_that_no_change_explains_stays() {
        let mut files = Files::default();
        files.change(&[], true);
        files.change(&[changed("x", Change::Created, Some(b""))], false);
        assert!(files.lost().is_some());
        // Nor does a large file explain it, once that is gone.
        let mut files = Files::default();
        files.change(&[changed("big", Change::Created, None)], true);
        files.change(&[changed("big", Change::Deleted, None)], false);
        assert_eq!(files.lost().as_deref(), Some("a change"));
    }

    #[test]
    fn what_a_sandbox_took_along_is_forgotten_and_the_rest_stays() {
        let mut files = Files::new(vec![("in".to_owned(), Arc::from(&b"a"[..]))]);
        files.change(
            &[
                changed("in", Change::Modified, None),
                changed("out", Change::Created, Some(b"1")),
            ],
            true,
        );
        files.forget_lost();
        assert_eq!((files.lost(), files.changes().len()), (None, 1));
        assert_eq!(files.content("in"), Some(&b"a"[..]));
    }
}
