//! Exporting shards as one Hugging Face weights file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::world::{Global, line, list, world, zoo};
use fsdp_ckpt::hf::{ExportOptions, HfModel, export, export_with};
use fsdp_ckpt::{SafetensorsFile, TensorShard, TensorSource};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, DType, MeshLayout, Placement, Readable};

/// Data that is read in pieces of this many bytes, as data on disk is.
struct InPieces(Arc<dyn Readable>, usize);

impl Readable for InPieces {
    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        self.0.read(f)
    }

    fn read_pieces(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        self.0.read(&mut |bytes| bytes.chunks(self.1).for_each(&mut *f))
    }
}

fn export_all(dir: &Path, globals: &[Global], mesh: &MeshLayout) -> Vec<fsdp_ckpt::Result<u64>> {
    let config = dir.with_file_name("config.json");
    std::fs::write(&config, "{}").unwrap();
    world(mesh.size(), |group| {
        let mut shards: Vec<TensorShard> = globals.iter().map(|global| global.shard(mesh, group.rank())).collect();
        // Pieces that end within rows and elements. Rank 0 has whole data.
        shards
            .iter_mut()
            .filter(|_| group.rank() > 0)
            .for_each(|shard| shard.data = Arc::new(InPieces(shard.data.clone(), 7)));
        export(dir, group, &shards, std::slice::from_ref(&config))
    })
}

#[test]
fn exports_every_dtype_and_placement() {
    for size in 1..=4 {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("model");
        let bytes = export_all(&dir, &zoo(), &line(size));
        let file = std::fs::read(dir.join("model.safetensors")).unwrap();
        assert!(bytes.into_iter().all(|bytes| bytes.unwrap() == file.len() as u64));
        assert_eq!(list(&dir), ["config.json", "model.safetensors"]);
        let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.len(), zoo().len());
        let model = HfModel::open(&dir).unwrap();
        for global in zoo() {
            assert_eq!(tensors.tensor(&global.fqn).unwrap().data(), global.bytes, "{}", global.fqn);
            assert_eq!(model.tensor(&global.fqn).unwrap().shape, global.shape);
            let part = global.region(&line(3), 1);
            let mut slice = vec![0; part.elements() * global.dtype.size()];
            model.read(&global.fqn, &part, &mut slice).unwrap();
            assert_eq!(slice, global.cut(&part));
        }
    }
}

#[test]
fn exports_from_a_2d_mesh() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let mesh = MeshLayout::new(&[("replicate", 2), ("shard", 2)]).unwrap();
    let globals = [
        Global::new("rows", DType::F32, &[5, 4], &[Placement::Replicate, Placement::Shard(0)]),
        Global::new("grid", DType::BF16, &[5, 4], &[Placement::Shard(0), Placement::Shard(1)]),
    ];
    export_all(&dir, &globals, &mesh).into_iter().for_each(|bytes| assert!(bytes.is_ok(), "{bytes:?}"));
    let model = HfModel::open(&dir).unwrap();
    for global in &globals {
        let mut whole = vec![0; global.bytes.len()];
        model.read(&global.fqn, &Region::whole(&global.shape), &mut whole).unwrap();
        assert_eq!(whole, global.bytes);
    }
}

#[test]
fn export_removes_only_stale_files() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    std::fs::create_dir(&dir).unwrap();
    let left = [".model.safetensors.tmp-host-1-1f", ".config.json.tmp-another-host-2-2f"];
    let live = ".model.safetensors.tmp-host-3-3f";
    let others = [".model.safetensors.tmp", ".model.safetensors.tmp-host-x-1f", "notes.tmp-host-1-1f"];
    for name in left.iter().chain([&live]).chain(&others) {
        std::fs::write(dir.join(name), "x").unwrap();
    }
    let held = std::fs::File::open(dir.join(live)).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    export_all(&dir, &zoo(), &line(2)).into_iter().for_each(|bytes| assert!(bytes.is_ok()));
    let [plain, strange, notes] = others;
    assert_eq!(list(&dir), [plain, live, strange, "config.json", "model.safetensors", notes]);
    // An export that fails also removes stale files.
    std::fs::write(dir.join(left[0]), "x").unwrap();
    export_all(&dir, &zoo(), &line(1)).into_iter().for_each(|bytes| assert!(bytes.is_err()));
    assert!(!dir.join(left[0]).exists());
}

