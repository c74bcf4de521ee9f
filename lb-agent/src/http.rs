//! What the agent answers over HTTP: `/metrics`, `/healthz`, `/readyz`.

use crate::health::Subscriber;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::net::TcpListener;
use tracing::error;

/// The media type of the OpenMetrics text format, version 1.0.0.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Starts to answer on `address`, and goes on until the process ends.
///
/// # Errors
/// The address cannot be had.
pub async fn serve(
    address: SocketAddr,
    registry: Registry,
    health: Subscriber,
) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    let router = Router::new()
        .route("/metrics", get(metrics))
        .with_state(Arc::new(registry))
        .merge(Router::new().route("/healthz", get(alive)).route("/readyz", get(ready)).with_state(health));
    tokio::spawn(async move {
        if let Err(problem) = axum::serve(listener, router).await {
            error!("HTTP: {problem}");
        }
    });
    Ok(bound)
}

/// Reads maps, so it has a thread of its own.
async fn metrics(State(registry): State<Arc<Registry>>) -> Response {
    let text = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        encode(&mut text, &registry).map(|()| text)
    });
    match text.await {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Whether the loop still turns: not whether the node is as wanted, which a restart would not mend.
async fn alive(State(health): State<Subscriber>) -> Response {
    verdict(health.borrow().hangs(Instant::now()))
}

/// Whether the node is as wanted.
async fn ready(State(health): State<Subscriber>) -> Response {
    verdict(health.borrow().not_ready(Instant::now()))
}

fn verdict(problem: Option<String>) -> Response {
    match problem {
        None => "ok\n".into_response(),
        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, problem + "\n").into_response(),
    }
}
