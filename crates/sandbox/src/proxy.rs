//! The way out of sandboxes that have one: an HTTP proxy in this program, outside of them, that lets through only what
//! the allow list names and writes down every request.
//!
//! A [`Proxy`] belongs to a pool, a [`Traffic`] to one sandbox. The proxy knows whose connection it serves by where it
//! accepted it ([`Accept`]): for `local` a TCP socket that was made inside the sandbox's network namespace and handed
//! out, so there is no relay and no route inside; for `docker` streams that its PID 1 carries; for others any source of
//! byte streams.
//!
//! Every connection carries one request, so no two parsers can disagree on where the second one begins; what goes on
//! to the server is written anew from what was understood. Names are resolved here, addresses checked, and the very
//! address that was checked is connected to. Tunnels carry TLS alone, and its greeting must name the tunnel's host.
//! What is inside TLS cannot be seen: a listed server that serves other hosts under the same name can still be asked
//! for them.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as _, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Version, client, server};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::SocketFlags;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Sleep, timeout};

use crate::network::{
    AllowList, CacheUse, Host, NetworkLimits, NetworkRequest, NetworkVerdict, Permit, split_port,
};
use crate::{SandboxError, Stream};

mod address;
mod cache;
mod hello;

use cache::{Cache, Store};
use hello::Hello;

/// How long connections may take to notice that their tool is dead, before they are cut.
const NOTICE: Duration = Duration::from_millis(50);
/// Between looks whether there is room for another connection.
const NO_ROOM: Duration = Duration::from_millis(20);
/// Bytes of a URL that are written down.
const URL_BYTES: usize = 2000;
/// Bytes of a method that are written down.
const METHOD_BYTES: usize = 32;
/// Bytes of a note.
const NOTE_BYTES: usize = 1000;
/// Name look-ups of one sandbox at once.
const LOOKUPS: usize = 4;
/// Addresses of one name that are tried.
const ADDRESSES: usize = 4;
/// Headers of a request or an answer.
const HEADERS: usize = 128;
/// A TLS alert: fatal, access denied.
const ACCESS_DENIED: [u8; 7] = [21, 3, 1, 0, 2, 2, 49];

/// Headers that concern one connection alone. Those that `Connection` names are dropped too; lengths are told anew.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers that tell caches on the way what to do; a request that the cache may answer goes on without them, so that a
/// whole answer comes.
const ABOUT_CACHES: [HeaderName; 7] = [
    header::CACHE_CONTROL,
    header::PRAGMA,
    header::IF_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_NONE_MATCH,
    header::IF_RANGE,
    header::IF_UNMODIFIED_SINCE,
];

type Body = UnsyncBoxBody<Bytes, io::Error>;
/// Resolves a name; blocks.
type Resolve = dyn Fn(&str, u16) -> io::Result<Vec<IpAddr>> + Send + Sync;

/// Where the connections of one sandbox come from.
pub trait Accept: Send {
    /// The next connection.
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Box<dyn Stream>>>;
    /// Drops the connections that nobody has taken yet: who made them is dead.
    fn clear(&mut self);
}

impl Accept for TcpListener {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Box<dyn Stream>>> {
        TcpListener::poll_accept(self, cx).map_ok(|(stream, _)| {
            let _ = stream.set_nodelay(true);
            Box::new(stream) as Box<dyn Stream>
        })
    }

    fn clear(&mut self) {
        while rustix::net::accept_with(&*self, SocketFlags::CLOEXEC).is_ok() {}
    }
}

impl Accept for UnixListener {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Box<dyn Stream>>> {
        UnixListener::poll_accept(self, cx).map_ok(|(s, _)| Box::new(s) as Box<dyn Stream>)
    }

    fn clear(&mut self) {
        while rustix::net::accept_with(&*self, SocketFlags::CLOEXEC).is_ok() {}
    }
}

