//! The cells' outcomes, as a person reads them.

use crate::cells::columns;
use std::fmt::Write as _;

/// What became of a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Everything arrived, from whom it should.
    Right,
    Failed(String),
}

/// One client on one network.
pub(crate) struct Row {
    pub(crate) order: (usize, usize),
    pub(crate) network: String,
    pub(crate) client: &'static str,
    /// In the order of [`columns`].
    pub(crate) outcomes: Vec<Outcome>,
}

pub(crate) fn draw(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.network.len()).max().unwrap_or(0);
    let mut text = format!("\n{:width$} {:14}", "network", "client");
    // Writing to a String cannot fail.
    for (place, protocol) in columns() {
        let _ = write!(text, " {:>19}", format!("{} {}", protocol.name(), place.name()));
    }
    for Row { network, client, outcomes, .. } in rows {
        let _ = write!(text, "\n{network:width$} {client:14}");
        for outcome in outcomes {
            let word = match outcome {
                Outcome::Right => "ok",
                Outcome::Failed(_) => "FAILED",
            };
            let _ = write!(text, " {word:>19}");
        }
    }
    text + "\n"
}

pub(crate) fn failures(rows: &[Row]) -> Vec<String> {
    let of_row = |row: &Row| {
        let cells: Vec<_> = columns().zip(row.outcomes.clone()).collect();
        let row = format!("{}, client {}", row.network, row.client);
        cells.into_iter().filter_map(move |((place, protocol), outcome)| match outcome {
            Outcome::Right => None,
            Outcome::Failed(why) => Some(format!("{row}, {} {}: {why}", protocol.name(), place.name())),
        })
    };
    rows.iter().flat_map(of_row).collect()
}
