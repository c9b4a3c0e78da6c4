//! Operations element by element.

use candle_core::Tensor;

use super::rules::{self, Binary, Unary};
use super::tensor::DTensor;
use crate::error::{Error, Result};

/// The other operand of [`DTensor::add`] and its like: a DTensor on the same mesh, or a number.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A DTensor, broadcast where its dimensions are 1 or missing.
    DTensor(&'a DTensor),
    /// A number, which every rank has.
    Number(f64),
}

impl<'a> From<&'a DTensor> for Operand<'a> {
    fn from(tensor: &'a DTensor) -> Self {
        Operand::DTensor(tensor)
    }
}

impl From<f64> for Operand<'_> {
    fn from(number: f64) -> Self {
        Operand::Number(number)
    }
}

/// Operations of one operand: PyTorch's name, Candle's, what they do to terms that are still to be reduced, and a line
/// of documentation.
macro_rules! unary {
    ($($name:ident: $candle:ident, $kind:ident, $doc:literal;)*) => {
        impl DTensor {$(
            #[doc = $doc]
            ///
            /// # Errors
            /// For terms of a reduction of which it makes no terms: they are to be redistributed first.
            pub fn $name(&self) -> Result<Self> {
                self.unary(stringify!($name), Unary::$kind, Tensor::$candle)
            }
        )*}
    };
}

unary! {
    neg: neg, Negation, "The negative of each element. Terms of a sum or average remain such; smallest become largest.";
    exp: exp, Increasing, "e to the power of each element. Terms of a largest or smallest remain such.";
    log: log, Other, "The natural logarithm of each element.";
    sqrt: sqrt, Other, "The square root of each element.";
    tanh: tanh, Increasing, "The hyperbolic tangent of each element. Terms of a largest or smallest remain such.";
    erf: erf, Increasing, "The error function of each element. Terms of a largest or smallest remain such.";
    relu: relu, Increasing, "Each element, or 0 if it is negative. Terms of a largest or smallest remain such.";
    ceil: ceil, Increasing, "The least integer not below each element. Terms of a largest or smallest remain such.";
    floor: floor, Increasing, "The largest integer not above each element. Terms of a largest or smallest remain such.";
    round: round, Increasing, "The integer next to each element. Terms of a largest or smallest remain such.";
    sign: sign, Increasing, "The sign of each element: -1, 0 or 1. Terms of a largest or smallest remain such.";
    abs: abs, Other, "The magnitude of each element.";
    square: sqr, Other, "The square of each element.";
    reciprocal: recip, Other, "1 divided by each element.";
    sin: sin, Other, "The sine of each element.";
    cos: cos, Other, "The cosine of each element.";
    gelu: gelu_erf, Other, "The Gaussian error linear unit of each element, by the error function.";
    silu: silu, Other, "The sigmoid linear unit of each element.";
}

/// Operations of two operands: their name and a line of documentation.
macro_rules! binary {
    ($($name:ident: $op:ident, $doc:literal;)*) => {
        impl DTensor {$(
            #[doc = $doc]
            ///
            /// # Errors
            /// When the two are not on one mesh, have different dtypes or shapes that don't go together, or lie so that
            /// it takes communication: the message says which of them is to be redistributed.
            pub fn $name<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Self> {
                self.binary(Binary::$op, other.into())
            }
        )*}
    };
}

binary! {
    add: Add, "The sum of two, element by element. Terms of one sum and of another are terms of their sum.";
    sub: Sub, "The difference of two, element by element. Terms of sums are such of their difference.";
    mul: Mul, "The product of two, element by element. Terms of a sum remain such when all ranks hold the other.";
    div: Div, "The quotient of two, element by element. Terms of a sum remain such when all ranks hold the divisor.";
    maximum: Maximum, "The larger of two, element by element. Terms of a largest and of another are such of both.";
    minimum: Minimum, "The smaller of two, element by element. Terms of a smallest and of another are such of both.";
}

impl DTensor {
    /// Each element to a power.
    ///
    /// # Errors
    /// For terms of a reduction: they are to be redistributed first.
    pub fn pow(&self, exponent: f64) -> Result<Self> {
        self.unary("pow", Unary::Other, |local| local.powf(exponent))
    }

    fn unary(
        &self,
        name: &str,
        kind: Unary,
        compute: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let placements = rules::unary(name, kind, self.spec())?;
        self.result(self.shape(), &placements, |_| Ok(compute(self.to_local())?))
    }

    fn binary(&self, op: Binary, other: Operand<'_>) -> Result<Self> {
        let local = self.to_local();
        match other {
            Operand::Number(number) => {
                let placements = rules::scalar(op, self.spec())?;
                self.result(self.shape(), &placements, |_| {
                    Ok(match op {
                        Binary::Add => (local + number)?,
                        Binary::Sub => (local - number)?,
                        Binary::Mul => (local * number)?,
                        Binary::Div => (local / number)?,
                        Binary::Maximum => local.maximum(number)?,
                        Binary::Minimum => local.minimum(number)?,
                    })
                })
            }
            Operand::DTensor(other) => {
                self.check_goes_with(op.name(), other)?;
                if op == Binary::Div && !self.dtype().is_float() {
                    // Quotients of integers are rounded: those of terms don't add up.
                    rules::unary("div", Unary::Other, self.spec())?;
                }
                let (shape, placements) = rules::binary(op, self.spec(), other.spec())?;
                let right = other.to_local();
                self.result(&shape, &placements, |_| {
                    Ok(match op {
                        Binary::Add => local.broadcast_add(right)?,
                        Binary::Sub => local.broadcast_sub(right)?,
                        Binary::Mul => local.broadcast_mul(right)?,
                        Binary::Div => local.broadcast_div(right)?,
                        Binary::Maximum => local.broadcast_maximum(right)?,
                        Binary::Minimum => local.broadcast_minimum(right)?,
                    })
                })
            }
        }
    }

    /// Fails unless the two can be operands of one operation.
    pub(super) fn check_goes_with(&self, name: &str, other: &DTensor) -> Result<()> {
        let (mesh, theirs) = (self.device_mesh(), other.device_mesh());
        let is_same = mesh.rank() == theirs.rank() && mesh.covers(theirs) && theirs.covers(mesh);
        rules::same_mesh(name, self.spec(), other.spec(), is_same)?;
        if self.dtype() != other.dtype() {
            return Err(Error::Argument(format!(
                "{name} of {} and {}: the dtypes differ; convert one of them with `to_dtype`",
                self.spec(),
                other.spec()
            )));
        }
        Ok(())
    }
}