impl Accept for mpsc::Receiver<Box<dyn Stream>> {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Box<dyn Stream>>> {
        match self.poll_recv(cx) {
            Poll::Ready(Some(stream)) => Poll::Ready(Ok(stream)),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    fn clear(&mut self) {
        while self.try_recv().is_ok() {}
    }
}

/// The proxy of a pool.
pub struct Proxy {
    allow: AllowList,
    cache: Option<Cache>,
    resolve: Box<Resolve>,
    /// For the connections of all sandboxes together.
    room: Arc<Semaphore>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Proxy").field(&self.allow).finish()
    }
}

impl Proxy {
    /// For an allow list; makes the cache directory where there is to be one.
    pub fn new(allow: AllowList) -> Result<Arc<Self>, SandboxError> {
        Self::with_resolver(
            allow,
            Box::new(|name, port| Ok((name, port).to_socket_addrs()?.map(|a| a.ip()).collect())),
        )
    }

    fn with_resolver(allow: AllowList, resolve: Box<Resolve>) -> Result<Arc<Self>, SandboxError> {
        allow.check()?;
        let cache = allow
            .cache
            .as_deref()
            .map(|directory| Cache::open(directory, allow.limits.cache_bytes))
            .transpose()
            .map_err(|error| SandboxError::Config {
                field: "network",
                message: format!("the cache cannot be used: {error}"),
            })?;
        Ok(Arc::new(Self {
            allow,
            cache,
            resolve,
            room: Arc::new(Semaphore::new(room())),
        }))
    }

    /// Serves the connections of one sandbox until the result is dropped.
    pub fn serve(self: &Arc<Self>, from: impl Accept + 'static) -> Traffic {
        let shared = Arc::new(Shared {
            proxy: Arc::clone(self),
            log: Mutex::default(),
            bytes: AtomicU64::new(0),
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
        });
        let (ends, ended) = mpsc::channel(1);
        Traffic {
            ends,
            server: tokio::spawn(serve(shared, from, ended)),
        }
    }

    fn limits(&self) -> &NetworkLimits {
        &self.allow.limits
    }
}

/// How many connections fit: with a descriptor to the tool and one to the server each, they may take half of what this
/// process can open.
fn room() -> usize {
    let open = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    usize::try_from(open.unwrap_or(u64::MAX) / 4)
        .unwrap_or(usize::MAX)
        .clamp(1, 16_384)
}

/// The network of one sandbox. Dropping it closes its connections and the place where they come from.
#[derive(Debug)]
pub struct Traffic {
    ends: mpsc::Sender<oneshot::Sender<Vec<NetworkRequest>>>,
    server: JoinHandle<()>,
}

impl Traffic {
    /// To be asked when a call has ended and its processes are dead: ends what they left of connections, and says what
    /// they asked for since the last time.
    pub async fn take(&self) -> Vec<NetworkRequest> {
        let (tell, told) = oneshot::channel();
        if self.ends.send(tell).await.is_err() {
            return Vec::new();
        }
        told.await.unwrap_or_default()
    }

