//! Loading into memory: names, dtypes, and no writes after an error.

use std::sync::{Arc, Mutex};

use fsdp_ckpt::{Error, LoadOptions, LoadTensor, Strict, TensorSource, hf, load, open, open_for};
use fsdp_core::{Buffer, DType, layout::Region};

use crate::world::{damage, fresh, line, save_all, shard_file, state, world, zoo};

/// Creates memory for a whole tensor, filled with ones.
fn memory(fqn: &str, shape: &[usize], dtype: DType) -> (LoadTensor, Arc<Mutex<Buffer>>) {
    let mut buffer = Buffer::zeros(dtype, shape.iter().product());
    buffer.bytes_mut().fill(1);
    let data = Arc::new(Mutex::new(buffer));
    let tensor =
        LoadTensor { fqn: fqn.into(), shape: shape.to_vec(), region: Region::whole(shape), data: data.clone() };
    (tensor, data)
}

#[test]
fn fills_every_shard_of_every_mesh() {
    let (_root, dir) = fresh();
    let globals = zoo();
    save_all(&dir, &globals, &line(3));
    for ranks in [1, 2, 4] {
        world(ranks, |group| {
            let mesh = line(ranks);
            let (tensors, memories): (Vec<_>, Vec<_>) = globals
                .iter()
                .map(|global| {
                    let (mut tensor, _) = memory(&global.fqn, &global.shape, global.dtype);
                    tensor.region = global.region(&mesh, group.rank());
                    let data = Arc::new(Mutex::new(Buffer::zeros(global.dtype, tensor.region.elements())));
                    tensor.data = data.clone();
                    (tensor, data)
                })
                .unzip();
            let options = LoadOptions { strict: Strict::Both, convert: false, ..LoadOptions::default() };
            let report = load(&*open(&dir).unwrap(), &tensors, &options).unwrap();
            assert_eq!((report.loaded, report.missing.len(), report.unexpected.len()), (globals.len(), 0, 0));
            for ((global, tensor), memory) in globals.iter().zip(&tensors).zip(&memories) {
                assert_eq!(memory.lock().unwrap().bytes(), global.cut(&tensor.region), "{}", global.fqn);
            }
        });
    }
}

#[test]
fn strictness_of_names() {
    let (_root, dir) = fresh();
    save_all(&dir, &zoo(), &line(2));
    let source = open(&dir).unwrap();
    let (norm, _) = memory("model.norm.weight", &[9], DType::F32);
    let (other, untouched) = memory("model.other.weight", &[9], DType::F32);
    let asked = |strict| LoadOptions { strict, ..LoadOptions::default() };
    let tensors = [norm.clone(), other];
    for strict in [Strict::Both, Strict::Missing] {
        let error = load(&*source, &tensors, &asked(strict)).unwrap_err();
        assert!(error.to_string().contains("it lacks \"model.other.weight\""), "{error}");
        assert_eq!(error.to_string().contains("unexpected"), strict == Strict::Both, "{error}");
    }
    let report = load(&*source, &tensors, &asked(Strict::Neither)).unwrap();
    assert_eq!((report.loaded, &report.missing[..]), (1, &["model.other.weight".to_string()][..]));
    assert_eq!(report.unexpected.len(), zoo().len() - 1);
    assert_eq!(untouched.lock().unwrap().bytes(), [1; 36]);

    let only = LoadOptions { strict: Strict::Both, include: vec!["model.norm.*".into()], ..LoadOptions::default() };
    assert_eq!(load(&*source, &tensors, &only).unwrap().loaded, 1);
    let none = LoadOptions { exclude: vec!["model.*".into()], ..LoadOptions::default() };
    assert_eq!(load(&*source, &tensors, &none).unwrap().loaded, 0);
    let bad = LoadOptions { include: vec!["[".into()], ..LoadOptions::default() };
    assert!(load(&*source, &tensors, &bad).unwrap_err().to_string().contains("\"[\" is not a valid name pattern"));
    for idle in [
        LoadOptions { include: vec!["model.*".into(), "model.nrom.*".into()], ..LoadOptions::default() },
        LoadOptions { exclude: vec!["model.nrom.*".into()], ..LoadOptions::default() },
    ] {
        let error = load(&*source, &tensors, &idle).unwrap_err().to_string();
        assert!(error.contains("clude: \"model.nrom.*\" matches no tensor of"), "{error}");
    }
    // Names are checked before any I/O.
    assert!(load(&*source, &[norm], &asked(Strict::Both)).unwrap_err().to_string().contains("and 3 more"));
}

#[test]
fn converts_only_floating_point_dtypes() {
    let (_root, dir) = fresh();
    save_all(&dir, &zoo(), &line(2));
    let source = open(&dir).unwrap();
    let (exact, exact_memory) = memory("model.even.weight", &[12, 5], DType::F32);
    let (half, half_memory) = memory("model.even.weight", &[12, 5], DType::BF16);
    load(&*source, &[exact], &LoadOptions::default()).unwrap();
    let report = load(&*source, std::slice::from_ref(&half), &LoadOptions::default()).unwrap();
    assert_eq!(report.converted, [("model.even.weight".to_string(), DType::F32, DType::BF16)]);
    let (exact, rounded) = (exact_memory.lock().unwrap().clone(), half_memory.lock().unwrap().clone());
    let (Buffer::F32(exact), Buffer::BF16(rounded)) = (exact, rounded) else { panic!("other dtypes") };
    assert!(
        exact.iter().zip(&rounded).all(|(exact, rounded)| half::bf16::from_f32(*exact).to_bits() == rounded.to_bits())
    );

    let strict = LoadOptions { convert: false, ..LoadOptions::default() };
    let (integer, untouched) = memory("model.even.weight", &[12, 5], DType::I64);
    let (misshapen, _) = memory("model.even.weight", &[5, 12], DType::F32);
    for (tensor, options, part) in [
        (&half, &strict, "dtype F32, expected BF16, and conversion is off"),
        (&integer, &LoadOptions::default(), "only floating point types are converted"),
        (&misshapen, &LoadOptions::default(), "shape [12, 5], expected [5, 12]"),
    ] {
        let error = load(&*source, std::slice::from_ref(tensor), options).unwrap_err();
        assert!(matches!(error, Error::TensorMismatch { .. }) && error.to_string().contains(part), "{error}");
    }
    assert_eq!(untouched.lock().unwrap().bytes(), [1; 480]);
}

