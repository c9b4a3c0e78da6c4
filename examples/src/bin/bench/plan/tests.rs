//! Comparison of plans with published figures of torchtitan: the errors in docs/planning.md.

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/llama-3.1-8b/config.json");

fn planned(flags: &str) -> anyhow::Result<Report> {
    planned_with(CONFIG, flags)
}

fn planned_with(config: &str, flags: &str) -> anyhow::Result<Report> {
    let words = ["plan", "--model", config].into_iter().chain(flags.split_whitespace());
    let Cli { args } = Cli::try_parse_from(words)?;
    let (models, seq) = models(&args)?;
    Ok(Report::new(&setup(&args, &models, seq)?, args.top))
}

fn gib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}

/// Returns the error of a plan in percent of the run's figure.
fn error(planned: f64, published: f64) -> f64 {
    100. * (planned / published - 1.)
}

/// A published figure, and the error of its plan in percent according to docs/planning.md.
type Figure = (f64, f64);

/// Reads the table in docs/planning.md: flags, tokens per second per rank, and GiB.
fn published() -> Vec<(String, [Option<Figure>; 2])> {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/planning.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let (_, table) = docs.split_once("| flags | tokens/s per rank |").unwrap();
    let number = |cell: &str| cell.trim().trim_end_matches('%').trim().replace(',', "").parse::<f64>().ok();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        let pair = |at: usize| Some((number(cells[at])?, number(cells[at + 2])?));
        (cells[0].trim().trim_matches('`').to_owned(), [pair(1), pair(4)])
    })
    .collect()
}

/// Llama 3.1 70B: the 8B's file with other sizes.
fn llama_70b() -> tempfile::NamedTempFile {
    let mut config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(CONFIG).unwrap()).unwrap();
    for (field, value) in
        [("hidden_size", 8192), ("intermediate_size", 28672), ("num_hidden_layers", 80), ("num_attention_heads", 64)]
    {
        config[field] = value.into();
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), config.to_string()).unwrap();
    file
}

#[test]
fn errors_match_the_docs() {
    let large = llama_70b();
    let rows = published();
    assert_eq!(rows.len(), 5);
    for (flags, [speed, memory]) in rows {
        let (config, flags) = match flags.strip_prefix("70B ") {
            Some(flags) => (large.path().to_str().unwrap(), flags),
            None => (CONFIG, flags.as_str()),
        };
        let report = planned_with(config, &format!("--framework pytorch {flags}")).unwrap();
        for (name, planned, row) in
            [("tokens/s", report.time.tokens_per_s_per_rank, speed), ("GiB", gib(report.memory.total), memory)]
        {
            let Some((figure, written)) = row else { continue };
            let error = error(planned, figure);
            assert!((error - written).abs() < 0.06, "{flags}: {planned} {name} is off {figure} by {error} %");
            // The docs state this bound for all of them.
            assert!(error.abs() < 8., "{flags}: {error} %");
        }
        assert!(report.fits, "{flags}");
    }
}

#[test]
fn state_is_sixteen_bytes_per_parameter() {
    for (flags, shards) in [("--device h100-sxm", 8.), ("--device h100-sxm --hosts 16 --replicate 16", 8.)] {
        let memory::State { parameters, gradients, optimizer, .. } = planned(flags).unwrap().memory.state;
        assert_eq!(parameters + gradients + optimizer, 16. * 8_030_261_248. / shards);
    }
    let halves = planned("--device h100-sxm --shard-dtype bf16").unwrap().memory.state;
    assert_eq!(halves.optimizer, 4. * 8_030_261_248. / 8.);
}

#[test]
fn a_gpu_holds_a_block_of_scores_and_a_stretch_of_logits() {
    let h100 = |more: &str| {
        planned(&format!("--device h100-sxm --ranks-per-host 8 --activation-checkpoint full {more}")).unwrap()
    };
    // A block of 256 queries, 32 heads and 8192 keys: products and their gradients in f32, two matrices in bf16, and
    // sums of two gradients of 8 heads of 128.
    let report = h100("--seq 8192");
    let block = 256. * 32. * 8192. * (2. * 4. + 2. * 2.) + 8192. * 1024. * (2. * 4. + 2.);
    let moment = report.memory.moments.iter().find(|moment| moment.when == "a block's backward").unwrap();
    assert!(moment.working > block && moment.working < block + 8192. * 4096. * 2. * 40., "{}", gib(moment.working));
    assert!(report.fits && gib(report.memory.total) < 40., "{}", gib(report.memory.total));
    // A stretch of 2^26 logits in f32, and a number per row.
    assert_eq!(report.memory.moments[0].logits, 67108864. * 4. + 8192. * 4.);
    let report = h100("--seq 32768");
    assert!(report.fits && gib(report.memory.total) < 79., "{}", gib(report.memory.total));
    // 14336 elements per token inside the MLP.
    let report = h100("--seq 131072 --batch 2");
    assert_eq!((report.uncountable, report.fits), (Some(3758096384.), false));
}

