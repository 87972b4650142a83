//! HTTP.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use camino::{Utf8Path, Utf8PathBuf};
use drillyard_model::Llama;
use drillyard_render::{ChatTemplate, Tokenizer};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::api::ChatRequest;
use crate::chat::{prepare, served};
use crate::engine::{Engine, EngineOptions};
use crate::{ServeError, stream};

/// Largest request body.
const MAX_BODY: usize = 64 << 20;

/// What to serve, and where.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The checkpoint's folder, in Hugging Face layout.
    pub model: Utf8PathBuf,
    /// The name clients see; the folder's name by default.
    pub name: Option<String>,
    /// Where to listen. Loopback, unless others are meant to reach it: there is no authentication.
    pub host: IpAddr,
    /// The port; 0 takes a free one.
    pub port: u16,
    /// How the engine runs.
    pub engine: EngineOptions,
}

impl ServeOptions {
    /// A checkpoint on a free loopback port.
    pub fn new(model: impl Into<Utf8PathBuf>) -> Self {
        Self {
            model: model.into(),
            name: None,
            host: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            engine: EngineOptions::default(),
        }
    }
}

/// What a server says once it is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listening {
    /// `address:port`.
    pub listening: String,
    /// The model's name.
    pub model: String,
    /// The hash of its weights.
    pub weights_hash: String,
}

/// One model and all that is needed to talk to it.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) engine: Engine,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: ChatTemplate,
    pub(crate) name: String,
    pub(crate) vocab_size: i64,
    pub(crate) stop_ids: Vec<i32>,
}

/// A server that listens already.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    served: Arc<Served>,
    listening: Listening,
}

impl Server {
    /// Loads a checkpoint, starts its engine and listens.
    pub async fn bind(options: &ServeOptions) -> Result<Self, ServeError> {
        let name = options.name.clone();
        let name = name.or_else(|| Some(options.model.file_name()?.to_owned()));
        let name = name.unwrap_or_else(|| "model".to_owned());
        let served = {
            // Tensors may not be shared between threads, so the model must not live across the wait below.
            let model = Llama::load(&options.model, tch::Device::cuda_if_available())?;
            load_around(&model, &options.model, name, options.engine.clone())?
        };
        Self::listen(served, SocketAddr::new(options.host, options.port)).await
    }

    /// Serves a model that is in memory, with the tokenizer and chat template of a checkpoint folder. The engine gets a copy of the
    /// weights; [`Server::engine`] swaps them.
    pub fn bind_model(
        model: &Llama,
        dir: &Utf8Path,
        name: String,
        engine: EngineOptions,
        address: SocketAddr,
    ) -> impl Future<Output = Result<Self, ServeError>> + Send + use<> {
        let served = load_around(model, dir, name, engine);
        async move { Self::listen(served?, address).await }
    }

    async fn listen(served: Served, address: SocketAddr) -> Result<Self, ServeError> {
        let listen = |source| ServeError::Listen {
            address: address.to_string(),
            source,
        };
        let listener = TcpListener::bind(address).await.map_err(listen)?;
        let listening = Listening {
            listening: listener.local_addr().map_err(listen)?.to_string(),
            model: served.name.clone(),
            weights_hash: served.engine.weights_hash().to_string(),
        };
        Ok(Self {
            listener,
            served: Arc::new(served),
            listening,
        })
    }

    /// Where it listens and what it serves.
    pub const fn listening(&self) -> &Listening {
        &self.listening
    }

    /// The engine, to swap weights or to read its metrics.
    pub fn engine(&self) -> Engine {
        self.served.engine.clone()
    }

    /// Answers requests until `shutdown` resolves; requests under way are finished.
    pub async fn run(
        self,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServeError> {
        let router = Router::new()
            .route("/v1/chat/completions", post(chat_completions))
            .route("/v1/models", get(models))
            .route("/health", get(health))
            .route("/metrics.json", get(metrics))
            .fallback(not_found)
            .layer(DefaultBodyLimit::max(MAX_BODY))
            .with_state(self.served);
        Ok(axum::serve(self.listener, router)
            .with_graceful_shutdown(shutdown)
            .await?)
    }
}

/// Loads a checkpoint and serves it until `shutdown` resolves; `ready` is called once, when requests are answered.
pub async fn run(
    options: &ServeOptions,
    ready: impl FnOnce(&Listening),
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let server = Server::bind(options).await?;
    ready(server.listening());
    server.run(shutdown).await
}

/// Resolves when standard input ends: a server started by another program ends with it.
pub async fn stdin_closed() {
    let (ended, wait) = tokio::sync::oneshot::channel();
    // A thread of its own: reading can't be interrupted, and must not keep the runtime from ending.
    std::thread::spawn(move || {
        // However it ends, nobody writes any more.
        drop(std::io::copy(
            &mut std::io::stdin().lock(),
            &mut std::io::sink(),
        ));
        let _ = ended.send(());
    });
    drop(wait.await);
}

async fn chat_completions(State(served): State<Arc<Served>>, body: Bytes) -> Response {
    match answer(served, &body).await {
        Ok(response) => response,
        Err(error) => error_response(&error),
    }
}

async fn answer(served: Arc<Served>, body: &[u8]) -> Result<Response, ServeError> {
    let request = ChatRequest::parse(body)?;
    let streamed = request.stream.unwrap_or(false);
    let prepared = prepare(&served, request)?;
    if streamed {
        return stream::respond(served, prepared);
    }
    let stop_when = prepared.shape.stop_when(&served.tokenizer);
    let done = served.engine.submit(prepared.generate, stop_when, None)?;
    let generated = done.await.map_err(|_| ServeError::Stopped)??;
    Ok(Json(prepared.shape.response(&served, &generated)?).into_response())
}

async fn models(State(served): State<Arc<Served>>) -> Json<Value> {
    Json(json!({
        "object": "list",
        "data": [{
            "id": served.name,
            "object": "model",
            "owned_by": "drillyard",
            "max_model_len": served.engine.max_len(),
            "weights_hash": served.engine.weights_hash(),
        }],
    }))
}

async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

async fn metrics(State(served): State<Arc<Served>>) -> Response {
    Json(served.engine.metrics().snapshot()).into_response()
}

async fn not_found(uri: Uri) -> Response {
    let message = format!("{} is not served; POST /v1/chat/completions is", uri.path());
    let body = json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": "not_found"}});
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}

/// An error in the API's form.
pub(crate) fn error_body(error: &ServeError) -> Value {
    let (_, kind, code) = error.http();
    json!({"error": {"message": error.to_string(), "type": kind, "param": error.field(), "code": code}})
}

fn error_response(error: &ServeError) -> Response {
    let (status, ..) = error.http();
    if status.is_server_error() {
        tracing::warn!(%error, "request failed");
    }
    let mut response = (status, Json(error_body(error))).into_response();
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// Starts the engine of a model and reads what else answering takes.
fn load_around(
    model: &Llama,
    dir: &Utf8Path,
    name: String,
    engine: EngineOptions,
) -> Result<Served, ServeError> {
    let tokenizer = Tokenizer::load(dir)?;
    let template = ChatTemplate::load(dir)?;
    let eos = template.eos_token().and_then(|eos| tokenizer.id(eos));
    let mut stop_ids: Vec<i32> = model
        .config()
        .eos_token_ids
        .iter()
        .map(|id| *id as i32)
        .collect();
    stop_ids.extend(eos);
    let engine = Engine::start(model, &stop_ids, engine)?;
    served(
        engine,
        tokenizer,
        template,
        name,
        model.config().vocab_size,
        stop_ids,
    )
}
