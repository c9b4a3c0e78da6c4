//! Nodes of Candle's graph for operations of this library.
//!
//! Candle's backward adds each gradient that an operation returns to a new tensor of zeros. Between two operations of
//! this library, gradients therefore bypass Candle: an operation has a *token*, a scalar node that stands for it in the
//! graph, and its output is a node that follows the token. An operation that takes the output follows the token
//! instead, and adds its gradient to the sum in which the token's backward finds it. The first gradient is moved there.
//! Other operations follow the output, whose backward passes their gradient on to the same sum.
//!
//! An output that is a scalar is the operation's own node.
//!
//! The sums belong to one backward and not to the graph: see [`running`].
//!
//! The graph holds the values that an operation's backward reads ([`Reads`]), and no others. So the output of a sum, or
//! queries that a rotation reads, are freed with the caller's last handle. Outputs that cost little are freed as well,
//! and computed again when a backward reads them ([`recomputed_op`]).
//!
//! The table of tokens ([`token`]) is the process's. Candle gives no access to a tensor's operation, so only the
//! output's id leads to its token, and another thread may use the output. An entry ends with its output.
//!
//! | file | subject |
//! |---|---|
//! | `operation` | an operation, from its result to its backward |
//! | `token` | tokens and outputs |
//! | `computed` | Candle's traits for results that are already computed |
//! | `running` | the state of one backward |
//! | `recomputation` | outputs that are computed again |
//! | `joined` | one node for many sources |
//! | `record` | records of outputs, for diagnostics and checkpoints |
//! | `teardown` | freeing long graphs without recursion |

mod computed;
mod joined;
mod operation;
mod recomputation;
mod record;
mod running;
mod teardown;
mod token;

pub(crate) use joined::Joined;
pub(crate) use operation::{Backward, Reads, graph_op, lasting_node, node, node_without_values, recomputed_op};
pub(crate) use record::RecordedOutputs;
pub(crate) use running::{Key, Running, backward};
#[cfg(test)]
pub(crate) use token::is_output;
pub(crate) use token::{Lifetime, followed, lifetime};

#[cfg(test)]
mod tests;
