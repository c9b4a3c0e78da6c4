//! The parameters of one unit, as its collectives see them.

use std::sync::Arc;

use fsdp_core::process_group::{Signature, Subject};

use super::listed::listed;
use super::param::FsdpParam;
use super::unit_path::UnitId;
use crate::error::Error;
use crate::storage::Pool;

/// The parameters of one unit.
pub(crate) struct UnitParams {
    id: UnitId,
    params: Vec<Arc<FsdpParam>>,
    pool: Arc<Pool>,
    /// The parameters' names, for the signatures of collectives.
    subject: Arc<Subject>,
}

impl UnitParams {
    /// `map` is the number of the unit's map among the maps of its ranks.
    pub(super) fn new(id: UnitId, params: Vec<Arc<FsdpParam>>, pool: Arc<Pool>, map: u64) -> Self {
        let names = params.iter().map(|param| param.name().to_string());
        // Two models may have the same names in two maps.
        let of_map = if map == 0 {
            String::new()
        } else {
            format!(" of ShardedVarMap {map} (in the order of creation, from 0)")
        };
        let subject = Subject::new(format!("unit `{}`{of_map}", id.name), names);
        UnitParams { id, params, pool, subject }
    }

    pub(crate) fn id(&self) -> &UnitId {
        &self.id
    }

    pub(crate) fn name(&self) -> &str {
        &self.id.name
    }

    pub(crate) fn index(&self) -> usize {
        self.id.index
    }

    pub(crate) fn params(&self) -> &[Arc<FsdpParam>] {
        &self.params
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Lists the parameters' names for a message.
    pub(super) fn listed(&self) -> String {
        listed(&self.params.iter().map(|param| param.name().to_string()).collect::<Vec<_>>())
    }

    /// Returns the signature of a collective for the parameters at these positions.
    pub(super) fn signature(&self, positions: impl IntoIterator<Item = usize>) -> Signature {
        Signature::new(&self.subject, positions)
    }

    pub(super) fn communication_failed(&self, what: &str, source: fsdp_core::Error) -> Error {
        Error::Communication {
            unit: self.name().into(),
            what: what.into(),
            parameters: self.params.len(),
            source: Box::new(source),
        }
    }
}
