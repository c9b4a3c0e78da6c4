//! Activations by transformers' names.

use anyhow::bail;

/// An activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Activation {
    Silu,
    Gelu,
    GeluErf,
}

impl Activation {
    /// The one that `field` of a configuration names.
    pub(super) fn parse(field: &str, name: &str) -> anyhow::Result<Self> {
        Ok(match name {
            "silu" | "swish" => Activation::Silu,
            "gelu_pytorch_tanh" | "gelu_new" => Activation::Gelu,
            "gelu" => Activation::GeluErf,
            _ => bail!(
                "{field} = \"{name}\" is not known; \"silu\", \"gelu_pytorch_tanh\", \"gelu_new\" and \"gelu\" are"
            ),
        })
    }
}
