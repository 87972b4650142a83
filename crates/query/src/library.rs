//! The `sql/` folder: views, rules and questions, read at run time.

use std::collections::{BTreeMap, BTreeSet};

use camino::{Utf8Path, Utf8PathBuf};
use datafusion::sql::parser::{DFParser, Statement};
use datafusion::sql::resolve::resolve_table_references;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};

use crate::error::{ErrorKind, Problem, QueryError};
use crate::explain::{explain, nearest};
use crate::header::{Header, Kind, QaHeader};
use crate::params::ParamValue;

/// One `.sql` file: a header and one statement.
#[derive(Debug, Clone, PartialEq)]
pub struct SqlFile {
    /// Where it was read from.
    pub path: Utf8PathBuf,
    /// What it says of itself.
    pub header: Header,
    /// The whole text.
    pub text: String,
}

impl SqlFile {
    /// Reads and checks one file: header, syntax, that `reads` names what the query reads, and that each `$name` has a `param`.
    pub fn load(path: &Utf8Path) -> Result<Self, QueryError> {
        let text = fs_err::read_to_string(path)
            .map_err(|e| QueryError::new(ErrorKind::Input, path.as_str(), e.to_string()))?;
        Self::parse(path, text)
    }

    /// The same for text that is already there; `path` says where it came from.
    pub fn parse(path: &Utf8Path, text: String) -> Result<Self, QueryError> {
        let stem = path.file_stem().unwrap_or_default();
        let header = Header::parse(path.as_str(), stem, &text)?;
        let file = Self {
            path: path.to_owned(),
            header,
            text,
        };
        file.check_reads()?;
        file.check_params()?;
        Ok(file)
    }

    /// The rule's part of the header, where the file is a rule.
    pub fn qa(&self) -> Option<&QaHeader> {
        match &self.header.kind {
            Kind::Qa(qa) => Some(qa),
            _ => None,
        }
    }

    /// The placeholders' values: the header's defaults under what `overrides` has as `<id>.<name>`.
    pub fn params(&self, overrides: &BTreeMap<String, ParamValue>) -> BTreeMap<String, ParamValue> {
        self.header
            .params
            .iter()
            .map(|(name, default)| {
                let key = format!("{}.{name}", self.header.id);
                let value = overrides.get(&key).unwrap_or(default);
                (name.clone(), value.clone())
            })
            .collect()
    }

    fn statement(&self) -> Result<Statement, QueryError> {
        let origin = self.path.as_str();
        let mut statements =
            DFParser::parse_sql(&self.text).map_err(|e| explain(&e, origin, &[]))?;
        match (statements.pop_front(), statements.is_empty()) {
            (Some(statement), true) => Ok(statement),
            (None, _) => Err(self.wrong("has a header and no query")),
            (Some(_), false) => Err(self.wrong("must hold one statement")),
        }
    }

    fn check_reads(&self) -> Result<(), QueryError> {
        let (references, _) = resolve_table_references(&self.statement()?, true)
            .map_err(|e| explain(&e, self.path.as_str(), &[]))?;
        let found: BTreeSet<String> = references.iter().map(ToString::to_string).collect();
        let said: BTreeSet<String> = self.header.reads.iter().cloned().collect();
        if found == said {
            return Ok(());
        }
        let list = |set: &BTreeSet<String>| set.iter().cloned().collect::<Vec<_>>().join(", ");
        Err(self.wrong(format!(
            "header says it reads '{}', the query reads '{}'",
            list(&said),
            list(&found)
        )))
    }

    fn check_params(&self) -> Result<(), QueryError> {
        let tokens = Tokenizer::new(&GenericDialect {}, &self.text)
            .tokenize()
            .map_err(|e| self.wrong(e.to_string()))?;
        let used: BTreeSet<String> = tokens
            .iter()
            .filter_map(|token| match token {
                Token::Placeholder(name) => name.strip_prefix('$').map(str::to_owned),
                _ => None,
            })
            .collect();
        let declared: BTreeSet<String> = self.header.params.keys().cloned().collect();
        if let Some(name) = used.difference(&declared).next() {
            return Err(self.wrong(format!("'${name}' has no '-- param: {name} = …' line")));
        }
        if let Some(name) = declared.difference(&used).next() {
            return Err(self.wrong(format!("parameter '{name}' is declared and never used")));
        }
        Ok(())
    }

    fn wrong(&self, message: impl Into<String>) -> QueryError {
        QueryError::new(ErrorKind::Query, self.path.as_str(), message)
    }
}

/// The `sql/` folder.
#[derive(Debug, Clone, Default)]
pub struct Library {
    root: Utf8PathBuf,
    files: Vec<SqlFile>,
    problems: Vec<Problem>,
}

