//! A whole plan.

use serde::Serialize;

use super::device::Device;
use super::link::{Links, Mesh};
use super::memory::{self, Memory};
use super::search::{self, Choice};
use super::setup::Setup;
use super::time::{self, Time};

/// A plan. Bytes and seconds.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) parameters: f64,
    /// Floating point operations of a token, forward and backward, without any that run twice.
    pub(super) operations_per_token: f64,
    pub(super) mesh: Mesh,
    pub(super) device: Device,
    pub(super) links: Links,
    pub(super) memory: Memory,
    pub(super) fits: bool,
    /// Elements of a tensor that is refused, for Candle's kernels on devices count fewer than 2^31.
    pub(super) uncountable: Option<f64>,
    pub(super) time: Time,
    pub(super) best: Vec<Choice>,
}

impl Report {
    /// The plan, with the `top` best choices.
    pub(super) fn new(setup: &Setup, top: usize) -> Self {
        let memory = memory::of(setup);
        Report {
            parameters: setup.model.parameters(),
            operations_per_token: setup.model.operations(),
            mesh: setup.mesh,
            device: setup.device,
            links: setup.links,
            fits: setup.fits(memory.total),
            uncountable: setup.uncountable(),
            memory,
            time: time::of(setup),
            best: search::best(setup, top),
        }
    }
}
