//! Every network that the testbed can build, with an agent on every node: whom do pods see, and does everything arrive?
//!
//! What is tried is data: [`kinds::all`] are the networks, [`cells`] has the places of backends, protocols and clients. Each
//! network is a testbed of its own, several are up at once, and a table of all cells is printed at the end. `LB_MATRIX=TEXT`
//! leaves out networks whose name in the table does not have that text.
//!
//! Needs root, and the programs that `cargo xtask setup` installs.

mod bed;
mod cells;
mod kinds;
mod table;
mod talk;

use bed::Bed;
use kinds::Kind;
use std::collections::VecDeque;
use std::env;
use std::io::Write as _;
use std::sync::Mutex;
use std::thread;
use table::{Outcome, Row};

/// Testbeds that are up at once. While one waits for its agents, another exchanges bytes.
const AT_ONCE: usize = 4;

#[test]
fn clients_are_seen_as_they_should_be_on_every_network() {
    let only = env::var("LB_MATRIX").unwrap_or_default();
    let chosen = kinds::all().into_iter().filter(|kind| kind.to_string().contains(&only));
    let kinds: Mutex<VecDeque<_>> = Mutex::new(chosen.collect());
    let rows: Mutex<Vec<Row>> = Mutex::default();
    let next = || kinds.lock().unwrap().pop_front();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(kind) = next() {
                    let of_kind = try_all(&kind);
                    rows.lock().unwrap().extend(of_kind);
                }
            });
        }
    });
    let mut rows: Vec<Row> = rows.into_inner().unwrap();
    rows.sort_by_key(|row| row.order);
    // Not println: the harness would keep the table of a test that passes.
    let _ = std::io::stdout().write_all(table::draw(&rows).as_bytes());
    let failed = table::failures(&rows);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// All cells of one network: a row for each client.
fn try_all(kind: &Kind) -> Vec<Row> {
    // A testbed that does not come up is a row that says so, and the others are still tried.
    let built = Bed::start(kind);
    let clients = cells::CLIENTS.iter().zip(0..);
    clients
        .map(|(client, number)| Row {
            order: (kind.number, number),
            network: kind.to_string(),
            client: client.name,
            outcomes: cells::columns()
                .map(|(place, protocol)| match &built {
                    Ok(bed) => bed.try_cell(client, place, protocol),
                    Err(error) => Outcome::Failed(format!("{error:#}")),
                })
                .collect(),
        })
        .collect()
}
