//! The environment variable that chooses between cuDNN's attention and this crate's.

use candle_core::{Result, bail};

/// The environment variable that chooses: `cudnn`, or `own` for this crate's kernels.
pub(super) const VARIABLE: &str = "FSDP_ATTENTION_BACKEND";

/// Returns whether the environment asks for cuDNN: `None` where it says nothing. Fails for another value, and if it asks
/// for cuDNN in a build without the feature.
pub(super) fn wants_cudnn() -> Result<Option<bool>> {
    match std::env::var(VARIABLE).as_deref() {
        Err(_) | Ok("") => Ok(None),
        Ok("own") => Ok(Some(false)),
        Ok("cudnn") if cfg!(feature = "cudnn") => Ok(Some(true)),
        Ok("cudnn") => bail!("{VARIABLE}=cudnn: this build has no cuDNN: build it with `--features cudnn`"),
        Ok(other) => bail!("{VARIABLE}={other}: expected cudnn or own"),
    }
}
