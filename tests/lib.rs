//! Tests that span crates. Few binaries, since each links the heavy engines once:
//!
//! - `tidy`: the architecture's invariants and the tree's cleanliness;
//! - `sql`: every `.slt` beside a rule or question under `sql/`;
//! - `e2e`: whole runs through the command line.
