//! Saves of hosts that share no directory, where something is in the way: all ranks say the same, and nothing is left.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use fsdp_ckpt::{HostDirs, SaveOptions, save_with};
use fsdp_core::{Buffer, DType, Readable};

use crate::host_dirs::{Disks, one};
use crate::world::{Global, line, list, state, world, zoo};

/// Memory of which a directory comes into the way as it is read.
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
fn a_host_that_can_not_leaves_nothing_on_the_others() {
    let disks = Disks::new();
    // In the last moment: the first host has given its directory the name already, or not.
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
fn arguments_that_make_no_hosts_are_refused() {
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
    // What hosts hold alike has to be alike.
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
fn directories_that_are_not_the_hosts_own_are_told_before_the_work() {
    let disks = Disks::new();
    let check = |host_of: &(dyn Fn(usize) -> usize + Sync), disk_of: &(dyn Fn(usize) -> usize + Sync)| {
        world(4, |group| {
            let dirs = HostDirs::new(group, &format!("node{}", host_of(group.rank()))).unwrap();
            dirs.check_writable(&disks.dir(disk_of(group.rank()), "runs")).map_err(|error| error.to_string())
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
