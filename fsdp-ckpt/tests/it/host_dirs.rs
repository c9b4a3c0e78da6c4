//! Hosts without a shared directory: each saves a part, and the parts form a checkpoint.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::{
    AsyncSaver, Checkpoint, Error, HostDirs, MANIFEST, Result, SaveOptions, SaveState, SaveSummary, TensorSource,
    WhenBusy, keep_newest, save_with,
};
use fsdp_core::{Buffer, DType, MeshLayout, Placement, ProcessGroup, Readable};
use tempfile::TempDir;

use crate::cli::{fails, json, succeeds, text};
use crate::world::{Global, damage, line, list, read, shard_file, state, world, zoo};

/// The disks of two hosts with two ranks each.
pub(crate) struct Disks(pub(crate) [TempDir; 2]);

impl Disks {
    pub(crate) fn new() -> Self {
        Disks([tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()])
    }

    pub(crate) fn dir(&self, host: usize, name: &str) -> PathBuf {
        self.0[host].path().join(name)
    }

    /// Saves from every rank.
    fn save(&self, name: &str, globals: &[Global], mesh: &MeshLayout) -> Vec<Result<SaveSummary>> {
        world(4, |group| self.save_rank(name, group, &state(globals, mesh, group.rank())))
    }

    pub(crate) fn save_rank(&self, name: &str, group: &ProcessGroup, state: &SaveState) -> Result<SaveSummary> {
        save_with(self.dir(group.rank() / 2, name), group, state, &options(group.rank() / 2))
    }

    fn saved(&self, names: &[&str]) {
        for name in names {
            self.save(name, &zoo(), &line(4)).into_iter().collect::<Result<Vec<_>>>().unwrap();
        }
    }
}

fn options(host: usize) -> SaveOptions {
    SaveOptions { host: Some(format!("node{host}")), ..SaveOptions::default() }
}

fn dirs(group: &ProcessGroup) -> HostDirs {
    HostDirs::new(group, &format!("node{}", group.rank() / 2)).unwrap()
}

/// Copies a directory's files.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in list(from) {
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

/// Asserts that every rank returned the same value, and returns it.
pub(crate) fn one<T: PartialEq + std::fmt::Debug>(mut said: Vec<T>) -> T {
    said.dedup();
    assert_eq!(said.len(), 1, "{said:?}");
    said.remove(0)
}

/// Two meshes: all ranks shard, or the hosts are replicas.
fn meshes() -> [(Vec<Global>, MeshLayout); 2] {
    let (shard, copy) = (Placement::Shard(0), Placement::Replicate);
    let copied = vec![
        Global::new("model.weight", DType::F32, &[6, 3], &[copy, shard]),
        Global::new("model.norm", DType::BF16, &[5], &[copy, copy]),
        Global::new("optim.state.weight.step", DType::F32, &[], &[copy, copy]),
    ];
    [(zoo(), line(4)), (copied, MeshLayout::new(&[("dp_replicate", 2), ("dp_shard", 2)]).unwrap())]
}

#[test]
fn copied_parts_form_the_checkpoint() {
    for (globals, mesh) in meshes() {
        let disks = Disks::new();
        disks.save("step-1", &globals, &mesh).into_iter().collect::<Result<Vec<_>>>().unwrap();
        for host in 0..2 {
            let own: Vec<String> = list(&disks.dir(host, "step-1"));
            assert_eq!(own, [MANIFEST.to_string(), shard_file(2 * host), shard_file(2 * host + 1)]);
        }
        let manifest = |host: usize| fs::read(disks.dir(host, "step-1").join(MANIFEST)).unwrap();
        assert_eq!(manifest(0), manifest(1));
        for order in [[0, 1], [1, 0]] {
            let together = tempfile::tempdir().unwrap();
            let dir = together.path().join("step-1");
            copy(&disks.dir(order[0], "step-1"), &dir);
            assert!(matches!(Checkpoint::open(&dir), Err(Error::MissingParts { .. })));
            copy(&disks.dir(order[1], "step-1"), &dir);
            let checkpoint = Checkpoint::open(&dir).unwrap();
            checkpoint.verify().unwrap();
            let ranks = line(3);
            for global in &globals {
                let global = Global { placements: vec![Placement::Shard(0)], ..global.clone() };
                if !global.shape.is_empty() {
                    for rank in 0..3 {
                        let region = global.region(&ranks, rank);
                        assert_eq!(read(&checkpoint, &global, &region).unwrap(), global.cut(&region));
                    }
                }
            }
            // The directory has no other files.
            assert_eq!(keep_newest(together.path(), NonZeroUsize::MIN, &[]).unwrap(), [] as [PathBuf; 0]);
            copy(&dir, &together.path().join("step-2"));
            assert_eq!(keep_newest(together.path(), NonZeroUsize::MIN, &[]).unwrap(), [dir]);
        }
    }
}

