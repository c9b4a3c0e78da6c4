//! `--numa-binding`: how near to a GPU or to memory a rank runs.

use clap::ValueEnum;

/// Where a rank runs, in `torchrun`'s words: near to the GPU of its local rank, or where there is none on one of the
/// NUMA nodes, over which the ranks are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NumaBinding {
    /// On all cores of the NUMA node
    Node,
    /// On all cores of the node's socket
    Socket,
    /// On its own share of the node's cores; none is shared
    Exclusive,
    /// On cores of the node that share a last-level cache
    CoreComplex,
}
