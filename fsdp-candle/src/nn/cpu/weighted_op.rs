//! Candle's traits for an operation on an input, a weight and maybe a bias.

/// Implements `CustomOp2` (weight) and `CustomOp3` (weight and bias) for a type with `function`, `forward(x, layout)`
/// and `backward(x, dy) -> [dx, dw, db]`. The weight and the bias are read through [`super::super::weight::Weight`],
/// never through the arguments.
macro_rules! weighted_op {
    ($op:ty) => {
        impl candle_core::CustomOp2 for $op {
            fn name(&self) -> &'static str {
                self.function
            }

            fn cpu_fwd(
                &self,
                x: &candle_core::CpuStorage,
                xl: &candle_core::Layout,
                _: &candle_core::CpuStorage,
                _: &candle_core::Layout,
            ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
                self.forward(x, xl)
            }

            fn bwd(
                &self,
                x: &candle_core::Tensor,
                _: &candle_core::Tensor,
                _: &candle_core::Tensor,
                dy: &candle_core::Tensor,
            ) -> candle_core::Result<(Option<candle_core::Tensor>, Option<candle_core::Tensor>)> {
                let [dx, dw, _] = self.backward(x, dy)?;
                Ok((dx, dw))
            }
        }

        impl candle_core::CustomOp3 for $op {
            fn name(&self) -> &'static str {
                self.function
            }

            fn cpu_fwd(
                &self,
                x: &candle_core::CpuStorage,
                xl: &candle_core::Layout,
                _: &candle_core::CpuStorage,
                _: &candle_core::Layout,
                _: &candle_core::CpuStorage,
                _: &candle_core::Layout,
            ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
                self.forward(x, xl)
            }

            fn bwd(
                &self,
                x: &candle_core::Tensor,
                _: &candle_core::Tensor,
                _: &candle_core::Tensor,
                _: &candle_core::Tensor,
                dy: &candle_core::Tensor,
            ) -> candle_core::Result<(
                Option<candle_core::Tensor>,
                Option<candle_core::Tensor>,
                Option<candle_core::Tensor>,
            )> {
                let [dx, dw, db] = self.backward(x, dy)?;
                Ok((dx, dw, db))
            }
        }
    };
}
pub(in crate::nn) use weighted_op;
