//! A picture for the terminal of which file holds what: a row for each tensor or layer, a column for each file.

use std::io::{Result, Write};

use bytesize::ByteSize;

use super::holdings::{Holdings, Row};

/// Between the parts of a line.
const GAP: usize = 2;
/// Columns are no wider, however much room there is.
const WIDEST: usize = 8;
const SIZE: usize = 10;

/// Draws at most `width` characters wide. Where there are more files than columns, several share one.
pub(super) fn draw(holdings: &Holdings, width: usize, color: bool, out: &mut dyn Write) -> Result<()> {
    let labels: Vec<String> = holdings.rows.iter().map(label).collect();
    let longest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    let names = longest.min((width * 2 / 5).max(12));
    let room = width.saturating_sub(GAP + names + GAP + SIZE + GAP).max(8);
    let files = holdings.files.len();
    let each = files.div_ceil(room).max(1);
    let columns = files.div_ceil(each);
    // A column and the space after it.
    let cell = if columns * 3 > room { 1 } else { (room / columns).min(WIDEST + 1) };

    let mut head = String::new();
    // Numbers of the first file in a column, wherever there is room for one.
    let digits = files.to_string().len() + 1;
    for column in 0..columns {
        let at = column * cell;
        if head.chars().count() <= at {
            head.extend(std::iter::repeat_n(' ', at - head.chars().count()));
            let number = (column * each + 1).to_string();
            head.push_str(&number);
            head.extend(std::iter::repeat_n(' ', digits.saturating_sub(number.len())));
        }
    }
    let (indent, blank) = (" ".repeat(GAP), " ".repeat(names + GAP + SIZE));
    writeln!(out, "{indent}{blank}{indent}{}", head.trim_end())?;
    let mut total = Row { name: "all".into(), tensors: 1, bytes: vec![0; files] };
    for (row, label) in holdings.rows.iter().zip(&labels) {
        total.bytes.iter_mut().zip(&row.bytes).for_each(|(sum, bytes)| *sum = sum.saturating_add(*bytes));
        line(row, label, (names, columns, each, cell), color, out)?;
    }
    writeln!(out, "{indent}{}", "─".repeat(names + GAP + SIZE + GAP + columns * cell - usize::from(cell > 1)))?;
    line(&total, &total.name, (names, columns, each, cell), color, out)?;
    if each > 1 {
        writeln!(out, "{indent}a column stands for {each} files")?;
    }
    Ok(())
}

fn label(row: &Row) -> String {
    if row.tensors == 1 { row.name.clone() } else { format!("{} ({})", row.name, row.tensors) }
}

fn line(
    row: &Row,
    label: &str,
    (names, columns, each, cell): (usize, usize, usize, usize),
    color: bool,
    out: &mut dyn Write,
) -> Result<()> {
    let bytes = row.bytes.chunks(each).map(|files| files.iter().copied().fold(0, u64::saturating_add)).collect();
    let shared = Row { name: String::new(), tensors: 0, bytes };
    let mut bars = String::new();
    for share in shared.shares().into_iter().take(columns) {
        bars.push_str(&bar(share, cell.saturating_sub(1).max(1)));
        if cell > 1 {
            bars.push(' ');
        }
    }
    let (indent, bars) = (" ".repeat(GAP), bars.trim_end());
    let bars = if color { format!("\x1b[36m{bars}\x1b[0m") } else { bars.to_string() };
    let size = ByteSize(row.total()).to_string();
    writeln!(out, "{indent}{:<names$}{indent}{size:>SIZE$}{indent}{bars}", shortened(label, names))
}

/// A bar of `width` characters, filled in eighths of one; what is not empty has one eighth at least.
fn bar(share: f64, width: usize) -> String {
    const ACROSS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    const UP: [char; 9] = ['·', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = 8 * width;
    let eighths = if share > 0.0 { ((share * most as f64).round() as usize).clamp(1, most) } else { 0 };
    if width == 1 {
        return UP[eighths].to_string();
    }
    let mut bar = "█".repeat(eighths / 8);
    if eighths == 0 {
        bar.push('·');
    } else if eighths % 8 > 0 {
        bar.push(ACROSS[eighths % 8]);
    }
    let used = bar.chars().count();
    bar.extend(std::iter::repeat_n(' ', width - used));
    bar
}

/// The first and last characters of a text that is too long.
fn shortened(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_string();
    }
    let tail = (width - 1) * 2 / 3;
    let head = width - 1 - tail;
    text.chars().take(head).chain(['…']).chain(text.chars().skip(count - tail)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::holdings::File;
    use super::*;

    fn picture(rows: &[(&str, usize, &[u64])], width: usize) -> Vec<String> {
        let files = rows[0].2.len();
        let file = |i| File { name: format!("f{i}"), bytes: 0, chunks: 0 };
        let row =
            |&(name, tensors, bytes): &(&str, usize, &[u64])| Row { name: name.into(), tensors, bytes: bytes.to_vec() };
        let holdings = Holdings { files: (0..files).map(file).collect(), rows: rows.iter().map(row).collect() };
        let mut out = Vec::new();
        draw(&holdings, width, false, &mut out).unwrap();
        String::from_utf8(out).unwrap().lines().map(str::to_string).collect()
    }

    #[test]
    fn shares_are_bars() {
        let lines = picture(&[("layers.0", 9, &[1024, 1024, 512, 0]), ("norm", 1, &[0, 64, 0, 0])], 60);
        assert_eq!(
            lines,
            [
                "                            1       2       3       4",
                "  layers.0 (9)     2.5 KiB  ███████ ███████ ███▌    ·",
                "  norm                64 B  ·       ███████ ·       ·",
                "  ─────────────────────────────────────────────────────────",
                "  all              2.6 KiB  ██████▋ ███████ ███▎    ·",
            ]
        );
    }

    #[test]
    fn many_files_and_long_names_fit_the_width() {
        for (files, width) in [(8, 80), (20, 80), (64, 80), (500, 80), (3, 20), (64, 200)] {
            let bytes: Vec<u64> = (0..files).collect();
            let name = "optim.state.model.layers.17.self_attn.q_proj.weight.exp_avg_sq";
            let lines = picture(&[(name, 1, &bytes), ("x", 3, &bytes)], width);
            for line in &lines {
                assert!(line.chars().count() <= width.max(40), "{files} files in {width}: {line:?}");
            }
            assert!(lines[1].contains('…') || width > 150, "{lines:?}");
        }
    }
}