#[test]
fn ranks_read_their_shards_from_their_host() {
    for (globals, mesh) in meshes() {
        let disks = Disks::new();
        disks.save("step-1", &globals, &mesh).into_iter().collect::<Result<Vec<_>>>().unwrap();
        let chunks = world(4, |group| {
            let (rank, dirs) = (group.rank(), dirs(group));
            let part = dirs.open(disks.dir(rank / 2, "step-1")).unwrap();
            for global in &globals {
                let region = global.region(&mesh, rank);
                assert_eq!(read(&part, global, &region).unwrap(), global.cut(&region), "{}", global.fqn);
            }
            let (reader, readers) = dirs.local_rank_and_size();
            assert_eq!((reader, readers), (rank % 2, 2));
            part.verify_share(reader, readers).unwrap().chunks
        });
        // The shares cover every chunk and copy.
        copy(&disks.dir(0, "step-1"), &disks.dir(1, "step-1"));
        let whole = Checkpoint::open(disks.dir(1, "step-1")).unwrap();
        let written = whole.tensors().values().flat_map(|tensor| &tensor.chunks).map(|chunk| chunk.files().count());
        assert_eq!(chunks.iter().sum::<usize>(), written.sum::<usize>());
    }
}

#[test]
fn missing_files_are_named_with_their_host() {
    let disks = Disks::new();
    disks.saved(&["step-1"]);
    // The hosts have swapped places.
    let said = world(4, |group| {
        let host = 1 - group.rank() / 2;
        let dirs = HostDirs::new(group, &format!("node{host}")).unwrap();
        let part = dirs.open(disks.dir(host, "step-1")).unwrap();
        let global = &zoo()[0];
        read(&part, global, &global.region(&line(4), group.rank())).unwrap_err()
    });
    for (rank, error) in said.iter().enumerate() {
        let file = shard_file(rank);
        let (path, host) = (disks.dir(1 - rank / 2, "step-1"), format!("node{}", rank / 2));
        let want = format!(
            "{0} is one host's part of a checkpoint: it lacks the file of rank {rank} from {host} ({file}); copy this \
             directory from all hosts into one: `rsync -a {host}:{0}/ {0}/`",
            path.display()
        );
        assert_eq!(error.to_string(), want);
        assert!(!error.is_damage());
    }
    let alone = Checkpoint::open(disks.dir(0, "step-1")).unwrap_err();
    let Error::MissingParts { files, .. } = &alone else { panic!("{alone}") };
    assert_eq!(files.len(), 2);
    assert!(alone.to_string().contains("lacks the files of ranks 2, 3 from node1 (shard-00003-"), "{alone}");
    // A file that is lost after copying is still named with its host.
    copy(&disks.dir(1, "step-1"), &disks.dir(0, "step-1"));
    fs::remove_file(disks.dir(0, "step-1").join(list(&disks.dir(1, "step-1"))[2].clone())).unwrap();
    let lost = Checkpoint::open(disks.dir(0, "step-1")).unwrap_err().to_string();
    assert!(lost.contains("lacks the file of rank 3 from node1"), "{lost}");
}

