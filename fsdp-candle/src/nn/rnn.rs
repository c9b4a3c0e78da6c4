//! Recurrent networks: `candle_nn::rnn`.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Init, VarBuilder};

pub use candle_nn::rnn::{Direction, GRUConfig, GRUState, LSTMConfig, LSTMState, RNN};

use super::linear::affine;
use super::ops::sigmoid;
use super::weight::register_layer;

/// The weights of a recurrent layer.
#[derive(Clone, Debug)]
struct Weights {
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Option<Tensor>,
    b_hh: Option<Tensor>,
    hidden: usize,
    device: Device,
    dtype: DType,
}

impl Weights {
    /// Creates the tensors whose names end in `suffix`.
    fn new(
        [gates, inputs, hidden]: [usize; 3],
        suffix: &str,
        [w_ih, w_hh]: [Init; 2],
        [b_ih, b_hh]: [Option<Init>; 2],
        vb: &VarBuilder,
    ) -> Result<Self> {
        let bias = |name: &str, init: Option<Init>| {
            init.map(|init| vb.get_with_hints(gates * hidden, &format!("{name}_{suffix}"), init)).transpose()
        };
        let weights = Self {
            w_ih: vb.get_with_hints((gates * hidden, inputs), &format!("weight_ih_{suffix}"), w_ih)?,
            w_hh: vb.get_with_hints((gates * hidden, hidden), &format!("weight_hh_{suffix}"), w_hh)?,
            b_ih: bias("bias_ih", b_ih)?,
            b_hh: bias("bias_hh", b_hh)?,
            hidden,
            device: vb.device().clone(),
            dtype: vb.dtype(),
        };
        let Weights { w_ih, w_hh, b_ih, b_hh, .. } = &weights;
        [w_ih, w_hh].into_iter().chain(b_ih).chain(b_hh).for_each(register_layer);
        Ok(weights)
    }

    fn zeros(&self, batch: usize) -> Result<Tensor> {
        Tensor::zeros((batch, self.hidden), self.dtype, &self.device)
    }

    fn input_gates(&self, function: &'static str, x: &Tensor) -> Result<Tensor> {
        affine(function, x, &self.w_ih, self.b_ih.as_ref(), false, None)
    }

    fn state_gates(&self, function: &'static str, h: &Tensor) -> Result<Tensor> {
        affine(function, h, &self.w_hh, self.b_hh.as_ref(), false, None)
    }
}

/// A long short-term memory, as [`candle_nn::LSTM`]: input `[batch, T, in]`, states `[batch, hidden]`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::{self, RNN, VarBuilder, VarMap};
///
/// let vars = VarMap::new();
/// let lstm = nn::lstm(4, 3, Default::default(), VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let states = lstm.seq(&Tensor::ones((2, 5, 4), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(lstm.states_to_tensor(&states)?.dims(), [2, 5, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::upper_case_acronyms)]
#[derive(Clone, Debug)]
pub struct LSTM {
    weights: Weights,
    config: LSTMConfig,
}

impl LSTM {
    /// Returns a layer from the tensors `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0` and `bias_hh_l0` of `vb`. The
    /// names end in the layer's number, and `_reverse` for the backward direction.
    pub fn new(in_dim: usize, hidden_dim: usize, config: LSTMConfig, vb: VarBuilder) -> Result<Self> {
        let direction = match config.direction {
            Direction::Forward => "",
            Direction::Backward => "_reverse",
        };
        let suffix = format!("l{}{direction}", config.layer_idx);
        let inits = [config.w_ih_init, config.w_hh_init];
        let biases = [config.b_ih_init, config.b_hh_init];
        Ok(Self { weights: Weights::new([4, in_dim, hidden_dim], &suffix, inits, biases, &vb)?, config })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &LSTMConfig {
        &self.config
    }
}

/// Calls [`LSTM::new`].
pub fn lstm(in_dim: usize, hidden_dim: usize, config: LSTMConfig, vb: VarBuilder) -> Result<LSTM> {
    LSTM::new(in_dim, hidden_dim, config, vb)
}

impl RNN for LSTM {
    type State = LSTMState;

    fn zero_state(&self, batch_dim: usize) -> Result<Self::State> {
        let zeros = self.weights.zeros(batch_dim)?;
        Ok(LSTMState::new(zeros.clone(), zeros))
    }

    fn step(&self, input: &Tensor, state: &Self::State) -> Result<Self::State> {
        let gates = (self.weights.input_gates("LSTM", input)? + self.weights.state_gates("LSTM", &state.h)?)?;
        let gate = |i: usize| gates.narrow(1, i * self.weights.hidden, self.weights.hidden)?.contiguous();
        let (open, keep, out) = (sigmoid(&gate(0)?)?, sigmoid(&gate(1)?)?, sigmoid(&gate(3)?)?);
        let c = ((keep * &state.c)? + (open * gate(2)?.tanh()?)?)?;
        Ok(LSTMState::new((out * c.tanh()?)?, c))
    }

    fn states_to_tensor(&self, states: &[Self::State]) -> Result<Tensor> {
        Tensor::stack(&states.iter().map(|state| &state.h).collect::<Vec<_>>(), 1)
    }
}

/// A gated recurrent unit, as [`candle_nn::GRU`]: input `[batch, T, in]`, states `[batch, hidden]`.
#[allow(clippy::upper_case_acronyms)]
#[derive(Clone, Debug)]
pub struct GRU {
    weights: Weights,
    config: GRUConfig,
}

impl GRU {
    /// Returns a layer from the tensors `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0` and `bias_hh_l0` of `vb`.
    pub fn new(in_dim: usize, hidden_dim: usize, config: GRUConfig, vb: VarBuilder) -> Result<Self> {
        let inits = [config.w_ih_init, config.w_hh_init];
        let biases = [config.b_ih_init, config.b_hh_init];
        Ok(Self { weights: Weights::new([3, in_dim, hidden_dim], "l0", inits, biases, &vb)?, config })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &GRUConfig {
        &self.config
    }
}

/// Calls [`GRU::new`].
pub fn gru(in_dim: usize, hidden_dim: usize, config: GRUConfig, vb: VarBuilder) -> Result<GRU> {
    GRU::new(in_dim, hidden_dim, config, vb)
}

impl RNN for GRU {
    type State = GRUState;

    fn zero_state(&self, batch_dim: usize) -> Result<Self::State> {
        Ok(GRUState { h: self.weights.zeros(batch_dim)? })
    }

    fn step(&self, input: &Tensor, state: &Self::State) -> Result<Self::State> {
        let (of_input, of_state) =
            (self.weights.input_gates("GRU", input)?, self.weights.state_gates("GRU", &state.h)?);
        let part = |of: &Tensor, i: usize| of.narrow(1, i * self.weights.hidden, self.weights.hidden)?.contiguous();
        let reset = sigmoid(&(part(&of_input, 0)? + part(&of_state, 0)?)?)?;
        let keep = sigmoid(&(part(&of_input, 1)? + part(&of_state, 1)?)?)?;
        let new = (part(&of_input, 2)? + (reset * part(&of_state, 2)?)?)?.tanh()?;
        Ok(GRUState { h: ((&keep * &state.h)? - ((&keep - 1.)? * new)?)? })
    }

    /// Returns the states side by side, `[batch, T * hidden]`.
    fn states_to_tensor(&self, states: &[Self::State]) -> Result<Tensor> {
        Tensor::cat(&states.iter().map(|state| &state.h).collect::<Vec<_>>(), 1)
    }
}
