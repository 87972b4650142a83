//! Answers to plain GETs, kept for ever, so that an episode gets tomorrow what it got today.
//!
//! ```text
//! <directory>/requests/ab/abcd…   a request's answer: status, headers, and the hash of its body (JSON)
//! <directory>/bodies/12/1234…     a body, by its BLAKE3
//! ```
//!
//! A request is known by its URL and by those of its headers that commonly change an answer, as a hash: nothing secret
//! is written down. Both kinds of file appear by a rename and never change.

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use camino::{Utf8Path, Utf8PathBuf};
use hyper::header::{HeaderMap, HeaderName};
use serde::{Deserialize, Serialize};

/// Headers of a request that make another request of it.
const RELEVANT: [HeaderName; 6] = [
    hyper::header::ACCEPT,
    hyper::header::ACCEPT_ENCODING,
    hyper::header::ACCEPT_LANGUAGE,
    hyper::header::AUTHORIZATION,
    hyper::header::COOKIE,
    hyper::header::RANGE,
];

/// Numbers the unfinished bodies of this program.
static UNFINISHED: AtomicU64 = AtomicU64::new(0);

/// A cache directory.
#[derive(Debug)]
pub struct Cache {
    directory: Utf8PathBuf,
}

/// A request, as the cache knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key(String);

/// The head of a kept answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// For who looks into the directory.
    pub url: String,
    pub status: u16,
    pub headers: Vec<(String, String)>,
    /// BLAKE3 of the body, in hexadecimal.
    pub body: String,
    pub bytes: u64,
}

impl Kept {
    /// The headers, unless they are damaged.
    pub fn headers(&self) -> Option<HeaderMap> {
        let pair = |(name, value): &(String, String)| {
            Some((name.parse::<HeaderName>().ok()?, value.parse().ok()?))
        };
        let mut headers = HeaderMap::new();
        for (name, value) in self.headers.iter().map(pair).collect::<Option<Vec<_>>>()? {
            headers.append(name, value);
        }
        Some(headers)
    }
}

