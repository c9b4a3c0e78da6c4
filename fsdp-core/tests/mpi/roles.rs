//! Roles of ranks.

use std::{path::PathBuf, sync::Arc, time::Duration};

use fsdp_core::{
    Buffer, DType, GatherPart, Heap, ProcessGroup, RankEnv, ReduceOp, ScatterPart,
    process_group::{self, Options, mpi, shm},
};
use fsdp_test_support::conformance;
use tracing::Level;

/// Plays a role, and writes what it has to say.
pub(crate) fn play(role: &str) {
    let env = match std::env::var("FSDP_TEST_ALONE") {
        Ok(_) => RankEnv { world_size: 2, local_world_size: 2, ..RankEnv::single() },
        Err(_) => RankEnv::from_env().unwrap(),
    };
    let (hosts, role) = match role.split_once(' ') {
        Some((hosts @ ("pairs" | "fours" | "turns"), role)) => (Some(hosts), role),
        _ => (None, role),
    };
    let on_hosts = |options: Options| match hosts {
        Some("pairs") => options.with_host(format!("host {}", env.rank / 2)),
        Some("fours") => options.with_host(format!("host {}", env.rank / 4)),
        Some(_) => options.with_host(format!("host {}", env.rank % 2)),
        None => options,
    };
    // Small steps, so that what the suite moves is not all short.
    let in_steps = |options: Options| match hosts {
        Some("pairs") => on_hosts(options).with_chunk_bytes(64),
        _ => on_hosts(options),
    };
    let said = match role {
        "bits" => bits(&env, &on_hosts),
        "loses one" => loses_one(&env),
        "stops one" => stops_one(&env, on_hosts(options())),
        "loses one within" => loses_one_within(&env, on_hosts(options())),
        "side by side" => side_by_side(&env),
        "init" => init(&env),
        "comes late" => comes_late(&env),
        "mixes backends" => mixes_backends(&env),
        "share hosts" => shares_hosts(&env, on_hosts(options()), None),
        "share no hosts" => shares_hosts(&env, on_hosts(options()), (env.rank == 1).then_some("0")),
        other => match other.strip_prefix("conforms ") {
            Some(trial) => conformance::take_part(trial, &|options| mpi::connect(&env, in_steps(options))),
            None => panic!("no role {other}"),
        },
    };
    std::fs::write(folder().join(env.rank.to_string()), said).unwrap();
}

/// Where ranks say what they have to say.
fn folder() -> PathBuf {
    PathBuf::from(std::env::var_os("FSDP_TEST_FOLDER").unwrap())
}

fn options() -> Options {
    Options::default().with_timeout(Duration::from_secs(60))
}

/// Groups over MPI and over shared memory give the same.
fn bits(env: &RankEnv, on_hosts: &dyn Fn(Options) -> Options) -> String {
    let (rank, size) = (env.rank, env.world_size);
    let lists = [&DType::ALL[..], &[DType::F32], &[DType::BF16]];
    // Even, uneven, empty for the first rank, and empty for all but the last.
    let shares: [&dyn Fn(usize) -> usize; 4] =
        [&|_| 1000, &|rank| 70 + 311 * rank, &|rank| rank * 4003, &|of| if of + 1 == size { 7 } else { 0 }];
    // Messages in many steps, and in one.
    for chunk_bytes in [1 << 10, 16 << 10] {
        let options = options().with_chunk_bytes(chunk_bytes);
        let shared = shm::connect(env, options.clone()).unwrap();
        let over_mpi = mpi::connect(env, on_hosts(options)).unwrap();
        for (dtypes, share) in lists.iter().flat_map(|list| shares.iter().map(move |share| (*list, share))) {
            let counts: Vec<usize> = (0..size).map(share).collect();
            let len = counts.iter().sum();
            let ours = |op, len: usize| -> Vec<Buffer> {
                let has_one = |dtype: &&DType| op != ReduceOp::Avg || dtype.is_float();
                dtypes.iter().filter(has_one).map(|dtype| conformance::input(1, rank, 0, *dtype, len)).collect()
            };
            let moved = |group: &ProcessGroup| {
                let gather = ours(ReduceOp::Sum, counts[rank]).into_iter().map(|input| {
                    let counts = counts.clone();
                    GatherPart { input: Arc::new(input), counts }
                });
                let gathered = group.all_gather(gather.collect(), Heap::shared());
                let told = group.broadcast(ours(ReduceOp::Sum, len), size - 1);
                [gathered, told].map(|work| work.wait().unwrap())
            };
            if moved(&over_mpi) != moved(&shared) {
                return format!("{dtypes:?}, {counts:?}: other elements than shared memory's");
            }
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product] {
                let sum = |group: &ProcessGroup| {
                    let part = |input| ScatterPart { input, counts: counts.clone() };
                    let parts = ours(op, len).into_iter().map(part).collect();
                    let scattered = group.reduce_scatter(parts, op, Heap::shared());
                    let reduced = group.all_reduce([ours(op, len), ours(op, 3)].concat(), op);
                    [scattered, reduced].map(|work| work.wait().unwrap())
                };
                let bytes = |all: [Vec<Buffer>; 2]| -> Vec<Vec<u8>> {
                    all.iter().flatten().map(|buffer| buffer.bytes().to_vec()).collect()
                };
                if bytes(sum(&over_mpi)) != bytes(sum(&shared)) {
                    return format!("{op:?} of {dtypes:?}, {counts:?}: other bits than shared memory's");
                }
            }
        }
    }
    "done".into()
}

