//! `lb-agent run`: the agent itself.

use super::datapath_args::DatapathArgs;
use super::node_args::NodeArgs;
use crate::api::client;
use crate::api::stats::Stats;
use crate::cluster::Cluster;
use crate::datapath::attach::{Hook, Hooks, best_hook};
use crate::datapath::load::{self, Limits};
use crate::datapath::maps::Maps;
use crate::health::Health;
use crate::http;
use crate::lock::Lock;
use crate::metrics;
use crate::node;
use crate::node::preflight::{self, Check, Verdict};
use crate::policy::extend;
use crate::reconcile::Reconciler;
use crate::report::kubernetes::Reporter;
use crate::run::Agent;
use crate::source::kubernetes::{Kubernetes, Timing};
use anyhow::{Context as _, bail};
use clap::ValueEnum;
use lb_common::config::{Config, Timeouts};
use lb_common::limits;
use std::net::{AddrParseError, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::watch;
use tracing::{info, warn};

/// How remote backends are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Forwarding {
    /// Straight to the overlay device, past the stack
    Redirect,
    /// Through the stack
    Stack,
}

/// Where the programs are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attach {
    /// TCX from Linux 6.6 on, clsact before
    Auto,
    /// TCX links
    Tcx,
    /// Filters of a clsact qdisc
    Clsact,
}

/// Where HTTP is answered, if anywhere.
#[derive(Clone, Copy, Debug)]
struct Listen(Option<SocketAddr>);

fn parse_listen(text: &str) -> Result<Listen, AddrParseError> {
    if text == "off" { Ok(Listen(None)) } else { text.parse().map(|address| Listen(Some(address))) }
}

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// This node's name, as in the Node objects
    #[arg(long, env = "LB_NODE", value_name = "NAME")]
    node: String,
    /// A kubeconfig for the API server. Default: that of KUBECONFIG, else the ServiceAccount of this pod
    #[arg(long, env = "LB_KUBECONFIG", value_name = "FILE", conflicts_with = "manifests")]
    kubeconfig: Option<PathBuf>,
    /// Instead of an API server: a directory of Kubernetes manifests to read objects from and to report status and
    /// annotations to; the agents of all nodes share it
    #[arg(long, env = "LB_MANIFESTS", value_name = "DIR")]
    manifests: Option<PathBuf>,
    #[command(flatten)]
    datapath: DatapathArgs,
    #[command(flatten)]
    node_args: NodeArgs,
    /// How packets reach backends on other nodes
    #[arg(long, env = "LB_FORWARDING", value_enum, default_value_t = Forwarding::Redirect)]
    forwarding: Forwarding,
    /// Where the packet programs are attached
    #[arg(long, env = "LB_ATTACH", value_enum, default_value_t = Attach::Auto)]
    attach: Attach,
    /// Serve ports too that the node itself needs (22, 2379, 2380, 6443, 10250)
    #[arg(long, env = "LB_FORCE_RESERVED_PORTS")]
    force_reserved_ports: bool,
    /// When no endpoint of a port is ready, use those that terminate but still serve
    #[arg(long, env = "LB_TERMINATING_FALLBACK")]
    terminating_fallback: bool,
    /// Answer /metrics, /healthz and /readyz here; `off` for nowhere
    #[arg(long, env = "LB_LISTEN", value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9213", value_parser = parse_listen)]
    listen: Listen,
    /// Seconds without a word from the API server after which a watch is given up and begun again. The server sends one
    /// about each minute
    #[arg(long, env = "LB_API_SILENCE", value_name = "SECONDS", default_value_t = 90, value_parser = clap::value_parser!(u64).range(1..=3600))]
    api_silence: u64,
    /// Seconds between full comparisons of everything with what the kernel holds
    #[arg(long, env = "LB_PERIOD", value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    period: u64,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    timeouts: TimeoutArgs,
}

