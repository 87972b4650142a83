//! The network of sandboxes: none, or an allow list kept by a proxy outside. Each refusal has a request beside it that
//! shows the way is there.
//!
//! Each test runs on every backend; those of `docker` are skipped where there is no engine. As root the whole file also runs
//! once more as an ordinary user (`also_as_an_ordinary_user`).

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drillyard_sandbox::{
    AllowList, CacheUse, Call, CallOutcome, CallResult, Holds, Network, NetworkVerdict, Pool,
    SandboxConfig, Setup,
};

use common::{engine, fresh as lease, shell, small, text};

/// Makes a test of each function for each backend. It takes the backend's configuration, without a network.
macro_rules! every_backend_must {
    ($($name:ident,)*) => {
        mod local {
            $(#[tokio::test]
            async fn $name() {
                super::$name(super::small()).await;
            })*
        }
        mod docker {
            $(#[tokio::test]
            async fn $name() {
                if let Some(base) = super::contained().await {
                    super::$name(base).await;
                }
            })*
        }
    };
}

every_backend_must! {
    tools_reach_what_is_listed_and_nothing_else,
    the_proxy_is_the_only_way_out,
    by_default_there_is_nothing,
    tls_goes_through_a_tunnel_to_the_host_it_names,
    requests_are_told_with_their_call_and_their_sandbox,
    answers_are_kept_for_replays,
    large_bodies_arrive_whole,
    who_never_reads_holds_up_nobody_else,
    connections_may_end_at_any_moment,
    what_is_under_way_when_a_call_ends_is_not_the_next_ones,
    floods_are_bounded_and_dead_sandboxes_leave_no_descriptor,
    wrong_networks_are_refused_at_start,
}

/// The same in containers; nothing where there is no engine.
async fn contained() -> Option<SandboxConfig> {
    let address = tokio::task::spawn_blocking(engine::engine).await.unwrap()?;
    Some(SandboxConfig {
        backend: "docker".into(),
        engine: Some(address.to_owned()),
        ..small()
    })
}

async fn start(base: &SandboxConfig, network: Network) -> Pool {
    let config = SandboxConfig {
        network,
        ..base.clone()
    };
    Pool::start(config).await.unwrap()
}

fn allow<const N: usize>(entries: [String; N]) -> Network {
    Network::Allow(AllowList::parse(entries).unwrap())
}

/// A web server of the host that answers with the path it was asked for, and does as a few of them say.
struct Web {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Web {
    /// On an address of loopback that no tool takes for its own machine.
    const ADDRESS: &str = "127.0.0.2";
    /// What `/large` answers with, over and over, and how many bytes in all.
    const PATTERN: &[u8] = b"0123456789abcdef";
    const LARGE: usize = 8 << 20;

    fn start() -> Self {
        let listener = TcpListener::bind((Self::ADDRESS, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let keep = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, keep) = (stream.unwrap(), Arc::clone(&keep));
                std::thread::spawn(move || {
                    let mut head = Vec::new();
                    let mut byte = [0];
                    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                        head.push(byte[0]);
                    }
                    let path = text(&head).split(' ').nth(1).unwrap_or_default().to_owned();
                    if path.is_empty() {
                        return;
                    }
                    keep.lock().unwrap().push(path.clone());
                    let length = text(&head)
                        .lines()
                        .find_map(|l| {
                            l.to_lowercase()
                                .strip_prefix("content-length: ")?
                                .parse()
                                .ok()
                        })
                        .unwrap_or(0_usize);
                    let body = match path.as_str() {
                        "/silent" => {
                            let _ = stream.read(&mut byte);
                            keep.lock().unwrap().push("/silent closed".into());
                            return;
                        }
                        // Reads no body and answers nothing.
                        "/deaf" => {
                            std::thread::sleep(Duration::from_secs(5));
                            return;
                        }
                        "/endless" => {
                            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
                            while stream.write_all(&Self::PATTERN.repeat(4096)).is_ok() {}
                            return;
                        }
                        "/large" => Self::PATTERN.repeat(Self::LARGE / Self::PATTERN.len()),
                        "/echo" => {
                            let mut body = vec![0; length];
                            let _ = stream.read_exact(&mut body);
                            body
                        }
                        _ => path.into_bytes(),
                    };
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                    let _ = stream.write_all(&[head.as_bytes(), &body].concat());
                });
            }
        });
        Self { port, asked }
    }

    fn entry(&self) -> String {
        format!("{}:{}", Self::ADDRESS, self.port)
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}:{}{path}", Self::ADDRESS, self.port)
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

