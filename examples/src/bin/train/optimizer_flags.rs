//! The flags of the optimizer.

use clap::{Args, ValueEnum};
use fsdp_candle::AdjustLr;
use serde::Serialize;

use crate::values::{Switch, betas, count, not_negative, positive};

/// What steps the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam; weight decay is added to gradients (L2)
    Adam,
    /// Gradient descent with momentum; weight decay is L2
    Sgd,
    /// Muon for the matrices of the blocks, AdamW for the rest
    Muon,
    /// AdamW whose moments are kept in 8 bits: a quarter of their memory
    Adamw8bit,
}

impl Kind {
    /// What the flag calls it.
    pub(crate) fn word(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
    }

    /// The kinds that go on with each other's checkpoints.
    pub(crate) fn family(self) -> &'static str {
        match self {
            Kind::Adamw | Kind::Adam | Kind::Adamw8bit => "Adam",
            Kind::Sgd => "SGD",
            Kind::Muon => "Muon",
        }
    }
}

/// How Muon's learning rate follows from a matrix's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Adjust {
    /// Times the root of rows / columns, at least 1
    Original,
    /// So that updates are as large as AdamW's, and one --lr suits both
    MatchRmsAdamw,
    /// Times the root of rows / columns
    SpectralUnclamped,
}

impl From<Adjust> for AdjustLr {
    fn from(adjust: Adjust) -> Self {
        match adjust {
            Adjust::Original => AdjustLr::Original,
            Adjust::MatchRmsAdamw => AdjustLr::MatchRmsAdamW,
            Adjust::SpectralUnclamped => AdjustLr::SpectralUnclamped,
        }
    }
}

#[derive(Args, Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Optimizer")]
pub(crate) struct OptimizerFlags {
    /// What steps the weights
    ///
    /// Checkpoints of adamw, adam and adamw8bit go on with each other. Muon makes the update of a whole matrix
    /// orthogonal, of which each process does its share; embeddings, heads, norms and biases are AdamW's.
    #[arg(long, value_enum, default_value_t = Kind::Adamw)]
    pub(crate) optimizer: Kind,

    /// The highest learning rate; the default suits the small built-in model, fine-tuning wants about 2e-5
    #[arg(long, value_name = "RATE", default_value = "2e-3", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) lr: f64,

    /// Adam's decay rates of the mean and of the mean square of the gradients, such as 0.9,0.999 [default: 0.9,0.95]
    #[arg(long, value_name = "B1,B2", value_parser = betas, allow_hyphen_values = true)]
    pub(crate) betas: Option<(f64, f64)>,

    /// The epsilon that Adam adds to the denominator [default: 1e-8]
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) eps: Option<f64>,

    /// Weight decay, of every parameter but those of --no-decay: decoupled, of adam and sgd added to gradients
    #[arg(long, value_name = "X", default_value = "0.1", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) weight_decay: f64,

    /// Parameters whose weights do not decay, by their names or what these end with, such as bias,*norm*.weight
    ///
    /// `*` and `?` stand for characters of one part between dots, `**` for any parts.
    #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
    pub(crate) no_decay: Vec<String>,

    /// How much of the last steps' direction stays, of sgd and muon [default: 0.9, of muon 0.95]
    #[arg(long, value_name = "X", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) momentum: Option<f64>,

    /// How much of a gradient is kept out of sgd's momentum [default: 0]
    #[arg(long, value_name = "X", value_parser = not_negative, allow_hyphen_values = true)]
    pub(crate) dampening: Option<f64>,

    /// Whether momentum looks ahead, as Nesterov has it [default: off, of muon on]
    #[arg(long, value_enum)]
    pub(crate) nesterov: Option<Switch>,

    /// The highest learning rate of muon's matrices [default: --lr]
    #[arg(long, value_name = "RATE", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) muon_lr: Option<f64>,

    /// How muon's learning rate follows from a matrix's shape [default: match-rms-adamw]
    #[arg(long, value_enum)]
    pub(crate) muon_adjust_lr: Option<Adjust>,

    /// The fewest elements of a parameter whose moments adamw8bit keeps in 8 bits [default: 4096]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) min_8bit_size: Option<usize>,
}