/// How much fits. Costs are kernel memory.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Established connections; each takes about 200 bytes while it lasts
    #[arg(long, env = "LB_MAX_FLOWS", value_name = "N", default_value_t = limits::FLOWS, value_parser = clap::value_parser!(u32).range(1..))]
    max_flows: u32,
    /// Connections in a handshake; about 250 bytes each, allocated at start
    #[arg(long, env = "LB_MAX_HANDSHAKES", value_name = "N", default_value_t = limits::HANDSHAKES, value_parser = clap::value_parser!(u32).range(1..))]
    max_handshakes: u32,
    /// Served ports
    #[arg(long, env = "LB_MAX_SERVICES", value_name = "N", default_value_t = limits::SERVICES, value_parser = clap::value_parser!(u32).range(1..))]
    max_services: u32,
    /// Endpoints of all served ports together
    #[arg(long, env = "LB_MAX_BACKENDS", value_name = "N", default_value_t = limits::BACKENDS, value_parser = clap::value_parser!(u32).range(1..))]
    max_backends: u32,
    /// Endpoints that are recognised: those of this node's Services, and this node's own
    #[arg(long, env = "LB_MAX_ENDPOINTS", value_name = "N", default_value_t = limits::ENDPOINTS, value_parser = clap::value_parser!(u32).range(1..))]
    max_endpoints: u32,
}

/// Idle times after which a connection is forgotten.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Timeouts, in seconds without a packet")]
struct TimeoutArgs {
    /// TCP, handshake not complete
    #[arg(long, env = "LB_TIMEOUT_HANDSHAKE", value_name = "S", default_value_t = Timeouts::DEFAULT.handshake)]
    timeout_handshake: u32,
    /// TCP, both directions open: a little above the kernel's whole keep-alive cycle
    #[arg(long, env = "LB_TIMEOUT_ESTABLISHED", value_name = "S", default_value_t = Timeouts::DEFAULT.established)]
    timeout_established: u32,
    /// TCP, one side has closed
    #[arg(long, env = "LB_TIMEOUT_HALF_CLOSED", value_name = "S", default_value_t = Timeouts::DEFAULT.half_closed)]
    timeout_half_closed: u32,
    /// TCP, both sides have closed
    #[arg(long, env = "LB_TIMEOUT_CLOSED", value_name = "S", default_value_t = Timeouts::DEFAULT.closed)]
    timeout_closed: u32,
    /// TCP, reset by either side
    #[arg(long, env = "LB_TIMEOUT_RESET", value_name = "S", default_value_t = Timeouts::DEFAULT.reset)]
    timeout_reset: u32,
    /// UDP, not answered yet
    #[arg(long, env = "LB_TIMEOUT_UDP_OPENING", value_name = "S", default_value_t = Timeouts::DEFAULT.udp_opening)]
    timeout_udp_opening: u32,
    /// UDP, answered
    #[arg(long, env = "LB_TIMEOUT_UDP_ESTABLISHED", value_name = "S", default_value_t = Timeouts::DEFAULT.udp_established)]
    timeout_udp_established: u32,
}

impl LimitArgs {
    fn limits(&self) -> Limits {
        let Self { max_flows, max_handshakes, max_services, max_backends, max_endpoints } = *self;
        Limits {
            flows: max_flows,
            handshakes: max_handshakes,
            services: max_services,
            // Slot 0 means "none".
            backends: max_backends.saturating_add(1),
            endpoints: max_endpoints,
        }
    }
}

impl TimeoutArgs {
    fn timeouts(&self) -> Timeouts {
        Timeouts {
            handshake: self.timeout_handshake,
            established: self.timeout_established,
            half_closed: self.timeout_half_closed,
            closed: self.timeout_closed,
            reset: self.timeout_reset,
            udp_opening: self.timeout_udp_opening,
            udp_established: self.timeout_udp_established,
        }
    }
}

/// Runs the agent until it is told to stop.
///
/// # Errors
/// The node lacks something that the agent cannot do without, or another agent runs here.
pub fn run(args: Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(start(args))
}

