//! What the commands that look at a node have in common: where they look, and how they print.

use super::datapath_args::PinArgs;
use crate::datapath::maps::{Maps, MapsError};
use crate::datapath::pins::Pins;
use clap::ValueEnum;
use lb_common::addr::{Ipv4, Port, Protocol};
use serde::Serialize;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4};

/// Where to look, and how to print.
#[derive(Debug, clap::Args)]
pub(super) struct Look {
    #[command(flatten)]
    pins: PinArgs,
    /// A table for people, or JSON with exact numbers for programs
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

impl Look {
    /// Where the datapath is pinned.
    pub(super) fn pins(&self) -> Pins {
        self.pins.pins()
    }

    /// The datapath's maps, whether an agent runs or not.
    pub(super) fn maps(&self) -> Result<Maps, MapsError> {
        Maps::open(&self.pins())
    }

    /// Prints rows: a table, or a JSON array of objects.
    pub(super) fn print_rows<R: Row>(&self, rows: &[R]) -> anyhow::Result<()> {
        self.print(rows, || table(rows))
    }

    /// Prints one value: JSON, or the text for people.
    pub(super) fn print<T: Serialize + ?Sized>(
        &self,
        value: &T,
        text: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        let text = match self.output {
            Output::Table => text(),
            Output::Json => serde_json::to_string_pretty(value)? + "\n",
        };
        Ok(print(&text)?)
    }
}

/// Prints text. A reader that has seen enough (`| head`) is no error.
pub(super) fn print(text: &str) -> io::Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// A column of a table.
pub(super) struct Column {
    title: &'static str,
    is_number: bool,
}

/// A column of words.
pub(super) const fn words(title: &'static str) -> Column {
    Column { title, is_number: false }
}

/// A column of numbers, whose ends stand below each other.
pub(super) const fn numbers(title: &'static str) -> Column {
    Column { title, is_number: true }
}

/// One line of a table, and (serialised) one object of the JSON array.
pub(super) trait Row: Serialize {
    /// The table's columns.
    const COLUMNS: &'static [Column];

    /// One cell for each column.
    fn cells(&self) -> Vec<String>;

    /// More to say, on a line of its own.
    fn note(&self) -> Option<&str> {
        None
    }
}

impl<R: Row> Row for &R {
    const COLUMNS: &'static [Column] = R::COLUMNS;

    fn cells(&self) -> Vec<String> {
        R::cells(self)
    }

    fn note(&self) -> Option<&str> {
        R::note(self)
    }
}

/// Rows below their headings; the word `none` where there are no rows, so that a reader sees that nothing was left out.
pub(super) fn table<R: Row>(rows: &[R]) -> String {
    if rows.is_empty() {
        return "none\n".to_owned();
    }
    let titles = R::COLUMNS.iter().map(|column| column.title.to_owned()).collect();
    let notes = rows.iter().map(Row::note);
    let lines: Vec<(Vec<String>, Option<&str>)> =
        std::iter::once((titles, None)).chain(rows.iter().map(Row::cells).zip(notes)).collect();
    let widths = widths(lines.iter().map(|(cells, _)| cells));
    let mut text = String::new();
    for (cells, note) in &lines {
        let padded = cells.iter().zip(&widths).zip(R::COLUMNS).map(|((cell, width), column)| {
            if column.is_number { format!("{cell:>width$}") } else { format!("{cell:width$}") }
        });
        text.push_str(padded.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
        if let Some(note) = note {
            text.push_str("    ");
            text.push_str(note);
            text.push('\n');
        }
    }
    text
}

/// Rows without headings, as lines.
pub(super) fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let widths = widths(rows);
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// The width of each column, in characters.
fn widths<'a>(rows: impl IntoIterator<Item = &'a Vec<String>>) -> Vec<usize> {
    let mut widths = Vec::new();
    for row in rows {
        widths.resize(row.len().max(widths.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    widths
}

/// A number of bytes, short; the exact number is in the JSON.
pub(super) fn short_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut tenths = u128::from(bytes) * 10;
    let mut unit = "B";
    for larger in UNITS {
        if tenths < 10_240 {
            break;
        }
        tenths /= 1024;
        unit = larger;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{}.{} {unit}", tenths / 10, tenths % 10) }
}

/// An address and a port, as people write them.
pub(super) fn socket(address: Ipv4Addr, port: u16) -> String {
    SocketAddrV4::new(address, port).to_string()
}

/// A port of an address, with its protocol.
pub(super) fn served(address: Ipv4Addr, port: u16, protocol: &str) -> String {
    format!("{}/{protocol}", socket(address, port))
}

/// Address, port and protocol of a map as plain values.
pub(super) fn plain(address: Ipv4, port: Port, protocol: Protocol) -> (Ipv4Addr, u16, &'static str) {
    (address.into(), port.number(), protocol.name())
}

/// For what is not known, or not there.
pub(super) fn or_dash(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "-".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Fruit {
        name: &'static str,
        count: u32,
        note: Option<&'static str>,
    }

    impl Row for Fruit {
        const COLUMNS: &'static [Column] = &[words("NAME"), numbers("COUNT"), words("END")];

        fn cells(&self) -> Vec<String> {
            vec![self.name.to_owned(), self.count.to_string(), String::new()]
        }

        fn note(&self) -> Option<&str> {
            self.note
        }
    }

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_blanks() {
        let rows = [
            Fruit { name: "pear", count: 7, note: None },
            Fruit { name: "Äpfel", count: 1_000_000, note: Some("red") },
        ];
        assert_eq!(table(&rows), "NAME     COUNT  END\npear         7\nÄpfel  1000000\n    red\n");
        assert_eq!(table::<Fruit>(&[]), "none\n");
    }

    #[test]
    fn bytes_are_short() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1_048_575, "1023.9 KiB"),
            (1_048_576, "1.0 MiB"),
            (u64::MAX, "15.9 EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(short_bytes(bytes), text);
        }
    }
}
