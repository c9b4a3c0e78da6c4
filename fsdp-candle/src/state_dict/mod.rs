//! Model and optimizer as named tensors, and back: what checkpoints hold. Names are those of PyTorch's flattened state
//! dicts (`torch.distributed.checkpoint.state_dict`).

mod both;
mod dict;
mod ema;
mod hyper;
mod model;
mod optimizer;
mod options;
mod transfer;

pub use both::{get_state_dict, set_state_dict};
pub use dict::{IncompatibleKeys, StateDict, StateTensor};
pub use ema::{get_ema_state_dict, set_ema_state_dict};
pub use hyper::load_param_groups;
pub use model::{get_model_state_dict, load_model, model_tensors, set_model_state_dict};
pub use optimizer::{
    get_optimizer_state_dict, load_optimizer, optimizer_tensors, optimizer_values, set_optimizer_state_dict,
};
pub use options::StateDictOptions;
