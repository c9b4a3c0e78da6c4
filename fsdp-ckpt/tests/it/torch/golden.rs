//! Reading checkpoints of PyTorch FSDP2 exactly.

use fsdp_ckpt::hf::HfModel;
use fsdp_ckpt::{Format, TensorSource, open};
use fsdp_core::DType;
use fsdp_core::layout::{Region, chunk_range};
use serde_json::json;

use super::{recorded, whole};

const RUNS: [&str; 2] = ["llama_tiny", "gpt2_tiny"];

#[test]
fn classic_format_equals_hugging_face_layout() {
    for run in RUNS {
        let classic = open(recorded(run).join("dcp_step10")).unwrap();
        assert_eq!(classic.format(), Format::TorchDcp);
        let layout = HfModel::open(recorded(run).join("dcp_step10_hf")).unwrap();
        assert!(layout.tensors().len() > 10);
        for (fqn, tensor) in layout.tensors() {
            let name = format!("model.{fqn}");
            let here = classic.tensor(&name).unwrap();
            assert_eq!((here.dtype, &here.shape), (tensor.dtype, &tensor.shape), "{fqn}");
            assert!(whole(&*classic, &name).unwrap() == whole(&layout, fqn).unwrap(), "{fqn}");
            // A third of it, across the chunks of two ranks.
            let rows = chunk_range(tensor.shape[0], 3, 1);
            let mut region = Region::whole(&tensor.shape);
            (region.offsets[0], region.sizes[0]) = (rows.start, rows.len());
            let mut parts = [(); 2].map(|()| vec![0; region.elements() * 4]);
            classic.read(&name, &region, &mut parts[0]).unwrap();
            layout.read(fqn, &region, &mut parts[1]).unwrap();
            assert!(parts[0] == parts[1], "{fqn}");
        }
        let models = classic.tensors().keys().filter(|fqn| fqn.starts_with("model.")).count();
        assert!(models == layout.tensors().len() || run == "gpt2_tiny" && models == layout.tensors().len() + 1);
        assert!(classic.unreadable().is_empty(), "{:?}", classic.unreadable());
    }
}

#[test]
fn reads_optimizer_state_and_values() {
    let classic = open(recorded("llama_tiny/dcp_step10")).unwrap();
    let step = classic.tensor("optim.state.lm_head.weight.step").unwrap();
    assert_eq!((step.dtype, &step.shape[..]), (DType::F32, &[][..]));
    assert_eq!(whole(&*classic, "optim.state.lm_head.weight.step").unwrap(), 10f32.to_le_bytes());
    assert_eq!(classic.tensor("optim.state.lm_head.weight.exp_avg").unwrap().shape, [131, 32]);
    let value = |key: &str| &classic.values()[&format!("optim.param_groups.lm_head.weight.{key}")];
    assert_eq!(*value("lr"), json!(0.001));
    assert_eq!(*value("betas"), json!([0.9, 0.95]));
    assert_eq!(*value("foreach"), json!(null));
    assert_eq!(*value("amsgrad"), json!(false));
}

#[test]
fn shares_of_ranks_verify_everything_once() {
    let classic = open(recorded("gpt2_tiny/dcp_step10")).unwrap();
    let all = classic.verify().unwrap();
    assert_eq!(all.bytes, classic.tensors().values().map(|tensor| tensor.bytes()).sum::<u64>());
    let shares: Vec<_> = (0..3).map(|rank| classic.verify_share(rank, 3).unwrap()).collect();
    assert_eq!(shares.iter().map(|share| share.chunks).sum::<usize>(), all.chunks);
    assert_eq!(shares.iter().map(|share| share.bytes).sum::<u64>(), all.bytes);
}
