//! Pictures of the bytes of each tensor in each file, for terminals and as SVG.

use std::collections::BTreeMap;
use std::io::{Result, Write};

use bytesize::ByteSize;
use fsdp_ckpt::{TensorSource, escape};

/// A file, which is a column. Names here are escaped.
#[derive(Debug)]
pub(super) struct File {
    pub(super) name: String,
    /// Size of the file.
    pub(super) bytes: u64,
    pub(super) chunks: usize,
}

/// A tensor or a group of tensors, which is a row.
#[derive(Debug, PartialEq)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) tensors: usize,
    /// Bytes in each file.
    pub(super) bytes: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct TensorsByFile {
    pub(super) files: Vec<File>,
    pub(super) rows: Vec<Row>,
}

impl Row {
    pub(super) fn total(&self) -> u64 {
        self.bytes.iter().copied().fold(0, u64::saturating_add)
    }

    /// Returns the share of each file, relative to the largest one.
    pub(super) fn shares(&self) -> Vec<f64> {
        let most = self.bytes.iter().copied().max().unwrap_or(0).max(1);
        self.bytes.iter().map(|&bytes| bytes as f64 / most as f64).collect()
    }
}

impl TensorsByFile {
    /// Groups tensors into rows: a row for each tensor if there are at most `most`, else for each layer, else one for
    /// all layers.
    pub(super) fn of(source: &dyn TensorSource, most: usize) -> Self {
        let mut files: Vec<File> = source
            .files()
            .iter()
            .map(|(name, file)| File { name: name.clone(), bytes: file.bytes, chunks: 0 })
            .collect();
        let at: BTreeMap<String, usize> = files.iter().enumerate().map(|(at, file)| (file.name.clone(), at)).collect();
        for chunk in source.tensors().values().flat_map(|tensor| &tensor.chunks) {
            if let Some(&at) = at.get(&chunk.file) {
                files[at].chunks += 1;
            }
        }
        let rows = |group: &dyn Fn(&str) -> String| {
            let mut rows = Vec::<Row>::new();
            let mut known = BTreeMap::<String, usize>::new();
            for (fqn, tensor) in source.tensors() {
                let name = group(fqn);
                let row = *known.entry(name.clone()).or_insert_with(|| {
                    rows.push(Row { name, tensors: 0, bytes: vec![0; files.len()] });
                    rows.len() - 1
                });
                rows[row].tensors += 1;
                for chunk in &tensor.chunks {
                    if let Some(&at) = at.get(&chunk.file) {
                        let bytes = chunk.region().elements() as u64 * tensor.dtype.size() as u64;
                        rows[row].bytes[at] = rows[row].bytes[at].saturating_add(bytes);
                    }
                }
            }
            rows.sort_by_cached_key(|row| natural(&row.name));
            rows
        };
        let mut found = rows(&str::to_string);
        if found.len() > most {
            found = rows(&|fqn| layer(fqn, false));
        }
        if found.len() > most.saturating_mul(2) {
            found = rows(&|fqn| layer(fqn, true));
        }
        // Names are only displayed from here on.
        files.iter_mut().for_each(|file| file.name = escape(&file.name).to_string());
        found.iter_mut().for_each(|row| row.name = escape(&row.name).to_string());
        TensorsByFile { files, rows: found }
    }
}

/// Returns a name up to its first number, which is the layer; with `all`, `*` replaces the number.
fn layer(fqn: &str, all: bool) -> String {
    let mut parts = Vec::new();
    for part in fqn.split('.') {
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            parts.push(if all { "*" } else { part });
            return parts.join(".");
        }
        parts.push(part);
    }
    fqn.to_string()
}

/// Returns a key that sorts layer 10 after layer 9.
pub(super) fn natural(name: &str) -> Vec<(Option<u64>, String)> {
    name.split('.').map(|part| (part.parse().ok(), part.to_string())).collect()
}

/// Spaces between columns.
const GAP: usize = 2;
/// Widest bar.
const WIDEST: usize = 8;
const SIZE: usize = 10;