fn loses_one(env: &RankEnv) -> String {
    let world = mpi::connect(env, options().with_timeout(Duration::from_secs(20))).unwrap();
    let sum = |len| world.all_reduce(vec![Buffer::zeros(DType::F32, len)], ReduceOp::Sum);
    sum(1000).wait().unwrap();
    if world.rank() == 1 {
        let _large = sum(8 << 20);
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    match sum(8 << 20).wait() {
        Ok(_) => "nothing was lost".into(),
        Err(error) => {
            // As a program does that has met an error.
            std::fs::write(folder().join(env.rank.to_string()), error.to_string()).unwrap();
            std::process::exit(1);
        }
    }
}

/// Rank 2 stops while rank 0 gets much from it, and hands it on to rank 1.
fn stops_one(env: &RankEnv, options: Options) -> String {
    // In many steps, so that it is most of the time in their midst.
    let options = options.with_timeout(Duration::from_secs(4)).with_chunk_bytes(64);
    let world = mpi::connect(env, options).unwrap();
    let counts = vec![16, 16, 256 << 10];
    let input = Arc::new(Buffer::zeros(DType::F32, counts[env.rank]));
    let gather = || world.all_gather(vec![GatherPart { input: input.clone(), counts: counts.clone() }], Heap::shared());
    gather().wait().unwrap();
    let itself = rustix::process::getpid();
    if env.rank == 2 {
        std::fs::write(folder().join("pid"), itself.as_raw_nonzero().to_string()).unwrap();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            rustix::process::kill_process(itself, rustix::process::Signal::STOP).unwrap();
        });
    }
    let error = loop {
        if let Err(error) = gather().wait() {
            break error;
        }
    };
    let folder = folder();
    std::fs::write(folder.join(env.rank.to_string()), error.to_string()).unwrap();
    // The launcher ends the job when one has ended.
    for _ in 0..1000 {
        if folder.join((1 - env.rank.min(1)).to_string()).exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let stopped = std::fs::read_to_string(folder.join("pid")).unwrap().parse().unwrap();
    let stopped = rustix::process::Pid::from_raw(stopped).unwrap();
    // The other one may have done so.
    let _ = rustix::process::kill_process(stopped, rustix::process::Signal::KILL);
    std::process::exit(1);
}

