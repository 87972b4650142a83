//! What sandboxes may reach, and the record of what they asked for. The proxy that acts on it is in `proxy`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use camino::Utf8PathBuf;
use serde::{Deserialize, Serialize};

use drillyard_sandbox_init::control::{Holds, LimitRow};

use crate::SandboxError;

/// Where tools find the proxy: this port of their sandbox's own loopback.
pub(crate) const PORT: u16 = 3128;

/// What sandboxes may reach.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Network {
    /// Nothing but their own loopback.
    #[default]
    None,
    /// Listed hosts, through a proxy outside. Tools learn of it by the usual environment variables.
    Allow(AllowList),
}

impl Network {
    pub(crate) fn allow_list(&self) -> Option<&AllowList> {
        match self {
            Self::None => None,
            Self::Allow(list) => Some(list),
        }
    }

    /// The environment that leads tools to the proxy.
    pub(crate) fn env(&self) -> Vec<String> {
        if *self == Self::None {
            return Vec::new();
        }
        let proxy = ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"]
            .map(|name| format!("{name}=http://127.0.0.1:{PORT}"));
        let direct = ["no_proxy", "NO_PROXY"].map(|name| format!("{name}=localhost,127.0.0.1,::1"));
        proxy.into_iter().chain(direct).collect()
    }

    /// The row of [`crate::LimitsReport`], where there is a network.
    pub(crate) fn row(&self) -> Option<LimitRow> {
        let list = self.allow_list()?;
        let cache = match (&list.cache, list.only_cache) {
            (None, _) => "",
            (Some(_), false) => "; plain HTTP GETs are cached",
            (Some(_), true) => "; only cached answers are given, nothing goes out",
        };
        Some(LimitRow {
            limit: "network".into(),
            value: format!("allow list: {list}"),
            holds: Holds::Yes,
            how: format!(
                "a network namespace of its own with loopback only; a proxy outside answers at 127.0.0.1:{PORT}, resolves \
                 names itself and connects to listed hosts alone (HTTP, and TLS whose server name matches){cache}"
            ),
        })
    }
}

/// The hosts that sandboxes may reach, and how much.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowList {
    entries: Vec<Entry>,
    /// Where answers to plain HTTP GETs are kept, for ever: the first answer of a URL is its answer in every later
    /// episode. Tunnels (HTTPS) cannot be cached.
    pub cache: Option<Utf8PathBuf>,
    /// For replays: answer from the cache alone, refuse everything else.
    pub only_cache: bool,
    /// How much of it.
    pub limits: NetworkLimits,
}

/// Limits of each sandbox's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetworkLimits {
    /// Connections served at once (with `docker` at most 256); more have to wait.
    pub connections: usize,
    /// Requests of one call; more are refused.
    pub requests_per_call: u64,
    /// Bytes of a request's or an answer's head.
    pub head_bytes: usize,
    /// Bytes from and to a server in one request or tunnel.
    pub request_bytes: u64,
    /// Bytes from and to servers over the sandbox's life.
    pub sandbox_bytes: u64,
    /// Bytes of all answers in the cache, of all sandboxes together; beyond it no more are kept.
    pub cache_bytes: u64,
    /// How long a request's head, a connection to a server or a TLS greeting may take.
    pub patience: Duration,
    /// How long a server and its client may both be silent.
    pub idle: Duration,
}

impl Default for NetworkLimits {
    fn default() -> Self {
        Self {
            connections: 32,
            requests_per_call: 1000,
            head_bytes: 64 << 10,
            request_bytes: 1 << 30,
            sandbox_bytes: 4 << 30,
            cache_bytes: 10 << 30,
            patience: Duration::from_secs(10),
            idle: Duration::from_mins(1),
        }
    }
}