#[test]
fn loads_a_model_without_prefix() {
    let (_root, dir) = fresh();
    let globals = zoo();
    let mesh = line(1);
    world(1, |group| {
        // As a causal language model of Hugging Face calls its weights: some begin with `model.`.
        let tensors = [("model.norm.weight", 4), ("lm_head.weight", 0)].map(|(name, at)| {
            let mut tensor = globals[at].shard(&mesh, 0);
            tensor.fqn = name.into();
            tensor
        });
        hf::export(&dir, group, &tensors, &[]).unwrap();
    });
    let (norm, data) = memory("model.model.norm.weight", &[9], DType::F32);
    let (head, _) = memory("model.lm_head.weight", &[12, 5], DType::F32);
    for path in [dir.clone(), dir.join("model.safetensors")] {
        let source = open(&path).unwrap();
        assert_eq!(source.path(), path);
        let options = LoadOptions { strict: Strict::Both, ..LoadOptions::default() };
        assert_eq!(load(&*source, &[norm.clone(), head.clone()], &options).unwrap().loaded, 2);
        assert_eq!(data.lock().unwrap().bytes(), globals[4].bytes);
    }
}

#[test]
fn ranks_that_open_together_know_and_verify_their_parts() {
    let (_root, dir) = fresh();
    let globals = zoo();
    save_all(&dir, &globals, &line(3));
    let whole = open(&dir).unwrap();
    let all: usize = whole.tensors().values().map(|tensor| tensor.chunks.len()).sum();
    for ranks in [1, 2, 4, 9] {
        let verified = world(ranks, |group| {
            let tensors = state(&globals, &line(ranks), group.rank()).tensors;
            let source = open_for(&dir, group, &tensors).unwrap();
            assert_eq!(source.tensors().keys().collect::<Vec<_>>(), whole.tensors().keys().collect::<Vec<_>>());
            assert_eq!((source.values(), source.mesh()), (whole.values(), whole.mesh()));
            let read = |source: &dyn TensorSource, fqn: &str, region: &Region| {
                let mut bytes = vec![0; region.elements() * source.tensor(fqn).unwrap().dtype.size()];
                source.read(fqn, region, &mut bytes).unwrap();
                bytes
            };
            for (global, shard) in globals.iter().zip(&tensors) {
                assert_eq!(read(&*source, &shard.fqn, &shard.region), global.cut(&shard.region), "{}", shard.fqn);
            }
            let known: usize = source.tensors().values().map(|tensor| tensor.chunks.len()).sum();
            assert!(ranks < 4 || known < all, "{known} of {all} chunks");
            let share = source.verify_share(group.rank(), ranks).unwrap();
            // Beyond its part, it reads the manifest.
            let embedding = globals.iter().find(|global| global.fqn == "model.even.weight").unwrap();
            let region = Region::whole(&embedding.shape);
            assert_eq!(read(&*source, &embedding.fqn, &region), embedding.bytes);
            assert_eq!(source.verify().unwrap(), whole.verify().unwrap());
            (share.chunks, share.bytes, share.files)
        });
        let sum = whole.verify().unwrap();
        assert_eq!(verified.iter().map(|(chunks, ..)| chunks).sum::<usize>(), sum.chunks);
        assert_eq!(verified.iter().map(|(_, bytes, _)| bytes).sum::<u64>(), sum.bytes);
        assert!(verified.iter().all(|(.., files)| *files == sum.files));
    }
    damage(&dir.join(shard_file(1)));
    let damaged = world(4, |group| {
        let source = open_for(&dir, group, &[]).unwrap();
        source.verify_share(group.rank(), 4).is_err_and(|error| error.is_damage())
    });
    assert_eq!(damaged.iter().filter(|damaged| **damaged).count(), 1, "{damaged:?}");
}

#[test]
fn ranks_that_open_together_fail_together() {
    let (root, dir) = fresh();
    let outcomes = |dir: &std::path::Path| world(2, |group| open_for(dir, group, &[]).map(drop));
    for outcome in outcomes(&dir) {
        // No rank finds a format.
        assert!(matches!(outcome, Err(Error::NotFound { .. })), "{outcome:?}");
    }
    save_all(&dir, &zoo(), &line(2));
    std::fs::remove_file(dir.join(shard_file(1))).unwrap();
    let [first, other] = outcomes(&dir).try_into().unwrap();
    let said = first.unwrap_err();
    assert!(matches!(said, Error::NotFound { .. }), "{said:?}");
    let told = other.unwrap_err();
    assert!(matches!(told, Error::Rank { rank: 0, error: None, .. }), "{told:?}");
    assert_eq!(told.to_string(), format!("rank 0 failed to open the checkpoint: {said}"));

    // Another format: each rank opens it.
    let model = root.path().join("model");
    world(2, |group| {
        hf::export(&model, group, &state(&zoo()[..1], &line(2), group.rank()).tensors, &[]).unwrap();
        assert_eq!(open_for(&model, group, &[]).unwrap().format(), fsdp_ckpt::Format::HuggingFace);
    });
}