async fn tools_reach_what_is_listed_and_nothing_else(base: SandboxConfig) {
    let web = Web::start();
    let other = Web::start();
    let pool = start(&base, allow([web.entry()])).await;
    let row = pool
        .limits()
        .rows
        .iter()
        .filter(|r| r.limit == "network")
        .collect::<Vec<_>>();
    assert_eq!(row.len(), 1);
    assert_eq!(
        (row[0].value.clone(), row[0].holds),
        (format!("allow list: {}", web.entry()), Holds::Yes)
    );
    assert!(row[0].how.contains("127.0.0.1:3128"), "{}", row[0].how);
    let mut sandbox = lease(&pool).await;

    let result = shell(
        &mut sandbox,
        &format!("curl -sS {}", web.url("/by-curl?x=1")),
    )
    .await;
    assert_eq!(
        text(&result.stdout),
        "/by-curl?x=1",
        "{}",
        text(&result.stderr)
    );
    let [request] = result.network.as_slice() else {
        panic!("{:?}", result.network);
    };
    assert_eq!(
        (
            request.method.as_str(),
            request.url.clone(),
            request.host.as_str(),
            request.port
        ),
        ("GET", web.url("/by-curl?x=1"), Web::ADDRESS, web.port)
    );
    assert_eq!(
        (
            request.verdict,
            request.status,
            &request.note,
            request.cache
        ),
        (NetworkVerdict::Allowed, Some(200), &None, None)
    );
    assert!(request.received_bytes > 12 && request.sent_bytes > 12);
    let python = format!(
        "python3 -c 'import urllib.request as u; print(u.urlopen(\"{}\").read().decode())'",
        web.url("/by-python")
    );
    let result = shell(&mut sandbox, &python).await;
    assert_eq!(
        text(&result.stdout),
        "/by-python\n",
        "{}",
        text(&result.stderr)
    );

    // Another port, another host, this machine's own loopback, an address in disguise; all are up or exist.
    TcpStream::connect((Web::ADDRESS, other.port)).unwrap();
    for url in [
        other.url("/"),
        "http://example.org/".into(),
        format!("http://127.0.0.3:{}/", web.port),
        "http://169.254.169.254/latest/meta-data/".into(),
        format!("http://[::ffff:7f00:2]:{}/", other.port),
    ] {
        let result = shell(
            &mut sandbox,
            &format!("curl -sS -o - -w '%{{http_code}}' '{url}'"),
        )
        .await;
        let said = text(&result.stdout);
        assert!(
            said.ends_with("403") && said.contains("is not listed\nallowed: 127.0.0.2:"),
            "{url}: {said}"
        );
        assert_eq!(result.network.len(), 1);
        assert_eq!(
            (result.network[0].verdict, result.network[0].status),
            (NetworkVerdict::Refused, Some(403))
        );
    }
    assert_eq!(web.asked(), ["/by-curl?x=1", "/by-python"]);
    assert!(other.asked().is_empty());
    sandbox.close().await;
}