impl Library {
    /// Reads `<root>/{views,qa,failures,metrics}/*.sql`. A file that does not load is set aside as a problem; a missing root is an error.
    pub fn load(root: &Utf8Path) -> Result<Self, QueryError> {
        if !root.is_dir() {
            return Err(
                QueryError::new(ErrorKind::Input, root.as_str(), "no such folder")
                    .with_hint("name the folder that holds views/, qa/, failures/ and metrics/"),
            );
        }
        let mut library = Self {
            root: root.to_owned(),
            ..Self::default()
        };
        for folder in ["views", "qa", "failures", "metrics"] {
            let folder = root.join(folder);
            if folder.is_dir() {
                library.add_folder(&folder)?;
            }
        }
        Ok(library)
    }

    /// Adds the `.sql` files of one more folder, in the order of their names.
    pub fn add_folder(&mut self, folder: &Utf8Path) -> Result<(), QueryError> {
        let unreadable =
            |e: std::io::Error| QueryError::new(ErrorKind::Input, folder.as_str(), e.to_string());
        let mut paths = Vec::new();
        for entry in fs_err::read_dir(folder).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            match Utf8PathBuf::from_path_buf(path) {
                Ok(path) if path.extension() == Some("sql") => paths.push(path),
                Ok(_) => {}
                Err(path) => self.problems.push(Problem::new(
                    folder.as_str(),
                    format!("{}: the name is not UTF-8", path.display()),
                )),
            }
        }
        paths.sort();
        for path in paths {
            if self.files.iter().any(|f| f.path == path) {
                continue;
            }
            match SqlFile::load(&path) {
                Ok(file) => match self.files.iter().find(|f| f.header.id == file.header.id) {
                    Some(other) => self.problems.push(Problem::new(
                        path.as_str(),
                        format!("{path}: id '{}' is taken by {}", file.header.id, other.path),
                    )),
                    None => self.files.push(file),
                },
                Err(error) => self.problems.push(error.into()),
            }
        }
        Ok(())
    }

    /// Where it was read from.
    pub fn root(&self) -> &Utf8Path {
        &self.root
    }

    /// Every file that loaded.
    pub fn files(&self) -> &[SqlFile] {
        &self.files
    }

    /// Files that did not load.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// The rules, in the order they were read.
    pub fn rules(&self) -> Vec<SqlFile> {
        let rules = self.files.iter().filter(|f| f.qa().is_some());
        rules.cloned().collect()
    }

    /// The rules whose files lie in one of `folders`, which are read if they were not yet. What does not load is a problem.
    pub fn rules_in(&mut self, folders: &[Utf8PathBuf]) -> Result<Vec<SqlFile>, QueryError> {
        for folder in folders {
            self.add_folder(folder)?;
        }
        let inside = |f: &&SqlFile| {
            f.qa().is_some() && folders.iter().any(|d| f.path.parent() == Some(d.as_path()))
        };
        Ok(self.files.iter().filter(inside).cloned().collect())
    }

    /// The file with this id.
    pub fn find(&self, id: &str) -> Option<&SqlFile> {
        self.files.iter().find(|f| f.header.id == id)
    }

    pub(crate) fn get(&self, id: &str) -> Result<&SqlFile, QueryError> {
        self.find(id).ok_or_else(|| {
            let missing = QueryError::new(
                ErrorKind::Query,
                self.root.as_str(),
                format!("no query with the id '{id}'"),
            );
            match nearest(id, self.files.iter().map(|f| f.header.id.as_str())) {
                Some(near) => missing.with_hint(format!("did you mean '{near}'?")),
                None => missing,
            }
        })
    }

    /// Hash over the text of everything that decides what QA says: views, rules, scores. Questions and figures don't count.
    pub fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut files: Vec<_> = self.files.iter().collect();
        files.sort_by(|a, b| a.header.id.cmp(&b.header.id));
        for file in files {
            if matches!(file.header.kind, Kind::View | Kind::Qa(_) | Kind::Score) {
                hasher.update(&(file.text.len() as u64).to_le_bytes());
                hasher.update(file.text.as_bytes());
            }
        }
        hasher.finalize().to_hex()[..16].to_owned()
    }

    /// Checks that every `<id>.<name>` names a parameter of a file.
    pub(crate) fn check_overrides(
        &self,
        overrides: &BTreeMap<String, ParamValue>,
    ) -> Result<(), QueryError> {
        let known: Vec<String> = self
            .files
            .iter()
            .flat_map(|f| {
                let id = &f.header.id;
                f.header
                    .params
                    .keys()
                    .map(move |name| format!("{id}.{name}"))
            })
            .collect();
        for key in overrides.keys() {
            if !known.contains(key) {
                let error = QueryError::new(
                    ErrorKind::Query,
                    self.root.as_str(),
                    format!("no file has the parameter '{key}'"),
                );
                return Err(match nearest(key, known.iter().map(String::as_str)) {
                    Some(near) => error.with_hint(format!("did you mean '{near}'?")),
                    None => error,
                });
            }
        }
        Ok(())
    }

    /// The views so that each comes after those it reads. Views in a circle come last and will fail to plan.
    pub(crate) fn views_in_order(&self) -> Vec<&SqlFile> {
        let mut waiting: Vec<&SqlFile> = self
            .files
            .iter()
            .filter(|f| f.header.kind == Kind::View)
            .collect();
        let mut ordered: Vec<&SqlFile> = Vec::new();
        while !waiting.is_empty() {
            let ids: BTreeSet<&str> = waiting.iter().map(|f| f.header.id.as_str()).collect();
            let (ready, rest): (Vec<_>, Vec<_>) = waiting
                .iter()
                .partition(|f| !f.header.reads.iter().any(|r| ids.contains(r.as_str())));
            if ready.is_empty() {
                ordered.extend(rest);
                break;
            }
            ordered.extend(ready);
            waiting = rest;
        }
        ordered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &Utf8Path, folder: &str, stem: &str, kind: &str, reads: &str, body: &str) {
        let folder = dir.join(folder);
        fs_err::create_dir_all(&folder).unwrap();
        let text = format!(
            "-- id: {stem}\n-- title: T\n-- kind: {kind}\n-- version: 1\n-- grain: one row\n-- reads: {reads}\n-- why: test\n{body}\n"
        );
        fs_err::write(folder.join(format!("{stem}.sql")), text).unwrap();
    }

    fn folder() -> (tempfile::TempDir, Utf8PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
        (dir, path)
    }

    #[test]
    fn a_bad_file_is_set_aside_and_the_rest_loads() {
        let (_guard, dir) = folder();
        file(
            &dir,
            "metrics",
            "good",
            "metric",
            "steps",
            "SELECT * FROM steps",
        );
        file(
            &dir,
            "metrics",
            "syntax",
            "metric",
            "steps",
            "SELECT * FORM steps",
        );
        file(
            &dir,
            "metrics",
            "reads",
            "metric",
            "episodes",
            "SELECT * FROM steps",
        );
        file(&dir, "metrics", "param", "metric", "nothing", "SELECT $x");
        let library = Library::load(&dir).unwrap();
        assert_eq!(library.files().len(), 1);
        let problems: Vec<_> = library.problems().iter().map(ToString::to_string).collect();
        assert_eq!(problems.len(), 3);
        assert!(problems[0].contains("'$x' has no"), "{}", problems[0]);
        assert!(problems[1].contains("says it reads 'episodes', the query reads 'steps'"));
        assert!(problems[2].contains("syntax.sql:"), "{}", problems[2]);
    }

    #[test]
    fn views_come_after_what_they_read() {
        let (_guard, dir) = folder();
        file(&dir, "views", "a", "view", "b", "SELECT * FROM b");
        file(
            &dir,
            "views",
            "b",
            "view",
            "c, steps",
            "SELECT * FROM c JOIN steps ON true",
        );
        file(&dir, "views", "c", "view", "nothing", "SELECT 1 AS one");
        let library = Library::load(&dir).unwrap();
        assert_eq!(library.problems(), []);
        let order: Vec<_> = library
            .views_in_order()
            .iter()
            .map(|f| f.header.id.as_str())
            .collect();
        assert_eq!(order, ["c", "b", "a"]);
    }

    #[test]
    fn the_fingerprint_follows_views_and_not_questions() {
        let (_guard, dir) = folder();
        file(&dir, "views", "v", "view", "nothing", "SELECT 1 AS one");
        file(&dir, "metrics", "m", "metric", "nothing", "SELECT 1 AS one");
        let first = Library::load(&dir).unwrap().fingerprint();
        file(&dir, "metrics", "m", "metric", "nothing", "SELECT 2 AS two");
        assert_eq!(Library::load(&dir).unwrap().fingerprint(), first);
        file(&dir, "views", "v", "view", "nothing", "SELECT 2 AS two");
        assert_ne!(Library::load(&dir).unwrap().fingerprint(), first);
    }

    #[test]
    fn an_override_must_name_a_parameter() {
        let (_guard, dir) = folder();
        file(&dir, "views", "v", "view", "nothing", "SELECT 1 AS one");
        let library = Library::load(&dir).unwrap();
        let overrides = BTreeMap::from([("v.x".to_owned(), ParamValue::Int(1))]);
        let error = library.check_overrides(&overrides).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("no file has the parameter 'v.x'")
        );
    }
}