#[test]
fn survey_finds_the_newest_step_of_all_hosts() {
    let disks = Disks::new();
    disks.saved(&["step-5", "step-10", "step-15", "step-20", "step-25"]);
    // node1 died before the rename, during the write, and lost a file later.
    fs::remove_dir_all(disks.dir(1, "step-25")).unwrap();
    fs::remove_file(disks.dir(1, "step-20").join(MANIFEST)).unwrap();
    fs::remove_file(disks.dir(1, "step-15").join(&list(&disks.dir(1, "step-15"))[1])).unwrap();
    let survey = || {
        one(world(4, |group| {
            let found = dirs(group).survey(disks.0[group.rank() / 2].path()).unwrap();
            let reason = |error: &Error| match error {
                Error::InconsistentParts { reason, damaged, .. } => {
                    (reason.split(['/', ';']).next().unwrap().to_string(), *damaged)
                }
                other => panic!("{other}"),
            };
            let skipped: Vec<_> =
                found.skipped.iter().map(|(path, error)| (name(path), reason(error).0, reason(error).1)).collect();
            let aside: Vec<String> = found.quarantined.iter().map(|path| name(path)).collect();
            (found.newest.map(|path| name(&path)), skipped, aside)
        }))
    };
    let (newest, skipped, _) = survey();
    assert_eq!(newest.as_deref(), Some("step-10"));
    let (third, fourth) = ("shard-00003-model-00001-of-00001", "shard-00004-model-00001-of-00001");
    let want = [
        (
            "step-25",
            format!("no host has the files of ranks 2, 3 from node1 ({third}.safetensors, {fourth}.safetensors)"),
            true,
        ),
        ("step-20", "on node1, incomplete checkpoint: ".into(), true),
        ("step-15", format!("no host has the file of rank 2 from node1 ({third}.safetensors)"), true),
    ];
    assert_eq!(skipped, want.map(|(name, why, damaged)| (name.to_string(), why, damaged)));

    // Quarantined parts do not block later saves.
    one(world(4, |group| {
        let dirs = dirs(group);
        ["step-15", "step-20", "step-25"].map(|step| {
            let moved = dirs.quarantine(disks.dir(group.rank() / 2, step)).unwrap();
            assert_eq!(moved.is_some(), group.rank() == 0 || (group.rank() == 2 && step != "step-25"));
        })
    }));
    let (newest, skipped, aside) = survey();
    assert_eq!((newest.as_deref(), skipped.len(), aside.len()), (Some("step-10"), 0, 3));

    // Parts of different saves are not damage.
    world(4, |group| {
        let mut state = state(&zoo(), &line(4), group.rank());
        state.values.insert("step".into(), 11.into());
        disks.save_rank("changed", group, &state).unwrap();
    });
    copy(&disks.dir(1, "changed"), &disks.dir(1, "step-10"));
    let (newest, skipped, _) = survey();
    assert_eq!(newest.as_deref(), Some("step-5"));
    assert_eq!(skipped, [("step-10".into(), "node0 and node1 have parts of different saves".into(), false)]);
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_string()
}

#[test]
fn missing_hosts_are_not_damage() {
    let disks = Disks::new();
    disks.saved(&["step-1"]);
    let open = |host: [&str; 2]| {
        one(world(4, |group| {
            let dirs = HostDirs::new(group, host[group.rank() / 2]).unwrap();
            match dirs.open(disks.dir(group.rank() / 2, "step-1")) {
                Ok(_) => None,
                Err(Error::InconsistentParts { reason, damaged, .. }) => {
                    let root = disks.0[group.rank() / 2].path().display().to_string();
                    Some((reason.replace(&root, ""), damaged))
                }
                Err(other) => panic!("{other}"),
            }
        }))
    };
    assert_eq!(open(["node0", "node1"]), None);
    // Another host replaces a host that lost its disk.
    fs::rename(disks.dir(1, "step-1"), disks.dir(1, "away")).unwrap();
    let (reason, damaged) = open(["node0", "node7"]).unwrap();
    let want = format!(
        "no host has the files of ranks 2, 3 from node1 ({}, {}), and node1 is not among the hosts; start ranks \
         there, or copy its part to each host: `rsync -a node1:/step-1/ /step-1/`",
        shard_file(2),
        shard_file(3)
    );
    assert_eq!((reason, damaged), (want, false));
    copy(&disks.dir(1, "away"), &disks.dir(0, "step-1"));
    let (reason, damaged) = open(["node0", "node7"]).unwrap();
    assert_eq!((reason.as_str(), damaged), ("node7 has no part; copy the part of node0 there", false));
    copy(&disks.dir(0, "step-1"), &disks.dir(1, "step-1"));
    assert_eq!(open(["node8", "node7"]), None);
    // A disk with an I/O error.
    disks.saved(&["runs/step-1"]);
    fs::rename(disks.dir(1, "runs"), disks.dir(1, "away-2")).unwrap();
    fs::write(disks.dir(1, "runs"), "").unwrap();
    for error in world(4, |group| dirs(group).open(disks.dir(group.rank() / 2, "runs/step-1")).unwrap_err()) {
        assert!(!error.is_damage() && error.to_string().contains("on node1, can't open "), "{error}");
    }
    // No host has it.
    let errors = world(4, |group| dirs(group).open(disks.dir(group.rank() / 2, "step-2")).unwrap_err());
    assert!(errors.iter().all(|error| error.to_string().contains("has no checkpoint on any host")), "{errors:?}");
}

