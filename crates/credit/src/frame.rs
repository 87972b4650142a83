//! Small helpers around polars.

use polars::prelude::*;

use crate::CreditError;

/// Left or inner join on columns that may be named differently on both sides.
pub fn join(left: LazyFrame, right: LazyFrame, on: &[(&str, &str)], how: JoinType) -> LazyFrame {
    let keys = |pick: fn(&(&str, &str)) -> String| -> Vec<Expr> {
        on.iter().map(|pair| col(pick(pair))).collect()
    };
    let mut args = JoinArgs::new(how);
    args.coalesce = JoinCoalesce::CoalesceColumns;
    left.join(
        right,
        keys(|p| p.0.to_owned()),
        keys(|p| p.1.to_owned()),
        args,
    )
}

/// A lazy frame's result.
pub fn collect(frame: LazyFrame, what: &'static str) -> Result<DataFrame, CreditError> {
    frame.collect().map_err(CreditError::plan(what))
}

/// Typed access to a collected frame's columns.
pub struct Columns<'a> {
    pub frame: &'a DataFrame,
    pub what: &'static str,
}

impl Columns<'_> {
    fn read<T>(
        &self,
        name: &str,
        convert: impl FnOnce(&Column) -> PolarsResult<Vec<Option<T>>>,
    ) -> Result<Vec<Option<T>>, CreditError> {
        self.frame
            .column(name)
            .and_then(convert)
            .map_err(CreditError::plan(self.what))
    }

    fn whole<T>(&self, name: &str, values: Vec<Option<T>>) -> Result<Vec<T>, CreditError> {
        values
            .into_iter()
            .collect::<Option<_>>()
            .ok_or_else(|| CreditError::Plan {
                what: self.what,
                message: format!("column {name} holds nulls"),
            })
    }

    pub fn texts_or_null(&self, name: &str) -> Result<Vec<Option<String>>, CreditError> {
        self.read(name, |c| {
            Ok(c.str()?.iter().map(|v| v.map(str::to_owned)).collect())
        })
    }

    pub fn texts(&self, name: &str) -> Result<Vec<String>, CreditError> {
        self.whole(name, self.texts_or_null(name)?)
    }

    pub fn ints(&self, name: &str) -> Result<Vec<i64>, CreditError> {
        let values = self.read(name, |c| {
            Ok(c.cast(&DataType::Int64)?.i64()?.iter().collect())
        })?;
        self.whole(name, values)
    }

    pub fn reals_or_null(&self, name: &str) -> Result<Vec<Option<f64>>, CreditError> {
        self.read(name, |c| Ok(c.f64()?.iter().collect()))
    }

    pub fn reals(&self, name: &str) -> Result<Vec<f64>, CreditError> {
        self.whole(name, self.reals_or_null(name)?)
    }

    pub fn bools_or_null(&self, name: &str) -> Result<Vec<Option<bool>>, CreditError> {
        self.read(name, |c| Ok(c.bool()?.iter().collect()))
    }

    pub fn bools(&self, name: &str) -> Result<Vec<bool>, CreditError> {
        self.whole(name, self.bools_or_null(name)?)
    }
}
