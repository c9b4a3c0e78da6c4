//! Numbers that are infinite or not a number: found before they get into the weights, a checkpoint or an export.

use fsdp_candle::{Error, NonFinite, ShardedVarMap, ValuesOf, check_finite};

/// What helps against numbers that grow beyond all bounds.
pub(crate) const ADVICE: &str = "Lower --lr, raise --warmup-steps, or look at the data of that step";

/// What of these is not finite, told on every rank. Collective.
pub(crate) fn look(vars: &ShardedVarMap, of: &[ValuesOf<'_>]) -> anyhow::Result<Option<NonFinite>> {
    match check_finite(vars, of) {
        Ok(()) => Ok(None),
        Err(Error::NonFinite(found)) => Ok(Some(found)),
        Err(error) => Err(error.into()),
    }
}
