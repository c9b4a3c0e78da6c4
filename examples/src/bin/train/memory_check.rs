//! The check that a run's memory is available, before anything is allocated, and the flags that would make it fit.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::bail;
use fsdp_candle::World;
use fsdp_candle::nn::LoraConfig;
use fsdp_train::models::{Base, Lora, ModelConfig, ModelSize, Targets};
use fsdp_train::ranks::Ranks;
use indicatif::{BinaryBytes, HumanCount};

use crate::adapters::Adapters;
use crate::args::{Args, OptimizerKind};
use crate::flag_types::InBackward;
use crate::setup::has_reference_copy;
use crate::task::Task;

/// Size of an f32 in bytes.
const F32: f64 = 4.;
/// Minimal overhead of a parameter tensor in bytes.
const TENSOR: f64 = 1024.;
/// Tokens of the sample at the end, at any batch size.
const FEWEST_TOKENS: usize = 64;

/// Fails unless this rank can allocate the least memory that its run needs, and all ranks of this machine fit into its
/// memory. Out of memory during the run would kill the process without an error.
pub(crate) fn check(
    args: &Args,
    config: &ModelConfig,
    task: &dyn Task,
    adapters: Option<&Adapters>,
    positions: usize,
    world: &World,
) -> anyhow::Result<()> {
    if !world.device().is_cpu() {
        return Ok(()); // allocation on a device reports an error by itself
    }
    let (ranks, local_ranks) = (args.ranks(world)?, world.env().local_world_size as f64);
    let sizes = [task.batch_tokens(args), positions];
    let choices = Choices::of(args, adapters.is_some());
    let size = config.size_with_head(task.head(), adapters.map(|adapters| &adapters.lora));
    let needs = memory_needs(args, choices, size, sizes, ranks);
    let total: f64 = needs.iter().map(|(_, bytes)| bytes).sum();
    let available = available();
    let missing = if local_ranks * total > available {
        let all = if local_ranks > 1. { format!(" for its {local_ranks} ranks") } else { String::new() };
        format!("this machine has {}{all}", Bytes(available))
    } else if let Err(error) = Vec::<u8>::new().try_reserve_exact(total as usize) {
        format!("the system refuses so much: {error}")
    } else {
        return Ok(());
    };
    let much = needs.iter().filter(|(_, bytes)| *bytes >= total / 100.);
    let needs = much.map(|(what, bytes)| format!("{} for {what}", Bytes(*bytes))).collect::<Vec<_>>();
    let mut fitting = vec![];
    for (flags, choices) in choices.smaller(args) {
        let new = Lora { config: LoraConfig { rank: LORA_RANK, alpha: 1. }, targets: Targets::queries_and_values()? };
        let lora = adapters.map_or(&new, |adapters| &adapters.lora);
        let size = config.size_with_head(task.head(), choices.has_adapters.then_some(lora));
        let total: f64 = memory_needs(args, choices, size, sizes, ranks).iter().map(|(_, bytes)| bytes).sum();
        if local_ranks * total <= available && Vec::<u8>::new().try_reserve_exact(total as usize).is_ok() {
            fitting.push(format!("{flags} ({})", Bytes(total)));
        }
    }
    let way_out = match fitting.is_empty() {
        true => {
            "Use a smaller model, --batch-size, --seq-len or --lora-rank, or a larger machine with more ranks".into()
        }
        false => format!("It would fit with one of: {}", fitting.join("; ")),
    };
    bail!(
        "rank {} needs at least {} of memory ({}), and {missing}. {way_out}",
        world.rank(),
        Bytes(total),
        needs.join(", ")
    );
}

/// Returns the bytes of memory that this process may use: the machine's, or the limit of its control group.
fn available() -> f64 {
    let machine = rustix::system::sysinfo();
    let machine = (machine.totalram as f64 + machine.totalswap as f64) * f64::from(machine.mem_unit.max(1));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limit_of_groups(&groups, Path::new("/sys/fs/cgroup")).map_or(machine, |limit| limit.min(machine))
}