/// Ranks of a host are a group that sees at once when one of them dies.
fn loses_one_within(env: &RankEnv, options: Options) -> String {
    let world = mpi::connect(env, options.with_timeout(Duration::from_secs(100))).unwrap();
    let host = world.split(world.rank() / 2, 0).unwrap();
    assert!(host.guarantees().detects_death, "a group of one host shares memory");
    let across = world.split(world.rank() % 2, 0).unwrap();
    assert!(!across.guarantees().detects_death, "a group of several hosts has MPI");
    let within = host.split(0, 1 - host.rank()).unwrap();
    for group in [&host, &across, &within] {
        assert_eq!(group.all_reduce_scalar(1u32, ReduceOp::Sum).unwrap(), 2);
    }
    if world.rank() == 3 {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    if world.rank() != 2 {
        // Until the launcher, or rank 2, ends it.
        return world.barrier().wait().map_or_else(|error| error.to_string(), |_| "nothing was lost".into());
    }
    match host.barrier().wait() {
        Ok(_) => "nothing was lost".into(),
        Err(error) => error.to_string(),
    }
}

/// Groups of the same ranks, each with a thread that issues, and groups made meanwhile.
fn side_by_side(env: &RankEnv) -> String {
    let world = mpi::connect(env, options()).unwrap();
    let groups: Vec<_> = (0..4).map(|_| world.split(0, 0).unwrap()).collect();
    std::thread::scope(|scope| {
        for (index, group) in groups.iter().enumerate() {
            scope.spawn(move || {
                for round in 0..50 {
                    let len = 1 + (round * 7919 + index * 104_729) % 50_000;
                    let sum = group.all_reduce(vec![Buffer::U32(vec![index as u32 + 1; len])], ReduceOp::Sum).wait();
                    assert_eq!(sum.unwrap(), [Buffer::U32(vec![(index as u32 + 1) * group.size() as u32; len])]);
                    if round % 10 == 0 {
                        let half = group.split(group.rank() % 2, 0).unwrap();
                        assert!(half.gather_values(vec![1u32]).unwrap().len() == half.size());
                    }
                }
            });
        }
    });
    "done".into()
}

/// As a program does it.
fn init(env: &RankEnv) -> String {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("FSDP_BACKEND", "mpi") };
    match process_group::init(env, options()) {
        Ok(world) => world.all_reduce_scalar(env.rank as u32 + 1, ReduceOp::Sum).unwrap().to_string(),
        Err(error) => error.to_string(),
    }
}

/// Rank 1 begins long after the others.
fn comes_late(env: &RankEnv) -> String {
    if env.rank == 1 {
        std::thread::sleep(Duration::from_secs(8));
    }
    let log = folder().join(format!("warnings of {}", env.rank));
    let warnings = tracing_subscriber::fmt().with_ansi(false).with_max_level(Level::WARN);
    warnings.with_writer(std::fs::File::create(&log).unwrap()).init();
    let met = mpi::connect(env, options()).unwrap().all_reduce_scalar(1u32, ReduceOp::Sum).unwrap();
    format!("{}; met {met}", std::fs::read_to_string(log).unwrap().trim())
}

/// Rank 0 is on its way to another backend.
fn mixes_backends(env: &RankEnv) -> String {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("FSDP_BACKEND", if env.rank == 0 { "shm" } else { "mpi" }) };
    let Err(error) = process_group::init(env, options()) else { return "the ranks have met".into() };
    std::fs::write(folder().join(env.rank.to_string()), error.to_string()).unwrap();
    // As a program does that has met an error.
    std::process::exit(1);
}

/// Whether a world that a program makes has groups that share a host's memory.
fn shares_hosts(env: &RankEnv, options: Options, hierarchy: Option<&str>) -> String {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("FSDP_BACKEND", "mpi") };
    if let Some(value) = hierarchy {
        // SAFETY: as above.
        unsafe { std::env::set_var("FSDP_HIERARCHY", value) };
    }
    let world = process_group::init(env, options).unwrap();
    let host = world.split(world.rank() / 2, 0).unwrap();
    assert_eq!(host.all_reduce_scalar(1u32, ReduceOp::Sum).unwrap(), 2);
    // Groups without rank 1, which may be the one that wants none, are as their larger one is.
    let three = world.split(usize::from(world.rank() == 1), 0).unwrap();
    let again = three.split(world.rank() / 2, 0).unwrap();
    if again.size() == 2 {
        assert_eq!(again.all_reduce_scalar(1u32, ReduceOp::Sum).unwrap(), 2);
        assert_eq!(again.guarantees().detects_death, host.guarantees().detects_death);
    }
    // Within a host the system says when a rank dies.
    host.guarantees().detects_death.to_string()
}
