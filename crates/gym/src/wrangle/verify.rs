//! The expected result, computed from set-up files and parameters, and its comparison with what the agent wrote.
//!
//! Content is compared, not text: cells are trimmed, numbers are equal by value, rows may come in any order where the task names
//! none, a missing or extra line end does not matter. Nothing is run, and nothing the agent says is read.

use drillyard_schema::Task;
use drillyard_schema::task::SetupContent;
use serde::Deserialize;

use crate::milestones::Check;
use crate::task_set::Verification;

use super::plan::{Op, Plan};

/// Numbers are equal within this: a mean may be written with two digits after the point.
const TOLERANCE: f64 = 0.006;
/// Lines of an output beyond this many are not looked at; no right answer has more than a dozen.
const MAX_LINES: usize = 1_000;

/// What a right output holds.
#[derive(Debug, PartialEq)]
struct Expected {
    /// What separates the cells; none where each line is one cell.
    delimiter: Option<char>,
    /// The first line, where there must be a header.
    header: Option<Vec<String>>,
    rows: Vec<Vec<String>>,
    /// The rows must come in this order.
    ordered: bool,
}

/// Checks the output file; `output` is its content, if it exists.
pub(crate) fn verify(task: &Task, plan: &Plan, output: Option<&[u8]>) -> Verification {
    let Some(expected) = expected(task, plan) else {
        return Verification::fault(format!(
            "the set-up files of {} do not fit its verifier",
            task.task_id
        ));
    };
    let text = output.map(String::from_utf8_lossy);
    let exists = text.as_ref().is_some_and(|t| !t.trim().is_empty());
    let lines = parse(text.as_deref().unwrap_or(""), expected.delimiter);
    let wanted = expected.rows.len() + usize::from(expected.header.is_some());
    let right = expected.right_lines(&lines);
    let of = wanted.max(lines.len()).max(1);
    let success = exists && right == wanted && lines.len() == wanted;
    let parses = exists && expected.fits(&lines);
    let milestones = task
        .milestones
        .iter()
        .filter(|milestone| match Check::deserialize(&milestone.check) {
            Ok(Check::FileExists) => exists,
            Ok(Check::FileParses) => parses,
            Ok(Check::ContentRight) => success,
            _ => false,
        })
        .map(|milestone| milestone.name.clone())
        .collect();
    let detail = if success {
        format!("all {wanted} lines of {} are right", plan.output)
    } else if output.is_none() {
        format!("{} does not exist", plan.output)
    } else if !exists {
        format!("{} is empty", plan.output)
    } else {
        format!(
            "{right} of {wanted} lines of {} are right, it has {}",
            plan.output,
            lines.len()
        )
    };
    Verification {
        success,
        score: if success {
            1.0
        } else {
            right as f64 / of as f64
        },
        detail,
        milestones,
        fault: None,
    }
}

fn parse(text: &str, delimiter: Option<char>) -> Vec<Vec<String>> {
    let text = text.trim_end_matches(['\n', '\r']);
    if text.is_empty() {
        return Vec::new();
    }
    text.lines()
        .take(MAX_LINES)
        .map(|line| match delimiter {
            Some(d) => line.split(d).map(|cell| cell.trim().to_owned()).collect(),
            None => vec![line.trim().to_owned()],
        })
        .collect()
}

impl Expected {
    /// How many lines are right: the header in its place, each row once.
    fn right_lines(&self, lines: &[Vec<String>]) -> usize {
        let (mut right, rows) = match (&self.header, lines.split_first()) {
            (Some(header), Some((first, rest))) => (usize::from(same_line(header, first)), rest),
            _ => (0, lines),
        };
        if self.ordered {
            right += self
                .rows
                .iter()
                .zip(rows)
                .filter(|(wanted, got)| same_line(wanted, got))
                .count();
        } else {
            let mut open: Vec<&Vec<String>> = self.rows.iter().collect();
            for got in rows {
                if let Some(at) = open.iter().position(|wanted| same_line(wanted, got)) {
                    open.swap_remove(at);
                    right += 1;
                }
            }
        }
        right
    }

    /// True if every line has as many cells as a right one, and numbers where only numbers are right.
    fn fits(&self, lines: &[Vec<String>]) -> bool {
        let number = matches!(self.rows.as_slice(), [row] if row.len() == 1 && row[0].parse::<f64>().is_ok());
        if self.delimiter.is_none() && number && self.header.is_none() {
            return matches!(lines, [line] if line[0].parse::<f64>().is_ok());
        }
        // A row without a partner in a join may leave out its empty last cell.
        let widths: Vec<usize> = self
            .header
            .iter()
            .chain(&self.rows)
            .flat_map(|line| {
                let open_end = line.last().is_some_and(String::is_empty);
                [line.len(), line.len() - usize::from(open_end)]
            })
            .collect();
        lines.iter().all(|line| widths.contains(&line.len()))
    }
}

fn same_line(wanted: &[String], got: &[String]) -> bool {
    // A row without a partner in a join may or may not write its empty last cell.
    let longest = wanted.len().max(got.len());
    let cell = |line: &[String], at: usize| line.get(at).cloned().unwrap_or_default();
    longest - wanted.len().min(got.len()) <= 1
        && (0..longest).all(|at| same_cell(&cell(wanted, at), &cell(got, at)))
}

fn same_cell(wanted: &str, got: &str) -> bool {
    wanted == got
        || match (wanted.parse::<f64>(), got.parse::<f64>()) {
            (Ok(a), Ok(b)) => (a - b).abs() <= TOLERANCE,
            _ => false,
        }
}

