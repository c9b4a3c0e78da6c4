//! A picture as SVG of which file holds what.

use std::io::{Result, Write};

use bytesize::ByteSize;
use fsdp_ckpt::shown;

use super::holdings::Holdings;

/// Pixels.
const ROW: usize = 18;
const CHARACTER: usize = 7;
const MARGIN: usize = 16;

/// Draws a row for each tensor and a column for each file; the darker a box, the more of the row it holds. Boxes say
/// what they are when pointed at.
pub(super) fn draw(holdings: &Holdings, title: &str, out: &mut dyn Write) -> Result<()> {
    let names = holdings.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0) * CHARACTER;
    let files = holdings.files.len();
    let cell = (960 / files.max(1)).clamp(6, 72);
    let (left, top) = (MARGIN + names + 90, MARGIN + 3 * ROW);
    let width = (left + files * cell + MARGIN).max(2 * MARGIN + title.chars().count() * CHARACTER);
    let height = top + holdings.rows.len() * ROW + MARGIN;
    write!(out, r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}""#)?;
    write!(out, r#" viewBox="0 0 {width} {height}""#)?;
    writeln!(out, r#" font-family="monospace" font-size="11" fill="black">"#)?;
    writeln!(out, r#"<rect width="{width}" height="{height}" fill="white"/>"#)?;
    writeln!(out, r#"<text x="{MARGIN}" y="{}" font-weight="bold">{}</text>"#, MARGIN + ROW / 2, escaped(title))?;
    // Numbers stand over as many columns as they have room.
    let each = (files.to_string().len() * CHARACTER + 4).div_ceil(cell);
    for (at, file) in holdings.files.iter().enumerate() {
        if at % each == 0 {
            let (x, y) = (left + at * cell + cell / 2, top - 6);
            let about = format!("{}, {}", escaped(&file.name), ByteSize(file.bytes));
            writeln!(out, r#"<text x="{x}" y="{y}" text-anchor="middle"><title>{about}</title>{}</text>"#, at + 1)?;
        }
    }
    for (line, row) in holdings.rows.iter().enumerate() {
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
            let about = format!("{name}: {} in {}", ByteSize(bytes), escaped(&holdings.files[at].name));
            let opacity = 0.15 + 0.85 * share;
            write!(out, r#"<rect x="{x}" y="{y}" width="{w}" height="{h}""#)?;
            writeln!(out, r##" fill="#1f5fa8" fill-opacity="{opacity:.2}"><title>{about}</title></rect>"##)?;
        }
    }
    writeln!(out, "</svg>")
}

/// Text in XML, in which control characters can't be even as its own escapes.
fn escaped(text: &str) -> String {
    shown(text).to_string().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::holdings::{File, Row};
    use super::*;

    #[test]
    fn names_can_not_break_the_picture() {
        let files =
            vec![File { name: "a&b".into(), bytes: 9, chunks: 1 }, File { name: "c".into(), bytes: 0, chunks: 0 }];
        let rows = vec![Row { name: "<script>".into(), tensors: 1, bytes: vec![9, 0] }];
        let mut out = Vec::new();
        draw(&Holdings { files, rows }, "\"x\"", &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("&lt;script&gt;: 9 B in a&amp;b") && !text.contains("<script>"), "{text}");
        assert_eq!(text.matches("<rect").count(), 3);
        assert_eq!(text.matches("<text").count(), text.matches("</text>").count());
    }
}
