//! The files of an instance. Names that a command has to repeat begin with what they are for (`raw_`, `ref_`, `out_`, `key_`, `old_`,
//! `new_`), which is what a small model finds them by.
//!
//! Each file holds the trap that tells the right command from the mistake: a row equal to the bound, numbers whose text order differs
//! from their order, a cell equal to the old column name, repeats that are not neighbours, …

use drillyard_schema::Split;

use crate::draw::Draw;
use crate::names::Names;

use super::plan::{Op, Plan};

const DELIMITERS: [char; 3] = [',', ';', ':'];
const MAX_NUMBER: i64 = 99;

/// The parameters of an instance and its files (path, text), the input first.
pub(crate) fn draw(op: Op, split: Split, draw: &mut Draw) -> (Plan, Vec<(String, String)>) {
    let mut names = Names::new(split);
    let extension = match op {
        Op::CountRows
        | Op::Mean
        | Op::Largest
        | Op::ExtractColumn
        | Op::SumForKey
        | Op::ColumnToLine
        | Op::CountAbove
        | Op::Smallest => "txt",
        _ => "csv",
    };
    let input = format!("raw_{}.csv", names.next(draw));
    let output = format!("out_{}.{extension}", names.next(draw));
    let plan = Plan {
        op,
        input,
        second: None,
        output,
        delimiter: *draw.pick(&DELIMITERS),
        column: 2 + draw.below(2),
        bound: None,
        word: None,
        new_word: None,
    };
    match op {
        Op::Join => join(plan, &mut names, draw),
        Op::Dedupe => dedupe(plan, &mut names, draw),
        Op::RenameColumn => rename_column(plan, &mut names, draw),
        Op::FilterAbove | Op::FilterAtMost | Op::CountAbove => compare(plan, &mut names, draw),
        Op::Largest | Op::SortRows | Op::Smallest => text_order(plan, &mut names, draw),
        Op::FillEmpty => fill_empty(plan, &mut names, draw),
        Op::SumForKey => sum_for_key(plan, &mut names, draw),
        Op::ExtractColumn | Op::ColumnToLine => any_column(plan, &mut names, draw),
        Op::CountRows | Op::Mean | Op::Convert => plain(plan, &mut names, draw),
    }
}

/// A table of cells; the first line is the header.
type Lines = Vec<Vec<String>>;

/// Three columns: names, and in `column` the given numbers; the third is one or the other.
fn three_columns(column: usize, numbers: &[i64], names: &mut Names, draw: &mut Draw) -> Lines {
    let other_is_numbers = draw.chance(0.5);
    let mut lines = vec![(0..3).map(|_| names.next(draw)).collect::<Vec<_>>()];
    for number in numbers {
        let mut cells = vec![names.next(draw)];
        for place in 2..=3 {
            cells.push(if place == column {
                number.to_string()
            } else if other_is_numbers {
                draw.between(1, MAX_NUMBER).to_string()
            } else {
                names.next(draw)
            });
        }
        lines.push(cells);
    }
    lines
}

fn row_count(draw: &mut Draw) -> usize {
    4 + draw.below(4)
}

fn text(lines: &[Vec<String>], delimiter: char) -> String {
    let mut text = String::new();
    for line in lines {
        text.push_str(&line.join(&delimiter.to_string()));
        text.push('\n');
    }
    text
}

fn one_file(plan: Plan, lines: &[Vec<String>]) -> (Plan, Vec<(String, String)>) {
    let file = (plan.input.clone(), text(lines, plan.delimiter));
    (plan, vec![file])
}

/// No trap needed: the mistake is wrong on every table.
fn plain(plan: Plan, names: &mut Names, draw: &mut Draw) -> (Plan, Vec<(String, String)>) {
    let count = row_count(draw);
    let numbers = draw.distinct(count, 1, MAX_NUMBER);
    let lines = three_columns(plan.column, &numbers, names, draw);
    one_file(plan, &lines)
}

/// As [`plain`], with any of the three columns.
fn any_column(mut plan: Plan, names: &mut Names, draw: &mut Draw) -> (Plan, Vec<(String, String)>) {
    plan.column = 1 + draw.below(3);
    plain(plan, names, draw)
}

/// One row is equal to the bound, at least one is above it and one below.
fn compare(mut plan: Plan, names: &mut Names, draw: &mut Draw) -> (Plan, Vec<(String, String)>) {
    let count = row_count(draw);
    let numbers = draw.distinct(count, 1, MAX_NUMBER);
    let mut sorted = numbers.clone();
    sorted.sort_unstable();
    plan.bound = Some(sorted[1 + draw.below(count - 2)]);
    let lines = three_columns(plan.column, &numbers, names, draw);
    one_file(plan, &lines)
}

