//! Matrix products in 8-bit floats: the recipes, and the layers that use one.

use indexmap::IndexSet;
use parking_lot::Mutex;

use crate::adapter::layer_of;
use crate::kernels::{Float8Cast, Float8Format};

/// How a layer's matrix products are computed in 8-bit floats (float8): the recipes of torchao's
/// [`Float8LinearConfig`](https://docs.pytorch.org/ao/stable/workflows/training.html).
///
/// A layer `y = x W^T` has three products: `y`, the input's gradient `dy W`, and the weight's gradient `dy^T x`. Before
/// a product, each operand is multiplied by a scale and rounded to 8 bits. The scale maps the largest magnitude to the
/// largest 8-bit float, and follows from the operand alone, so nothing is kept between steps. Sums are computed in f32
/// and divided by both scales. The layer's inputs, outputs and gradients keep their dtypes.
///
/// E4M3 has 3 bits of mantissa and reaches 448. E5M2 has 2 bits and reaches 57,344.
///
/// [`ShardedVarMap::convert_to_float8_training`](crate::ShardedVarMap::convert_to_float8_training) chooses the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float8Recipe {
    /// One scale for each tensor. Inputs and weights are E4M3, and gradients of outputs are E5M2. The fastest.
    Tensorwise,
    /// One scale for each row of a product's left operand and for each column of its right one, rounded down to a power
    /// of two. All operands are E4M3. Outliers affect their own row only.
    Rowwise,
    /// [`Rowwise`](Float8Recipe::Rowwise), but the weight's gradient is computed in the layer's dtype, and for the
    /// input's gradient the weight has one scale. The most accurate.
    RowwiseWithGwHp,
}

/// A product of a fully connected layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinearProduct {
    /// The input and the weight.
    Output,
    /// The output's gradient and the weight.
    GradInput,
    /// The output's gradient and the input.
    GradWeight,
}

impl Float8Recipe {
    /// Returns how the left and the right operand of a product are cast, or `None` for a product in the layer's dtype.
    /// With a weight stored as `[in, out]`, its gradient is `x^T dy`.
    pub(crate) fn casts(self, product: LinearProduct, in_out: bool) -> Option<[Float8Cast; 2]> {
        let cast =
            |format, per_vector| Float8Cast { format, per_vector, power_of_two: self != Float8Recipe::Tensorwise };
        let of_gradient = match self {
            Float8Recipe::Tensorwise => cast(Float8Format::E5M2, false),
            _ => cast(Float8Format::E4M3, true),
        };
        let other = cast(Float8Format::E4M3, self != Float8Recipe::Tensorwise);
        match (product, self) {
            (LinearProduct::Output, _) => Some([other, other]),
            (LinearProduct::GradInput, Float8Recipe::RowwiseWithGwHp) => {
                Some([of_gradient, cast(Float8Format::E4M3, false)])
            }
            (LinearProduct::GradWeight, Float8Recipe::RowwiseWithGwHp) => None,
            (LinearProduct::GradWeight, _) if in_out => Some([other, of_gradient]),
            _ => Some([of_gradient, other]),
        }
    }
}

/// Selection of the layers that compute in 8 bits.
pub(crate) struct Float8Layers {
    recipe: Float8Recipe,
    filter: Box<dyn Fn(&str) -> bool + Send + Sync>,
    /// FQNs of the layers that were built.
    built: Mutex<IndexSet<String>>,
}

impl Float8Layers {
    pub(crate) fn new(recipe: Float8Recipe, filter: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Float8Layers { recipe, filter: Box::new(filter), built: Mutex::default() }
    }

    /// Returns the recipe of the layer whose weight is called `weight`, if it is selected.
    pub(crate) fn build(&self, weight: &str) -> Option<Float8Recipe> {
        let layer = layer_of(weight, "weight")?;
        if !(self.filter)(layer) {
            return None;
        }
        self.built.lock().insert(layer.into());
        Some(self.recipe)
    }

    /// Returns the FQNs of the layers that were built.
    pub(crate) fn built(&self) -> Vec<String> {
        self.built.lock().iter().cloned().collect()
    }
}
