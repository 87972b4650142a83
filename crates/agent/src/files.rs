//! What is known of the files an episode works on: its set-up, and the last state of each that a call changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use drillyard_sandbox::{Change, ChangedFile, Kind};

/// Set-up files and changes.
#[derive(Debug, Default)]
pub(crate) struct Files {
    setup: Vec<(String, Arc<[u8]>)>,
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

    /// Takes over a call's changes; `lost` where they do not tell everything.
    pub fn change(&mut self, changed: &[ChangedFile], lost: bool) {
        self.incomplete |= lost && !changed.iter().any(is_lost);
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
        Some(format!(
            "the content of '{}' ({} bytes)",
            file.path, file.size
        ))
    }

    /// A file's content; none where it does not exist or is not known.
    pub fn content(&self, path: &str) -> Option<&[u8]> {
        match self.changes.get(path) {
            Some(file) if file.change == Change::Deleted || file.kind != Kind::File => None,
            Some(file) => file.content.as_deref(),
            None => {
                let (_, content) = self.setup.iter().find(|(name, _)| name == path)?;
                Some(content)
            }
        }
    }
}

/// Its content is needed to restore it, and is not there.
fn is_lost(file: &ChangedFile) -> bool {
    file.change != Change::Deleted
        && matches!(file.kind, Kind::File | Kind::Link)
        && file.content.is_none()
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
        files.change(&[changed("big", Change::Created, None)], true);
        assert!(files.lost().unwrap().contains("'big'"));
        files.change(&[changed("big", Change::Deleted, None)], false);
        assert_eq!(files.lost(), None);
    }

    #[test]
    fn a_loss_that_no_change_explains_stays() {
        let mut files = Files::default();
        files.change(&[], true);
        files.change(&[changed("x", Change::Created, Some(b""))], false);
        assert!(files.lost().is_some());
    }
}
