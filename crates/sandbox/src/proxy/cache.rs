//! Answers to plain GETs, kept for ever, so that an episode gets tomorrow what it got today.
//!
//! ```text
//! <directory>/requests/ab/abcd…   a request's answer: status, headers, and the hash of its body (JSON)
//! <directory>/bodies/12/1234…     a body, by its BLAKE3
//! ```
//!
//! A request is known by its URL and all of its headers, as a hash: nothing secret is written down, and no request can
//! choose the answer to another one. Both kinds of file appear whole and never change.

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use camino::{Utf8Path, Utf8PathBuf};
use hyper::header::{HeaderMap, HeaderName};
use serde::{Deserialize, Serialize};

/// Numbers the unfinished bodies of this program.
static UNFINISHED: AtomicU64 = AtomicU64::new(0);

/// A cache directory.
#[derive(Debug)]
pub struct Cache {
    directory: Utf8PathBuf,
    /// Bytes of all bodies.
    used: Arc<AtomicU64>,
    most: u64,
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
    /// Opens a cache, or begins one; it takes no more once its bodies have this many bytes together.
    pub fn open(directory: &Utf8Path, most: u64) -> io::Result<Self> {
        let bodies = directory.join("bodies");
        for part in [&directory.join("requests"), &bodies] {
            fs_err::create_dir_all(part)?;
        }
        let mut used = 0;
        for shelf in fs_err::read_dir(&bodies)? {
            for body in fs_err::read_dir(shelf?.path())? {
                used += body?.metadata()?.len();
            }
        }
        Ok(Self {
            directory: directory.to_owned(),
            used: Arc::new(AtomicU64::new(used)),
            most,
        })
    }

    pub fn key(url: &str, headers: &HeaderMap) -> Key {
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        add(url.as_bytes());
        let mut sorted: Vec<_> = headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_bytes()))
            .collect();
        // By name alone: values of one name keep their order.
        sorted.sort_by_key(|(name, _)| *name);
        for (name, value) in sorted {
            add(name.as_bytes());
            add(value);
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
        if !is_hash(&kept.body) {
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
        let head = self.place("requests", &key.0);
        if let Ok(bytes) = fs_err::read(&head)
            && let Ok(kept) = serde_json::from_slice::<Kept>(&bytes)
            && is_hash(&kept.body)
        {
            let _ = fs_err::remove_file(self.place("bodies", &kept.body));
        }
        let _ = fs_err::remove_file(head);
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
            cache: Self {
                directory: self.directory.clone(),
                used: Arc::clone(&self.used),
                most: self.most,
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
            counted: false,
        })
    }
}

/// An answer on its way into the cache; dropped before its end it is forgotten.
#[derive(Debug)]
pub struct Store {
    cache: Cache,
    key: Key,
    kept: Kept,
    file: File,
    unfinished: Utf8PathBuf,
    hasher: blake3::Hasher,
    /// Its bytes are in the cache for good.
    counted: bool,
}

impl Store {
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let n = bytes.len() as u64;
        self.hasher.update(bytes);
        self.kept.bytes += n;
        if self.cache.used.fetch_add(n, Ordering::Relaxed) + n > self.cache.most {
            return Err(io::Error::other("the cache is full"));
        }
        self.file.write_all(bytes)
    }

    /// The body is complete.
    pub fn finish(mut self) -> io::Result<()> {
        self.kept.body = self.hasher.finalize().to_hex().to_string();
        let body = self.cache.place("bodies", &self.kept.body);
        let head = self.cache.place("requests", &self.key.0);
        for path in [&body, &head] {
            if let Some(parent) = path.parent() {
                fs_err::create_dir_all(parent)?;
            }
        }
        if !body.exists() {
            fs_err::rename(&self.unfinished, &body)?;
            self.counted = true;
        }
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
        if !self.counted {
            self.cache
                .used
                .fetch_sub(self.kept.bytes, Ordering::Relaxed);
        }
    }
}

fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())
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
        let cache = Cache::open(path, 11).unwrap();
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
        assert!(fs_err::read_dir(path).unwrap().all(|e| {
            !e.unwrap()
                .file_name()
                .to_string_lossy()
                .contains("unfinished")
        }));
        // A full one takes no more, and knows how full it is when it is opened again.
        for cache in [&cache, &Cache::open(path, 11).unwrap()] {
            let mut store = cache
                .store(key.clone(), "u", 200, &HeaderMap::new())
                .unwrap();
            assert!(store.write(b"more").is_err());
        }
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
        let cache = Cache::open(Utf8Path::from_path(dir.path()).unwrap(), 100).unwrap();
        let key = Cache::key("u", &HeaderMap::new());
        for (status, kept) in [(200, true), (206, false), (304, false), (404, false)] {
            let stored = cache.store(key.clone(), "u", status, &HeaderMap::new());
            assert_eq!(stored.is_ok(), kept, "{status}");
        }
        // Whatever a server may act on makes another request.
        let of = |pairs| Cache::key("u", &headers(pairs));
        let keys = [
            key,
            of(&[("cookie", "a")]),
            of(&[("x-forwarded-host", "a")]),
            of(&[("x-forwarded-host", "a"), ("cookie", "a")]),
            of(&[("accept", "a"), ("accept", "b")]),
            of(&[("accept", "b"), ("accept", "a")]),
        ];
        for (i, key) in keys.iter().enumerate() {
            assert!(!keys[i + 1..].contains(key), "{i}");
        }
        assert_eq!(
            keys[3],
            of(&[("cookie", "a"), ("x-forwarded-host", "a")]),
            "the order of names is nothing"
        );
    }
}