/// The smallest number has one digit and some other number begins with a lower digit, so as text that one comes first.
fn text_order(plan: Plan, names: &mut Names, draw: &mut Draw) -> (Plan, Vec<(String, String)>) {
    let count = row_count(draw);
    let digit = draw.between(2, 9);
    let lower_start = draw.between(10, digit * 10 - 1);
    let mut numbers = vec![digit, lower_start];
    for number in draw.distinct(count, digit + 1, MAX_NUMBER) {
        if numbers.len() < count && number != lower_start {
            numbers.push(number);
        }
    }
    draw.shuffle(&mut numbers);
    let lines = three_columns(plan.column, &numbers, names, draw);
    one_file(plan, &lines)
}

/// Some cells of the column are empty, not all.
fn fill_empty(plan: Plan, names: &mut Names, draw: &mut Draw) -> (Plan, Vec<(String, String)>) {
    let count = row_count(draw);
    let numbers = draw.distinct(count, 1, MAX_NUMBER);
    let mut lines = three_columns(plan.column, &numbers, names, draw);
    let empty = 1 + draw.below(2);
    for row in draw.distinct(empty, 1, count as i64) {
        lines[row as usize][plan.column - 1].clear();
    }
    one_file(plan, &lines)
}

/// Two or three rows have the key, so the last of them alone is not the sum.
fn sum_for_key(
    mut plan: Plan,
    names: &mut Names,
    draw: &mut Draw,
) -> (Plan, Vec<(String, String)>) {
    let count = row_count(draw);
    let numbers = draw.distinct(count, 1, MAX_NUMBER);
    let mut lines = three_columns(plan.column, &numbers, names, draw);
    let key = format!("key_{}", names.next(draw));
    let hits = 2 + draw.below(2);
    for row in draw.distinct(hits, 1, count as i64) {
        lines[row as usize][0].clone_from(&key);
    }
    plan.word = Some(key);
    one_file(plan, &lines)
}

/// A cell of the same column is equal to the column's name.
fn rename_column(
    mut plan: Plan,
    names: &mut Names,
    draw: &mut Draw,
) -> (Plan, Vec<(String, String)>) {
    let count = row_count(draw);
    let mut lines = vec![(0..3).map(|_| names.next(draw)).collect::<Vec<_>>()];
    let number_column = 1 + draw.below(2);
    for _ in 0..count {
        let mut cells: Vec<String> = (0..3).map(|_| names.next(draw)).collect();
        cells[number_column] = draw.between(1, MAX_NUMBER).to_string();
        lines.push(cells);
    }
    plan.column = *draw.pick(&[1, 4 - number_column]);
    let old = format!("old_{}", lines[0][plan.column - 1]);
    lines[0][plan.column - 1].clone_from(&old);
    let row = 1 + draw.below(count);
    lines[row][plan.column - 1].clone_from(&old);
    plan.word = Some(old);
    plan.new_word = Some(format!("new_{}", names.next(draw)));
    one_file(plan, &lines)
}

/// One or two rows occur again further down, never right below themselves.
fn dedupe(mut plan: Plan, names: &mut Names, draw: &mut Draw) -> (Plan, Vec<(String, String)>) {
    plan.column = 1;
    let count = 3 + draw.below(3);
    let numbers = draw.distinct(count, 1, MAX_NUMBER);
    let column = 2 + draw.below(2);
    let mut lines = three_columns(column, &numbers, names, draw);
    for repeat in 0..=draw.below(2) {
        // Sources are different rows; the copy goes at least one line away from its source and from other copies of it.
        let source = 1 + repeat;
        let place = draw.between(source as i64 + 2, lines.len() as i64) as usize;
        let copy = lines[source].clone();
        lines.insert(place, copy);
    }
    one_file(plan, &lines)
}

/// Two files sorted by their first column; one or two keys of the first are missing from the second, which may have one of its own.
fn join(mut plan: Plan, names: &mut Names, draw: &mut Draw) -> (Plan, Vec<(String, String)>) {
    plan.column = 1;
    let second = format!("ref_{}.csv", names.next(draw));
    let count = row_count(draw);
    let mut keys: Vec<String> = (0..count).map(|_| names.next(draw)).collect();
    keys.sort_unstable();
    let missing_count = 1 + draw.below(2);
    let missing = draw.distinct(missing_count, 0, count as i64 - 1);
    let mut other_keys: Vec<String> = keys
        .iter()
        .enumerate()
        .filter(|(row, _)| !missing.contains(&(*row as i64)))
        .map(|(_, key)| key.clone())
        .collect();
    if draw.chance(0.5) {
        other_keys.push(names.next(draw));
        other_keys.sort_unstable();
    }
    let key_column = names.next(draw);
    let mut table = |keys: &[String], draw: &mut Draw| {
        let mut lines = vec![vec![key_column.clone(), names.next(draw)]];
        for key in keys {
            lines.push(vec![key.clone(), draw.between(1, MAX_NUMBER).to_string()]);
        }
        lines
    };
    let (first_lines, second_lines) = (table(&keys, draw), table(&other_keys, draw));
    let files = vec![
        (plan.input.clone(), text(&first_lines, plan.delimiter)),
        (second.clone(), text(&second_lines, plan.delimiter)),
    ];
    plan.second = Some(second);
    (plan, files)
}
