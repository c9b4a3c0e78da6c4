//! Saving to the server and loading from it.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fsdp_ckpt::{
    Checkpoint, Error, MANIFEST, SaveState, TensorSource, keep_newest, latest, non_finite, quarantine, save, survey,
};
use fsdp_core::layout::Region;
use fsdp_core::{DType, Placement, Readable};

use crate::server::requests;
use crate::server_root;
use crate::world::{Broken, Global, line, read, save_all, save_fails, state, world, zoo};

/// Returns the names under a prefix from the server's directory.
pub(crate) fn names(prefix: &str) -> Vec<String> {
    crate::world::list(&server_root().join("objects/bucket").join(prefix))
}

pub(crate) fn saved_by_two_loaded_by_three() {
    let dir = Path::new("s3://bucket/round/trip/step-00000010");
    save_all(dir, &zoo(), &line(2));
    world(3, |group| {
        let checkpoint = Checkpoint::open(dir).unwrap();
        for global in zoo() {
            let region = global.region(&line(3), group.rank());
            assert_eq!(read(&checkpoint, &global, &region).unwrap(), global.cut(&region), "{}", global.fqn);
        }
    });
    assert_eq!(latest(dir.parent().unwrap()).unwrap().as_deref(), Some(dir));
    assert_eq!(latest(Path::new("s3://bucket/round/nothing")).unwrap(), None);
    let names = names("round/trip/step-00000010");
    assert!(names.len() == 3 && names[0] == MANIFEST, "{names:?}");
    for (rank, name) in names[1..].iter().enumerate() {
        let stem = format!("shard-{:05}-model-00001-of-00001.save-", rank + 1);
        assert!(name.starts_with(&stem) && name.ends_with(".safetensors"), "{name}");
    }
    assert!(save_fails(dir, 2, |rank| state(&zoo(), &line(2), rank)).contains("exists already"));

    // A thread of another runtime may use the store, too.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let opened = runtime.block_on(async { fsdp_ckpt::open(dir).unwrap() });
    assert_eq!(opened.verify().unwrap().files, 2);
}

pub(crate) fn requests_only_needed_ranges() {
    let dir = Path::new("s3://bucket/ranges/step-1");
    let global = Global::new("w", DType::F32, &[1024, 1024], &[Placement::Shard(0)]);
    save_all(dir, std::slice::from_ref(&global), &line(2));
    let before = requests(&server_root(), "ranges/step-1").len();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let row = Region { offsets: vec![600, 0], sizes: vec![1, 1024] };
    assert_eq!(read(&checkpoint, &global, &row).unwrap(), global.cut(&row));

    let asked = requests(&server_root(), "ranges/step-1").split_off(before);
    let gets: Vec<&String> = asked.iter().filter(|line| line.contains("bytes=")).collect();
    assert!(gets.iter().all(|line| line.contains("shard-00002")), "{asked:?}");
    // The header's length, the header, the row.
    assert_eq!(gets.len(), 3, "{asked:?}");
    let (first, last) = gets[2].rsplit_once("bytes=").unwrap().1.split_once('-').unwrap();
    assert_eq!(last.parse::<u64>().unwrap() + 1 - first.parse::<u64>().unwrap(), 4096);
    // Also the manifest, and one listing, whose prefix is in the query with %2F.
    assert_eq!(asked.len(), 4, "{asked:?}");

    // Gaps between columns are smaller than `ReadSizes::gap`.
    let before = requests(&server_root(), "ranges/step-1").len();
    let column = Region { offsets: vec![0, 3], sizes: vec![512, 2] };
    assert_eq!(read(&checkpoint, &global, &column).unwrap(), global.cut(&column));
    assert_eq!(requests(&server_root(), "ranges/step-1").len() - before, 3);

    // Each chunk of 2 MiB is one request.
    let before = requests(&server_root(), "ranges/step-1").len();
    non_finite(&checkpoint, &mut |_| ()).unwrap();
    assert_eq!(requests(&server_root(), "ranges/step-1").len() - before, 2);
}

pub(crate) fn uploads_a_large_tensor_in_parts() {
    let dir = Path::new("s3://bucket/large/step-1");
    let global = Global::new("w", DType::U8, &[45 << 20], &[Placement::Replicate]);
    save_all(dir, std::slice::from_ref(&global), &line(1));
    let parts = requests(&server_root(), "large/step-1");
    let parts = parts.iter().filter(|line| line.contains("partNumber=")).count();
    assert_eq!(parts, 6);
    let checkpoint = Checkpoint::open(dir).unwrap();
    let whole = Region::whole(&global.shape);
    assert!(read(&checkpoint, &global, &whole).unwrap() == global.bytes);
    assert_eq!(checkpoint.verify().unwrap().bytes, 45 << 20);
}

