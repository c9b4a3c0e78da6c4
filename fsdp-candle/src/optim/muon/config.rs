//! Muon's hyper-parameters.

use serde_json::{Map, Value, json};

use super::super::hyper;
use super::super::per_shard::Hyper;

/// How the learning rate of a matrix of `[a, b]` follows from its shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdjustLr {
    /// Times `sqrt(max(1, a / b))`, as Keller Jordan has it.
    #[default]
    Original,
    /// Times `0.2 sqrt(max(a, b))`, as Moonshot has it: updates are as large as AdamW's, and so a learning rate for
    /// AdamW suits.
    MatchRmsAdamW,
    /// Times `sqrt(a / b)`, as Jeremy Bernstein has it.
    SpectralUnclamped,
}

impl AdjustLr {
    const NAMES: [(AdjustLr, &'static str); 3] = [
        (AdjustLr::Original, "original"),
        (AdjustLr::MatchRmsAdamW, "match_rms_adamw"),
        (AdjustLr::SpectralUnclamped, "spectral_unclamped"),
    ];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(own, _)| *own == self).map_or("original", |(_, name)| name)
    }

    pub(super) fn ratio(self, rows: usize, columns: usize) -> f64 {
        let (a, b) = (rows as f64, columns as f64);
        match self {
            AdjustLr::Original => (a / b).max(1.).sqrt(),
            AdjustLr::MatchRmsAdamW => 0.2 * a.max(b).sqrt(),
            AdjustLr::SpectralUnclamped => (a / b).sqrt(),
        }
    }
}

/// The hyper-parameters of [`crate::Muon`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonConfig {
    /// Learning rate, at least 0, which `adjust_lr` changes for each matrix.
    pub lr: f64,
    /// Decoupled weight decay: a step takes `lr * weight_decay` of each parameter away.
    pub weight_decay: f64,
    /// How much of the running mean of gradients stays.
    pub momentum: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// The coefficients `a`, `b` and `c` of the Newton-Schulz iteration `a x + (b x x' + c (x x')^2) x`.
    pub ns_coefficients: (f64, f64, f64),
    /// How many iterations, below 100.
    pub ns_steps: usize,
    /// The least norm that a matrix is divided by.
    pub eps: f64,
    /// How the learning rate follows from a matrix's shape.
    pub adjust_lr: AdjustLr,
}

impl Default for MuonConfig {
    fn default() -> Self {
        MuonConfig {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: (3.4445, -4.7750, 2.0315),
            ns_steps: 5,
            eps: 1e-7,
            adjust_lr: AdjustLr::Original,
        }
    }
}

impl Hyper for MuonConfig {
    const NAME: &'static str = "Muon";

    fn hyper(&self) -> Map<String, Value> {
        hyper::map([
            ("lr", self.lr.into()),
            ("weight_decay", self.weight_decay.into()),
            ("momentum", self.momentum.into()),
            ("nesterov", self.nesterov.into()),
            ("ns_coefficients", json!(self.ns_coefficients)),
            ("ns_steps", self.ns_steps.into()),
            ("eps", self.eps.into()),
            ("adjust_lr_fn", self.adjust_lr.name().into()),
        ])
    }

    fn with(&self, values: &Map<String, Value>) -> Result<Self, String> {
        let (a, b, c) = self.ns_coefficients;
        let [a, b, c] = hyper::numbers(values, "ns_coefficients", [a, b, c])?;
        let ns_steps = match values.get("ns_steps") {
            None | Some(Value::Null) => self.ns_steps,
            Some(steps) => {
                steps.as_u64().ok_or_else(|| format!("hold `ns_steps` as {steps}, which is no count"))? as usize
            }
        };
        let adjust_lr = match values.get("adjust_lr_fn") {
            None => self.adjust_lr,
            Some(Value::Null) => AdjustLr::Original,
            Some(name) => {
                let found = AdjustLr::NAMES.iter().find(|(_, own)| name == own);
                found
                    .map(|(adjust, _)| *adjust)
                    .ok_or_else(|| format!("hold `adjust_lr_fn` as {name}, which is unknown"))?
            }
        };
        Ok(MuonConfig {
            lr: hyper::number(values, "lr", self.lr)?,
            weight_decay: hyper::number(values, "weight_decay", self.weight_decay)?,
            momentum: hyper::number(values, "momentum", self.momentum)?,
            nesterov: hyper::switch(values, "nesterov", self.nesterov)?,
            ns_coefficients: (a, b, c),
            ns_steps,
            eps: hyper::number(values, "eps", self.eps)?,
            adjust_lr,
        })
    }

    fn check(&self) -> Result<(), String> {
        let MuonConfig { lr, weight_decay, momentum, eps, ns_steps, .. } = *self;
        hyper::at_least_zero(&[("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum), ("eps", eps)])?;
        hyper::check("ns_steps", ns_steps as f64, ns_steps < 100, "below 100")
    }

    fn lr(&mut self) -> &mut f64 {
        &mut self.lr
    }
}
