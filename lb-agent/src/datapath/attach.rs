//! Attaching the programs to interfaces.
