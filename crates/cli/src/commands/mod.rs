//! One file per verb.

pub(crate) mod base;
pub(crate) mod bench;
pub(crate) mod control;
pub(crate) mod image;
pub(crate) mod import;
pub(crate) mod limits;
pub(crate) mod loop_;
pub(crate) mod nights;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod sql;
