//! The instructions: short, natural, precise; two wordings a family at most, from few words, for the sake of small models.

use crate::draw::Draw;

use super::plan::{Op, Plan};

/// What the agent is told.
pub(crate) fn instruction(plan: &Plan, draw: &mut Draw) -> String {
    let wordings = wordings(plan);
    draw.pick(&wordings).clone()
}

/// The two wordings of a family.
#[expect(
    clippy::many_single_char_names,
    reason = "the sentences below read better with short names"
)]
fn wordings(plan: &Plan) -> [String; 2] {
    let (i, j, o, c) = (&plan.input, plan.second(), &plan.output, plan.column);
    let (v, w, n) = (plan.bound_text(), plan.word(), plan.new_word());
    match plan.op {
        Op::FilterAbove => [
            format!(
                "Keep the header and the rows of {i} where column {c} is above {v}. Write them to {o}."
            ),
            format!("Write to {o} the header of {i} and the rows where column {c} is above {v}."),
        ],
        Op::FilterAtMost => [
            format!(
                "Keep the header and the rows of {i} where column {c} is at most {v}. Write them to {o}."
            ),
            format!("Write to {o} the header of {i} and the rows where column {c} is at most {v}."),
        ],
        Op::CountRows => [
            format!("Count the rows of {i} without the header. Write the number to {o}."),
            format!("Write the number of rows of {i} without the header to {o}."),
        ],
        Op::Mean => [
            format!("Write the mean of column {c} of {i} to {o}."),
            format!("Find the mean of column {c} of {i}. Write it to {o}."),
        ],
        Op::Largest => [
            format!("Write the largest number in column {c} of {i} to {o}."),
            format!("Find the largest number in column {c} of {i}. Write it to {o}."),
        ],
        Op::SortRows => [
            format!(
                "Sort the rows of {i} by the number in column {c}, smallest first. Write them without the header to {o}."
            ),
            format!(
                "Write the rows of {i} without the header to {o}, sorted by the number in column {c}, smallest first."
            ),
        ],
        Op::Dedupe => [
            format!(
                "Remove repeated rows from {i}, keeping the first of each. Write the table to {o}."
            ),
            format!("Write {i} to {o} without repeated rows."),
        ],
        Op::RenameColumn => [
            format!("Rename column {w} of {i} to {n}. Write the table to {o}."),
            format!("Write {i} to {o} with column {w} renamed to {n}."),
        ],
        Op::Join => [
            format!(
                "Join the sorted files {i} and {j} on column 1, keeping all rows of {i}. Write the table to {o}."
            ),
            format!(
                "Write the join of the sorted files {i} and {j} on column 1 to {o}, keeping all rows of {i}."
            ),
        ],
        Op::Convert => [
            format!("Change all delimiters of {i} to |. Write the table to {o}."),
            format!("Write {i} to {o} with | between all cells."),
        ],
        Op::ExtractColumn => [
            format!("Write the cells of column {c} of {i} without the header to {o}."),
            format!("Write column {c} of {i} to {o} without the header."),
        ],
        Op::FillEmpty => [
            format!("Fill the empty cells of column {c} of {i} with 0. Write the table to {o}."),
            format!("Write {i} to {o} with 0 in the empty cells of column {c}."),
        ],
        Op::SumForKey => [
            format!(
                "Find the sum of column {c} of {i} for the rows where column 1 is {w}. Write it to {o}."
            ),
            format!("Write to {o} the sum of column {c} of {i} where column 1 is {w}."),
        ],
        Op::ColumnToLine => [
            format!(
                "Write the cells of column {c} of {i} without the header to {o} on one line with commas."
            ),
            format!("Write column {c} of {i} without the header on one line with commas to {o}."),
        ],
        Op::CountAbove => [
            format!(
                "Count the rows of {i} where column {c} is above {v}. Write the number to {o}."
            ),
            format!("Write to {o} the number of rows of {i} where column {c} is above {v}."),
        ],
        Op::Smallest => [
            format!("Write the smallest number in column {c} of {i} to {o}."),
            format!("Find the smallest number in column {c} of {i}. Write it to {o}."),
        ],
    }
}
