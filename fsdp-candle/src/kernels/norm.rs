//! Norms of many values together.

use crate::error::{Error, Result};

/// Which norm of all gradients together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum NormType {
    /// The square root of the sum of squares.
    #[default]
    Two,
    /// The `p`-th root of the sum of `p`-th powers of magnitudes, `p` > 0.
    P(f64),
    /// The largest magnitude.
    Infinity,
}

impl NormType {
    /// Fails for an order that is not positive.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            NormType::P(p) if !(p.is_finite() && p > 0.) => {
                Err(Error::Argument(format!("a norm of order {p}: the order is a positive number")))
            }
            _ => Ok(()),
        }
    }

    /// What one value adds.
    pub(crate) fn power(self, magnitude: f64) -> f64 {
        match self {
            NormType::Two => magnitude * magnitude,
            NormType::P(1.) | NormType::Infinity => magnitude,
            NormType::P(p) => magnitude.powf(p),
        }
    }

    /// What two shares come to.
    pub(crate) fn combine(self, a: f64, b: f64) -> f64 {
        match self {
            // f64::max would drop a NaN.
            NormType::Infinity if a.is_nan() || b.is_nan() => f64::NAN,
            NormType::Infinity => a.max(b),
            _ => a + b,
        }
    }

    /// The norm whose powers come to `total`.
    pub(crate) fn root(self, total: f64) -> f64 {
        match self {
            NormType::Two => total.sqrt(),
            NormType::P(p) => total.powf(1. / p),
            NormType::Infinity => total,
        }
    }
}