impl AllowList {
    /// From entries such as `pypi.org:443`, `*.example.org:443` (any host below it, not itself), `example.org` (ports 80
    /// and 443), `192.0.2.7:8080`, `[2001:db8::7]:443`. A name may only resolve to public addresses, unless its entry
    /// starts with `internal:`; an address that is listed as such may be any.
    pub fn parse<S: AsRef<str>>(
        entries: impl IntoIterator<Item = S>,
    ) -> Result<Self, SandboxError> {
        let entries: Vec<_> = entries
            .into_iter()
            .map(|text| {
                Entry::parse(text.as_ref()).map_err(|why| SandboxError::Config {
                    field: "network",
                    message: format!("'{}': {why}", text.as_ref()),
                })
            })
            .collect::<Result<_, _>>()?;
        if entries.is_empty() {
            return Err(SandboxError::Config {
                field: "network",
                message: "the allow list is empty; list hosts such as 'pypi.org:443', or choose no network".into(),
            });
        }
        Ok(Self {
            entries,
            cache: None,
            only_cache: false,
            limits: NetworkLimits::default(),
        })
    }

    /// Whether a host may be reached at a port.
    pub(crate) fn permit(&self, host: &Host, port: u16) -> Option<Permit> {
        let mut matching = self.entries.iter().filter(|e| e.matches(host, port));
        let first = matching.next()?;
        let internal = first.internal || matching.any(|e| e.internal);
        Some(if internal || matches!(host, Host::Address(_)) {
            Permit::AnyAddress
        } else {
            Permit::PublicAddress
        })
    }

    /// Whether everything that the other list lets through, this one does too, entry by entry.
    pub fn covers(&self, other: &Self) -> bool {
        other
            .entries
            .iter()
            .all(|entry| self.entries.iter().any(|own| own.covers(entry)))
    }

    /// Says what is wrong with the values.
    pub(crate) fn check(&self) -> Result<(), SandboxError> {
        let wrong = |message: &str| {
            Err(SandboxError::Config {
                field: "network",
                message: message.into(),
            })
        };
        if self.only_cache && self.cache.is_none() {
            return wrong("only_cache is set, but no cache directory is named");
        }
        let NetworkLimits {
            connections,
            requests_per_call,
            head_bytes,
            request_bytes,
            sandbox_bytes,
            cache_bytes: _,
            patience,
            idle,
        } = self.limits;
        if connections == 0 || requests_per_call == 0 || request_bytes == 0 || sandbox_bytes == 0 {
            return wrong("a limit of 0 lets nothing through; choose no network instead");
        }
        if head_bytes < 8 << 10 {
            return wrong("limits.head_bytes is too small; at least 8192 is needed");
        }
        if patience.is_zero() || idle.is_zero() {
            return wrong("limits.patience and limits.idle must be longer than 0");
        }
        Ok(())
    }
}

impl fmt::Display for AllowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, entry) in self.entries.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{entry}")?;
        }
        Ok(())
    }
}

/// What a listed host's name may resolve to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permit {
    PublicAddress,
    AnyAddress,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    /// The host may have an address of this machine or of a private network.
    internal: bool,
    pattern: Pattern,
    /// None for 80 and 443.
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Pattern {
    Host(Host),
    /// Any name that ends so; it starts with a dot.
    Below(String),
}

impl Entry {
    fn parse(text: &str) -> Result<Self, String> {
        let (internal, rest) = match text.strip_prefix("internal:") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if rest.contains("://") || rest.contains('/') {
            return Err("this is a URL; name a host and a port, as in 'example.org:443'".into());
        }
        let (pattern, port) = match rest.strip_prefix("*.") {
            Some(below) => {
                let (host, port) = split_port(below)?;
                match host {
                    Host::Name(name) if name.contains('.') => {
                        (Pattern::Below(format!(".{name}")), port)
                    }
                    Host::Name(name) => {
                        return Err(format!(
                            "'*.{name}' would allow every host below a top-level domain; name the domain"
                        ));
                    }
                    Host::Address(_) => {
                        return Err(
                            "a pattern of addresses cannot be given; list each address".into()
                        );
                    }
                }
            }
            None if rest.contains('*') => {
                return Err(
                    "a '*' stands only for what precedes a domain, as in '*.example.org:443'"
                        .into(),
                );
            }
            None => {
                let (host, port) = split_port(rest)?;
                (Pattern::Host(host), port)
            }
        };
        Ok(Self {
            internal,
            pattern,
            port,
        })
    }