/// A rank sends all but its own part of what is gathered twice, and of the gradients.
#[test]
fn ranks_send_what_others_gather() {
    let flags = "--device h100-sxm --ranks-per-host 8 --seq 128 --activation-checkpoint full";
    let llama = planned(flags).unwrap();
    let embedding = 128_256. * 4096.;
    // bf16 and f32. The embedding and the head are gathered once.
    let want = 7. / 8. * (8. * llama.parameters - 2. * 2. * embedding - 2. * 4096.);
    assert!((llama.time.sent / want - 1.).abs() < 1e-9, "{} bytes, not {want}", llama.time.sent);
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/qwen3-30b-a3b/config.json");
    let [with, without] =
        [8, 1].map(|ranks| planned_with(config, &format!("{flags} --expert-parallel {ranks}")).unwrap());
    // No rank gathers an expert. Tokens are sent twice in each of two forwards, and in backward.
    let experts = 48. * 128. * 3. * 2048. * 768.;
    let tokens = 48. * 6. * 2. * 128. * 8. * 2048.;
    let want = without.time.sent + 7. / 8. * (tokens - 8. * experts);
    assert!((with.time.sent / want - 1.).abs() < 1e-9, "{} bytes, not {want}", with.time.sent);
    assert_eq!(with.memory.state.total(), without.memory.state.total());
}

#[test]
fn policies_trade_memory_for_communication() {
    let slow = |more: &str| planned(&format!("--device h100-sxm --seq 512 --intra 5 {more}")).unwrap();
    let (freed, kept) = (slow(""), slow("--reshard-after-forward never"));
    assert!(kept.memory.total > freed.memory.total + 32. * 2. * 2e8, "{} {}", kept.memory.total, freed.memory.total);
    assert!(kept.time.step < freed.time.step && kept.time.communication < freed.time.communication);
    let half = slow("--reshard-after-forward 4");
    assert!(freed.memory.total < half.memory.total && half.memory.total < kept.memory.total);
    let again = slow("--activation-checkpoint full");
    assert!(again.memory.peak.activations < freed.memory.peak.activations / 4.);
    assert!(again.time.compute.products > freed.time.compute.products * 1.2);
}

#[test]
fn tensor_ranks_split_layers_and_wait_for_each_other() {
    let flags = "--device h100-sxm --hosts 2 --tensor-parallel 8 --seq 4096";
    let report = planned(flags).unwrap();
    let norms = 65. * 4096.;
    let memory::State { parameters, .. } = report.memory.state;
    assert_eq!(parameters, 4. * ((8_030_261_248. - norms) / 8. + norms) / 2.);
    // Four sums a block and two of the root, each by seven hops there and back.
    let sum = 2. * (7. * 10e-6 + 7. / 8. * 4096. * 4096. * 2. / 360e9);
    let exchanges = |report: &Report| report.time.units.iter().map(|unit| unit.exchange).sum::<f64>();
    assert!((exchanges(&report) - 130. * sum).abs() < 1e-9);
    let again = planned(&format!("{flags} --activation-checkpoint full")).unwrap();
    assert!((exchanges(&again) - 194. * sum).abs() < 1e-9);
    assert!(report.time.exposed > exchanges(&report));
    // Two groups of ranks read 4096 tokens each.
    let tokens = 16. * report.time.tokens_per_s_per_rank * report.time.step;
    assert!((tokens - 2. * 4096.).abs() < 1e-6, "{tokens}");
    let split = planned(&format!("{flags} --sequence-parallel")).unwrap();
    assert_eq!(exchanges(&split), exchanges(&report));
    assert!(report.best.iter().all(|choice| choice.shard * choice.replicate == 2));
}

#[test]
fn replicas_pay_off_over_slow_links() {
    let small = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/golden/llama_tiny/config.json");
    // The host's launches would bound candle-fsdp's step of so small a model, with every mesh.
    let flags =
        "--framework pytorch --device h100-sxm --hosts 16 --seq 32 --latency 1 --inter 0.001 --reduce-dtype bf16";
    let best = &planned_with(small, flags).unwrap().best[0];
    assert!(best.shard <= 8 && best.shard * best.replicate == 128, "{best:?}");
    // A model that just fits on all ranks has no replicas.
    let large = planned("--device h100-sxm --memory 26 --seq 128").unwrap();
    assert!(!large.best.is_empty() && large.best.iter().all(|choice| (choice.shard, choice.replicate) == (8, 1)));
    assert!(large.best.iter().all(|choice| choice.memory <= 26e9));
    // A model that does not fit has no choices.
    let none = planned("--device h100-sxm --memory 2").unwrap();
    assert!(none.best.is_empty() && !none.fits);
}

