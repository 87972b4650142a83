//! The families, and the parameters that make an instance of one.

use drillyard_schema::Task;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::task_set::Family;

macro_rules! ops {
    ($($(#[$meta:meta])* $variant:ident => $name:literal, $difficulty:literal, $unseen:literal;)*) => {
        /// What is to be done with the input: one operation a family.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub(crate) enum Op { $($(#[$meta])* $variant,)* }

        impl Op {
            pub(crate) const ALL: &'static [Self] = &[$(Self::$variant,)*];

            pub(crate) const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            pub(crate) const fn difficulty(self) -> u8 {
                match self { $(Self::$variant => $difficulty,)* }
            }

            pub(crate) const fn unseen(self) -> bool {
                match self { $(Self::$variant => $unseen,)* }
            }
        }

        pub(crate) const FAMILIES: [Family; Op::ALL.len()] = [
            $(Family { name: $name, difficulty: $difficulty, unseen: $unseen },)*
        ];
    };
}

ops! {
    /// Rows with a number above a bound. Mistake: the bound itself is kept.
    FilterAbove => "filter_above", 1, false;
    /// Rows with a number at most a bound. Mistake: the bound itself is dropped.
    FilterAtMost => "filter_at_most", 1, false;
    /// How many rows. Mistake: the header is counted.
    CountRows => "count_rows", 1, false;
    /// Mean of a column. Mistake: the header counts as a row.
    Mean => "mean", 2, false;
    /// Largest number of a column. Mistake: sorted as text.
    Largest => "largest", 2, false;
    /// Rows by a number. Mistake: sorted as text.
    SortRows => "sort_rows", 2, false;
    /// Each line once. Mistake: only neighbours are compared.
    Dedupe => "dedupe", 1, false;
    /// Another name in the header. Mistake: equal cells are renamed too.
    RenameColumn => "rename_column", 1, false;
    /// Two tables on their first column, keeping all rows of the first. Mistake: rows without a partner are lost.
    Join => "join", 3, false;
    /// Another delimiter. Mistake: only the first one of each line.
    Convert => "convert", 1, false;
    /// The values of a column. Mistake: with the header.
    ExtractColumn => "extract_column", 1, false;
    /// A value for empty cells. Mistake: changed rows lose the delimiter.
    FillEmpty => "fill_empty", 2, false;
    /// Sum over the rows with a key. Mistake: only the last one.
    SumForKey => "sum_for_key", 3, false;
    /// A column as one line. Mistake: with the header.
    ColumnToLine => "column_to_line", 2, false;
    /// How many rows with a number above a bound. Mistake: the bound counts. Never trained on.
    CountAbove => "count_above", 2, true;
    /// Smallest number of a column. Mistake: sorted as text. Never trained on.
    Smallest => "smallest", 2, true;
}

/// The parameters of an instance, stored as the task's verifier. Together with the set-up files they decide the right result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// The operation.
    pub(crate) op: Op,
    /// The file to work on.
    pub(crate) input: String,
    /// The second file of a join.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) second: Option<String>,
    /// The file to write.
    pub(crate) output: String,
    /// What separates the cells of the input.
    pub(crate) delimiter: char,
    /// The column, counted from 1.
    #[serde(default = "one")]
    pub(crate) column: usize,
    /// The bound of a comparison.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bound: Option<i64>,
    /// The key whose rows count, or the old name of a column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) word: Option<String>,
    /// The new name of a column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) new_word: Option<String>,
}

fn one() -> usize {
    1
}

impl Plan {
    /// The parameters of a task.
    pub(crate) fn of(task: &Task) -> Result<Self, serde_json::Error> {
        Self::deserialize(&task.verifier)
    }

    /// As JSON, for [`Task::verifier`].
    pub(crate) fn to_value(&self) -> Value {
        // Only strings and numbers: this cannot fail, and a null would be reported by `of`.
        serde_json::to_value(self).unwrap_or(Value::Null)
    }

    /// The bound as text; empty in a family without one.
    pub(crate) fn bound_text(&self) -> String {
        self.bound.map(|b| b.to_string()).unwrap_or_default()
    }

    /// The key or old name; empty in a family without one.
    pub(crate) fn word(&self) -> &str {
        self.word.as_deref().unwrap_or("")
    }

    /// The new name; empty in a family without one.
    pub(crate) fn new_word(&self) -> &str {
        self.new_word.as_deref().unwrap_or("")
    }

    /// The second file; empty in a family without one.
    pub(crate) fn second(&self) -> &str {
        self.second.as_deref().unwrap_or("")
    }
}
