//! What must never happen, and whether everything works.

use anyhow::{Context as _, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use testbed::capture::Captured;

/// Questions in a row that must be answered by the right pods, of each client: it meets each of three but once in thousands.
const ENOUGH: usize = 20;

/// See the module. Shared by clients and pods of a testbed.
#[derive(Debug, Default)]
pub(crate) struct Judge(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// As whom a pod may see a client inside the cluster, by the Service's address: the holders' overlay addresses.
    disguises: BTreeMap<Ipv4Addr, BTreeSet<Ipv4Addr>>,
    wrong: Vec<(SystemTime, String)>,
    /// When something was missing that nothing can hold the place of.
    wounds: Vec<(SystemTime, Option<SystemTime>)>,
    clients: BTreeMap<&'static str, Streak>,
    questions: u64,
}

/// The last answers to a client since a question was not answered.
#[derive(Clone, Debug, Default)]
struct Streak {
    pods: VecDeque<String>,
    last_failure: String,
}

/// A question: who asks, and whom. It goes to the pod as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) is_outside: bool,
    pub(crate) client: SocketAddrV4,
    pub(crate) service: SocketAddrV4,
}

impl Question {
    pub(crate) fn text(self) -> String {
        let Self { is_outside, client, service } = self;
        format!("{} {client} {service}\n", if is_outside { "outside" } else { "inside" })
    }

    pub(crate) fn read(text: &str) -> Result<Self> {
        let words: Vec<_> = text.split_whitespace().collect();
        let [place, client, service] = words[..] else { bail!("no question: {text:?}") };
        Ok(Self { is_outside: place == "outside", client: client.parse()?, service: service.parse()? })
    }
}

impl Judge {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this node may hold the address too, for the rest of the sequence.
    pub(crate) fn allow(&self, address: Ipv4Addr, overlay: Ipv4Addr) {
        self.state().disguises.entry(address).or_default().insert(overlay);
    }

    /// A sequence begins: these alone hold addresses.
    pub(crate) fn begin(&self, holders: &[(Ipv4Addr, Ipv4Addr)]) {
        let mut state = self.state();
        state.disguises.clear();
        for (address, overlay) in holders {
            state.disguises.entry(*address).or_default().insert(*overlay);
        }
        state.wrong.clear();
        state.wounds.clear();
    }

    /// Something is taken away that nothing can hold the place of.
    pub(crate) fn wound(&self) {
        self.state().wounds.push((SystemTime::now(), None));
    }

    /// It is back, and what was under way meanwhile has ended.
    pub(crate) fn heal(&self) {
        let now = SystemTime::now();
        for wound in &mut self.state().wounds {
            wound.1.get_or_insert(now);
        }
    }

    /// A pod is asked, and sees the client as `seen`.
    pub(crate) fn asked(&self, pod: &str, question: Question, seen: SocketAddrV4) {
        let mut state = self.state();
        let Question { is_outside, client, service } = question;
        let is_right = if is_outside {
            seen == client
        } else {
            state.disguises.get(service.ip()).is_some_and(|allowed| allowed.contains(seen.ip()))
        };
        if !is_right {
            let place = if is_outside { "outside" } else { "inside" };
            state.wrong.push((
                SystemTime::now(),
                format!("{pod} sees {client} ({place}), who asks {service}, as {seen}"),
            ));
        }
    }

    /// A client's question has an answer, or none.
    pub(crate) fn heard(&self, client: &'static str, answer: Result<String>) {
        let mut state = self.state();
        state.questions += 1;
        let streak = state.clients.entry(client).or_default();
        match answer {
            Ok(pod) => {
                streak.pods.push_back(pod);
                if streak.pods.len() > ENOUGH {
                    streak.pods.pop_front();
                }
            }
            Err(error) => *streak = Streak { last_failure: format!("{error:#}"), ..Streak::default() },
        }
    }

    /// Questions so far, answered or not.
    pub(crate) fn questions(&self) -> u64 {
        self.state().questions
    }

    /// What was answered until now does not count any more for [`Judge::works`].
    pub(crate) fn begin_to_count(&self) {
        for streak in self.state().clients.values_mut() {
            *streak = Streak::default();
        }
    }

    /// That every client is answered, by all of these pods and by nobody else; by nobody where there are none.
    pub(crate) fn works(&self, pods: &BTreeSet<String>) -> Result<()> {
        for (client, streak) in &self.state().clients {
            let Streak { pods: answering, last_failure } = streak;
            let answers = answering.len();
            let answering: BTreeSet<_> = answering.iter().cloned().collect();
            if pods.is_empty() {
                ensure!(answers == 0 && !last_failure.is_empty(), "{client} is answered by {answering:?}");
                continue;
            }
            ensure!(
                answers >= ENOUGH && answering == *pods,
                "{client} has {answers} answers in a row, of {answering:?} instead of {pods:?}, before: {last_failure}"
            );
        }
        Ok(())
    }

    /// What went wrong in the sequence while nothing was missing.
    pub(crate) fn verdict(&self) -> Vec<String> {
        let state = self.state();
        let counts = |(time, _): &&(SystemTime, String)| !is_within(&state.wounds, *time);
        state.wrong.iter().filter(counts).map(|(_, text)| text.clone()).collect()
    }

    /// The wounds of the sequence.
    pub(crate) fn wounds(&self) -> Vec<(SystemTime, Option<SystemTime>)> {
        self.state().wounds.clone()
    }
}

/// Whether something was missing then.
pub(crate) fn is_within(wounds: &[(SystemTime, Option<SystemTime>)], time: SystemTime) -> bool {
    wounds.iter().any(|(begin, end)| *begin <= time && end.is_none_or(|end| time <= end))
}

/// A packet that a client should not have got.
#[derive(Clone, Debug)]
pub(crate) struct Strange {
    pub(crate) time: SystemTime,
    pub(crate) source: Ipv4Addr,
    pub(crate) text: String,
}

/// The packets to a client that are no answer to one of its packets: by address and port, as a stranger reads them.
pub(crate) fn strange_answers(captured: &Captured, client: Ipv4Addr) -> Result<Vec<Strange>> {
    const FIELDS: [&str; 7] =
        ["frame.time_epoch", "ip.src", "ip.dst", "tcp.srcport", "tcp.dstport", "udp.srcport", "udp.dstport"];
    let mut asked = BTreeSet::new();
    let mut strange = Vec::new();
    for line in captured.fields("!icmp", &FIELDS)? {
        let words: Vec<_> = line.split('\t').collect();
        let [time, source, destination, tcp_from, tcp_to, udp_from, udp_to] = words[..] else {
            bail!("tshark says {line:?}")
        };
        let protocol = if udp_from.is_empty() { "TCP" } else { "UDP" };
        let from = (source.to_owned(), format!("{tcp_from}{udp_from}"));
        let to = (destination.to_owned(), format!("{tcp_to}{udp_to}"));
        if source == client.to_string() {
            asked.insert((protocol, from, to));
        } else if !asked.contains(&(protocol, to.clone(), from.clone())) {
            let seconds: f64 = time.parse().with_context(|| format!("a time: {time:?}"))?;
            let text = format!("{protocol} from {}:{} to {}:{}", from.0, from.1, to.0, to.1);
            let time = UNIX_EPOCH + Duration::from_secs_f64(seconds);
            strange.push(Strange { time, source: source.parse()?, text });
        }
    }
    Ok(strange)
}
