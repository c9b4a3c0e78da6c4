//! Reports of a training step to the launcher. The test runs its own binary as a rank, which reads its own report
//! during the step.

use crate::common::vars_on;
use candle_core::{DType, Module, Tensor};
use fsdp_candle::{AdamW, AdamWConfig, FullyShard, fully_shard, nn};
use fsdp_core::heartbeat::{Snapshot, StatusPage, VARIABLE, read};

/// The rank's own board.
fn board() -> Snapshot {
    read(std::env::var_os(VARIABLE).unwrap()).unwrap()
}

fn doing() -> String {
    board().doing.map_or_else(String::new, |doing| doing.what)
}

struct Looks(nn::Linear);

impl Module for Looks {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        assert_eq!(doing(), "forward inner");
        self.0.forward(x)
    }
}

struct Model(fsdp_candle::FsdpModule<Looks>);

impl Module for Model {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.0.forward(x)?;
        assert!(doing().starts_with("forward") && !doing().contains("inner"), "{}", doing());
        y.sum_all()
    }
}

/// Not a test: the code that the rank runs.
#[test]
fn run_as_a_rank() {
    if std::env::var_os("FSDP_TEST_ROLE").is_none() {
        return;
    }
    let world = fsdp_candle::init().unwrap();
    let vars = vars_on(&world, &[("dp_shard", 1)]);
    let opts = FullyShard::new(&vars);
    let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
        let inner = fully_shard(&opts, vb.pp("inner"), |vb| Ok(Looks(nn::linear(4, 2, vb)?)))?;
        Ok(Model(inner))
    })
    .unwrap();
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
    assert_eq!(board().step, None);
    for step in 1..=2 {
        let loss = model.forward(&Tensor::ones((3, 4), DType::F32, world.device()).unwrap()).unwrap();
        assert_eq!(doing(), "");
        let grads = model.backward(&loss).unwrap();
        optim.step(&grads).unwrap();
        assert!(board().step.is_some_and(|done| done.number == step));
        assert_eq!(doing(), "");
    }
    println!("says: done");
}

#[test]
fn a_training_step_reports_its_phase() {
    let board = StatusPage::new().unwrap();
    let mut rank = std::process::Command::new(std::env::current_exe().unwrap());
    rank.args(["--exact", "heartbeat::run_as_a_rank", "--nocapture", "--test-threads=1"])
        .env("FSDP_TEST_ROLE", "trains");
    let output = rank.env(VARIABLE, board.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("says: done"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let snapshot = board.snapshot();
    assert!(snapshot.beat.is_some() && snapshot.step.is_some_and(|step| step.number == 2));
}
