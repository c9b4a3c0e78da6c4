//! What of a conversation the assistant says.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Result, bail, ensure};
use minijinja::Value;

use super::template::Template;
use crate::data::text::Marked;

/// Writes a conversation and finds the assistant's turns in it: as the template marks them, or else by writing the
/// conversation up to each of them, and with it.
///
/// A turn reaches to its last special token, if nothing but whitespace follows that, else to its end.
pub(super) fn conversation(
    template: &Template,
    messages: &[Value],
    others: &BTreeMap<String, Value>,
    specials: &[String],
) -> Result<Marked> {
    let is_assistant = |message: &Value| message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"));
    ensure!(
        messages.iter().any(is_assistant),
        "there is no message with the role \"assistant\", so there is nothing to learn: add the answer, or remove the \
         line"
    );
    let (text, marked) = template.render(messages, others, false)?;
    let mut learnt = marked;
    if !template.marks {
        for (i, _) in messages.iter().enumerate().filter(|(_, message)| is_assistant(message)) {
            let turn = turn(template, messages, others, i, &text, specials)?;
            learnt.push(turn);
        }
    }
    for span in &mut learnt {
        let said = text[span.clone()].trim_end();
        if specials.iter().any(|token| said.ends_with(token.as_str())) {
            span.end = span.start + said.len();
        }
    }
    let says_something = |span: &Range<usize>| {
        let said = specials.iter().fold(text[span.clone()].to_owned(), |said, token| said.replace(token.as_str(), ""));
        !said.trim().is_empty()
    };
    ensure!(
        learnt.iter().all(Range::is_empty) || learnt.iter().any(says_something),
        "the assistant's answer is empty, so there is nothing to learn: write it, or remove the line"
    );
    learnt.retain(|span| !span.is_empty());
    ensure!(
        !learnt.is_empty(),
        "{} leaves nothing of the assistant to be learnt{}",
        template.origin,
        if template.marks { ": it marks nothing by {% generation %} here" } else { "" }
    );
    Ok(Marked { text, learnt, bare: false })
}

/// The stretch that is message `i`, which is the assistant's.
fn turn(
    template: &Template,
    messages: &[Value],
    others: &BTreeMap<String, Value>,
    i: usize,
    text: &str,
    specials: &[String],
) -> Result<Range<usize>> {
    let (before, _) = template.render(&messages[..i], others, true)?;
    let (after, _) = template.render(&messages[..=i], others, false)?;
    // Some templates end every conversation, and so this one, by a token of its own.
    let endings = specials.iter().filter_map(|token| after.trim_end().strip_suffix(token.as_str()));
    let end = std::iter::once(after.as_str()).chain(endings).find(|after| text.starts_with(after));
    match end {
        Some(end) if text.starts_with(&before) && before.len() <= end.len() => Ok(before.len()..end.len()),
        _ => bail!(
            "{} writes the messages up to number {} otherwise when they are alone than within the whole conversation, \
             so that it is not known which words are the assistant's. Write the conversation as lines that end with \
             the assistant's first answer, or mark what the assistant says by {{% generation %}} and \
             {{% endgeneration %}} in a chat_template.jinja in the model directory",
            template.origin,
            i + 1
        ),
    }
}
