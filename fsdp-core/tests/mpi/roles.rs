//! What ranks do.

use std::{path::PathBuf, sync::Arc, time::Duration};

use fsdp_core::{
    Buffer, DType, GatherPart, Heap, ProcessGroup, RankEnv, ReduceOp, ScatterPart,
    process_group::{self, Options, conformance, mpi, shm},
};
use half::{bf16, f16};

/// Plays a role, and writes what it has to say.
pub(crate) fn play(role: &str) {
    let env = match std::env::var("FSDP_TEST_ALONE") {
        Ok(_) => RankEnv { world_size: 2, local_world_size: 2, ..RankEnv::single() },
        Err(_) => RankEnv::from_env().unwrap(),
    };
    let said = match role {
        "bits" => bits(&env),
        "loses one" => loses_one(&env),
        "side by side" => side_by_side(&env),
        "init" => init(&env),
        other => match other.strip_prefix("conforms ") {
            Some(trial) => conformance::take_part(trial, &|options| mpi::connect(&env, options)),
            None => panic!("no role {other}"),
        },
    };
    let folder = PathBuf::from(std::env::var_os("FSDP_TEST_FOLDER").unwrap());
    std::fs::write(folder.join(env.rank.to_string()), said).unwrap();
}

fn options() -> Options {
    Options::default().with_timeout(Duration::from_secs(60))
}

/// Numbers whose sums are rounded in every dtype.
fn values(rank: usize, len: usize, dtype: DType) -> Buffer {
    let values = (0..len).map(|i| (((i * 37 + rank * 11) as f32).sin() * 1e3).exp2().rem_euclid(977.0) - 300.0);
    match dtype {
        DType::F32 => Buffer::F32(values.collect()),
        DType::BF16 => Buffer::BF16(values.map(bf16::from_f32).collect()),
        _ => Buffer::F16(values.map(f16::from_f32).collect()),
    }
}

/// Both groups sum the same.
fn bits(env: &RankEnv) -> String {
    // Short messages, and longer ones than any step.
    for chunk_bytes in [1 << 10, 128 << 10] {
        let options = options().with_chunk_bytes(chunk_bytes);
        let over_mpi = mpi::connect(env, options.clone()).unwrap();
        let shared = shm::connect(env, options).unwrap();
        let (rank, size) = (env.rank, env.world_size);
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                // Even, uneven, empty for the first rank, and empty for all but the last.
                let shares: [&dyn Fn(usize) -> usize; 4] =
                    [&|_| 1000, &|rank| 70 + 1311 * rank, &|rank| rank * 333_333, &|of| {
                        if of + 1 == size { 7 } else { 0 }
                    }];
                for share in shares {
                    let counts: Vec<usize> = (0..size).map(share).collect();
                    let len = counts.iter().sum();
                    let sum = |group: &ProcessGroup| {
                        let part = || ScatterPart { input: values(rank, len, dtype), counts: counts.clone() };
                        let scattered = group.reduce_scatter(vec![part(), part()], op, Heap::shared());
                        let reduced = group.all_reduce(vec![values(rank, len, dtype), values(rank, 3, dtype)], op);
                        let input = Arc::new(values(rank, counts[rank], dtype));
                        let gathered =
                            group.all_gather(vec![GatherPart { input, counts: counts.clone() }], Heap::shared());
                        [scattered, reduced, gathered].map(|work| work.wait().unwrap())
                    };
                    let (ours, theirs) = (sum(&over_mpi), sum(&shared));
                    let bytes = |all: &[Vec<Buffer>; 3]| -> Vec<Vec<u8>> {
                        all.iter().flatten().map(|buffer| buffer.bytes().to_vec()).collect()
                    };
                    if bytes(&ours) != bytes(&theirs) {
                        return format!("{op:?} of {dtype}, {counts:?}: other bits than shared memory's");
                    }
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
            let folder = PathBuf::from(std::env::var_os("FSDP_TEST_FOLDER").unwrap());
            std::fs::write(folder.join(env.rank.to_string()), error.to_string()).unwrap();
            std::process::exit(1);
        }
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
