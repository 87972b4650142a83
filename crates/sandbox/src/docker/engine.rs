//! Reaching a container engine: Docker, or what speaks its interface.

use std::error::Error as _;
use std::time::Duration;

use bollard::errors::Error;
use bollard::models::SystemInfo;
use bollard::{API_DEFAULT_VERSION, Docker};
use camino::{Utf8Path, Utf8PathBuf};

use crate::SandboxError;

/// Seconds one request may take: starting a container on a busy machine takes several.
const REQUEST_S: u64 = 60;
/// How long an engine may take to say that it is there.
const HELLO: Duration = Duration::from_secs(10);
/// The first version of the interface that knows private control group namespaces.
const LEAST: (usize, usize) = (1, 41);

/// A container engine that answers.
#[derive(Debug)]
pub struct Engine {
    pub api: Docker,
    /// As DOCKER_HOST would name it.
    pub address: String,
    /// What it calls itself.
    pub name: String,
    /// Whether it is Podman, whose interface leaves some things out.
    pub podman: bool,
    pub info: SystemInfo,
}

impl Engine {
    /// Finds an engine: the configured one, that of DOCKER_HOST, or one behind a usual socket.
    pub async fn connect(configured: Option<&str>) -> Result<Self, SandboxError> {
        let asked = configured
            .map(str::to_owned)
            .or_else(|| std::env::var("DOCKER_HOST").ok())
            .filter(|host| !host.is_empty());
        let addresses = asked.map_or_else(usual, |host| vec![host]);
        let mut tried = Vec::new();
        for address in addresses {
            match tokio::time::timeout(HELLO, Self::at(&address)).await {
                Ok(Ok(engine)) => return Ok(engine),
                Ok(Err(reason)) => tried.push(format!("{address}: {reason}")),
                Err(_) => tried.push(format!("{address}: no answer in {} s", HELLO.as_secs())),
            }
        }
        Err(SandboxError::NoEngine {
            tried: tried.join("; "),
        })
    }

    async fn at(address: &str) -> Result<Self, String> {
        let api = client(address)?
            .negotiate_version()
            .await
            .map_err(|e| chain(&e))?;
        let version = api.version().await.map_err(|e| chain(&e))?;
        let spoken = api.client_version();
        if (spoken.major_version, spoken.minor_version) < LEAST {
            return Err(format!(
                "it speaks version {spoken} of the interface; at least {}.{} is needed (Docker 20.10, Podman 4)",
                LEAST.0, LEAST.1
            ));
        }
        let info = api.info().await.map_err(|e| chain(&e))?;
        if info.os_type.as_deref().is_some_and(|os| os != "linux") {
            return Err("it does not run Linux containers".into());
        }
        let podman = version
            .components
            .iter()
            .flatten()
            .any(|c| c.name.contains("Podman"));
        Ok(Self {
            api,
            address: address.to_owned(),
            name: format!(
                "{} {}",
                if podman { "Podman" } else { "Docker" },
                version.version.as_deref().unwrap_or("of unknown version")
            ),
            podman,
            info,
        })
    }

    /// Whether one of its security options has this name.
    pub fn has(&self, option: &str) -> bool {
        let name = format!("name={option}");
        self.info
            .security_options
            .iter()
            .flatten()
            .any(|o| o.split(',').any(|part| part == name))
    }

    /// What went wrong in a request.
    pub fn fault(&self, step: &str, error: &Error) -> SandboxError {
        match error {
            Error::DockerResponseServerError { message, .. }
            | Error::DockerStreamError { error: message } => SandboxError::Engine {
                step: step.to_owned(),
                message: message.clone(),
            },
            other => SandboxError::EngineGone {
                engine: self.address.clone(),
                message: format!("{step}: {}", chain(other)),
            },
        }
    }
}

/// Whether the engine answered that there is no such thing.
pub fn is_missing(error: &Error) -> bool {
    matches!(
        error,
        Error::DockerResponseServerError {
            status_code: 404,
            ..
        }
    )
}

/// An error with its causes.
pub fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = inner.source();
    }
    text
}

/// Where engines listen when nobody says otherwise.
fn usual() -> Vec<String> {
    let mut sockets = vec!["unix:///var/run/docker.sock".to_owned()];
    if let Ok(dir) = std::env::var("XDG_RUNTIME_DIR") {
        sockets.push(format!("unix://{dir}/docker.sock"));
        sockets.push(format!("unix://{dir}/podman/podman.sock"));
    }
    sockets.push("unix:///run/podman/podman.sock".to_owned());
    sockets
}

fn client(address: &str) -> Result<Docker, String> {
    let tls = std::env::var("DOCKER_TLS_VERIFY").is_ok_and(|v| !v.is_empty());
    let made = match address.split_once("://") {
        Some(("unix", _)) => Docker::connect_with_unix(address, REQUEST_S, API_DEFAULT_VERSION),
        Some(("tcp", _)) if !tls => {
            Docker::connect_with_http(address, REQUEST_S, API_DEFAULT_VERSION)
        }
        Some(("http", _)) => Docker::connect_with_http(address, REQUEST_S, API_DEFAULT_VERSION),
        Some(("tcp" | "https", _)) => {
            // Whoever embeds this library may have chosen one already.
            if rustls::crypto::CryptoProvider::get_default().is_none() {
                let _ = rustls::crypto::ring::default_provider().install_default();
            }
            let dir = certificates()?;
            let file = |name: &str| dir.join(name).into_std_path_buf();
            for name in ["key.pem", "cert.pem", "ca.pem"] {
                let path = dir.join(name);
                fs_err::metadata(&path).map_err(|e| format!("{e} (DOCKER_CERT_PATH)"))?;
            }
            Docker::connect_with_ssl(
                address,
                &file("key.pem"),
                &file("cert.pem"),
                &file("ca.pem"),
                REQUEST_S,
                API_DEFAULT_VERSION,
            )
        }
        _ => {
            return Err(
                "not an address that can be used; unix://, tcp://, http:// and https:// can (for ssh://, forward the \
                 engine's socket with `ssh -L`)"
                    .into(),
            );
        }
    };
    made.map_err(|e| chain(&e))
}

/// The directory of the client's key and certificates.
fn certificates() -> Result<Utf8PathBuf, String> {
    if let Ok(dir) = std::env::var("DOCKER_CERT_PATH") {
        return Ok(dir.into());
    }
    std::env::var("HOME")
        .map(|home| Utf8Path::new(&home).join(".docker"))
        .map_err(|_| "neither DOCKER_CERT_PATH nor HOME is set".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_engine_that_is_not_there_is_named_with_the_way_out() {
        for (address, part) in [
            ("unix:///nonexistent/d.sock", "/nonexistent/d.sock"),
            ("tcp://127.0.0.1:1", "onnection refused"),
            ("ssh://somewhere", "ssh -L"),
        ] {
            let error = Engine::connect(Some(address)).await.unwrap_err();
            assert!(matches!(error, SandboxError::NoEngine { .. }), "{error}");
            let text = error.to_string();
            assert!(
                text.contains(part) && text.contains("DOCKER_HOST"),
                "{text}"
            );
        }
    }
}
