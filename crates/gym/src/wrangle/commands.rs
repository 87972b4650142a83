//! What the expert types: the look, the right command, and the systematic mistake.
//!
//! Commands are short and use the same idioms and quoting everywhere, because a small model spends a token on every piece. They
//! hold no double quote and no backslash, so they look the same inside JSON, and run with coreutils, sed and any awk.

use super::plan::{Op, Plan};

/// The first turn: the header and one row, which shows the delimiter.
pub(crate) fn look(plan: &Plan) -> String {
    let Plan { input, second, .. } = plan;
    match second {
        Some(second) => format!("head -n 2 {input} {second}"),
        None => format!("head -n 2 {input}"),
    }
}

/// The command that does the task.
pub(crate) fn right(plan: &Plan) -> String {
    command(plan, true)
}

/// The command that runs cleanly and gives a wrong result.
pub(crate) fn mistake(plan: &Plan) -> String {
    command(plan, false)
}

#[expect(
    clippy::many_single_char_names,
    reason = "the commands below read better with short names"
)]
fn command(plan: &Plan, right: bool) -> String {
    let (i, j, o) = (&plan.input, plan.second(), &plan.output);
    let (d, c) = (plan.delimiter, plan.column);
    let (v, w, n) = (plan.bound_text(), plan.word(), plan.new_word());
    match (plan.op, right) {
        (Op::FilterAbove, true) => format!("awk -F'{d}' 'NR<2||${c}>{v}' {i}>{o}"),
        (Op::FilterAbove, false) => format!("awk -F'{d}' 'NR<2||${c}>={v}' {i}>{o}"),
        (Op::FilterAtMost, true) => format!("awk -F'{d}' 'NR<2||${c}<={v}' {i}>{o}"),
        (Op::FilterAtMost, false) => format!("awk -F'{d}' 'NR<2||${c}<{v}' {i}>{o}"),
        (Op::CountRows, true) => format!("tail -n +2 {i}|wc -l>{o}"),
        (Op::CountRows, false) => format!("wc -l<{i}>{o}"),
        (Op::Mean, true) => format!("awk -F'{d}' '{{s+=${c}}}END{{print s/(NR-1)}}' {i}>{o}"),
        (Op::Mean, false) => format!("awk -F'{d}' '{{s+=${c}}}END{{print s/NR}}' {i}>{o}"),
        (Op::Largest, true) => format!("cut -d'{d}' -f{c} {i}|sort -n|tail -n1>{o}"),
        (Op::Largest, false) => format!("cut -d'{d}' -f{c} {i}|sort|tail -n1>{o}"),
        (Op::SortRows, true) => format!("tail -n +2 {i}|sort -t'{d}' -nk{c}>{o}"),
        (Op::SortRows, false) => format!("tail -n +2 {i}|sort -t'{d}' -k{c}>{o}"),
        (Op::Dedupe, true) => format!("awk '!s[$0]++' {i}>{o}"),
        (Op::Dedupe, false) => format!("uniq {i}>{o}"),
        (Op::RenameColumn, true) => format!("sed '1s/{w}/{n}/' {i}>{o}"),
        (Op::RenameColumn, false) => format!("sed 's/{w}/{n}/' {i}>{o}"),
        (Op::Join, true) => format!("join --header -t'{d}' -a1 {i} {j}>{o}"),
        (Op::Join, false) => format!("join --header -t'{d}' {i} {j}>{o}"),
        (Op::Convert, true) => format!("sed 's/{d}/|/g' {i}>{o}"),
        (Op::Convert, false) => format!("sed 's/{d}/|/' {i}>{o}"),
        (Op::ExtractColumn, true) => format!("cut -d'{d}' -f{c} {i}|tail -n +2>{o}"),
        (Op::ExtractColumn, false) => format!("cut -d'{d}' -f{c} {i}>{o}"),
        (Op::FillEmpty, true) => format!("awk -F'{d}' -v OFS='{d}' '!${c}{{${c}=0}}1' {i}>{o}"),
        (Op::FillEmpty, false) => format!("awk -F'{d}' '!${c}{{${c}=0}}1' {i}>{o}"),
        (Op::SumForKey, true) => {
            format!("awk -F'{d}' '$1~/{w}/{{s+=${c}}}END{{print s}}' {i}>{o}")
        }
        (Op::SumForKey, false) => {
            format!("awk -F'{d}' '$1~/{w}/{{s=${c}}}END{{print s}}' {i}>{o}")
        }
        (Op::ColumnToLine, true) => format!("cut -d'{d}' -f{c} {i}|tail -n +2|paste -sd,>{o}"),
        (Op::ColumnToLine, false) => format!("cut -d'{d}' -f{c} {i}|paste -sd,>{o}"),
        (Op::CountAbove, true) => format!("awk -F'{d}' 'NR>1&&${c}>{v}' {i}|wc -l>{o}"),
        (Op::CountAbove, false) => format!("awk -F'{d}' 'NR>1&&${c}>={v}' {i}|wc -l>{o}"),
        (Op::Smallest, true) => format!("cut -d'{d}' -f{c} {i}|tail -n +2|sort -n|head -n1>{o}"),
        (Op::Smallest, false) => format!("cut -d'{d}' -f{c} {i}|tail -n +2|sort|head -n1>{o}"),
    }
}
