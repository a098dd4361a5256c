//! Listener for HTTP: `/metrics`, `/status`, `/healthz`, `/readyz` and the page at `/`.
//!
//! One thread with a runtime of its own serves bounded connections, each with one request, short headers and a time
//! limit. Where the server encrypts, it speaks TLS with the server's certificate. A reader that is slow or hostile
//! delays other readers at most; shards are asked at a bounded rate.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderValue, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pserver_core::error::Failure;
use pserver_transport::network::JobToken;
use pserver_transport::tls::Encryption;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::{Watch, metrics};

/// Connections at once; further ones wait in the system's queue.
const CONNECTIONS_MAX: usize = 64;
/// Time for a handshake of TLS, and for a request's head.
const HEAD_LIMIT: Duration = Duration::from_secs(3);
/// Time for a whole connection.
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// Pause after the system had no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The page loads nothing from elsewhere: its one style and one script stand in it.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                           connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                           frame-ancestors 'none'";

/// The running listener.
pub(crate) struct HttpServer {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// State that handlers share.
struct HttpState {
    watch: Arc<Watch>,
    token: Option<JobToken>,
}

impl HttpServer {
    /// Listens and serves until [`HttpServer::end`].
    ///
    /// # Errors
    /// When the address cannot be had or the system has no thread.
    pub(crate) fn start(
        at: SocketAddr,
        (token, encryption): (Option<JobToken>, Option<Encryption>),
        watch: Arc<Watch>,
    ) -> Result<Self, Failure> {
        let wrong = |error: std::io::Error| Failure::Node(format!("listening on {at} for HTTP: {error}"));
        let listener = TcpListener::bind(at).map_err(wrong)?;
        let address = listener.local_addr().map_err(wrong)?;
        listener.set_nonblocking(true).map_err(wrong)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
        let runtime = runtime.map_err(wrong)?;
        let routes = routes(Arc::new(HttpState { watch, token }));
        let (stop, stopped) = oneshot::channel();
        let scheme = if encryption.is_some() { "https" } else { "http" };
        let serve = async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => tokio::select! {
                    () = accept(listener, routes, encryption) => {}
                    _ = stopped => {}
                },
                Err(error) => tracing::error!("serving HTTP: {error}"),
            }
        };
        let run = move || {
            runtime.block_on(serve);
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("pserver-http".to_owned()).spawn(run).map_err(wrong)?;
        tracing::info!("metrics, status and page: {scheme}://{address}/");
        Ok(Self { address, stop, thread })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops at once, with open connections.
    pub(crate) fn end(self) {
        // The thread may have ended.
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

async fn accept(listener: tokio::net::TcpListener, routes: Router, encryption: Option<Encryption>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!("a connection for HTTP is lost: {error}");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (routes, acceptor) =
            (routes.clone(), encryption.as_ref().map(Encryption::http_config).map(TlsAcceptor::from));
        tokio::spawn(async move {
            match acceptor {
                None => serve(stream, routes).await,
                Some(acceptor) => match timeout(HEAD_LIMIT, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => serve(stream, routes).await,
                    Ok(Err(error)) => tracing::debug!("a connection for HTTPS ended: {error}"),
                    Err(_) => tracing::debug!("a connection for HTTPS ended: no handshake within {HEAD_LIMIT:?}"),
                },
            }
            drop(permit);
        });
    }
}

/// Answers the request of a connection.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, routes: Router) {
    let mut protocol = http1::Builder::new();
    protocol.keep_alive(false).max_buf_size(HEAD_BYTES_MAX).timer(TokioTimer::new());
    protocol.header_read_timeout(HEAD_LIMIT);
    let connection = protocol.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    if let Ok(Err(error)) = timeout(CONNECTION_LIMIT, connection).await {
        tracing::debug!("a connection for HTTP ended: {error}");
    }
}

fn routes(state: Arc<HttpState>) -> Router {
    let closed = Router::new()
        .route("/metrics", get(metrics_text))
        .route("/status", get(status))
        .route_layer(from_fn_with_state(Arc::clone(&state), admit));
    let open = Router::new()
        .route("/", get(|| async { ([(CONTENT_SECURITY_POLICY, PAGE_POLICY)], Html(include_str!("page.html"))) }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready));
    let all = closed.merge(open).layer(from_fn_with_state(Arc::clone(&state), check_host));
    all.with_state(state)
}

/// Refuses a request without the token, where there is one.
async fn admit(State(state): State<Arc<HttpState>>, request: Request, next: Next) -> Response {
    let Some(token) = &state.token else { return next.run(request).await };
    let shown = request.headers().get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    if shown.is_some_and(|shown| token.is(shown.trim_ascii())) {
        return next.run(request).await;
    }
    let text = "this server has an http_token_file: send its token in the header \"Authorization: Bearer TOKEN\"\n";
    (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")], text).into_response()
}

/// Refuses a request for a name of somewhere else: a page from there could have a browser of this machine read the
/// answer. With a token it could not. Adds headers that every answer has.
async fn check_host(State(state): State<Arc<HttpState>>, request: Request, next: Next) -> Response {
    if state.token.is_none() && !is_near(request.headers()) {
        let text = "without an http_token_file this server answers requests for a number or localhost only\n";
        return (StatusCode::MISDIRECTED_REQUEST, text).into_response();
    }
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// Whether the host of a request is a number or `localhost`. A request without one comes from no browser.
fn is_near(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST) else { return true };
    let host = host.to_str().unwrap_or("?");
    let bare = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    };
    bare.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

async fn ready(State(state): State<Arc<HttpState>>) -> Response {
    if state.watch.is_ready() {
        return "ready\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, "the server recovers or stops\n").into_response()
}

async fn metrics_text(State(state): State<Arc<HttpState>>) -> Response {
    let watch = Arc::clone(&state.watch);
    let encoded = tokio::task::spawn_blocking(move || metrics::encode(&watch.job())).await;
    answer(encoded.ok(), "text/plain; version=0.0.4; charset=utf-8")
}

async fn status(State(state): State<Arc<HttpState>>) -> Response {
    let watch = Arc::clone(&state.watch);
    let encoded = tokio::task::spawn_blocking(move || serde_json::to_string(&*watch.job()).ok()).await;
    answer(encoded.ok().flatten(), "application/json")
}

fn answer(text: Option<String>, kind: &'static str) -> Response {
    match text {
        Some(text) => ([(CONTENT_TYPE, kind)], text).into_response(),
        None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;
    use crate::settings::Settings;

    #[test]
    fn a_server_is_ready_from_the_end_of_its_recovery_to_its_stop() {
        let settings = Settings::of_words(["--log-level=warn"]).expect("the settings are right");
        let watch = Arc::new(Watch::new(&settings));
        let server = HttpServer::start(SocketAddr::from(([127, 0, 0, 1], 0)), (None, None), Arc::clone(&watch));
        let server = server.expect("a port is free");
        let ask = |path: &str| {
            let mut stream = TcpStream::connect(server.address()).expect("it listens");
            stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).expect("it reads");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("it answers");
            answer.split(' ').nth(1).expect("a status").to_owned()
        };
        assert_eq!([ask("/readyz"), ask("/healthz"), ask("/status")], ["503", "200", "200"], "it recovers");
        watch.serves("127.0.0.1:7164".to_owned());
        assert_eq!(ask("/readyz"), "200", "it serves");
        watch.stops();
        assert_eq!([ask("/readyz"), ask("/healthz")], ["503", "200"], "it stops");
        server.end();
    }

    #[test]
    fn host_headers_with_foreign_names_are_refused() {
        let check = |host: &str, expected| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_str(host).expect("it is text"));
            assert_eq!(is_near(&headers), expected, "{host}");
        };
        ["127.0.0.1:80", "localhost", "LOCALHOST:1", "[::1]:80", "10.0.0.1"].iter().for_each(|host| check(host, true));
        ["evil.example", "127.0.0.1.evil.example:80", "", "[evil]", "localhost.evil"]
            .iter()
            .for_each(|host| check(host, false));
        assert!(is_near(&HeaderMap::new()));
    }
}