    /// Closes everything and comes back when it is closed.
    pub async fn close(mut self) {
        self.server.abort();
        let _ = (&mut self.server).await;
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(
    shared: Arc<Shared>,
    mut from: impl Accept,
    mut ended: mpsc::Receiver<oneshot::Sender<Vec<NetworkRequest>>>,
) {
    let mut connections = JoinSet::new();
    let most = shared.proxy.limits().connections;
    loop {
        let room = shared.proxy.room.available_permits() > 0;
        tokio::select! {
            biased;
            end = ended.recv() => {
                let Some(tell) = end else { return };
                from.clear();
                let noticed = async { while connections.join_next().await.is_some() {} };
                let _ = timeout(NOTICE, noticed).await;
                connections.shutdown().await;
                let _ = tell.send(shared.log().take(shared.proxy.limits()));
            }
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            () = tokio::time::sleep(NO_ROOM), if !room => {}
            stream = poll_fn(|cx| from.poll_accept(cx)), if room && connections.len() < most => match stream {
                Ok(stream) => {
                    let Ok(place) = Arc::clone(&shared.proxy.room).try_acquire_owned() else {
                        continue;
                    };
                    let shared = Arc::clone(&shared);
                    connections.spawn(async move {
                        connection(shared, stream).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    // Out of descriptors, most likely: others will give some back.
                    tracing::warn!(%error, "a sandbox's connection could not be accepted");
                    tokio::time::sleep(NO_ROOM).await;
                }
            }
        }
    }
}

/// What the connections of one sandbox have in common.
struct Shared {
    proxy: Arc<Proxy>,
    log: Mutex<Log>,
    /// From and to servers so far.
    bytes: AtomicU64,
    lookups: Arc<Semaphore>,
}

impl Shared {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to write a request down; nothing if there have been too many.
    fn begin(self: &Arc<Self>, method: &str, url: &str) -> Option<Open> {
        let number = {
            let mut log = self.log();
            if log.begun >= self.proxy.limits().requests_per_call {
                log.beyond += 1;
                return None;
            }
            log.begun += 1;
            log.begun
        };
        Some(Open {
            request: NetworkRequest {
                method: capped(method, METHOD_BYTES),
                host: String::new(),
                port: 0,
                url: capped(url, URL_BYTES),
                status: None,
                sent_bytes: 0,
                received_bytes: 0,
                wall_us: 0,
                verdict: NetworkVerdict::Failed,
                note: Some("the tool went away first".to_owned()),
                cache: None,
            },
            number,
            started: Instant::now(),
            counts: Arc::new(Counts {
                shared: Arc::clone(self),
                sent: AtomicU64::new(0),
                received: AtomicU64::new(0),
                cut: OnceLock::new(),
            }),
        })
    }
}

/// The requests of the current call.
#[derive(Default)]
struct Log {
    /// With their number, in the order in which they ended.
    requests: Vec<(u64, NetworkRequest)>,
    begun: u64,
    /// How many more were refused.
    beyond: u64,
}

impl Log {
    fn take(&mut self, limits: &NetworkLimits) -> Vec<NetworkRequest> {
        let Self {
            mut requests,
            begun: _,
            beyond,
        } = std::mem::take(self);
        requests.sort_by_key(|(number, _)| *number);
        let mut requests: Vec<_> = requests.into_iter().map(|(_, request)| request).collect();
        if beyond > 0 {
            requests.push(NetworkRequest {
                method: String::new(),
                host: String::new(),
                port: 0,
                url: String::new(),
                status: Some(429),
                sent_bytes: 0,
                received_bytes: 0,
                wall_us: 0,
                verdict: NetworkVerdict::Refused,
                note: Some(format!(
                    "{beyond} more requests: a call may make {}",
                    limits.requests_per_call
                )),
                cache: None,
            });
        }
        requests
    }
}

/// A request that is being answered; it is written down when this is dropped, however it ends.
struct Open {
    request: NetworkRequest,
    number: u64,
    started: Instant,
    counts: Arc<Counts>,
}

impl Open {
    fn allowed(&mut self) {
        self.request.verdict = NetworkVerdict::Allowed;
        self.request.note = None;
    }

    fn note(&mut self, note: impl AsRef<str>) {
        self.request.note = Some(capped(note.as_ref(), NOTE_BYTES));
    }

    fn failed(&mut self, why: impl AsRef<str>) {
        self.request.verdict = NetworkVerdict::Failed;
        self.note(why);
    }

    /// Refuses, and says so to the tool.
    fn refuse(mut self, status: StatusCode, why: &str) -> Response<Body> {
        let allow = &self.counts.shared.proxy.allow;
        let text = format!("refused by the sandbox's network: {why}\nallowed: {allow}\n");
        self.request.verdict = NetworkVerdict::Refused;
        self.note(why);
        self.request.status = Some(status.as_u16());
        plain(status, text)
    }

    fn fail(mut self, status: StatusCode, why: &str) -> Response<Body> {
        self.request.status = Some(status.as_u16());
        let text = format!("the sandbox's network: {why}\n");
        self.failed(why);
        plain(status, text)
    }

    fn fault(self, fault: Fault) -> Response<Body> {
        match fault {
            Fault::Refused(why) => self.refuse(StatusCode::FORBIDDEN, &why),
            Fault::Failed(why) => self.fail(StatusCode::BAD_GATEWAY, &why),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut request = self.request.clone();
        request.sent_bytes = self.counts.sent.load(Ordering::Relaxed);
        request.received_bytes = self.counts.received.load(Ordering::Relaxed);
        request.wall_us = self.started.elapsed().as_micros() as u64;
        if let Some(cut) = self.counts.cut.get() {
            request.verdict = NetworkVerdict::Failed;
            request.note = Some(cut.clone());
        }
        self.counts
            .shared
            .log()
            .requests
            .push((self.number, request));
    }
}

fn capped(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}

/// Why a server was not connected to.
enum Fault {
    Refused(String),
    Failed(String),
}

fn plain(status: StatusCode, text: String) -> Response<Body> {
    let body = Full::new(Bytes::from(text)).map_err(|never: Infallible| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// Serves one connection: one request, or a tunnel.
async fn connection(shared: Arc<Shared>, stream: Box<dyn Stream>) {
    let tunnel: Arc<Mutex<Option<Tunnel>>> = Arc::default();
    let understood = Arc::new(AtomicBool::new(false));
    let service = hyper::service::service_fn(|request| {
        understood.store(true, Ordering::Relaxed);
        let (shared, tunnel) = (Arc::clone(&shared), Arc::clone(&tunnel));
        async move { Ok::<_, Infallible>(answer(&shared, &tunnel, request).await) }
    });
    let limits = shared.proxy.limits();
    let served = server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.patience)
        .keep_alive(false)
        .half_close(false)
        .auto_date_header(false)
        .max_buf_size(limits.head_bytes)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
    if let Err(error) = served
        && !understood.load(Ordering::Relaxed)
        && (error.is_parse() || error.is_timeout())
        && let Some(mut open) = shared.begin("", "")
    {
        open.request.verdict = NetworkVerdict::Refused;
        open.request.status = error.is_parse().then_some(400);
        open.note(if error.is_timeout() {
            format!("no whole request came within {:?}", limits.patience)
        } else {
            format!("the request is malformed: {error}")
        });
    }
    let tunnel = tunnel.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(tunnel) = tunnel {
        tunnel.run().await;
    }
}

/// What a request asks for.
struct Asked {
    host: Host,
    port: u16,
    /// Of a plain request: path and query.
    path: String,
}

/// Reads where a request wants to go, refusing all that can be read in two ways.
fn understand<B>(request: &Request<B>) -> Result<Asked, String> {
    let headers = request.headers();
    if headers.get_all(header::HOST).iter().count() > 1 {
        return Err("it has more than one Host header".into());
    }
    let host_header = match headers.get(header::HOST) {
        None => None,
        Some(value) => Some(value.to_str().map_err(|_| "its Host header is no text")?),
    };
    let encodings: Vec<_> = headers
        .get_all(header::TRANSFER_ENCODING)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    let chunked = match encodings.as_slice() {
        [] => false,
        [one] if one.eq_ignore_ascii_case(b"chunked") => true,
        _ => return Err("its Transfer-Encoding is not just 'chunked'".into()),
    };
    if chunked && headers.contains_key(header::CONTENT_LENGTH) {
        return Err("it has both Transfer-Encoding and Content-Length".into());
    }
    let uri = request.uri();
    let authority = uri.authority().map(hyper::http::uri::Authority::as_str);
    if request.method() == Method::CONNECT {
        if uri.scheme().is_some() || uri.path_and_query().is_some() {
            return Err("CONNECT takes a host and a port, not a URL".into());
        }
        let (host, port) = split_port(authority.unwrap_or_default())?;
        let port = port.ok_or("CONNECT needs a port")?;
        if chunked
            || headers
                .get(header::CONTENT_LENGTH)
                .is_some_and(|l| l != "0")
        {
            return Err("CONNECT has no body".into());
        }
        if let Some(text) = host_header {
            let (other, other_port) = split_port(text)?;
            if other != host || other_port.is_some_and(|p| p != port) {
                return Err(format!("its Host header '{text}' names another host"));
            }
        }
        return Ok(Asked {
            host,
            port,
            path: String::new(),
        });
    }
    let authority = match (uri.scheme_str(), authority) {
        (Some("http"), Some(authority)) => authority,
        (Some("https"), _) => return Err("https goes through CONNECT".into()),
        (Some(_), _) => return Err("only http and https are known".into()),
        (None, _) => return Err("this is a proxy: it needs a whole URL".into()),
    };
    let (host, port) = split_port(authority)?;
    let port = port.unwrap_or(80);
    match host_header {
        Some(text) => {
            let (other, other_port) = split_port(text)?;
            if other != host || other_port.unwrap_or(80) != port {
                return Err(format!(
                    "its Host header '{text}' names another host than its URL"
                ));
            }
        }
        None if request.version() == Version::HTTP_11 => {
            return Err("it has no Host header".into());
        }
        None => {}
    }
    let path = uri.path_and_query().map_or("/", |p| p.as_str());
    Ok(Asked {
        host,
        port,
        path: if path.starts_with('/') {
            path.to_owned()
        } else {
            format!("/{path}")
        },
    })
}

async fn answer(
    shared: &Arc<Shared>,
    tunnel: &Mutex<Option<Tunnel>>,
    request: Request<Incoming>,
) -> Response<Body> {
    let url = request.uri().to_string();
    let Some(mut open) = shared.begin(request.method().as_str(), &url) else {
        let most = shared.proxy.limits().requests_per_call;
        let text = format!("refused by the sandbox's network: a call may make {most} requests\n");
        return plain(StatusCode::TOO_MANY_REQUESTS, text);
    };
    let asked = match understand(&request) {
        Ok(asked) => asked,
        Err(why) => return open.refuse(StatusCode::BAD_REQUEST, &why),
    };
    open.request.host = asked.host.to_string();
    open.request.port = asked.port;
    let proxy = &shared.proxy;
    let Some(permit) = proxy.allow.permit(&asked.host, asked.port) else {
        let why = format!("{}:{} is not listed", asked.host, asked.port);
        return open.refuse(StatusCode::FORBIDDEN, &why);
    };
    if request.method() != Method::CONNECT {
        return forward(shared, open, asked, permit, request).await;
    }
    if proxy.allow.only_cache {
        return open.refuse(
            StatusCode::FORBIDDEN,
            "only the cache answers here, and tunnels are not cached",
        );
    }
    let server = match connect(shared, &asked, permit).await {
        Ok(server) => server,
        Err(fault) => return open.fault(fault),
    };
    open.request.status = Some(200);
    let server = Metered::new(server, &open.counts);
    *tunnel.lock().unwrap_or_else(PoisonError::into_inner) = Some(Tunnel {
        client: hyper::upgrade::on(request),
        server,
        host: asked.host,
        open,
    });
    Response::new(
        Full::default()
            .map_err(|never| match never {})
            .boxed_unsync(),
    )
}

/// Passes a plain request on, or answers it from the cache.
async fn forward(
    shared: &Arc<Shared>,
    mut open: Open,
    asked: Asked,
    permit: Permit,
    request: Request<Incoming>,
) -> Response<Body> {
    let proxy = &shared.proxy;
    let (parts, body) = request.into_parts();
    let url = format!("http://{}:{}{}", asked.host, asked.port, asked.path);
    let mut headers = parts.headers;
    drop_hop_by_hop(&mut headers);
    for name in [header::CONTENT_LENGTH, header::EXPECT, header::HOST] {
        headers.remove(name);
    }
    let cacheable = parts.method == Method::GET && body.is_end_stream();
    let mut damaged = None;
    let key = if cacheable && proxy.cache.is_some() {
        for name in &ABOUT_CACHES {
            headers.remove(name);
        }
        let key = Cache::key(&url, &headers);
        match find(proxy, &key).await {
            Ok(Some((kept, file))) => {
                open.request.cache = Some(CacheUse::Hit);
                return cached(open, &kept, file);
            }
            Ok(None) => {}
            Err(error) => damaged = Some(error.to_string()),
        }
        open.request.cache = Some(CacheUse::Miss);
        Some(key)
    } else {
        None
    };
    if proxy.allow.only_cache {
        return match damaged {
            Some(why) => open.fail(StatusCode::BAD_GATEWAY, &why),
            None => open.refuse(
                StatusCode::GATEWAY_TIMEOUT,
                "only the cache answers here, and it has no answer to this request",
            ),
        };
    }
    let server = match connect(shared, &asked, permit).await {
        Ok(server) => server,
        Err(fault) => return open.fault(fault),
    };
    let mut onward = Request::new(body);
    *onward.method_mut() = parts.method;
    let host = if asked.port == 80 {
        asked.host.to_string()
    } else {
        format!("{}:{}", asked.host, asked.port)
    };
    match (asked.path.parse(), HeaderValue::try_from(host)) {
        (Ok(path), Ok(host)) => {
            *onward.uri_mut() = path;
            *onward.headers_mut() = headers;
            onward.headers_mut().insert(header::HOST, host);
            onward
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        _ => return open.refuse(StatusCode::BAD_REQUEST, "its URL cannot be passed on"),
    }
    let (response, driver) = match exchange(proxy, server, onward, &open).await {
        Ok(answered) => answered,
        Err(error) => {
            let why = format!("{url}: {}", chain(&error));
            return open.fail(StatusCode::BAD_GATEWAY, &why);
        }
    };
    let (mut head, body) = response.into_parts();
    if head.status.is_informational() {
        let why = format!("{url}: the server switched to another protocol");
        return open.fail(StatusCode::BAD_GATEWAY, &why);
    }
    drop_hop_by_hop(&mut head.headers);
    open.allowed();
    open.request.status = Some(head.status.as_u16());
    let mut store = None;
    if let (Some(cache), Some(key)) = (&proxy.cache, key) {
        match cache.store(key, &url, head.status.as_u16(), &head.headers) {
            Ok(new) => store = Some(new),
            Err(why) => open.note(why),
        }
    }
    if let Some(damaged) = damaged {
        open.note(damaged);
    }
    head.version = Version::HTTP_11;
    head.extensions.clear();
    let mut relay = Relay {
        body,
        _driver: driver,
        open: Some(open),
        store,
    };
    if relay.body.is_end_stream() {
        relay.complete();
    }
    Response::from_parts(head, relay.boxed_unsync())
}

/// Sends a request and returns the answer's head, its body still to come.
async fn exchange(
    proxy: &Proxy,
    server: TcpStream,
    request: Request<Incoming>,
    open: &Open,
) -> hyper::Result<(Response<Incoming>, Driver)> {
    let (mut sender, connection) = client::conn::http1::Builder::new()
        .max_headers(HEADERS)
        .max_buf_size(proxy.limits().head_bytes)
        .handshake(TokioIo::new(Metered::new(server, &open.counts)))
        .await?;
    let driver = Driver(tokio::spawn(async move {
        let _ = connection.await;
    }));
    Ok((sender.send_request(request).await?, driver))
}

async fn find(
    proxy: &Arc<Proxy>,
    key: &cache::Key,
) -> io::Result<Option<(cache::Kept, std::fs::File)>> {
    let (proxy, key) = (Arc::clone(proxy), key.clone());
    let found = tokio::task::spawn_blocking(move || match &proxy.cache {
        Some(cache) => cache.find(&key).inspect_err(|_| cache.forget(&key)),
        None => Ok(None),
    });
    found.await.map_err(io::Error::other)?
}

fn cached(mut open: Open, kept: &cache::Kept, file: std::fs::File) -> Response<Body> {
    let (Ok(status), Some(headers)) = (StatusCode::from_u16(kept.status), kept.headers()) else {
        let why = format!("the cached answer of {} is damaged", kept.url);
        return open.fail(StatusCode::BAD_GATEWAY, &why);
    };
    open.allowed();
    open.request.status = Some(kept.status);
    let body = KeptBody {
        file,
        left: kept.bytes,
        open: (kept.bytes > 0).then_some(open),
    };
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// An error with what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}

fn drop_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        // What frames the body, and for whom it is, is not for a client to drop.
        .filter(|name| *name != header::HOST && *name != header::CONTENT_LENGTH)
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Connects to a host, at an address that was checked.
async fn connect(shared: &Arc<Shared>, asked: &Asked, permit: Permit) -> Result<TcpStream, Fault> {
    let limits = shared.proxy.limits();
    let port = asked.port;
    if shared.bytes.load(Ordering::Relaxed) >= limits.sandbox_bytes {
        return Err(Fault::Refused(format!(
            "this sandbox has had its {} bytes",
            limits.sandbox_bytes
        )));
    }
    let mut addresses = match &asked.host {
        Host::Address(address) => vec![*address],
        Host::Name(name) => lookup(shared, name, port).await?,
    };
    if permit == Permit::PublicAddress {
        let resolved = addresses.clone();
        addresses.retain(|a| address::is_public(*a));
        if let (true, Some(first)) = (addresses.is_empty(), resolved.first()) {
            return Err(Fault::Refused(format!(
                "{host} resolves to {first}, an address of this machine or of a private network; \
                 to allow it, list 'internal:{host}:{port}'",
                host = asked.host,
            )));
        }
    }
    addresses.truncate(ADDRESSES);
    let patience = limits.patience / u32::try_from(addresses.len().max(1)).unwrap_or(1);
    let mut last = "it has no address".to_owned();
    for address in addresses {
        match timeout(patience, TcpStream::connect((address, port))).await {
            Ok(Ok(server)) => {
                let _ = server.set_nodelay(true);
                return Ok(server);
            }
            Ok(Err(error)) => last = error.to_string(),
            Err(_) => last = format!("no answer within {patience:?}"),
        }
    }
    Err(Fault::Failed(format!(
        "{}:{port} could not be reached: {last}",
        asked.host
    )))
}

async fn lookup(shared: &Arc<Shared>, name: &str, port: u16) -> Result<Vec<IpAddr>, Fault> {
    let found = async {
        // The permit goes along: a look-up whose tool is gone still counts until it ends.
        let turn = Arc::clone(&shared.lookups)
            .acquire_owned()
            .await
            .map_err(io::Error::other)?;
        let (proxy, name) = (Arc::clone(&shared.proxy), name.to_owned());
        tokio::task::spawn_blocking(move || {
            let found = (proxy.resolve)(&name, port);
            drop(turn);
            found
        })
        .await
        .map_err(io::Error::other)?
    };
    match timeout(shared.proxy.limits().patience, found).await {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => Err(Fault::Failed(format!(
            "{name} could not be resolved: {error}"
        ))),
        Err(_) => Err(Fault::Failed(format!("{name} was not resolved in time"))),
    }
}

/// A tunnel that was agreed to, before its first byte.
struct Tunnel {
    client: hyper::upgrade::OnUpgrade,
    server: Metered,
    host: Host,
    open: Open,
}

impl Tunnel {
    async fn run(self) {
        let Self {
            client,
            mut server,
            host,
            mut open,
        } = self;
        let Ok(client) = client.await else { return };
        let mut client = TokioIo::new(client);
        let patience = open.counts.shared.proxy.limits().patience;
        let mut first = Vec::new();
        let greeting = match timeout(patience, greeting(&mut client, &mut first)).await {
            Ok(Ok(greeting)) => greeting,
            Ok(Err(_)) => return,
            Err(_) => Err(format!("no TLS greeting came within {patience:?}")),
        };
        let checked = greeting.and_then(|name| match name {
            Some(name) if Host::parse(&name).ok().as_ref() != Some(&host) => {
                Err(format!("its TLS greeting names another host, '{name}'"))
            }
            _ => Ok(()),
        });
        if let Err(why) = checked {
            open.request.verdict = NetworkVerdict::Refused;
            open.note(why);
            drop(open);
            let _ = timeout(patience, client.write_all(&ACCESS_DENIED)).await;
            let _ = timeout(patience, client.shutdown()).await;
            return;
        }
        open.allowed();
        if server.write_all(&first).await.is_ok() {
            let _ = copy_bidirectional(&mut client, &mut server).await;
        }
    }
}

/// The server's name in a tunnel's first bytes, or why they are not let through. An error means the tool has gone.
async fn greeting(
    client: &mut (impl AsyncRead + Unpin),
    first: &mut Vec<u8>,
) -> io::Result<Result<Option<String>, String>> {
    loop {
        match hello::read(first) {
            Hello::Complete(name) => return Ok(Ok(name)),
            Hello::Wrong(why) => return Ok(Err(why.to_owned())),
            Hello::Incomplete => {
                if client.read_buf(first).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
        }
    }
}

/// What went through a request's connection to its server.
struct Counts {
    shared: Arc<Shared>,
    sent: AtomicU64,
    received: AtomicU64,
    /// Why it was cut short.
    cut: OnceLock<String>,
}

impl Counts {
    fn add(&self, counter: &AtomicU64, n: usize) -> io::Result<()> {
        let n = n as u64;
        counter.fetch_add(n, Ordering::Relaxed);
        let here = self.sent.load(Ordering::Relaxed) + self.received.load(Ordering::Relaxed);
        let all = self.shared.bytes.fetch_add(n, Ordering::Relaxed) + n;
        let limits = self.shared.proxy.limits();
        if here > limits.request_bytes {
            return Err(self.cut(format!(
                "cut short: more than {} bytes in one request",
                limits.request_bytes
            )));
        }
        if all > limits.sandbox_bytes {
            return Err(self.cut(format!(
                "cut short: more than {} bytes in one sandbox",
                limits.sandbox_bytes
            )));
        }
        Ok(())
    }

    fn cut(&self, why: String) -> io::Error {
        io::Error::other(self.cut.get_or_init(|| why).clone())
    }
}

/// A connection to a server that counts, and that ends when both sides are silent for too long.
struct Metered {
    server: TcpStream,
    counts: Arc<Counts>,
    silence: Pin<Box<Sleep>>,
}

impl Metered {
    fn new(server: TcpStream, counts: &Arc<Counts>) -> Self {
        Self {
            server,
            counts: Arc::clone(counts),
            silence: Box::pin(tokio::time::sleep(counts.shared.proxy.limits().idle)),
        }
    }

    fn progress(&mut self) {
        let idle = self.counts.shared.proxy.limits().idle;
        self.silence
            .as_mut()
            .reset(tokio::time::Instant::now() + idle);
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.server).poll_read(cx, buffer) {
            Poll::Ready(Ok(())) => {
                self.progress();
                let n = buffer.filled().len() - before;
                Poll::Ready(self.counts.add(&self.counts.received, n))
            }
            Poll::Pending => self.silence.as_mut().poll(cx).map(|()| {
                let idle = self.counts.shared.proxy.limits().idle;
                Err(self
                    .counts
                    .cut(format!("cut short: both sides were silent for {idle:?}")))
            }),
            error @ Poll::Ready(_) => error,
        }
    }
}

impl AsyncWrite for Metered {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = std::task::ready!(Pin::new(&mut self.server).poll_write(cx, bytes))?;
        self.progress();
        Poll::Ready(
            self.counts
                .add(&self.counts.sent, written)
                .map(|()| written),
        )
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.server).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.server).poll_shutdown(cx)
    }
}

/// The task that drives a connection to a server; dropping it closes the connection.
struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer's body on its way to the tool, and into the cache.
struct Relay {
    body: Incoming,
    _driver: Driver,
    /// Until the body is complete.
    open: Option<Open>,
    store: Option<Store>,
}

impl Relay {
    fn complete(&mut self) {
        if let Some(mut open) = self.open.take()
            && let Some(Err(error)) = self.store.take().map(Store::finish)
        {
            open.note(format!("not kept: {error}"));
        }
    }
}

impl hyper::body::Body for Relay {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        loop {
            match std::task::ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    // Trailers are left out.
                    let Ok(data) = frame.into_data() else {
                        continue;
                    };
                    if let Some(Err(error)) = self.store.as_mut().map(|s| s.write(&data)) {
                        self.store = None;
                        if let Some(open) = &mut self.open {
                            open.note(format!("not kept: {error}"));
                        }
                    }
                    if self.body.is_end_stream() {
                        self.complete();
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => {
                    let why = chain(&error);
                    self.store = None;
                    if let Some(mut open) = self.open.take() {
                        open.failed(&why);
                    }
                    return Poll::Ready(Some(Err(io::Error::other(why))));
                }
                None => {
                    self.complete();
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(open) = &mut self.open
            && open.request.method != Method::HEAD.as_str()
        {
            open.note("the answer was not read to its end");
        }
    }
}

/// A body out of the cache.
struct KeptBody {
    file: std::fs::File,
    left: u64,
    /// Until the body is complete.
    open: Option<Open>,
}

impl hyper::body::Body for KeptBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let piece = cache::piece(&mut self.file)?;
        if let (Some(piece), Some(open)) = (&piece, &self.open) {
            let n = piece.len() as u64;
            open.counts.received.fetch_add(n, Ordering::Relaxed);
            self.left = self.left.saturating_sub(n);
        }
        if piece.is_none() || self.left == 0 {
            self.open = None;
        }
        Poll::Ready(piece.map(|p| Ok(Frame::data(p.into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests;
