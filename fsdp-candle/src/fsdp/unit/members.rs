//! The parameters that move together.

use std::sync::Arc;

use fsdp_core::process_group::{Signature, Subject};

use super::param::FsdpParam;
use super::path::UnitId;
use crate::error::Error;
use crate::storage::Pool;

/// The parameters of one unit, and where its buffers come from: what never changes.
pub(super) struct Members {
    pub(super) unit: UnitId,
    pub(super) params: Vec<Arc<FsdpParam>>,
    pub(super) pool: Arc<Pool>,
    /// The parameters, for the signatures of collectives.
    subject: Arc<Subject>,
}

impl Members {
    pub(super) fn new(unit: UnitId, params: Vec<Arc<FsdpParam>>, pool: Arc<Pool>) -> Self {
        let names = params.iter().map(|param| param.name().to_string());
        let subject = Subject::new(format!("unit `{}`", unit.name), names);
        for (position, param) in params.iter().enumerate() {
            param.set_unit(&unit, position);
        }
        Members { unit, params, pool, subject }
    }

    pub(super) fn name(&self) -> &str {
        &self.unit.name
    }

    /// What a collective of the parameters at these positions is about.
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