    fn covers(&self, other: &Self) -> bool {
        let below = |name: &str, end: &str| name.len() > end.len() && name.ends_with(end);
        let host = match (&self.pattern, &other.pattern) {
            (Pattern::Below(own), Pattern::Host(Host::Name(name))) => below(name, own),
            (Pattern::Below(own), Pattern::Below(end)) => own == end || below(end, own),
            (own, pattern) => own == pattern,
        };
        let port = match (self.port, other.port) {
            (None, Some(port)) => port == 80 || port == 443,
            (own, port) => own == port,
        };
        host && port && (self.internal || !other.internal)
    }

    fn matches(&self, host: &Host, port: u16) -> bool {
        let port_fits = match self.port {
            Some(own) => own == port,
            None => port == 80 || port == 443,
        };
        port_fits
            && match (&self.pattern, host) {
                (Pattern::Host(own), host) => own == host,
                (Pattern::Below(end), Host::Name(name)) => {
                    name.len() > end.len() && name.ends_with(end.as_str())
                }
                (Pattern::Below(_), Host::Address(_)) => false,
            }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.internal {
            f.write_str("internal:")?;
        }
        match &self.pattern {
            Pattern::Host(host) => write!(f, "{host}")?,
            Pattern::Below(end) => write!(f, "*{end}")?,
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

/// A host as a request or an entry names it, in its one spelling.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// Lower case, no dot at the end, never an address in disguise.
    Name(String),
    /// A v4 address written as v6 is the v4 address.
    Address(IpAddr),
}

impl Host {
    /// Reads a host: a name, an IPv4 address, an IPv6 address in brackets.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            return inner
                .parse::<Ipv6Addr>()
                .map(|address| Self::Address(IpAddr::V6(address).to_canonical()))
                .map_err(|_| format!("'{text}' is no IPv6 address"));
        }
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return Ok(Self::Address(address.into()));
        }
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        if name.is_empty() {
            return Err("the host is missing".into());
        }
        if !name.is_ascii() {
            return Err(format!(
                "'{text}' is not ASCII; write an international name in its xn-- form"
            ));
        }
        let label_fits = |label: &str| {
            (1..=63).contains(&label.len())
                && label
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        if name.len() > 253 || !name.split('.').all(label_fits) {
            return Err(format!("'{text}' is no host name"));
        }
        // 127.1, 0x7f000001 and 017700000001 are addresses to many a resolver.
        let last = name.rsplit('.').next().unwrap_or_default();
        let hexadecimal = last
            .strip_prefix("0x")
            .is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        if hexadecimal || last.bytes().all(|b| b.is_ascii_digit()) {
            return Err(format!(
                "'{text}' is neither a host name nor an address of four decimal numbers"
            ));
        }
        Ok(Self::Name(name))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(address)) => write!(f, "{address}"),
            Self::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

/// Host and port of `host`, `host:port`, `[v6]` or `[v6]:port`.
pub(crate) fn split_port(text: &str) -> Result<(Host, Option<u16>), String> {
    let (host, port) = if text.starts_with('[') {
        let end = text
            .find(']')
            .ok_or_else(|| format!("'{text}' lacks a closing bracket"))?;
        let (host, rest) = text.split_at(end + 1);
        match rest.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if rest.is_empty() => (host, None),
            None => return Err(format!("'{text}' goes on after its bracket")),
        }
    } else {
        match text.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                return Err(format!(
                    "'{text}' holds more than one colon; an IPv6 address stands in brackets"
                ));
            }
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        }
    };
    let port = match port {
        None => None,
        Some(port) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => {
            match port.parse() {
                Ok(0) | Err(_) => return Err(format!("'{port}' is no port; ports are 1 to 65535")),
                Ok(number) => Some(number),
            }
        }
        Some(port) => return Err(format!("'{port}' is no port; ports are 1 to 65535")),
    };
    Ok((Host::parse(host)?, port))
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkVerdict {
    /// It was let through, or answered from the cache.
    Allowed,
    /// It was refused; nothing of it went on.
    Refused,
    /// It was allowed, but the server could not be reached or a limit cut it short.
    Failed,
}

/// What the cache had to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheUse {
    /// It gave the answer; nothing went out.
    Hit,
    /// It had none.
    Miss,
}