async fn the_proxy_is_the_only_way_out(base: SandboxConfig) {
    let web = Web::start();
    let (address, port) = (Web::ADDRESS, web.port);
    TcpStream::connect((address, port)).unwrap();
    let pool = start(&base, allow([web.entry()])).await;
    let mut sandbox = lease(&pool).await;
    let result = shell(
        &mut sandbox,
        &format!(
            "curl -sS --noproxy '*' {}; echo > /dev/tcp/{address}/{port}",
            web.url("/direct")
        ),
    )
    .await;
    assert!(
        text(&result.stderr).contains("Connection refused"),
        "{}",
        text(&result.stderr)
    );
    let result = shell(&mut sandbox, "echo > /dev/tcp/10.0.0.1/80").await;
    assert!(
        text(&result.stderr).contains("unreachable"),
        "{}",
        text(&result.stderr)
    );
    // No name is known inside, and no question about one gets out.
    let result = shell(&mut sandbox, "getent hosts example.org; python3 -c 'import socket; socket.getaddrinfo(\"example.org\", 80)'").await;
    assert!(
        text(&result.stderr).contains("gaierror") && result.stdout.is_empty(),
        "{}",
        text(&result.stderr)
    );
    assert!(result.network.is_empty());
    // The proxy itself is there, and its place cannot be taken.
    let result = shell(
        &mut sandbox,
        "exec 3<>/dev/tcp/127.0.0.1/3128 && echo there",
    )
    .await;
    assert_eq!(text(&result.stdout), "there\n");
    let bind = "python3 -c 'import socket as s
for a in (\"127.0.0.1\", \"0.0.0.0\"):
    x = s.socket(); x.setsockopt(s.SOL_SOCKET, s.SO_REUSEADDR, 1); x.setsockopt(s.SOL_SOCKET, s.SO_REUSEPORT, 1)
    try: x.bind((a, 3128)); x.listen(); print(\"bound\")
    except OSError as e: print(e.errno)'";
    let result = shell(&mut sandbox, bind).await;
    assert_eq!(text(&result.stdout), "98\n98\n", "{}", text(&result.stderr));
    // Servers of one's own stay possible.
    let own = "python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & \
               for i in $(seq 200); do curl -sS http://127.0.0.1:8000/ >/dev/null 2>&1 && echo own && break; sleep 0.05; done";
    assert_eq!(text(&shell(&mut sandbox, own).await.stdout), "own\n");
    assert!(web.asked().is_empty(), "{:?}", web.asked());
    sandbox.close().await;
}

async fn by_default_there_is_nothing(base: SandboxConfig) {
    let pool = start(&base, Network::None).await;
    let row = pool
        .limits()
        .rows
        .iter()
        .find(|r| r.limit == "network")
        .unwrap();
    assert_eq!(row.value, "none");
    let mut sandbox = lease(&pool).await;
    let result = shell(
        &mut sandbox,
        "env | grep -i proxy; echo > /dev/tcp/127.0.0.1/3128",
    )
    .await;
    assert!(result.stdout.is_empty());
    assert!(
        text(&result.stderr).contains("Connection refused"),
        "{}",
        text(&result.stderr)
    );
    sandbox.close().await;
}

/// A TLS server of the host for `localhost`, and its certificate.
struct Tls {
    server: Child,
    port: u16,
    certificate: Vec<u8>,
}

impl Tls {
    fn start(dir: &std::path::Path) -> Option<Self> {
        let openssl = |args: &[&str]| {
            Command::new("openssl")
                .args(args)
                .current_dir(dir)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
        };
        let made = openssl(&[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            "key",
            "-out",
            "cert",
        ]);
        let Ok(mut made) = made else {
            eprintln!("SKIPPED: there is no openssl here");
            return None;
        };
        assert!(made.wait().unwrap().success());
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let accept = format!("127.0.0.1:{port}");
        let server = openssl(&[
            "s_server", "-accept", &accept, "-cert", "cert", "-key", "key", "-www", "-quiet",
        ])
        .unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(Self {
            server,
            port,
            certificate: std::fs::read(dir.join("cert")).unwrap(),
        })
    }
}

impl Drop for Tls {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

async fn tls_goes_through_a_tunnel_to_the_host_it_names(base: SandboxConfig) {
    let dir = tempfile::tempdir().unwrap();
    let Some(tls) = Tls::start(dir.path()) else {
        return;
    };
    let port = tls.port;
    let pool = start(&base, allow([format!("internal:localhost:{port}")])).await;
    let setup = Setup::new([("cert.pem", &tls.certificate[..])]);
    let mut sandbox = pool.lease(&setup).await.unwrap();
    let curl = |more: &str| {
        format!("curl -sS --noproxy '' --cacert cert.pem {more} https://localhost:{port}/")
    };
    let result = shell(&mut sandbox, &curl("")).await;
    assert!(
        text(&result.stdout).contains("TLSv1"),
        "{}",
        text(&result.stderr)
    );
    let [request] = result.network.as_slice() else {
        panic!("{:?}", result.network);
    };
    assert_eq!(
        (
            request.method.as_str(),
            request.url.clone(),
            request.verdict,
            request.status
        ),
        (
            "CONNECT",
            format!("localhost:{port}"),
            NetworkVerdict::Allowed,
            Some(200)
        )
    );
    assert!(
        request.received_bytes > 1000 && request.sent_bytes > 200,
        "{request:?}"
    );
    let python = format!(
        "no_proxy= NO_PROXY= SSL_CERT_FILE=cert.pem python3 -c 'import urllib.request as u; print(len(u.urlopen(\"https://localhost:{port}/\").read()))'"
    );
    let result = shell(&mut sandbox, &python).await;
    assert!(
        text(&result.stdout)
            .trim()
            .parse::<usize>()
            .is_ok_and(|n| n > 100),
        "{}",
        text(&result.stderr)
    );

    // The same tunnel with another name in its greeting; without a name; with another protocol.
    let client = |name: &str| {
        format!(
            "echo Q | openssl s_client -proxy 127.0.0.1:3128 -connect localhost:{port} {name} -CAfile cert.pem 2>&1 | grep -q 'BEGIN CERTIFICATE' && echo shown || echo not"
        )
    };
    assert_eq!(
        text(
            &shell(&mut sandbox, &client("-servername localhost"))
                .await
                .stdout
        ),
        "shown\n"
    );
    assert_eq!(
        text(&shell(&mut sandbox, &client("-noservername")).await.stdout),
        "shown\n"
    );
    let result = shell(&mut sandbox, &client("-servername evil.example")).await;
    assert_eq!(text(&result.stdout), "not\n");
    assert_eq!(result.network[0].verdict, NetworkVerdict::Refused);
    assert!(
        result.network[0]
            .note
            .as_deref()
            .unwrap()
            .contains("'evil.example'"),
        "{:?}",
        result.network
    );
    let nested = format!(
        "exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT localhost:{port} HTTP/1.1\\r\\n\\r\\n' >&3; head -n 2 <&3; \
         printf 'CONNECT evil.example:443 HTTP/1.1\\r\\n\\r\\n' >&3; cat <&3 | od -An -tx1"
    );
    let result = shell(&mut sandbox, &nested).await;
    let said = text(&result.stdout);
    assert!(
        said.starts_with("HTTP/1.1 200") && said.contains("15 03 01 00 02 02 31"),
        "{said}"
    );
    assert!(
        result.network[0]
            .note
            .as_deref()
            .unwrap()
            .contains("only TLS"),
        "{:?}",
        result.network
    );

    // The same name where its entry does not say that it is inside.
    let pool = start(&base, allow([format!("localhost:{port}")])).await;
    let mut strict = pool.lease(&setup).await.unwrap();
    let result = shell(&mut strict, &curl("")).await;
    assert_eq!(result.outcome, CallOutcome::Error);
    assert!(
        text(&result.stderr).contains("403"),
        "{}",
        text(&result.stderr)
    );
    assert!(
        result.network[0]
            .note
            .as_deref()
            .unwrap()
            .contains(&format!("list 'internal:localhost:{port}'")),
        "{:?}",
        result.network
    );
    sandbox.close().await;
    strict.close().await;
}

async fn requests_are_told_with_their_call_and_their_sandbox(base: SandboxConfig) {
    let web = Web::start();
    let pool = start(&base, allow([web.entry()])).await;
    let (mut a, mut b) = (lease(&pool).await, lease(&pool).await);
    let paths = |result: &CallResult| -> Vec<String> {
        result
            .network
            .iter()
            .map(|r| r.url.rsplit_once('/').unwrap().1.to_owned())
            .collect()
    };
    let many = |who: &str| {
        let urls: Vec<_> = (0..5).map(|i| web.url(&format!("/{who}{i}"))).collect();
        format!("for u in {}; do curl -sS $u; done", urls.join(" "))
    };
    let (in_a, in_b) = (many("a"), many("b"));
    let (ra, rb) = tokio::join!(shell(&mut a, &in_a), shell(&mut b, &in_b));
    assert_eq!(paths(&ra), ["a0", "a1", "a2", "a3", "a4"]);
    assert_eq!(paths(&rb), ["b0", "b1", "b2", "b3", "b4"]);
    assert!(shell(&mut a, "true").await.network.is_empty());

    // What is under way when a call ends is cut off and told with that call; fire and forget gets nowhere later.
    let left = format!(
        "curl -sS {} & for i in $(seq 100); do sleep 0.02; done & \
         exec 3<>/dev/tcp/127.0.0.1/3128; printf 'GET {} HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n' >&3; sleep 1; echo done",
        web.url("/silent"),
        web.url("/thrown"),
        web.entry(),
    );
    let result = shell(&mut a, &left).await;
    assert_eq!(
        (text(&result.stdout).as_str(), result.survivors),
        ("done\n", true)
    );
    let mut seen = paths(&result);
    seen.sort();
    assert_eq!(seen, ["silent", "thrown"]);
    let silent = result
        .network
        .iter()
        .find(|r| r.url.ends_with("silent"))
        .unwrap();
    assert_eq!(
        (silent.verdict, silent.note.as_deref()),
        (NetworkVerdict::Failed, Some("the tool went away first"))
    );
    let until = Instant::now() + Duration::from_secs(10);
    while !web.asked().contains(&"/silent closed".to_owned()) {
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(shell(&mut a, "true").await.network.is_empty());
    // A call that times out tells as well.
    let call = Call::Shell {
        command: format!("curl -sS {}", web.url("/silent")),
        timeout: Some(Duration::from_millis(800)),
    };
    let result = a.call(call).await.unwrap();
    assert_eq!(
        (result.outcome, paths(&result)),
        (CallOutcome::Timeout, vec!["silent".to_owned()])
    );

    // The two do not meet: a server in one is not to be found in the other, by no way.
    let serve = "python3 -c 'import socket as s, time
l = s.socket(); l.bind((\"0.0.0.0\", 9999)); l.listen(); print(\"up\", flush=True); l.settimeout(3)
try: l.accept(); print(\"met\")
except TimeoutError: print(\"alone\")'";
    let look = "sleep 1; for i in $(seq 10); do (echo > /dev/tcp/127.0.0.1/9999) 2>/dev/null && echo found; sleep 0.1; done; curl -sS http://127.0.0.1:9999/ --noproxy ''";
    let (ra, rb) = tokio::join!(shell(&mut a, serve), shell(&mut b, look));
    assert_eq!(text(&ra.stdout), "up\nalone\n", "{}", text(&ra.stderr));
    assert!(
        !text(&rb.stdout).contains("found") && text(&rb.stdout).contains("is not listed"),
        "{}",
        text(&rb.stdout)
    );

    // A fresh sandbox has a network of its own again.
    a.reset().await.unwrap();
    let result = shell(&mut a, &format!("curl -sS {}", web.url("/after"))).await;
    assert_eq!(
        (text(&result.stdout).as_str(), paths(&result)),
        ("/after", vec!["after".to_owned()])
    );
    a.close().await;
    b.close().await;
}

async fn answers_are_kept_for_replays(base: SandboxConfig) {
    let web = Web::start();
    let dir = tempfile::tempdir().unwrap();
    let mut list = AllowList::parse([web.entry()]).unwrap();
    list.cache = Some(dir.path().join("cache").to_str().unwrap().into());
    let command = format!("curl -sS {}; curl -sS {}", web.url("/x"), web.url("/x"));
    let pool = start(&base, Network::Allow(list.clone())).await;
    let mut sandbox = lease(&pool).await;
    let result = shell(&mut sandbox, &command).await;
    assert_eq!(text(&result.stdout), "/x/x");
    let uses = |result: &CallResult| {
        result
            .network
            .iter()
            .map(|r| r.cache.unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(uses(&result), [CacheUse::Miss, CacheUse::Hit]);
    list.only_cache = true;
    let pool = start(&base, Network::Allow(list)).await;
    let mut replay = lease(&pool).await;
    let result = shell(&mut replay, &command).await;
    assert_eq!(
        (text(&result.stdout).as_str(), uses(&result)),
        ("/x/x", vec![CacheUse::Hit; 2])
    );
    let result = shell(
        &mut replay,
        &format!("curl -sS -w '%{{http_code}}' {}", web.url("/y")),
    )
    .await;
    assert!(
        text(&result.stdout).ends_with("504"),
        "{}",
        text(&result.stdout)
    );
    assert_eq!(
        (result.network[0].verdict, uses(&result)),
        (NetworkVerdict::Refused, vec![CacheUse::Miss])
    );
    assert_eq!(web.asked(), ["/x"]);
    sandbox.close().await;
    replay.close().await;
}

/// A Python program as a command line; `GET(path)` makes a request to a server, `connect()` a connection to the proxy.
fn python(web: &Web, program: &str) -> String {
    format!(
        "python3 - <<'END'\nimport socket as s, struct, time\n\
         def GET(path): return f\"GET http://{0}{{path}} HTTP/1.1\\r\\nHost: {0}\\r\\n\\r\\n\".encode()\n\
         def connect():\n    x = s.socket(); x.connect((\"127.0.0.1\", 3128)); return x\n\
         {program}\nEND",
        web.entry()
    )
}

async fn large_bodies_arrive_whole(base: SandboxConfig) {
    let web = Web::start();
    let pool = start(&base, allow([web.entry()])).await;
    let mut sandbox = lease(&pool).await;
    // Several at once, each compared byte by byte.
    let down = format!(
        "for i in 1 2 3 4; do curl -sS {} | python3 -c 'import sys; d = sys.stdin.buffer.read(); \
         print(len(d), d == b\"0123456789abcdef\" * (len(d) // 16))' & done; wait",
        web.url("/large")
    );
    let result = shell(&mut sandbox, &down).await;
    assert_eq!(
        text(&result.stdout),
        format!("{} True\n", Web::LARGE).repeat(4),
        "{}",
        text(&result.stderr)
    );
    assert_eq!(result.network.len(), 4);
    for request in &result.network {
        assert!(request.received_bytes >= Web::LARGE as u64, "{request:?}");
    }
    // What PID 1 carries is not what tools read.
    let read = result.read_chars.unwrap();
    let most = 4 * 3 * Web::LARGE as u64;
    assert!(read < most, "{read} bytes read");
    // Bytes that look like frames, both ways.
    let up = format!(
        "python3 -c 'import sys; sys.stdout.buffer.write(bytes([0,0,0,0, 5,0,0,0, 0,0,0,0, 4]) * 100000 + bytes(range(256)) * 9000)' > body; \
         curl -sS --data-binary @body -H 'Expect:' {} | cmp - body && echo same",
        web.url("/echo")
    );
    let result = shell(&mut sandbox, &up).await;
    assert_eq!(text(&result.stdout), "same\n", "{}", text(&result.stderr));
    assert!(
        result.network[0].sent_bytes > 3_600_000,
        "{:?}",
        result.network
    );
    sandbox.close().await;
}

async fn who_never_reads_holds_up_nobody_else(base: SandboxConfig) {
    let web = Web::start();
    let pool = start(&base, allow([web.entry()])).await;
    let mut sandbox = lease(&pool).await;
    let program = r#"
held = []
for i in range(31):
    x = connect(); x.send(GET("/endless")); held.append(x)
time.sleep(0.5)
x = connect(); x.send(GET("/other"))
answer = b""
while not answer.endswith(b"/other"): answer += x.recv(100)
print("y" * 500000)
"#;
    let result = shell(&mut sandbox, &python(&web, program)).await;
    assert_eq!(
        (result.outcome, result.stdout.len()),
        (CallOutcome::Ok, 500_001),
        "{}",
        text(&result.stderr)
    );
    assert!(result.wall < Duration::from_secs(10), "{:?}", result.wall);
    assert_eq!(result.network.len(), 32);
    // A server that reads nothing, while the clock runs.
    let call = Call::Shell {
        command: format!(
            "head -c 20000000 /dev/zero | curl -sS -T - -H 'Expect:' {}",
            web.url("/deaf")
        ),
        timeout: Some(Duration::from_millis(800)),
    };
    let result = sandbox.call(call).await.unwrap();
    assert_eq!(result.outcome, CallOutcome::Timeout);
    assert!(result.wall < Duration::from_secs(3), "{:?}", result.wall);
    let result = shell(&mut sandbox, &format!("curl -sS {}", web.url("/still"))).await;
    assert_eq!(text(&result.stdout), "/still", "{}", text(&result.stderr));
    sandbox.close().await;
}

async fn connections_may_end_at_any_moment(base: SandboxConfig) {
    let web = Web::start();
    let mut list = AllowList::parse([web.entry()]).unwrap();
    list.limits.requests_per_call = 10_000;
    let pool = start(&base, Network::Allow(list)).await;
    let mut sandbox = lease(&pool).await;
    let program = r#"
for i in range(400):
    x, k = connect(), i % 10
    request = GET(("/x", "/large", "/endless")[i % 3])
    if k == 1: x.send(request[:i % len(request)])
    if k > 1: x.send(request)
    if k == 2: x.shutdown(s.SHUT_WR)
    if k == 3: x.recv(100)
    if k == 4: x.shutdown(s.SHUT_RDWR)
    if k == 5: x.shutdown(s.SHUT_RD)
    if k in (6, 7): x.setsockopt(s.SOL_SOCKET, s.SO_LINGER, struct.pack("ii", 1, 0))
    if k in (7, 8): x.recv(50000)
    if k == 9: x.send(b"\0" * 1000)
    x.close()
x = connect(); x.send(GET("/last"))
answer = b""
while not answer.endswith(b"/last"): answer += x.recv(100)
print("last")
"#;
    for _ in 0..2 {
        let result = shell(&mut sandbox, &python(&web, program)).await;
        assert_eq!(text(&result.stdout), "last\n", "{}", text(&result.stderr));
    }
    sandbox.close().await;
}

async fn what_is_under_way_when_a_call_ends_is_not_the_next_ones(base: SandboxConfig) {
    let web = Web::start();
    let pool = start(&base, allow([web.entry()])).await;
    let mut sandbox = lease(&pool).await;
    for i in 0..30 {
        let program = format!(
            r#"
held = []
for i in range(8):
    x = connect(); x.send(GET("/endless")); held.append(x)
for x in held[:{i} % 9]: x.recv(1 << 20)
print({i})
"#
        );
        let result = shell(&mut sandbox, &python(&web, &program)).await;
        assert_eq!(
            text(&result.stdout),
            format!("{i}\n"),
            "{}",
            text(&result.stderr)
        );
        let result = shell(&mut sandbox, "echo next").await;
        assert_eq!(text(&result.stdout), "next\n");
        assert!(result.network.is_empty(), "{:?}", result.network);
    }
    let result = shell(&mut sandbox, &format!("curl -sS {}", web.url("/after"))).await;
    assert_eq!(text(&result.stdout), "/after");
    sandbox.close().await;
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

async fn floods_are_bounded_and_dead_sandboxes_leave_no_descriptor(base: SandboxConfig) {
    const CHILD: &str = "DRILLYARD_TEST_DESCRIPTORS";
    let local = base.backend == "local";
    let name = format!(
        "{}::floods_are_bounded_and_dead_sandboxes_leave_no_descriptor",
        base.backend
    );
    if std::env::var_os(CHILD).is_none() {
        // In a process of its own: other tests open descriptors too.
        let done = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(CHILD, "1")
            .env("DOCKER_HOST", base.engine.unwrap_or_default())
            .output()
            .unwrap();
        assert!(
            done.status.success(),
            "{}{}",
            text(&done.stdout),
            text(&done.stderr)
        );
        return;
    }
    let web = Web::start();
    let pool = start(&base, allow([web.entry()])).await;
    let most = Arc::new(AtomicUsize::new(0));
    let watch = {
        let most = Arc::clone(&most);
        tokio::spawn(async move {
            loop {
                most.fetch_max(descriptors(), Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
    };
    let mut sandbox = lease(&pool).await;
    shell(&mut sandbox, "true").await;
    let quiet = most.load(Ordering::Relaxed);
    let flood = "python3 -c 'import socket as s
held = []
try:
    for i in range(900):
        x = s.socket(); x.setblocking(False); x.connect_ex((\"127.0.0.1\", 3128)); held.append(x)
except OSError as e: print(e)
import time; time.sleep(0.5); print(len(held))'";
    let result = shell(&mut sandbox, flood).await;
    assert_eq!(text(&result.stdout), "900\n", "{}", text(&result.stderr));
    let flooded = most.load(Ordering::Relaxed);
    // Those of containers take none here.
    let taken = if local { quiet + 32 } else { quiet };
    assert!(
        flooded >= taken && flooded <= taken + 12,
        "{quiet} before, {flooded} at most"
    );
    watch.abort();
    let result = shell(&mut sandbox, &format!("curl -sS {}", web.url("/still"))).await;
    assert_eq!(text(&result.stdout), "/still");
    sandbox.close().await;

    let settled = |wanted: usize| async move {
        let until = Instant::now() + Duration::from_secs(10);
        while descriptors() > wanted && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        descriptors()
    };
    let mut before = 0;
    // A container takes a hundred times as long to make.
    for i in 0..if local { 210 } else { 30 } {
        if i == 10 {
            before = settled(0).await;
        }
        let mut sandbox = lease(&pool).await;
        match i % 4 {
            // Closed in order, in the middle of a request, dropped, never used.
            0 => {
                shell(&mut sandbox, &format!("curl -sS {}", web.url("/one"))).await;
                sandbox.close().await;
            }
            1 => {
                let command = format!("curl -sS {}", web.url("/silent"));
                let call = sandbox.call(Call::shell(command));
                let _ = tokio::time::timeout(Duration::from_millis(60), call).await;
                sandbox.close().await;
            }
            2 => drop(sandbox),
            _ => sandbox.close().await,
        }
    }
    let after = settled(before).await;
    assert!(
        after <= before,
        "{before} descriptors before, {after} after"
    );
    drop(pool);
    let end = settled(0).await;
    assert!(end < before, "{end} descriptors left");
}

async fn wrong_networks_are_refused_at_start(base: SandboxConfig) {
    let mut list = AllowList::parse(["example.org"]).unwrap();
    list.only_cache = true;
    let refused = |list: &AllowList| {
        let network = Network::Allow(list.clone());
        Pool::start(SandboxConfig {
            network,
            ..base.clone()
        })
    };
    let error = refused(&list).await.unwrap_err().to_string();
    assert!(
        error.contains("sandbox.network") && error.contains("no cache directory"),
        "{error}"
    );
    list.cache = Some("/proc/nowhere".into());
    let error = refused(&list).await.unwrap_err().to_string();
    assert!(
        error.contains("the cache cannot be used") && error.contains("/proc/nowhere"),
        "{error}"
    );
}

#[tokio::test]
async fn also_as_an_ordinary_user() {
    common::also_as_an_ordinary_user().await;
}