async fn start(args: Args) -> anyhow::Result<()> {
    let Args {
        node,
        kubeconfig,
        manifests,
        api_silence,
        datapath,
        node_args,
        forwarding,
        attach,
        force_reserved_ports,
        terminating_fallback,
        listen: Listen(listen),
        period,
        limits,
        timeouts,
    } = args;
    let (cluster, api) = match manifests {
        Some(path) => (open_directory(path, &node)?, None),
        None => connect(kubeconfig.as_deref(), &node, Duration::from_secs(api_silence)).await?,
    };
    let (pins, sysctls, state_dir) = (datapath.pins(), datapath.sysctls(), datapath.state_dir);
    let _lock = Lock::take(&state_dir)?;
    let netlink = node::connect().context("open a netlink socket")?;
    let (roles, return_path, timeouts) =
        (node_args.role_options(), node_args.return_path(), timeouts.timeouts());
    let options = preflight::Options {
        pins: pins.root().to_owned(),
        roles: roles.clone(),
        return_path,
        service_ports: Vec::new(),
    };
    heed(&preflight::check(&netlink, &options).await)?;
    let config = Config {
        mark_shift: return_path.mark_shift,
        through_stack: u32::from(forwarding == Forwarding::Stack),
        timeouts,
    };
    let ebpf = load::load(&pins, &limits.limits(), &config)?;
    let maps = Maps::open(&pins)?;
    info!(
        node,
        version = env!("CARGO_PKG_VERSION"),
        connections = maps.flows.list()?.len(),
        "loaded the packet program"
    );
    let hook = match attach {
        Attach::Auto => best_hook(),
        Attach::Tcx => Hook::Tcx,
        Attach::Clsact => Hook::Clsact,
    };
    let hooks = Hooks::new(pins.clone(), &state_dir, hook, netlink.clone());
    let reconciler = Reconciler::new(ebpf, maps, hooks, netlink, return_path, sysctls);
    let (health, watcher) = watch::channel(Health::default());
    if let Some(address) = listen {
        let registry = metrics::registry(pins.clone(), watcher.clone(), api);
        let bound = http::serve(address, registry, watcher)
            .await
            .with_context(|| format!("listen on {address} (--listen): choose another, or `off`"))?;
        info!("metrics and probes: http://{bound}/metrics, /healthz, /readyz");
    }
    let own_ports = listen.iter().map(SocketAddr::port).collect();
    let policy = extend::Options { own_ports, force_reserved_ports, terminating_fallback };
    let period = Duration::from_secs(period);
    let agent = Agent { node, roles, policy, timeouts, pins, period, health };
    agent.run(reconciler, cluster).await
}

fn open_directory(path: PathBuf, node: &str) -> anyhow::Result<Cluster> {
    if !path.is_dir() {
        bail!(
            "--manifests {}: not a directory; make it and put the cluster's manifests there",
            path.display()
        );
    }
    Ok(Cluster::manifests(path, node)?)
}

/// Nothing is awaited: the API may be away while the datapath of a former agent is looked after.
async fn connect(
    kubeconfig: Option<&Path>,
    node: &str,
    silence: Duration,
) -> anyhow::Result<(Cluster, Option<Stats>)> {
    let client = client::connect(kubeconfig).await?;
    let (stats, timing) = (Stats::default(), Timing { silence, ..Timing::default() });
    let source = Kubernetes::start(&client, node, timing, &stats);
    let reporter = Reporter::start(client, node, stats.clone());
    Ok((Cluster::kubernetes(source, reporter, node), Some(stats)))
}

/// Says what preflight found, and ends where the node lacks something. Devices may still come: those are awaited.
fn heed(checks: &[Check]) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for check in checks {
        let Check { name, verdict, found, advice } = check;
        match verdict {
            Verdict::Ok => {}
            Verdict::Warn => warn!("preflight: {name}: {found}. {advice}"),
            Verdict::Fail if preflight::may_come(check) => warn!("preflight: {name}: {found}. {advice}"),
            Verdict::Fail => failed.push(format!("{name}: {found}. {advice}")),
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("this node lacks what the agent needs:\n  {}", failed.join("\n  "))
}
