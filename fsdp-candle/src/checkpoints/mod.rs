//! Saving and resuming a training run by one call each.
//!
//! [`TrainState`] names what a run consists of: models, optimizers and values. [`CheckpointManager`] saves it to the
//! run's directory and resumes from the newest checkpoint there. A save and a resume take the same description, so
//! neither can forget what the other has.
//!
//! | file | content |
//! |---|---|
//! | `train_state` | the state to save, its comparison with a checkpoint, loading |
//! | `values` | the caller's values as JSON |
//! | `manager` | when and where to save, the choice of a checkpoint |
//! | `directory` | a directory that all ranks share, or one on each host |
//! | `agree` | the same outcome on all ranks |
//!
//! The parts are public: `state_dict` for tensors, and `fsdp_ckpt` for files.

mod agree;
mod directory;
mod manager;
mod train_state;
mod values;

pub use manager::{CheckpointManager, Resumed};
pub use train_state::TrainState;