/// Returns the lowest memory limit of this process's control groups and of the groups around them. `groups` is the text
/// of `/proc/self/cgroup`, and `root` the directory with the groups' files.
fn limit_of_groups(groups: &str, root: &Path) -> Option<f64> {
    let mut limits: Vec<f64> = vec![];
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // The second version of control groups has all controllers in one place.
        let (root, file): (PathBuf, _) = match controllers {
            "" => (root.into(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        // A container may see only a part of the path.
        let group = root.join(path.trim_start_matches('/'));
        let files = group.ancestors().take_while(|dir| dir.starts_with(&root)).map(|dir| dir.join(file));
        limits.extend(files.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse::<f64>().ok()));
    }
    limits.into_iter().min_by(f64::total_cmp)
}

/// Rank of the adapters that are suggested, as usual.
const LORA_RANK: usize = 16;

/// Settings that the memory of weights, gradients and optimizer state depends on.
#[derive(Clone, Copy)]
struct Choices {
    has_adapters: bool,
    base: Base,
    in_backward: bool,
    /// Number of moments in memory, in f32.
    moments: f64,
    shards_on_disk: bool,
}

impl Choices {
    fn of(args: &Args, has_adapters: bool) -> Self {
        let moments = match args.optimizer.optimizer {
            _ if args.offload.disk().is_some() => 0.,
            OptimizerKind::Adamw | OptimizerKind::Adam => 2.,
            OptimizerKind::Adamw8bit => 0.5,
            OptimizerKind::Sgd if args.optimizer.momentum == Some(0.) => 0.,
            OptimizerKind::Sgd | OptimizerKind::Muon => 1.,
        };
        let in_backward = args.optimizer_in_backward != InBackward::Off;
        let shards_on_disk = args.offload.disk_of_shards().is_some();
        Choices { has_adapters, base: args.base, in_backward, moments, shards_on_disk }
    }

    /// Returns choices that need less, by their flags.
    fn smaller(self, args: &Args) -> Vec<(&'static str, Self)> {
        if self.has_adapters {
            let stored = [("--base int8", Base::Int8), ("--base nf4", Base::Nf4)];
            return stored.map(|(flag, base)| (flag, Choices { base, ..self })).into();
        }
        let mut all = vec![];
        let (in_backward, on_disk) = (Choices { in_backward: true, ..self }, Choices { moments: 0., ..self });
        let can_be_on_disk =
            !self.shards_on_disk && args.optimizer.optimizer != OptimizerKind::Muon && !args.async_save;
        let can_step_in_backward = !self.in_backward && !args.computes_in_f16();
        if can_step_in_backward {
            all.push(("--optimizer-in-backward unclipped", in_backward));
        }
        if can_be_on_disk && self.moments > 0. {
            all.push(("--offload disk:DIR", on_disk));
        }
        if can_be_on_disk {
            let in_backward = can_step_in_backward || self.in_backward;
            let most = Choices { in_backward, shards_on_disk: true, ..on_disk };
            if can_step_in_backward {
                all.push(("--optimizer-in-backward unclipped --offload disk:DIR", Choices { in_backward, ..on_disk }));
                all.push(("--optimizer-in-backward unclipped --offload disk+shards:DIR", most));
            } else {
                all.push(("--offload disk+shards:DIR", most));
            }
        }
        all.push(("--lora-rank 16", Choices { has_adapters: true, ..self }));
        all.push(("--lora-rank 16 --base nf4", Choices { has_adapters: true, base: Base::Nf4, ..self }));
        all
    }
}

/// Lists a lower bound of the memory that a rank needs, in bytes.
fn memory_needs(
    args: &Args,
    Choices { has_adapters, base, in_backward, moments, shards_on_disk }: Choices,
    size: ModelSize,
    [tokens, positions]: [usize; 2],
    ranks: Ranks,
) -> Vec<(String, f64)> {
    // Tensor-parallel ranks hold whole norms, so this is slightly too low.
    let tensor = ranks.tensor as f64;
    let shards = ranks.shards() as f64 * tensor;
    let (frozen, trained) = if has_adapters { (size.base, size.adapters) } else { (0., size.base) };
    let holders = if args.shard_optimizer_over_replicas { shards * ranks.replicate as f64 } else { shards };
    // A trained parameter has a gradient and optimizer state.
    let gradients = if in_backward { size.largest_unit.min(trained) } else { trained };
    let in_memory = if shards_on_disk { 0. } else { 1. };
    let state =
        in_memory * base.bytes() * frozen / shards + F32 * ((in_memory + moments) * trained + gradients) / holders;
    let copy = if has_reference_copy(args, has_adapters) {
        in_memory * (base.bytes() * size.base + F32 * size.adapters) / shards
    } else {
        0.
    };
    let tokens = tokens.max(FEWEST_TOKENS) as f64;
    let compute = args.param_dtype.dtype().size_in_bytes() as f64;
    let parameters = Count(size.base + size.adapters);
    vec![
        (format!("its shards of {parameters} parameters, with gradients and optimizer state"), state),
        ("the reference model's shards".into(), copy),
        ("the largest unit's gathered parameters".into(), compute * size.largest_unit / tensor),
        (format!("the widest activation of {} tokens", Count(tokens)), compute * size.widest * tokens / tensor),
        (format!("the names and shapes of {} parameter tensors", Count(size.tensors)), TENSOR * size.tensors),
        ("rotary tables".into(), F32 * size.rotary * positions as f64),
    ]
}

/// Larger numbers are printed in scientific notation.
const MOST: f64 = 1e18;

struct Bytes(f64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < MOST { BinaryBytes(self.0 as u64).fmt(f) } else { write!(f, "{:.1e} bytes", self.0) }
    }
}