/// Memory whose read waits for another save.
struct Later {
    inner: Arc<dyn Readable>,
    wait: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Readable for Later {
    fn dtype(&self) -> DType {
        self.inner.dtype()
    }
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn read(&self, with: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        if let Some(wait) = self.wait.lock().unwrap().take() {
            wait();
        }
        self.inner.read(with)
    }
}

pub(crate) fn one_of_two_writers_succeeds() {
    let dir = Path::new("s3://bucket/two/step-1");
    let (begun, has_begun) = channel();
    let (go, may_go) = channel::<()>();
    let wait = move || {
        begun.send(()).unwrap();
        may_go.recv_timeout(Duration::from_secs(60)).unwrap();
    };
    let late = std::thread::spawn(move || {
        let mut shards: SaveState = state(&zoo(), &line(1), 0);
        let first = &mut shards.tensors[0];
        first.data = Arc::new(Later { inner: Arc::clone(&first.data), wait: Mutex::new(Some(Box::new(wait))) });
        let shards = Mutex::new(Some(shards));
        world(1, |group| save(dir, group, &shards.lock().unwrap().take().unwrap())).remove(0)
    });
    has_begun.recv_timeout(Duration::from_secs(60)).unwrap();
    save_all(dir, &zoo(), &line(2));
    go.send(()).unwrap();
    match late.join().unwrap() {
        Err(Error::Rank { error: Some(error), .. }) => {
            assert!(matches!(*error, Error::AlreadyExists { .. }), "{error}")
        }
        other => panic!("{other:?}"),
    }
    let checkpoint = Checkpoint::open(dir).unwrap();
    assert_eq!(checkpoint.world_size(), 2);
    checkpoint.verify().unwrap();
    assert_eq!(names("two/step-1").len(), 3);
}

pub(crate) fn keeps_other_objects() {
    let place = server_root().join("objects/bucket/taken/step-1");
    std::fs::create_dir_all(&place).unwrap();
    std::fs::write(place.join("notes.txt"), "mine").unwrap();
    let dir = Path::new("s3://bucket/taken/step-1");
    assert!(save_fails(dir, 1, |rank| state(&zoo(), &line(1), rank)).contains("exists already"));
    let message = save_fails(Path::new("s3://bucket"), 1, |rank| state(&zoo(), &line(1), rank));
    assert!(message.contains("s3://bucket is a whole bucket"), "{message}");
    assert_eq!(names("taken/step-1"), ["notes.txt"]);
}

pub(crate) fn failed_save_leaves_no_objects() {
    let dir = Path::new("s3://bucket/failed/step-1");
    let large = Global::new("a.large", DType::F32, &[6 << 20], &[Placement::Shard(0)]);
    let last = Global::new("z.last", DType::F32, &[8], &[Placement::Shard(0)]);
    let message = save_fails(dir, 2, |rank| {
        let mut state = state(&[large.clone(), last.clone()], &line(2), rank);
        if rank == 1 {
            state.tensors[1].data = Arc::new(Broken(4));
        }
        state
    });
    assert!(message.contains("rank 1") && message.contains("resharded"), "{message}");
    assert!(names("failed/step-1").is_empty());
    // The upload was aborted.
    let asked = requests(&server_root(), "failed/step-1/shard-00002");
    assert!(asked.iter().any(|line| line.starts_with("DELETE") && line.contains("uploadId=")), "{asked:?}");
}

pub(crate) fn opens_a_single_object() {
    let dir = Path::new("s3://bucket/single/step-1");
    save_all(dir, &zoo(), &line(1));
    let name = names("single/step-1").remove(1);
    let source = fsdp_ckpt::open(dir.join(&name)).unwrap();
    assert_eq!(source.tensors().len(), zoo().len());
}

pub(crate) fn removes_old_checkpoints() {
    let run = Path::new("s3://bucket/kept");
    let steps: Vec<PathBuf> = (1..=4).map(|step| run.join(format!("step-{step}"))).collect();
    for step in &steps {
        save_all(step, &zoo(), &line(1));
    }
    std::fs::write(server_root().join("objects/bucket/kept/step-2/notes.txt"), "mine").unwrap();
    let removed = keep_newest(run, NonZeroUsize::MIN, &[&steps[0]]).unwrap();
    assert_eq!(removed, [steps[2].clone()]);
    assert!(names("kept/step-3").is_empty());
    for step in [&steps[0], &steps[1], &steps[3]] {
        Checkpoint::open(step).unwrap().verify().unwrap();
    }
}

pub(crate) fn quarantines_a_damaged_checkpoint() {
    let run = Path::new("s3://bucket/aside");
    let steps: Vec<PathBuf> = (1..=3).map(|step| run.join(format!("step-{step}"))).collect();
    save_all(&steps[0], &zoo(), &line(1));
    // An unfinished save is not damage.
    save_all(&steps[2], &zoo(), &line(1));
    std::fs::remove_file(server_root().join("objects/bucket/aside/step-3").join(MANIFEST)).unwrap();
    for name in ["step-2.damaged", "step-2.damaged-2"] {
        save_all(&steps[1], &zoo(), &line(2));
        std::fs::write(server_root().join("objects/bucket/aside/step-2").join(MANIFEST), "{").unwrap();
        let before = names("aside/step-2");
        let found = survey(run).unwrap();
        assert_eq!(found.newest.as_ref(), Some(&steps[0]));
        assert!(
            found.skipped.len() == 1 && found.skipped[0].0 == steps[1] && found.skipped[0].1.is_damage(),
            "{found:?}"
        );
        assert_eq!(quarantine(&steps[1]).unwrap(), Some(run.join(name)));
        assert!(names("aside/step-2").is_empty());
        assert_eq!(names(&format!("aside/{name}")), before);
    }
    assert_eq!(quarantine(&steps[1]).unwrap(), None);
    assert_eq!(survey(run).unwrap().quarantined.len(), 2);
    assert_eq!(keep_newest(run, NonZeroUsize::MIN, &[]).unwrap(), [""; 0].map(PathBuf::from));
}

pub(crate) fn detects_flipped_bytes() {
    let dir = Path::new("s3://bucket/flipped/step-1");
    save_all(dir, &zoo(), &line(2));
    let verify = || Checkpoint::open(dir).and_then(|checkpoint| checkpoint.verify());
    verify().unwrap();
    for name in names("flipped/step-1") {
        let path = server_root().join("objects/bucket/flipped/step-1").join(&name);
        let good = std::fs::read(&path).unwrap();
        for at in (0..good.len()).step_by(good.len() / 8) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            std::fs::write(&path, &bad).unwrap();
            let error = verify().expect_err(&format!("byte {at} of {name}"));
            assert!(error.is_damage(), "byte {at} of {name}: {error}");
        }
        std::fs::write(&path, &good).unwrap();
    }
    verify().unwrap();
}

