//! The loss scale of runs in f16, whose numbers end at 6e-8 below and at 65504 above: losses are multiplied by it, so
//! that small gradients are not rounded to zero, and gradients are divided by it. Other runs have none.

use anyhow::{Context, ensure};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use fsdp_candle::{GradScaler, GradScalerState, ShardedOptimizer, ShardedVarMap};
use fsdp_ckpt::TensorSource;
use serde_json::{Map, Value};

use crate::args::{Args, Precision};

/// Gradients that overflow at this scale are too large for f16 themselves, and nothing is gained by a smaller one.
const LEAST: f64 = 1.;
/// What a checkpoint calls the state: `state_dict` of PyTorch's scaler, saved as `scaler`.
const SCALE: &str = "scaler.scale";
const GROWTH_TRACKER: &str = "scaler._growth_tracker";

/// What losses are multiplied by, if by anything.
pub(crate) struct LossScale {
    scaler: Option<GradScaler>,
    /// What the flags say.
    first: GradScalerState,
}

impl LossScale {
    /// # Errors
    /// When the flags have a scale, and nothing that it would be for.
    pub(crate) fn new(args: &Args) -> anyhow::Result<Self> {
        let needed = [args.param_dtype, args.reduce_dtype].contains(&Precision::F16);
        ensure!(
            needed || args.loss_scale.is_none(),
            "--loss-scale is for gradients in f16: pass --param-dtype f16, or leave it out"
        );
        let scaler = args.loss_scale.map_or_else(GradScaler::default, GradScaler::new);
        Ok(LossScale { first: scaler.state(), scaler: needed.then_some(scaler) })
    }

    /// Goes on with the scale that a checkpoint holds, or begins anew where it holds none.
    pub(crate) fn resume(&mut self, source: &dyn TensorSource) -> anyhow::Result<()> {
        let Some(scaler) = &mut self.scaler else { return Ok(()) };
        let [scale, tracker] = [SCALE, GROWTH_TRACKER].map(|name| source.values().get(name));
        let state = || {
            let growth_tracker = tracker?.as_u64()?.try_into().ok()?;
            Some(GradScalerState { scale: scale?.as_f64()?, growth_tracker, ..self.first })
        };
        let found = match (scale, tracker) {
            (None, None) => Ok(self.first),
            _ => state().context("they must be a number and a count of steps"),
        };
        let loaded = found.and_then(|state| Ok(scaler.load_state(state)?));
        loaded.with_context(|| {
            let shown = |value: Option<&Value>| value.map_or("missing".into(), Value::to_string);
            let (path, scale, tracker) = (source.path().display(), shown(scale), shown(tracker));
            format!("{path}: {SCALE} is {scale} and {GROWTH_TRACKER} is {tracker}")
        })
    }

    /// What a checkpoint is to hold.
    pub(crate) fn values(&self) -> Map<String, Value> {
        let state = self.scaler.as_ref().map(GradScaler::state);
        let values = state.map(|state| [(SCALE, state.scale.into()), (GROWTH_TRACKER, state.growth_tracker.into())]);
        values.into_iter().flatten().map(|(name, value): (&str, Value)| (name.to_owned(), value)).collect()
    }

    /// The scale, if there is one.
    pub(crate) fn current(&self) -> Option<f64> {
        self.scaler.as_ref().map(GradScaler::current_scale)
    }

    /// What backward takes in the place of a loss.
    pub(crate) fn scale(&self, loss: Tensor) -> anyhow::Result<Tensor> {
        Ok(match &self.scaler {
            Some(scaler) => scaler.scale(&loss)?,
            None => loss,
        })
    }

    /// Divides the gradients by the scale. Tells whether they overflowed on any rank, and a smaller scale may help.
    /// Collective.
    pub(crate) fn unscale(&mut self, vars: &ShardedVarMap, grads: &mut GradStore) -> anyhow::Result<bool> {
        let Some(scaler) = &mut self.scaler else { return Ok(false) };
        Ok(scaler.unscale(vars, grads)? && scaler.current_scale() > LEAST)
    }

    /// Takes the step, unless the gradients overflowed: that is told in words, and the next scale is a smaller one.
    pub(crate) fn step(
        &mut self,
        optim: &mut dyn ShardedOptimizer,
        grads: &GradStore,
    ) -> anyhow::Result<Option<String>> {
        let Some(scaler) = &mut self.scaler else {
            optim.step(grads)?;
            return Ok(None);
        };
        let scale = scaler.current_scale();
        let stepped = scaler.step(optim, grads)?;
        scaler.update()?;
        let next = scaler.current_scale();
        Ok((!stepped).then(|| {
            format!("skipped, for its gradients overflow f16 at a loss scale of {scale}; the next one is {next}")
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use fsdp_ckpt::SaveState;
    use fsdp_core::MeshLayout;
    use fsdp_core::process_group::local;

    fn of(flags: &[&str]) -> anyhow::Result<LossScale> {
        LossScale::new(&Args::try_parse_from([&["train"], flags].concat())?)
    }

    #[test]
    fn only_f16_has_one() {
        for flags in [&[][..], &["--param-dtype", "bf16", "--reduce-dtype", "bf16"]] {
            let none = of(flags).unwrap();
            assert_eq!((none.current(), none.values().len()), (None, 0));
            let error = of(&[flags, &["--loss-scale", "2"]].concat()).err().unwrap().to_string();
            assert!(error.contains("--loss-scale") && error.contains("--param-dtype f16"), "{error}");
        }
        assert_eq!(of(&["--param-dtype", "f16"]).unwrap().current(), Some(65536.));
        let some = of(&["--reduce-dtype", "f16", "--loss-scale", "3"]).unwrap();
        let values = serde_json::json!({ "scaler.scale": 3.0, "scaler._growth_tracker": 0 });
        assert_eq!((some.current(), Value::from(some.values())), (Some(3.), values));
    }

    #[test]
    fn a_run_goes_on_with_the_scale_of_its_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let resumed = |name: &str, values: Value| {
            let mut scale = of(&["--param-dtype", "f16", "--loss-scale", "8"]).unwrap();
            let (path, Value::Object(values)) = (dir.path().join(name), values) else { panic!() };
            let state = SaveState { mesh: MeshLayout::new(&[("dp_shard", 1)]).unwrap(), tensors: vec![], values };
            local::run(1, |group| fsdp_ckpt::save(&path, &group, &state).unwrap());
            scale.resume(&*fsdp_ckpt::open(&path).unwrap()).map(|()| scale)
        };
        let saved = serde_json::json!({ "scaler.scale": 512.0, "scaler._growth_tracker": 77, "step": 3 });
        let same = resumed("same", saved.clone()).unwrap();
        assert_eq!((same.current(), &same.values()[GROWTH_TRACKER]), (Some(512.), &saved[GROWTH_TRACKER]));
        assert_eq!(resumed("none", serde_json::json!({})).unwrap().current(), Some(8.));
        for (number, (scale, tracker)) in [
            (Value::from(0.), Value::from(1)),
            (512.0.into(), Value::Null),
            ("8".into(), 1.into()),
            (8.0.into(), (-1).into()),
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("bad-{number}");
            let values = serde_json::json!({ SCALE: scale, GROWTH_TRACKER: tracker });
            let error = format!("{:#}", resumed(&name, values).err().unwrap());
            let parts =
                [&format!("{name}: scaler.scale is {scale} and scaler._growth_tracker is {tracker}: "), "must be"];
            assert!(parts.iter().all(|part| error.contains(*part)), "{error}");
        }
    }
}