#[test]
fn failed_export_leaves_no_file() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let messages = world(2, |group| {
        let shard = zoo()[0].shard(&line(2), group.rank());
        let config = root.path().join("no-config.json");
        export(&dir, group, &[shard], &[config]).unwrap_err().to_string()
    });
    assert!(messages[0].starts_with("rank 0 failed to finish the export: can't copy"), "{messages:?}");
    assert_eq!(messages[0], messages[1]);
    assert!(list(&dir).is_empty());

    let gap = world(2, |group| {
        let data = Arc::new(Buffer::F32(vec![0.0; 2]));
        let region = Region { offsets: vec![0], sizes: vec![2] };
        let shard = TensorShard { fqn: "w".into(), shape: vec![3], region, data };
        export(&dir, group, &[shard], &[]).unwrap_err().to_string()
    });
    assert!(gap.iter().all(|message| message.contains("no rank holds 1 of the elements")), "{gap:?}");

    export_all(&dir, &zoo(), &line(2)).into_iter().for_each(|bytes| assert!(bytes.is_ok()));
    for again in export_all(&dir, &zoo(), &line(2)) {
        assert!(again.unwrap_err().to_string().contains("model.safetensors exists already"));
    }
}

#[test]
fn export_options_set_metadata_and_replace() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let all = |options: &ExportOptions| {
        let outcomes = world(2, |group| {
            let shards: Vec<TensorShard> = zoo().iter().map(|global| global.shard(&line(2), group.rank())).collect();
            export_with(&dir, group, &shards, options).map_err(|error| error.to_string())
        });
        assert_eq!(outcomes[0], outcomes[1]);
        outcomes.into_iter().next().unwrap()
    };
    let step = |step: &str| ExportOptions {
        file: "adapter_model.safetensors".into(),
        metadata: [("step".to_string(), step.to_string())].into(),
        ..ExportOptions::default()
    };
    let said = || SafetensorsFile::open(dir.join("adapter_model.safetensors")).unwrap().metadata()["step"].clone();
    all(&step("1")).unwrap();
    assert!(all(&step("2")).unwrap_err().contains("adapter_model.safetensors exists already"));
    assert_eq!(said(), "1");
    let over = ExportOptions { replace: true, ..step("2") };
    all(&over).unwrap();
    assert_eq!((said(), list(&dir)), ("2".to_string(), vec!["adapter_model.safetensors".to_string()]));
    // `replace` does not cover files of other names.
    for other in ["model.safetensors", "model.safetensors.index.json"] {
        std::fs::write(dir.join(other), "").unwrap();
        assert!(all(&over).unwrap_err().contains(&format!("{other} exists already")));
        std::fs::remove_file(dir.join(other)).unwrap();
    }
}

/// Memory whose read creates weights in the directory.
struct Meanwhile {
    values: Buffer,
    weights: PathBuf,
}

impl Readable for Meanwhile {
    fn dtype(&self) -> DType {
        self.values.dtype()
    }

    fn len(&self) -> usize {
        self.values.len()
    }

    fn read(&self, with: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        std::fs::write(&self.weights, "mine").unwrap();
        self.values.read(with)
    }
}

#[test]
fn export_keeps_weights_that_appear_meanwhile() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let weights = dir.join("model.safetensors");
    let messages = world(2, |group| {
        let data = Arc::new(Meanwhile { values: Buffer::F32(vec![1.0, 2.0]), weights: weights.clone() });
        export(&dir, group, &[TensorShard::whole("w", &[2], data)], &[]).unwrap_err().to_string()
    });
    let parts = ["rank 0 failed to finish the export", "model.safetensors exists already"];
    assert!(parts.iter().all(|part| messages[0].contains(part)), "{messages:?}");
    assert_eq!(messages[0], messages[1]);
    assert_eq!(std::fs::read(&weights).unwrap(), b"mine");
    assert_eq!(list(&dir), ["model.safetensors"]);
}
