//! A place where forward left the graph, as people are told of it.

use std::fmt;

/// How many names a report spells out.
const MOST_NAMES: usize = 8;

/// A place where forward left the graph: gradients of what comes before are wrong, or there are none.
///
/// What is seen, in the first iteration of each unit: `candle_nn`'s fused norms ([`Cut::Norm`]), where what they
/// normalise or their unit's input is still in the graph and a trainable matrix, or the unit's output, takes the
/// result; a unit whose outputs do not lead back to its inputs ([`Cut::Input`]) or to what the units inside it returned
/// ([`Cut::Units`]); a unit whose input has a graph and whose weights met none of it ([`Cut::Weights`]).
///
/// What is not seen: `softmax_last_dim`, `rotary_emb` and operations of others without backward, where another way
/// around them leads to the input (a residual); anything inside a checkpointed closure; [`Cut::Input`] and
/// [`Cut::Weights`] in units called by [`FsdpModule::call`](crate::FsdpModule::call), whose inputs nobody knows. The
/// layers of [`nn`](crate::nn) cut nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphCut {
    /// The unit in whose forward it was.
    pub unit: String,
    /// What was seen.
    pub cut: Cut,
    /// The trainable parameters before it: their gradients are wrong or missing.
    pub before: Vec<String>,
}

/// What was seen of a cut.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cut {
    /// A fused norm of `candle_nn` was applied to a tensor with a graph.
    Norm {
        /// The layer's path. Several, of which it is one, where their weights are the same.
        layers: Vec<String>,
        /// `RmsNorm` or `LayerNorm`.
        kind: &'static str,
    },
    /// The unit's input has a graph, and its outputs do not lead back to it.
    Input,
    /// What units inside it returned has a graph, and its outputs do not lead back to any of it.
    Units,
    /// The unit's input has a graph, and what these weights were applied to has none.
    Weights(Vec<String>),
}

impl fmt::Display for GraphCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unit `{}`: ", self.unit)?;
        match &self.cut {
            Cut::Norm { layers, kind } => {
                write!(f, "`{}` is candle_nn's {kind}, which has no backward", layers.join("` or `"))
            }
            Cut::Input => f.write_str("its input has a graph, and its output does not lead back to it"),
            Cut::Units => {
                f.write_str("what units inside it returned has a graph, and its output does not lead back to it")
            }
            Cut::Weights(names) => {
                write!(f, "its input has a graph, and what these weights were applied to has none: {}", listed(names))
            }
        }
    }
}

/// Names for people: the first few, and how many more there are.
pub(super) fn listed(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(MOST_NAMES).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(MOST_NAMES) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