impl Cache {
    pub fn open(directory: &Utf8Path) -> io::Result<Self> {
        for part in ["requests", "bodies"] {
            fs_err::create_dir_all(directory.join(part))?;
        }
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    pub fn key(url: &str, headers: &HeaderMap) -> Key {
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        add(url.as_bytes());
        for name in RELEVANT {
            let values: Vec<_> = headers.get_all(&name).iter().collect();
            add(&(values.len() as u64).to_le_bytes());
            for value in values {
                add(value.as_bytes());
            }
        }
        Key(hasher.finalize().to_hex().to_string())
    }

    fn place(&self, kind: &str, name: &str) -> Utf8PathBuf {
        self.directory
            .join(kind)
            .join(name.get(..2).unwrap_or_default())
            .join(name)
    }

    /// The kept answer with its body, which is checked against its hash; blocks while it reads.
    pub fn find(&self, key: &Key) -> io::Result<Option<(Kept, File)>> {
        let head = match fs_err::read(self.place("requests", &key.0)) {
            Ok(head) => head,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let kept: Kept = serde_json::from_slice(&head)?;
        let damaged = || io::Error::other(format!("the cached answer of {} is damaged", kept.url));
        if kept.body.len() != 64 || !kept.body.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(damaged());
        }
        let path = self.place("bodies", &kept.body);
        let mut hasher = blake3::Hasher::new();
        let bytes = io::copy(&mut fs_err::File::open(&path)?, &mut hasher)?;
        if hasher.finalize().to_hex().as_str() != kept.body || bytes != kept.bytes {
            return Err(damaged());
        }
        Ok(Some((kept, fs_err::File::open(&path)?.into_parts().0)))
    }

    /// Forgets a damaged answer.
    pub fn forget(&self, key: &Key) {
        let _ = fs_err::remove_file(self.place("requests", &key.0));
    }

    /// Begins to keep an answer, or says why it cannot be kept.
    pub fn store(
        &self,
        key: Key,
        url: &str,
        status: u16,
        headers: &HeaderMap,
    ) -> Result<Store, String> {
        if status != 200 {
            return Err(format!("not kept: its status is {status}"));
        }
        for value in headers.get_all(hyper::header::VARY) {
            let varies = value.to_str().unwrap_or("*");
            for name in varies.split(',').map(str::trim).filter(|n| !n.is_empty()) {
                if !RELEVANT.iter().any(|r| name.eq_ignore_ascii_case(r.as_str())) {
                    return Err(format!("not kept: it varies by {name}"));
                }
            }
        }
        let mut kept = Vec::new();
        for (name, value) in headers {
            let Ok(value) = value.to_str() else {
                return Err(format!("not kept: its header {name} is not ASCII"));
            };
            kept.push((name.as_str().to_owned(), value.to_owned()));
        }
        let unfinished = self.directory.join(format!(
            "unfinished-{}-{}",
            std::process::id(),
            UNFINISHED.fetch_add(1, Ordering::Relaxed)
        ));
        let file = fs_err::File::create_new(&unfinished)
            .map_err(|error| format!("not kept: {error}"))?
            .into_parts()
            .0;
        Ok(Store {
            directory: Self {
                directory: self.directory.clone(),
            },
            key,
            kept: Kept {
                url: url.to_owned(),
                status,
                headers: kept,
                body: String::new(),
                bytes: 0,
            },
            file,
            unfinished,
            hasher: blake3::Hasher::new(),
        })
    }
}

/// An answer on its way into the cache; dropped before its end it is forgotten.
#[derive(Debug)]
pub struct Store {
    directory: Cache,
    key: Key,
    kept: Kept,
    file: File,
    unfinished: Utf8PathBuf,
    hasher: blake3::Hasher,
}

impl Store {
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.kept.bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// The body is complete.
    pub fn finish(mut self) -> io::Result<()> {
        self.kept.body = self.hasher.finalize().to_hex().to_string();
        let body = self.directory.place("bodies", &self.kept.body);
        let head = self.directory.place("requests", &self.key.0);
        for path in [&body, &head] {
            if let Some(parent) = path.parent() {
                fs_err::create_dir_all(parent)?;
            }
        }
        fs_err::rename(&self.unfinished, &body)?;
        // Of two sandboxes that asked at once, the first one's answer stays.
        fs_err::write(&self.unfinished, serde_json::to_vec(&self.kept)?)?;
        match fs_err::hard_link(&self.unfinished, &head) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = fs_err::remove_file(&self.unfinished);
    }
}

/// Reads a piece of a kept body; nothing at its end.
pub fn piece(file: &mut File) -> io::Result<Option<Vec<u8>>> {
    let mut buffer = vec![0; 64 << 10];
    let n = file.read(&mut buffer)?;
    buffer.truncate(n);
    Ok((n > 0).then_some(buffer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(n, v)| (HeaderName::from_static(n), v.parse().unwrap()))
            .collect()
    }

    fn keep(cache: &Cache, url: &str, body: &[u8]) {
        let key = Cache::key(url, &HeaderMap::new());
        let answer = headers(&[("content-type", "text/plain")]);
        let mut store = cache.store(key, url, 200, &answer).unwrap();
        store.write(body).unwrap();
        store.finish().unwrap();
    }

    #[test]
    fn what_is_kept_comes_back_and_the_first_answer_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8Path::from_path(dir.path()).unwrap();
        let cache = Cache::open(path).unwrap();
        let key = Cache::key("http://a/x", &HeaderMap::new());
        assert!(cache.find(&key).unwrap().is_none());
        keep(&cache, "http://a/x", b"first");
        keep(&cache, "http://a/x", b"second");
        let (kept, mut file) = cache.find(&key).unwrap().unwrap();
        assert_eq!(piece(&mut file).unwrap().unwrap(), b"first");
        assert_eq!(piece(&mut file).unwrap(), None);
        assert_eq!(
            kept.headers,
            [("content-type".to_owned(), "text/plain".to_owned())]
        );
        // A dropped store leaves nothing.
        drop(cache.store(key.clone(), "u", 200, &HeaderMap::new()));
        assert!(
            fs_err::read_dir(path)
                .unwrap()
                .all(|e| !e.unwrap().file_name().to_string_lossy().contains("unfinished"))
        );
        // A damaged body is not given out.
        let body = cache.place("bodies", &kept.body);
        fs_err::write(body, "other").unwrap();
        assert!(
            cache
                .find(&key)
                .unwrap_err()
                .to_string()
                .contains("damaged")
        );
    }

    #[test]
    fn only_what_can_be_told_apart_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(Utf8Path::from_path(dir.path()).unwrap()).unwrap();
        let key = Cache::key("u", &HeaderMap::new());
        for (status, answer, kept) in [
            (200, headers(&[("vary", "Accept-Encoding, cookie")]), true),
            (200, headers(&[("vary", "Accept, User-Agent")]), false),
            (200, headers(&[("vary", "*")]), false),
            (206, HeaderMap::new(), false),
            (404, HeaderMap::new(), false),
        ] {
            assert_eq!(
                cache.store(key.clone(), "u", status, &answer).is_ok(),
                kept,
                "{answer:?}"
            );
        }
        assert_ne!(key, Cache::key("u", &headers(&[("cookie", "a")])));
        assert_eq!(key, Cache::key("u", &headers(&[("user-agent", "a")])));
    }
}