#[test]
fn best_choice_is_fast_and_small() {
    let report = planned("--framework pytorch --device h100-sxm --hosts 16 --seq 4096 --top 60000").unwrap();
    let best = &report.best[0];
    let fastest = report.best.iter().map(|choice| choice.tokens_per_s_per_rank).fold(0., f64::max);
    assert!(best.tokens_per_s_per_rank >= 0.995 * fastest);
    let alike = report.best.iter().filter(|choice| choice.tokens_per_s_per_rank >= 0.995 * fastest);
    assert!(alike.clone().count() > 1 && alike.clone().all(|choice| choice.memory >= best.memory));
    assert!(report.best.iter().all(|choice| choice.shard * choice.replicate == 128));
}

#[test]
fn impossible_plans_are_refused() {
    for (flags, words) in [
        ("--device h100-sxm --replicate 3", "--replicate 3 must divide the 8 ranks"),
        ("--device h100-sxm --replicate 16", "--replicate 16 must divide the 8 ranks"),
        ("--device h100-sxm --reshard-after-forward 3", "--reshard-after-forward 3 must divide the 8 ranks"),
        (
            "--device h100-sxm --reshard-after-forward some",
            "it must be default, always, never, or a number of processes",
        ),
        ("--device h100-sxm --activation-checkpoint selective", "`train` has none and full"),
        ("--device h100-sxm --seq 1000000", "--seq 1000000 is beyond the model's 131072 positions"),
        ("--device h100-sxm --hosts 65536 --ranks-per-host 65536", "4294967296 ranks are more"),
        ("--device h100-sxm --flops 0", "it must be a number above 0"),
        ("--device cpu", "--device cpu needs --flops"),
        (
            "--device h100-sxm --tensor-parallel 3",
            "--tensor-parallel 3 does not divide the model's num_attention_heads",
        ),
        ("--device h100-sxm --tensor-parallel 8 --replicate 2", "--replicate 2 times --tensor-parallel 8 must divide"),
        ("--device h100-sxm --sequence-parallel", "--sequence-parallel has no effect"),
        (
            "--device h100-sxm --context-parallel 2 --seq 30",
            "can't be split as --context-parallel needs: pass a multiple of 4",
        ),
        (
            "--device h100-sxm --tensor-parallel 4 --sequence-parallel --context-parallel 2 --seq 12",
            "can't be split as --context-parallel and --sequence-parallel needs: pass a multiple of 8",
        ),
        ("--device h100-sxm --context-parallel 3", "--context-parallel 3 must divide the 8 ranks"),
        ("--device h100-sxm --context-parallel 2 --framework pytorch", "not planned with --framework pytorch"),
        ("--device h100-sxm --tensor-parallel 2 --framework pytorch", "not planned with --framework pytorch"),
        ("--device a100-80 --cudnn", "--cudnn is for bf16 on h100-sxm, h200 and b200"),
        ("--device h200 --cudnn --param-dtype f32", "--cudnn is for bf16 on h100-sxm, h200 and b200"),
        ("--device h200 --cudnn --framework pytorch", "--cudnn is for bf16 on h100-sxm, h200 and b200"),
        (
            "--device cpu --flops 1 --allocate-memory-from-process-group-for-comm",
            "--allocate-memory-from-process-group-for-comm is for candle-fsdp on a GPU",
        ),
    ] {
        let error = format!("{:#}", planned(flags).unwrap_err());
        assert!(error.contains(words), "{flags}: {error}");
    }
    let error = format!("{:#}", planned_with("no-such-place", "--device h100-sxm").unwrap_err());
    assert!(error.contains("can't read no-such-place"), "{error}");
}

#[test]
fn plan_is_printed() {
    let flags = "--framework pytorch --device h100-sxm --hosts 16 --replicate 16 --batch 2 --seq 4096";
    let words = ["plan", "--model", CONFIG].into_iter().chain(flags.split(' '));
    let Cli { args } = Cli::try_parse_from(words).unwrap();
    let (models, seq) = models(&args).unwrap();
    let setup = setup(&args, &models, seq).unwrap();
    let text = report::table(&Report::new(&setup, 5), &setup);
    for words in [
        "8.030 billion parameters in 33 units, over 128 ranks on 16 hosts: 16 replicas, each sharded over 8 ranks",
        "A rank reads 2 x 4096 tokens per step",
        "  between steps          14.96",
        "blocks 2-31",
        "The fastest that fit",
    ] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 110 && line.trim_end() == line), "{text}");
}
