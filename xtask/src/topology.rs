//! The testbed's topologies on command lines.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use testbed::Topology;

/// Takes a topology by its name; `--help` lists all.
pub(crate) fn by_name() -> impl TypedValueParser<Value = Topology> {
    PossibleValuesParser::new(Topology::ALL.map(Topology::name)).try_map(|name| name.parse::<Topology>())
}
