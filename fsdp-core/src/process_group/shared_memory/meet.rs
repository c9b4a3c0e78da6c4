//! How the ranks of a group come to share a segment.

use super::{super::membership::Membership, segment::Port, watch::Watch};
use crate::Result;

/// What tells threads and processes apart.
pub(super) trait Meet: Send {
    /// This rank's end of a new group's segment, and how to watch its peers. `all_well` fails when a rank that is to
    /// come is gone.
    fn meet(&self, group: &Membership, all_well: &dyn Fn() -> Result<()>) -> Result<(Port, Watch)>;

    /// The same for the groups within the new one.
    fn again(&self) -> Box<dyn Meet>;
}
