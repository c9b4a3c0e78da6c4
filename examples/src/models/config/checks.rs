//! What numbers must be, and the words when they are not.

use anyhow::ensure;

/// Numbers of things there must be.
pub(super) fn at_least_one(fields: &[(&str, usize)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(*value > 0, "{name} = {value} must be at least 1");
        Ok(())
    })
}

pub(super) fn not_negative(fields: &[(&str, f64)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(value.is_finite() && *value >= 0., "{name} = {value} must be at least 0");
        Ok(())
    })
}

pub(super) fn below_one(fields: &[(&str, f64)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!((0. ..1.).contains(value), "{name} = {value} must be at least 0 and below 1");
        Ok(())
    })
}

/// Returns the row of the embedding that lookups do not train, as PyTorch's `nn.Embedding` reads `padding_idx`: a
/// negative id counts from the vocabulary's end.
pub(super) fn padding_row(pad_token_id: Option<i64>, vocabulary: usize) -> anyhow::Result<Option<usize>> {
    let Some(id) = pad_token_id else { return Ok(None) };
    let from = if id < 0 { vocabulary as i128 } else { 0 };
    let row = usize::try_from(i128::from(id) + from).ok().filter(|row| *row < vocabulary);
    ensure!(
        row.is_some(),
        "pad_token_id = {id} (which may be the default of this model_type) is not in the vocabulary of {vocabulary} \
         ids: give one that is, or null"
    );
    Ok(row)
}

pub(super) fn above_zero(fields: &[(&str, f64)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(value.is_finite() && *value > 0., "{name} = {value} must be above 0");
        Ok(())
    })
}