/// One request to the network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkRequest {
    /// `CONNECT` for a tunnel (HTTPS). Empty where no request could be understood.
    pub method: String,
    /// The host asked for, as far as it was understood.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The URL, its first 2,000 bytes; of a tunnel `host:port`.
    pub url: String,
    /// The status that the tool got.
    pub status: Option<u16>,
    /// Bytes to the server.
    pub sent_bytes: u64,
    /// Bytes from the server, or from the cache.
    pub received_bytes: u64,
    /// From the request's head to the answer's last byte, in microseconds.
    pub wall_us: u64,
    /// What became of it.
    pub verdict: NetworkVerdict,
    /// Why, and whatever else there is to know.
    pub note: Option<String>,
    /// What the cache had to do with it.
    pub cache: Option<CacheUse>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn permit(entries: &[&str], host: &str, port: u16) -> Option<Permit> {
        AllowList::parse(entries)
            .unwrap()
            .permit(&Host::parse(host).unwrap(), port)
    }

    #[test]
    fn a_list_covers_what_it_lets_through_itself() {
        for (own, other, expected) in [
            ("example.org", "example.org", true),
            ("example.org", "EXAMPLE.org.:443", true),
            ("example.org:443", "example.org", false),
            ("example.org", "example.org:8080", false),
            ("*.example.org:443", "a.example.org:443", true),
            ("*.example.org:443", "*.a.example.org:443", true),
            ("*.example.org:443", "*.example.org:443", true),
            ("*.a.example.org:443", "*.example.org:443", false),
            ("*.example.org:443", "example.org:443", false),
            ("*.example.org:443", "notexample.org:443", false),
            ("a.example.org:443", "*.example.org:443", false),
            ("internal:db.corp:80", "db.corp:80", true),
            ("db.corp:80", "internal:db.corp:80", false),
            ("192.0.2.7:80", "[::ffff:192.0.2.7]:80", true),
        ] {
            let list = |entry: &str| AllowList::parse([entry]).unwrap();
            assert_eq!(list(own).covers(&list(other)), expected, "{own} {other}");
        }
    }

    #[test]
    fn entries_allow_what_they_say() {
        use Permit::{AnyAddress, PublicAddress};
        let list = [
            "Example.ORG.",
            "*.example.net:8443",
            "internal:db.corp:5432",
            "192.0.2.7:80",
            "[2001:db8::7]:443",
        ];
        for (host, port, expected) in [
            ("example.org", 80, Some(PublicAddress)),
            ("EXAMPLE.org.", 443, Some(PublicAddress)),
            ("example.org", 8080, None),
            ("www.example.org", 443, None),
            ("notexample.org", 443, None),
            ("a.example.net", 8443, Some(PublicAddress)),
            ("a.b.example.net", 8443, Some(PublicAddress)),
            ("example.net", 8443, None),
            ("aexample.net", 8443, None),
            ("a.example.net", 443, None),
            ("a.example.net.evil.org", 8443, None),
            ("db.corp", 5432, Some(AnyAddress)),
            ("192.0.2.7", 80, Some(AnyAddress)),
            ("[::ffff:192.0.2.7]", 80, Some(AnyAddress)),
            ("192.0.2.8", 80, None),
            ("[2001:db8:0::7]", 443, Some(AnyAddress)),
        ] {
            assert_eq!(permit(&list, host, port), expected, "{host}:{port}");
        }
        // The more open of two entries for the same host counts.
        assert_eq!(
            permit(&["a.org", "internal:a.org:80"], "a.org", 80),
            Some(AnyAddress)
        );
    }

    #[test]
    fn wrong_entries_are_named() {
        for (entry, part) in [
            ("", "the host is missing"),
            ("*", "a '*' stands only for"),
            ("*.org", "top-level domain"),
            ("*.1.2.3.4", "addresses"),
            ("a*.example.org", "a '*' stands only for"),
            ("https://example.org", "this is a URL"),
            ("example.org/path", "this is a URL"),
            ("example.org:", "no port"),
            ("example.org:0", "no port"),
            ("example.org:65536", "no port"),
            ("example.org:+80", "no port"),
            ("::1", "brackets"),
            ("[::1", "closing bracket"),
            ("[::1]x", "after its bracket"),
            ("[fe80::1%eth0]", "no IPv6 address"),
            ("exa mple.org", "no host name"),
            ("a..b", "no host name"),
            ("user@example.org", "no host name"),
            ("bücher.example", "xn--"),
            ("127.1", "neither"),
            ("0x7f.0x1", "neither"),
            ("2130706433", "neither"),
            ("127.0.0.01", "neither"),
        ] {
            let error = AllowList::parse([entry]).unwrap_err().to_string();
            assert!(
                error.contains(part) && error.contains(&format!("'{entry}'")),
                "{error}"
            );
        }
        assert!(AllowList::parse::<&str>([]).is_err());
        let mut list = AllowList::parse(["a.org"]).unwrap();
        list.only_cache = true;
        assert!(
            list.check()
                .unwrap_err()
                .to_string()
                .contains("no cache directory")
        );
    }

    #[test]
    fn the_row_and_the_environment_tell_of_the_proxy() {
        assert!(Network::None.env().is_empty() && Network::None.row().is_none());
        let network = Network::Allow(AllowList::parse(["a.org", "internal:*.b.c:1"]).unwrap());
        assert_eq!(
            network.row().unwrap().value,
            "allow list: a.org, internal:*.b.c:1"
        );
        assert!(
            network
                .env()
                .contains(&"https_proxy=http://127.0.0.1:3128".to_owned())
        );
        assert!(!network.env().iter().any(|e| e.starts_with("ALL_PROXY")));
    }

    /// The matcher told in another way: compares labels from the right, one by one.
    fn oracle(entry: &str, host: &str, port: u16) -> bool {
        let (pattern, ports) = match entry.rsplit_once(':') {
            Some((pattern, port)) => (pattern, vec![port.parse().unwrap()]),
            None => (entry, vec![80, 443]),
        };
        let mut labels = host.trim_end_matches('.').rsplit('.');
        for wanted in pattern.rsplit('.') {
            if wanted == "*" {
                return ports.contains(&port) && labels.next().is_some();
            }
            if !labels
                .next()
                .is_some_and(|l| l.eq_ignore_ascii_case(wanted))
            {
                return false;
            }
        }
        ports.contains(&port) && labels.next().is_none()
    }

    unsafe extern "C" {
        /// Reads every spelling of an address that C programs ever took.
        fn inet_aton(text: *const libc::c_char, address: *mut libc::in_addr) -> libc::c_int;
    }

    proptest! {
        #[test]
        fn the_matcher_agrees_with_its_oracle(
            entries in prop::collection::vec(r"(\*\.[ab]\.)?[ab](\.[abA]){0,2}(:(80|443|8080))?", 1..4),
            host in r"[ab](\.[abB]){0,4}\.?",
            port in prop::sample::select(vec![80_u16, 443, 8080]),
        ) {
            let list = AllowList::parse(&entries).unwrap();
            let allowed = list.permit(&Host::parse(&host).unwrap(), port).is_some();
            let expected = entries.iter().any(|e| oracle(e, &host, port));
            prop_assert_eq!(allowed, expected, "{:?} {} {}", entries, host, port);
        }

        #[test]
        fn any_text_is_parsed_or_refused_and_what_is_parsed_says_itself_again(text in r"\PC{0,40}") {
            if let Ok(list) = AllowList::parse([&text]) {
                let again = AllowList::parse([list.to_string()]).unwrap();
                prop_assert_eq!(&again, &list);
            }
            let _ = split_port(&text);
        }

        #[test]
        fn no_name_is_what_a_resolver_takes_for_an_address(text in r"(0[xX])?[0-9a-f]{1,10}(\.(0x)?[0-9a-f]{0,4}){0,3}\.?") {
            if let Ok(Host::Name(name)) = Host::parse(&text) {
                let mut address = libc::in_addr { s_addr: 0 };
                let name = std::ffi::CString::new(name).unwrap();
                // SAFETY: a C string and room for one address.
                let numeric = unsafe { inet_aton(name.as_ptr(), &raw mut address) };
                prop_assert_eq!(numeric, 0, "{:?} is an address to inet_aton", name);
            }
        }
    }
}
