//! Activations by name, as a model's configuration has them.

use candle_core::{Module, Result, Tensor};
use candle_nn::ops;
use serde::{Deserialize, Serialize};

use super::{composed, fused};

/// An activation, as [`candle_nn::Activation`]: the same variants, and the same names in a configuration.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::Activation;
///
/// let act: Activation = serde_json::from_str("\"gelu_pytorch_tanh\"").unwrap();
/// assert_eq!(act, Activation::GeluPytorchTanh);
/// let y = Activation::Relu2.forward(&Tensor::new(&[-1f32, 3.], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec1::<f32>()?, [0., 9.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// GELU as it is defined, with the normal distribution function.
    #[default]
    #[serde(alias = "gelu")]
    Gelu,
    /// GELU in the tanh approximation.
    #[serde(alias = "gelu_new")]
    NewGelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    Relu2,
    /// `min(max(x, 0), 6)`.
    Relu6,
    /// `x s(x)` with the logistic function `s`.
    Silu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `min(max((x + 3) / 6, 0), 1)`.
    HardSigmoid,
    /// `silu` of the last dimension's first half, times its second half.
    Swiglu,
    /// The same as [`Activation::Silu`].
    Swish,
    /// `x tanh(ln(1 + e^x))`.
    Mish,
    /// `x` times [`Activation::HardSigmoid`] of it.
    HardSwish,
    /// `x` where it is positive, else `alpha (e^x - 1)`.
    Elu(f64),
    /// `x` where it is positive, else `slope x`.
    LeakyRelu(f64),
    /// GELU in the tanh approximation.
    #[serde(alias = "gelu_pytorch_tanh")]
    GeluPytorchTanh,
}

impl Module for Activation {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match *self {
            Self::Gelu => fused::gelu_erf(xs),
            Self::NewGelu | Self::GeluPytorchTanh => fused::gelu(xs),
            Self::Relu => xs.relu(),
            Self::Relu2 => xs.relu()?.sqr(),
            Self::Relu6 => xs.clamp(0f32, 6f32),
            Self::Silu | Self::Swish => fused::silu(xs),
            Self::Sigmoid => ops::sigmoid(xs),
            Self::HardSigmoid => ops::hard_sigmoid(xs),
            Self::Swiglu => composed::swiglu(xs),
            Self::HardSwish => xs * ops::hard_sigmoid(xs)?,
            Self::Mish => composed::mish(xs),
            Self::Elu(alpha) => xs.elu(alpha),
            Self::LeakyRelu(negative_slope) => ops::leaky_relu(xs, negative_slope),
        }
    }
}

/// Writes the conversions between this enum and Candle's, whose variants have the same names.
macro_rules! conversions {
    ($($plain:ident),*; $($with_number:ident),*) => {
        impl From<candle_nn::Activation> for Activation {
            fn from(theirs: candle_nn::Activation) -> Self {
                match theirs {
                    $(candle_nn::Activation::$plain => Self::$plain,)*
                    $(candle_nn::Activation::$with_number(number) => Self::$with_number(number),)*
                }
            }
        }

        impl From<Activation> for candle_nn::Activation {
            fn from(ours: Activation) -> Self {
                match ours {
                    $(Activation::$plain => Self::$plain,)*
                    $(Activation::$with_number(number) => Self::$with_number(number),)*
                }
            }
        }
    };
}

conversions!(
    Gelu, NewGelu, Relu, Relu2, Relu6, Silu, Sigmoid, HardSigmoid, Swiglu, Swish, Mish, HardSwish, GeluPytorchTanh;
    Elu, LeakyRelu
);