/// The right result; none if the set-up and the parameters do not fit together.
fn expected(task: &Task, plan: &Plan) -> Option<Expected> {
    let table = |path: &str| -> Option<Vec<Vec<String>>> {
        task.setup
            .iter()
            .find(|file| file.path == path)
            .and_then(|file| match &file.content {
                SetupContent::Text(text) => Some(parse(text, Some(plan.delimiter))),
                SetupContent::Asset(_) => None,
            })
    };
    let lines = table(&plan.input)?;
    let (header, rows) = lines.split_first()?;
    let at = plan.column.checked_sub(1)?;
    if rows.is_empty() || lines.iter().any(|line| line.len() <= at) {
        return None;
    }
    let number = |row: &Vec<String>| row[at].parse::<i64>().ok();
    let numbers = || rows.iter().map(number).collect::<Option<Vec<i64>>>();
    let keep = |fits: &dyn Fn(i64) -> bool| -> Option<Vec<Vec<String>>> {
        let numbers = numbers()?;
        Some(
            rows.iter()
                .zip(numbers)
                .filter(|(_, number)| fits(*number))
                .map(|(row, _)| row.clone())
                .collect(),
        )
    };
    let whole = |header: &[String], rows: Vec<Vec<String>>| Expected {
        delimiter: Some(plan.delimiter),
        header: Some(header.to_vec()),
        rows,
        ordered: false,
    };
    let value = |value: String| Expected {
        delimiter: None,
        header: None,
        rows: vec![vec![value]],
        ordered: true,
    };
    let column = || rows.iter().map(|row| row[at].clone());
    Some(match plan.op {
        Op::FilterAbove => {
            let bound = plan.bound?;
            whole(header, keep(&|n| n > bound)?)
        }
        Op::FilterAtMost => {
            let bound = plan.bound?;
            whole(header, keep(&|n| n <= bound)?)
        }
        Op::CountAbove => {
            let bound = plan.bound?;
            value(keep(&|n| n > bound)?.len().to_string())
        }
        Op::CountRows => value(rows.len().to_string()),
        Op::Mean => {
            let numbers = numbers()?;
            let sum: i64 = numbers.iter().sum();
            value((sum as f64 / numbers.len() as f64).to_string())
        }
        Op::Largest => value(numbers()?.into_iter().max()?.to_string()),
        Op::Smallest => value(numbers()?.into_iter().min()?.to_string()),
        Op::SortRows => {
            numbers()?;
            let mut sorted = rows.to_vec();
            sorted.sort_by_key(number);
            Expected {
                delimiter: Some(plan.delimiter),
                header: None,
                rows: sorted,
                ordered: true,
            }
        }
        Op::Dedupe => {
            let mut once: Vec<Vec<String>> = Vec::new();
            for row in rows {
                if !once.contains(row) {
                    once.push(row.clone());
                }
            }
            whole(header, once)
        }
        Op::RenameColumn => {
            let mut renamed = header.clone();
            let cell = renamed.iter_mut().find(|cell| *cell == plan.word())?;
            plan.new_word().clone_into(cell);
            whole(&renamed, rows.to_vec())
        }
        Op::Join => {
            let other = table(plan.second())?;
            let (other_header, other_rows) = other.split_first()?;
            let partner = |key: &String| other_rows.iter().find(|row| row.first() == Some(key));
            let joined = rows
                .iter()
                .map(|row| {
                    let mut row = row.clone();
                    match partner(&row[0]) {
                        Some(found) => row.extend_from_slice(&found[1..]),
                        None => row.push(String::new()),
                    }
                    row
                })
                .collect();
            let mut wide = header.clone();
            wide.extend_from_slice(&other_header[1..]);
            whole(&wide, joined)
        }
        Op::Convert => Expected {
            delimiter: Some('|'),
            ..whole(header, rows.to_vec())
        },
        Op::ExtractColumn => Expected {
            delimiter: None,
            header: None,
            rows: column().map(|cell| vec![cell]).collect(),
            ordered: true,
        },
        Op::FillEmpty => {
            let mut filled = rows.to_vec();
            for row in &mut filled {
                if row[at].is_empty() {
                    "0".clone_into(&mut row[at]);
                }
            }
            whole(header, filled)
        }
        Op::SumForKey => {
            let sum = rows
                .iter()
                .filter(|row| row[0] == plan.word())
                .map(number)
                .sum::<Option<i64>>()?;
            value(sum.to_string())
        }
        Op::ColumnToLine => Expected {
            delimiter: Some(','),
            header: None,
            rows: vec![column().collect()],
            ordered: true,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(line: &str) -> Vec<String> {
        line.split(',').map(str::to_owned).collect()
    }

    #[test]
    fn lines_are_compared_by_content() {
        assert!(same_line(&cells("kafo,44.5"), &cells("kafo,44.50")));
        assert!(same_line(&cells("kafo,1,"), &cells("kafo,1")));
        assert!(!same_line(&cells("kafo,1"), &cells("kafo,1,2")));
        assert!(!same_line(&cells("kafo,1"), &cells("kafo")));
        assert!(!same_line(&cells("kafo,1"), &cells("mire,1")));
        assert_eq!(parse("a;1\r\nb;2\n\n", Some(';')), [["a", "1"], ["b", "2"]]);
    }

    #[test]
    fn repeated_and_missing_rows_cost_credit() {
        let expected = Expected {
            delimiter: Some(','),
            header: Some(cells("h,x")),
            rows: vec![cells("a,1"), cells("b,2")],
            ordered: false,
        };
        let right = |text: &str| expected.right_lines(&parse(text, Some(',')));
        assert_eq!(right("h,x\nb,2\na,1\n"), 3);
        assert_eq!(right("h,x\na,1\na,1\n"), 2);
        assert_eq!(right("a,1\nb,2\n"), 1);
        assert_eq!(right(""), 0);
    }
}