struct Count(f64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < MOST { HumanCount(self.0 as u64).fmt(f) } else { write!(f, "{:.1e}", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn total(flags: &[&str], ranks: usize) -> f64 {
        let args = Args::try_parse_from([&["train"], flags].concat()).unwrap();
        let adapters = Adapters::of(&args).unwrap();
        let ranks = Ranks::new(ranks, args.replicate, args.context_parallel, args.tensor_parallel).unwrap();
        let size = ModelConfig::builtin().unwrap().size(adapters.as_ref().map(|adapters| &adapters.lora));
        let tokens = if args.dpo.is_some() { 0 } else { args.batch_size * args.seq_len };
        memory_needs(&args, Choices::of(&args, adapters.is_some()), size, [tokens, 128], ranks)
            .iter()
            .map(|(_, bytes)| bytes)
            .sum()
    }

    #[test]
    fn memory_depends_on_model_batch_and_ranks() {
        let one = total(&[], 1);
        // Five million parameters with a gradient and two moments.
        assert!((80e6..120e6).contains(&one), "{one}");
        assert!((0.4..0.8).contains(&(total(&[], 2) / one)));
        assert_eq!(total(&["--replicate", "2"], 2), one);
        // Layers that ranks compute together are divided as well.
        assert!((0.4..0.55).contains(&(total(&["--tensor-parallel", "2"], 2) / one)));
        assert_eq!(total(&["--replicate", "2", "--shard-optimizer-over-replicas"], 2), total(&[], 2));
        // Nothing but the shards is divided.
        assert!(total(&["--batch-size", "4000"], 2) > 4000. * 128. * 688. * 4.);
        let adapted = |base| total(&["--lora-rank", "8", "--base", base], 1);
        assert!(adapted("f32") < one / 2. && adapted("bf16") < adapted("f32") && adapted("nf4") < adapted("int8"));
        assert_eq!(total(&["--offload", "disk:/nvme"], 1), total(&["--optimizer", "sgd", "--momentum", "0"], 1));
        assert!(total(&["--lora-rank", "4611686018427387904"], 1) > 1e21);
        assert!(total(&["--param-dtype", "bf16"], 1) < one);
        // The reference model's shards, unless the base below the adapters is the reference.
        let tuned = |flags: &[&str]| total(&[flags, &["--dpo", "a.jsonl"]].concat(), 1) - total(flags, 1);
        let small = ["--batch-size", "1", "--seq-len", "64"];
        assert!((20e6..26e6).contains(&tuned(&small)));
        assert_eq!(tuned(&[&small[..], &["--lora-rank", "8"]].concat()), 0.);
        let of = |optimizer| total(&["--optimizer", optimizer], 1);
        assert!(of("adam") == one && of("adamw8bit") < of("sgd") && of("sgd") == of("muon") && of("muon") < one);
    }

    #[test]
    fn suggested_flags_need_less() {
        let args = Args::try_parse_from(["train"]).unwrap();
        let flags: Vec<&str> = Choices::of(&args, false).smaller(&args).into_iter().map(|(flags, _)| flags).collect();
        let totals: Vec<f64> = flags.iter().map(|flags| total(&flags.split(' ').collect::<Vec<_>>(), 1)).collect();
        assert_eq!(flags.len(), 6);
        assert!(totals.iter().all(|less| *less < total(&[], 1)) && totals[2] < totals[0].min(totals[1]), "{totals:?}");
        assert!(totals[3] < totals[5] && totals[5] < totals[4] && totals[4] < totals[2], "{totals:?}");
    }

    #[test]
    fn the_lowest_limit_of_a_control_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let limit = |groups: &str| limit_of_groups(groups, root.path());
        assert_eq!(limit("0::/a/b\n"), None);
        write("a/memory.max", "3000\n");
        write("a/b/memory.max", "max\n");
        assert_eq!(limit("0::/a/b\n"), Some(3000.));
        write("a/b/memory.max", "2000\n");
        assert_eq!((limit("0::/a/b\n"), limit("0::/a\n"), limit("")), (Some(2000.), Some(3000.), None));
        // The first version, and a path that the container does not see.
        write("memory/memory.limit_in_bytes", "1000\n");
        let first = "3:cpuset:/x\n4:cpu,memory:/outside/of/it\n0::/\n";
        assert_eq!(limit(first), Some(1000.));
    }

    #[test]
    fn large_sizes_are_formatted() {
        assert_eq!(Bytes(f64::from(1 << 30)).to_string(), "1.00 GiB");
        assert_eq!(Bytes(3e30).to_string(), "3.0e30 bytes");
        assert_eq!((Count(1e6).to_string(), Count(1e40).to_string()), ("1,000,000".into(), "1.0e40".into()));
    }
}