#[test]
fn detects_damage_on_one_host() {
    let disks = Disks::new();
    disks.saved(&["step-1"]);
    let path = disks.dir(1, "step-1").join(shard_file(3));
    damage(&path);
    let verified = world(4, |group| {
        let dirs = dirs(group);
        let part = dirs.open(disks.dir(group.rank() / 2, "step-1")).unwrap();
        let (reader, readers) = dirs.local_rank_and_size();
        part.verify_share(reader, readers).map_err(|error| error.is_damage())
    });
    let found: Vec<bool> = verified.iter().map(|outcome| *outcome == Err(true)).collect();
    assert!(found[2] != found[3] && !found[0] && !found[1], "{verified:?}");
    // Truncation is detected without reading.
    fs::write(&path, "").unwrap();
    for error in world(4, |group| dirs(group).open(disks.dir(group.rank() / 2, "step-1")).unwrap_err()) {
        assert!(error.is_damage() && error.to_string().contains("on node1, "), "{error}");
    }
}

#[test]
fn keep_newest_removes_on_every_host() {
    let disks = Disks::new();
    disks.saved(&["step-1", "step-2", "step-3", "step-4"]);
    fs::remove_dir_all(disks.dir(1, "step-3")).unwrap();
    let removed = world(4, |group| {
        let (host, keep) = (group.rank() / 2, NonZeroUsize::new(2).unwrap());
        let spare = disks.dir(host, "step-4");
        dirs(group).keep_newest(disks.0[host].path(), keep, &[&spare]).unwrap()
    });
    // A step of only one host does not count.
    let removed: Vec<Vec<String>> = removed.iter().map(|paths| paths.iter().map(|path| name(path)).collect()).collect();
    assert_eq!(removed, [vec!["step-1"], vec![], vec!["step-1"], vec![]]);
    assert_eq!(list(disks.0[0].path()), ["step-2", "step-3", "step-4"]);
    assert_eq!(list(disks.0[1].path()), ["step-2", "step-4"]);
    // `spare` may be another path of the same directory.
    let removed = world(4, |group| {
        let root = disks.0[group.rank() / 2].path();
        dirs(group).keep_newest(root, NonZeroUsize::MIN, &[&root.join("step-4/../step-2")]).unwrap()
    });
    assert!(removed.iter().all(Vec::is_empty), "{removed:?}");
    assert_eq!(list(disks.0[1].path()), ["step-2", "step-4"]);
}

#[test]
fn saves_parts_asynchronously() {
    let disks = Disks::new();
    world(4, |group| {
        let host = group.rank() / 2;
        let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap().keep_newest(NonZeroUsize::MIN);
        for step in ["step-1", "step-2"] {
            let state = state(&zoo(), &line(4), group.rank());
            saver.save_with(disks.dir(host, step), &state, &options(host)).unwrap();
        }
        saver.finish().unwrap();
        dirs(group).open(disks.dir(host, "step-2")).unwrap();
    });
    for disk in &disks.0 {
        assert_eq!(list(disk.path()), ["step-2"]);
    }
}

#[test]
fn command_names_missing_parts() {
    let disks = Disks::new();
    disks.saved(&["step-1"]);
    let part = disks.dir(1, "step-1");
    let want = "is one host's part of a checkpoint: it lacks the files of ranks 0, 1 from node0 (shard-00001-";
    let to = disks.dir(1, "to");
    for args in [
        vec!["verify", text(&part)],
        vec!["inspect", text(&part)],
        vec!["convert", text(&part), text(&to), "--to", "hf"],
    ] {
        let said = fails(&args);
        assert!(said.contains(want), "{said}");
    }
    assert!(succeeds(&["inspect", text(disks.0[1].path())]).contains(&format!("step-1  part        {}", text(&part))));
    let run = json(&succeeds(&["inspect", text(disks.0[1].path()), "--json"]));
    assert_eq!(run["steps"][0]["state"], "part");

    copy(&disks.dir(0, "step-1"), &part);
    assert!(succeeds(&["verify", text(&part)]).contains(" chunks in 4 files"));
    succeeds(&["convert", text(&part), text(&to), "--to", "fsdp", "--world-size", "3"]);
    assert_eq!(succeeds(&["diff", text(&part), text(&to)]).lines().count(), 1);
}

/// Memory whose read creates a directory at the target.
struct Blocks(PathBuf, Arc<dyn Readable>);

impl Readable for Blocks {
    fn dtype(&self) -> DType {
        self.1.dtype()
    }
    fn len(&self) -> usize {
        self.1.len()
    }
    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        fs::create_dir_all(self.0.join("full")).unwrap();
        self.1.read(f)
    }
}

