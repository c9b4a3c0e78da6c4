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

pub(super) fn above_zero(fields: &[(&str, f64)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(value.is_finite() && *value > 0., "{name} = {value} must be above 0");
        Ok(())
    })
}