/// Runs `fsdp-ckpt`, which must succeed.
fn command(args: &[&str]) {
    assert_cmd::Command::new(env!("CARGO_BIN_EXE_fsdp-ckpt"))
        .args(args)
        .timeout(Duration::from_secs(90))
        .assert()
        .success();
}

pub(crate) fn converts_there_and_back() {
    let first = "s3://bucket/converted/step-1";
    save_all(Path::new(first), &zoo(), &line(2));
    let second = "s3://bucket/converted/step-2";
    command(&["convert", first, second, "--to", "fsdp"]);
    command(&["verify", second]);
    command(&["diff", first, second]);
    // Fixed names need an empty prefix.
    let model = "s3://bucket/converted/model";
    command(&["convert", first, model, "--to", "hf"]);
    assert!(names("converted/model").contains(&"model.safetensors".to_string()));
    assert_eq!(fsdp_ckpt::open(Path::new(model)).unwrap().tensors().len(), 7);
}

pub(crate) fn file_urls_are_directories() {
    let root = tempfile::tempdir().unwrap();
    let dir = format!("file://{}/run/step-00000003", root.path().display());
    save_all(Path::new(&dir), &zoo(), &line(2));
    let found = latest(Path::new(&dir).parent().unwrap()).unwrap().unwrap();
    assert_eq!(found, Path::new(&dir));
    Checkpoint::open(&found).unwrap().verify().unwrap();
    Checkpoint::open(root.path().join("run/step-00000003")).unwrap();
    let message = Checkpoint::open(Path::new("file://host/run")).unwrap_err().to_string();
    assert!(message.contains("file:///path"), "{message}");
}
