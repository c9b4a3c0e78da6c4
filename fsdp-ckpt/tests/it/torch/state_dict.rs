//! Reading state dicts of `torch.save`.

use fsdp_ckpt::torch::TorchFile;
use fsdp_ckpt::{Error, Format, SafetensorsFile, open};
use fsdp_core::DType;
use fsdp_core::layout::Region;
use serde_json::json;

use super::{fixture, whole};

#[test]
fn reads_every_view() {
    let state = open(fixture("views.pt")).unwrap();
    assert_eq!(state.format(), Format::TorchFile);
    let expected = SafetensorsFile::open(fixture("views.safetensors")).unwrap();
    assert_eq!(expected.names().count(), 12);
    for fqn in expected.names() {
        let info = expected.info(fqn).unwrap();
        let tensor = state.tensor(fqn).unwrap();
        assert_eq!((tensor.dtype, &tensor.shape), (info.dtype, &info.shape), "{fqn}");
        let mut bytes = vec![0; tensor.bytes() as usize];
        expected.read(fqn, &Region::whole(&info.shape), &mut bytes).unwrap();
        assert_eq!(whole(&*state, fqn).unwrap(), bytes, "{fqn}");
        if let [rows, columns] = info.shape[..]
            && rows > 1
        {
            let region = Region { offsets: vec![1, columns / 2], sizes: vec![rows - 1, columns - columns / 2] };
            let mut parts = [(); 2].map(|()| vec![0; region.elements() * info.dtype.size()]);
            state.read(fqn, &region, &mut parts[0]).unwrap();
            expected.read(fqn, &region, &mut parts[1]).unwrap();
            assert_eq!(parts[0], parts[1], "{fqn}");
        }
    }
    assert!(state.verify().unwrap().chunks > 10);
}

#[test]
fn non_tensors_are_values() {
    let state = open(fixture("views.pt")).unwrap();
    assert_eq!(whole(&*state, "optimizer.state.0.step").unwrap(), 4f32.to_le_bytes());
    assert_eq!(state.tensor("mixed.1").unwrap().shape, [2]);
    let expected = json!({
        "big": 1u64 << 62,
        "device": "cuda:1",
        "dtype": "torch.float32",
        "epoch": 3,
        "mixed.0": 1,
        "mixed.2.deep": true,
        "name": "tiny é",
        "optimizer.param_groups": [{ "lr": 0.1, "betas": [0.9, 0.95], "foreach": null, "params": [0] }],
    });
    assert_eq!(serde_json::Value::Object(state.values().clone()), expected);
    assert_eq!(state.unreadable()["model.flags"], "bool");
    assert_eq!(state.unreadable()["best"], "inf");
    assert!(
        matches!(state.tensor("model.flags"), Err(Error::UnsupportedDTypes { tensors, .. }) if tensors["model.flags"] == "bool")
    );
}

#[test]
fn detects_formats_by_content() {
    let root = tempfile::tempdir().unwrap();
    for name in ["linear", "linear.safetensors", "linear.bin"] {
        let path = root.path().join(name);
        std::fs::copy(fixture("linear.pth"), &path).unwrap();
        let state = open(&path).unwrap();
        assert_eq!((state.format(), state.tensors().len()), (Format::TorchFile, 2), "{name}");
        assert!(state.values().is_empty());
    }
    let path = root.path().join("views.pt");
    std::fs::copy(fixture("views.safetensors"), &path).unwrap();
    assert_eq!(open(&path).unwrap().format(), Format::HuggingFace);
    let path = root.path().join("text.pt");
    std::fs::write(&path, "text").unwrap();
    assert!(open(&path).unwrap_err().to_string().ends_with("text.pt: it is not a zip file of torch.save"));
    let legacy = open(fixture("legacy.bin")).unwrap_err().to_string();
    assert!(
        legacy.contains("legacy.bin: it is in the format of PyTorch before 1.6, which is not supported"),
        "{legacy}"
    );

    let lone = open(fixture("tensor.pt")).unwrap();
    assert_eq!(lone.tensor("tensor").unwrap().dtype, DType::F32);
}

#[test]
fn reads_models_of_bin_files() {
    let root = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("linear.pth"), root.path().join("pytorch_model.bin")).unwrap();
    let model = open(root.path()).unwrap();
    assert_eq!((model.format(), model.tensors().len()), (Format::TorchFile, 2));

    let root = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("linear.pth"), root.path().join("a.bin")).unwrap();
    std::fs::copy(fixture("tensor.pt"), root.path().join("b.bin")).unwrap();
    let index = |map: serde_json::Value| {
        let text = json!({ "metadata": {}, "weight_map": map }).to_string();
        std::fs::write(root.path().join("pytorch_model.bin.index.json"), text).unwrap();
        open(root.path())
    };
    let model = index(json!({ "weight": "a.bin", "bias": "a.bin", "tensor": "b.bin" })).unwrap();
    assert_eq!(model.tensors().keys().collect::<Vec<_>>(), ["bias", "tensor", "weight"]);
    assert_eq!(whole(&*model, "tensor").unwrap(), [0f32, 1., 2.].map(f32::to_le_bytes).concat());
    assert_eq!(model.files().len(), 2);
    for (map, part) in [
        (json!({ "weight": "../a.bin" }), "which is not a plain file name"),
        (json!({ "weight": "c.bin" }), "has no file \"c.bin\""),
        (json!({ "other": "a.bin" }), "lists weight \"other\" in a.bin, which has no such tensor"),
    ] {
        let message = index(map).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    std::fs::copy(fixture("linear.pth"), root.path().join("b.bin")).unwrap();
    let twice = index(json!({ "weight": "a.bin", "bias": "b.bin" })).unwrap_err().to_string();
    assert!(twice.contains("this name is there twice"), "{twice}");
}

#[test]
fn detects_every_flipped_bit_of_data() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("linear.pt");
    let good = std::fs::read(fixture("linear.pth")).unwrap();
    let sound = TorchFile::open(fixture("linear.pth")).unwrap();
    let mut noticed = 0;
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let read = open(&path).and_then(|file| {
            file.verify()?;
            super::assert_same_tensors(&*file, &sound);
            Ok(())
        });
        if let Err(error) = read {
            noticed += 1;
            assert!(error.to_string().contains("linear.pt"), "{error}");
        }
    }
    // Padding and time stamps have no checksum.
    assert!(noticed > good.len() / 4, "{noticed} of {}", good.len());
    for len in 0..good.len() {
        std::fs::write(&path, &good[..len]).unwrap();
        assert!(open(&path).is_err(), "{len}");
    }
}

/// Tensors whose elements are not those of one strided storage.
#[test]
fn views_and_layouts_that_are_not_known_are_refused_by_name() {
    for (name, expected) in [
        ("neg", "it is torch._neg_view, whose elements are stored with the other sign: save it with .resolve_neg()"),
        ("conj", "it is a conjugate view, whose elements are not stored conjugated"),
        ("sparse", "torch._utils._rebuild_sparse_tensor"),
        ("meta", "torch._utils._rebuild_meta_tensor_no_storage"),
        ("nested", "torch._utils._rebuild_nested_tensor"),
    ] {
        let error = open(fixture(&format!("{name}.pt"))).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}.pt")) && error.contains(expected), "{error}");
    }
}