/// Draws at most `width` characters wide. If there are more files than columns, files share columns.
pub(super) fn draw_text(by_file: &TensorsByFile, width: usize, color: bool, out: &mut dyn Write) -> Result<()> {
    let labels: Vec<String> = by_file.rows.iter().map(label).collect();
    let longest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    let names = longest.min((width * 2 / 5).max(12));
    let room = width.saturating_sub(GAP + names + GAP + SIZE + GAP).max(8);
    let files = by_file.files.len();
    let each = files.div_ceil(room).max(1);
    let columns = files.div_ceil(each);
    // A bar and the space after it.
    let cell = if columns * 3 > room { 1 } else { (room / columns).min(WIDEST + 1) };

    let mut head = String::new();
    // Number of the first file of each column, where it fits.
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
    for (row, label) in by_file.rows.iter().zip(&labels) {
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

/// Returns a bar of `width` characters, in steps of one eighth. A share above 0 has at least one eighth.
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

/// Shortens text in the middle.
fn shortened(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_string();
    }
    let tail = (width - 1) * 2 / 3;
    let head = width - 1 - tail;
    text.chars().take(head).chain(['…']).chain(text.chars().skip(count - tail)).collect()
}

/// Height of a row in pixels.
const ROW: usize = 18;
const CHARACTER: usize = 7;
const MARGIN: usize = 16;

/// Draws a row for each tensor and a column for each file. Darker boxes hold more of the row. Boxes have tooltips.
pub(super) fn draw_svg(by_file: &TensorsByFile, title: &str, out: &mut dyn Write) -> Result<()> {
    let names = by_file.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0) * CHARACTER;
    let files = by_file.files.len();
    let cell = (960 / files.max(1)).clamp(6, 72);
    let (left, top) = (MARGIN + names + 90, MARGIN + 3 * ROW);
    let width = (left + files * cell + MARGIN).max(2 * MARGIN + title.chars().count() * CHARACTER);
    let height = top + by_file.rows.len() * ROW + MARGIN;
    write!(out, r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}""#)?;
    write!(out, r#" viewBox="0 0 {width} {height}""#)?;
    writeln!(out, r#" font-family="monospace" font-size="11" fill="black">"#)?;
    writeln!(out, r#"<rect width="{width}" height="{height}" fill="white"/>"#)?;
    writeln!(out, r#"<text x="{MARGIN}" y="{}" font-weight="bold">{}</text>"#, MARGIN + ROW / 2, escaped(title))?;
    // Write only as many file numbers as fit.
    let each = (files.to_string().len() * CHARACTER + 4).div_ceil(cell);
    for (at, file) in by_file.files.iter().enumerate() {
        if at % each == 0 {
            let (x, y) = (left + at * cell + cell / 2, top - 6);
            let about = format!("{}, {}", escaped(&file.name), ByteSize(file.bytes));
            writeln!(out, r#"<text x="{x}" y="{y}" text-anchor="middle"><title>{about}</title>{}</text>"#, at + 1)?;
        }
    }
    for (line, row) in by_file.rows.iter().enumerate() {
        let (y, name) = (top + line * ROW, escaped(&row.name));
        let base = y + ROW - 6;
        writeln!(out, r#"<text x="{MARGIN}" y="{base}">{name}</text>"#)?;
        let total = ByteSize(row.total());
        writeln!(out, r##"<text x="{}" y="{base}" text-anchor="end" fill="#666">{total}</text>"##, left - 10)?;
        for (at, (share, &bytes)) in row.shares().into_iter().zip(&row.bytes).enumerate() {
            let (x, w, h) = (left + at * cell, cell - 1, ROW - 2);
            if bytes == 0 {
                writeln!(out, r##"<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="#f2f2f2"/>"##)?;
                continue;
            }
            let about = format!("{name}: {} in {}", ByteSize(bytes), escaped(&by_file.files[at].name));
            let opacity = 0.15 + 0.85 * share;
            write!(out, r#"<rect x="{x}" y="{y}" width="{w}" height="{h}""#)?;
            writeln!(out, r##" fill="#1f5fa8" fill-opacity="{opacity:.2}"><title>{about}</title></rect>"##)?;
        }
    }
    writeln!(out, "</svg>")
}

/// Escapes text for XML, which can't hold control characters.
fn escaped(text: &str) -> String {
    escape(text).to_string().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_is_the_name_up_to_its_number() {
        assert_eq!(layer("model.layers.10.mlp.up.weight", false), "model.layers.10");
        assert_eq!(layer("model.layers.10.mlp.up.weight", true), "model.layers.*");
        assert_eq!(layer("model.lm_head.weight", true), "model.lm_head.weight");
        assert!(natural("h.9.x") < natural("h.10.x"));
    }

    fn picture(rows: &[(&str, usize, &[u64])], width: usize) -> Vec<String> {
        let files = rows[0].2.len();
        let file = |i| File { name: format!("f{i}"), bytes: 0, chunks: 0 };
        let row =
            |&(name, tensors, bytes): &(&str, usize, &[u64])| Row { name: name.into(), tensors, bytes: bytes.to_vec() };
        let by_file = TensorsByFile { files: (0..files).map(file).collect(), rows: rows.iter().map(row).collect() };
        let mut out = Vec::new();
        draw_text(&by_file, width, false, &mut out).unwrap();
        String::from_utf8(out).unwrap().lines().map(str::to_string).collect()
    }

    #[test]
    fn draws_bars() {
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
    fn fits_the_width() {
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

    #[test]
    fn escapes_names_in_svg() {
        let files =
            vec![File { name: "a&b".into(), bytes: 9, chunks: 1 }, File { name: "c".into(), bytes: 0, chunks: 0 }];
        let rows = vec![Row { name: "<script>".into(), tensors: 1, bytes: vec![9, 0] }];
        let mut out = Vec::new();
        draw_svg(&TensorsByFile { files, rows }, "\"x\"", &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("&lt;script&gt;: 9 B in a&amp;b") && !text.contains("<script>"), "{text}");
        assert_eq!(text.matches("<rect").count(), 3);
        assert_eq!(text.matches("<text").count(), text.matches("</text>").count());
    }
}