#[test]
fn failed_host_leaves_no_part_on_the_others() {
    let disks = Disks::new();
    // The first host has renamed its directory already, or not.
    for (host, rank) in [(1, 2), (0, 0)] {
        let name = format!("step-{host}");
        let errors = world(4, |group| {
            let mut state = state(&zoo(), &line(4), group.rank());
            if group.rank() == rank {
                let data = Arc::clone(&state.tensors[0].data);
                state.tensors[0].data = Arc::new(Blocks(disks.dir(host, &name), data));
            }
            disks.save_rank(&name, group, &state).unwrap_err().to_string()
        });
        let start = format!("rank {rank} failed to finish the checkpoint: ");
        let error = one(errors);
        assert!(error.starts_with(&start) && error.contains("exists already"), "{error}");
        assert!(list(disks.0[1 - host].path()).is_empty());
        assert_eq!(list(disks.0[host].path()), std::slice::from_ref(&name));
        fs::remove_dir_all(disks.dir(host, &name)).unwrap();
    }
}

#[test]
fn rejects_invalid_host_arguments() {
    let disks = Disks::new();
    let refused = |globals: &[Global],
                   dir: &dyn Fn(usize) -> PathBuf,
                   host: &(dyn Fn(usize) -> Option<String> + Sync)| {
        let dirs: Vec<PathBuf> = (0..4).map(dir).collect();
        one(world(4, |group| {
            let (rank, options) = (group.rank(), SaveOptions { host: host(group.rank()), ..SaveOptions::default() });
            save_with(&dirs[rank], group, &state(globals, &line(4), rank), &options).unwrap_err().to_string()
        }))
    };
    let (here, named) = (|rank: usize| disks.dir(rank / 2, "step-1"), |rank: usize| Some(format!("node{}", rank / 2)));
    let nameless = refused(&zoo(), &here, &|rank| named(rank).filter(|_| rank != 3));
    assert!(nameless.starts_with("rank 3 does not name its host, but others do"), "{nameless}");
    let empty = refused(&zoo(), &here, &|_| Some(String::new()));
    assert!(empty.starts_with("rank 0 does not name its host"), "{empty}");
    let url = refused(&zoo(), &|_| "s3://bucket/step-1".into(), &named);
    assert!(url.contains("a save to a directory of each host needs a directory of this host, not s3://"), "{url}");
    let shared = refused(&zoo(), &|_| disks.dir(0, "step-1"), &named);
    assert!(shared.contains("exists already"), "{shared}");
    for disk in &disks.0 {
        assert!(list(disk.path()).is_empty());
    }
    // Replicas on different hosts must be equal.
    let errors = world(4, |group| {
        let mut state = state(&zoo(), &line(4), group.rank());
        if group.rank() > 1 {
            let norm = state.tensors.iter_mut().find(|tensor| tensor.fqn == "model.norm.weight").unwrap();
            norm.data = Arc::new(Buffer::F32(vec![0.5; 9]));
        }
        disks.save_rank("step-1", group, &state).unwrap_err().to_string()
    });
    let error = one(errors);
    assert!(
        error.contains("tensor \"model.norm.weight\": ranks ") && error.contains("hold different bytes"),
        "{error}"
    );
}

#[test]
fn check_writable_detects_shared_directories() {
    let disks = Disks::new();
    let check = |host_of: &(dyn Fn(usize) -> usize + Sync), disk_of: &(dyn Fn(usize) -> usize + Sync)| {
        world(4, |group| {
            let dirs = HostDirs::new(group, &format!("node{}", host_of(group.rank()))).unwrap();
            dirs.check_writable(disks.dir(disk_of(group.rank()), "runs")).map_err(|error| error.to_string())
        })
    };
    let half = |rank: usize| rank / 2;
    assert!(check(&half, &half).iter().all(Result::is_ok));
    let in_common = |shared: String| {
        assert!(
            shared.starts_with("rank 0 failed to write a file there: node0 and node1 share the directory ")
                && shared.ends_with("; give each host its own, or let all ranks share one without naming hosts"),
            "{shared}"
        );
    };
    in_common(one(check(&half, &|_| 0)).unwrap_err());
    let url = PathBuf::from(format!("file://{}", disks.dir(0, "runs").display()));
    in_common(one(world(4, |group| {
        let dirs = HostDirs::new(group, &format!("node{}", group.rank() / 2)).unwrap();
        dirs.check_writable(&url).unwrap_err().to_string()
    })));
    let namesakes = one(check(&|_| 0, &half)).unwrap_err();
    assert!(namesakes.starts_with("rank 2 failed to write a file there: can't create"), "{namesakes}");
    for disk in &disks.0 {
        assert!(list(disk.path()).is_empty());
    }
}
