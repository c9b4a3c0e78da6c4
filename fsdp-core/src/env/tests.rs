use super::*;

fn read(vars: &[(&str, &str)]) -> Result<RankEnv> {
    RankEnv::read(
        &|name| vars.iter().find(|(have, _)| *have == name).map(|(_, value)| value.to_string()),
        &|descriptor| (descriptor == "7").then(|| "1252470".to_string()),
    )
}

/// Variables that a launcher set for a process, as `NAME=VALUE` words, and what `RankEnv` reads from them.
struct Recorded {
    vars: &'static str,
    /// Rank, world size, local rank, local world size.
    place: (usize, usize, usize, usize),
    master: (&'static str, u16),
    run_id: &'static str,
}

/// Recorded from real runs, with irrelevant variables left out and host names replaced. Two entries of Slurm follow its
/// manual.
const RECORDED: [Recorded; 10] = [
    // torchrun --nproc-per-node 2, of PyTorch 2.15
    Recorded {
        vars: "GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost \
               MASTER_PORT=37827 RANK=1 ROLE_NAME=default ROLE_RANK=1 \
               ROLE_WORLD_SIZE=2 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0 \
               TORCHELASTIC_RUN_ID=c47e112f-a61f-43f2-92a9-5dc017355004 \
               TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2",
        place: (1, 2, 1, 2),
        master: ("localhost", 37827),
        run_id: "c47e112f-a61f-43f2-92a9-5dc017355004",
    },
    // mpirun -np 2, Open MPI 4.1.4
    Recorded {
        vars: "OMPI_APP_CTX_NUM_PROCS=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
               OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 \
               OMPI_COMM_WORLD_SIZE=2 OMPI_FIRST_RANKS=0 OMPI_MCA_ess_base_jobid=270467073 OMPI_MCA_ess_base_vpid=1 \
               OMPI_MCA_orte_ess_node_rank=1 \
               OMPI_MCA_orte_ess_num_procs=2 OMPI_MCA_orte_num_nodes=1 OMPI_UNIVERSE_SIZE=2 PMIX_ID=270467073.1 \
               PMIX_NAMESPACE=270467073 PMIX_RANK=1 \
               PMIX_HOSTNAME=host PMIX_VERSION=4.2.2rc2",
        place: (1, 2, 1, 2),
        master: ("127.0.0.1", 29500),
        run_id: "270467073",
    },
    // Open MPI within a Slurm allocation.
    Recorded {
        vars: "ENVIRONMENT=BATCH SLURM_JOB_ID=41 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 \
               SLURM_JOB_NODELIST=node1 OMPI_COMM_WORLD_LOCAL_RANK=1 \
               OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=270467073",
        place: (1, 2, 1, 2),
        master: ("127.0.0.1", 29500),
        run_id: "270467073",
    },
    // mpirun -np 2, MPICH 4.0.2
    Recorded {
        vars: "GFORTRAN_UNBUFFERED_PRECONNECTED=y HYDI_CONTROL_FD=7 MPIR_CVAR_CH3_INTERFACE_HOSTNAME=host \
               MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 \
               PMI_RANK=1 PMI_SIZE=2",
        place: (1, 2, 1, 2),
        master: ("127.0.0.1", 29500),
        run_id: "mpich-1252470",
    },
    // srun, the last of 7 tasks on 4 nodes, by the manual
    Recorded {
        vars: "ENVIRONMENT=BATCH SLURM_JOB_ID=1234567 SLURM_STEP_ID=3 SLURM_STEPID=3 SLURM_PROCID=6 SLURM_NTASKS=7 \
               SLURM_NPROCS=7 SLURM_STEP_NUM_TASKS=7 \
               SLURM_LOCALID=0 SLURM_NODEID=3 SLURM_NNODES=4 SLURM_STEP_NUM_NODES=4 SLURM_STEP_TASKS_PER_NODE=2(x3),1 \
               SLURM_TASKS_PER_NODE=8(x8) \
               SLURM_STEP_NODELIST=node[03-05,11] SLURM_JOB_NODELIST=node[01-05,11-13] SLURM_STEP_LAUNCHER_PORT=35071 \
               SLURM_SRUN_COMM_HOST=192.0.2.7",
        place: (6, 7, 0, 1),
        master: ("node03", 27594),
        run_id: "slurm-1234567.3",
    },
    // srun with fewer tasks than the allocation allows, by the manual
    Recorded {
        vars: "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 \
               SLURM_NODEID=0 \
               SLURM_STEP_TASKS_PER_NODE=2 SLURM_NTASKS_PER_NODE=8 SLURM_STEP_NODELIST=n1",
        place: (1, 2, 1, 2),
        master: ("n1", 20009),
        run_id: "slurm-9.0",
    },
    // srun, the last of 7 tasks on 2 nodes, Slurm 22.05.8
    Recorded {
        vars: "ENVIRONMENT=BATCH SLURM_JOB_ID=1 SLURM_JOB_NODELIST=node[0-1] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=2 \
               SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=node[0-1] SLURM_NPROCS=7 SLURM_NTASKS=7 SLURM_PROCID=6 \
               SLURM_STEPID=1 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=node[0-1] SLURM_STEP_NUM_NODES=2 \
               SLURM_STEP_NUM_TASKS=7 SLURM_STEP_TASKS_PER_NODE=4,3 SLURM_TASKS_PER_NODE=4,3",
        place: (6, 7, 2, 3),
        master: ("node0", 21010),
        run_id: "slurm-1.1",
    },
    // srun --mpi=pmi2 --ntasks-per-node=2, Slurm 22.05.8
    Recorded {
        vars: "ENVIRONMENT=BATCH PMI_FD=13 PMI_JOBID=1.2 PMI_RANK=3 PMI_SIZE=4 SLURM_JOB_ID=1 \
               SLURM_JOB_NODELIST=node[0-1] SLURM_LOCALID=1 SLURM_MPI_TYPE=pmi2 SLURM_NNODES=2 SLURM_NODEID=1 \
               SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=3 SLURM_STEP_ID=2 SLURM_STEP_NODELIST=node[0-1] \
               SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) \
               SLURM_TASKS_PER_NODE=2(x2)",
        place: (3, 4, 1, 2),
        master: ("node0", 22019),
        run_id: "slurm-1.2",
    },
    // srun --mpi=pmix, Slurm 22.05.8, before Open MPI sets its own variables
    Recorded {
        vars: "ENVIRONMENT=BATCH PMIX_HOSTNAME=node1 PMIX_NAMESPACE=slurm.pmix.1.3 PMIX_RANK=3 PMIX_VERSION=4.2.2rc2 \
               SLURM_JOB_ID=1 SLURM_JOB_NODELIST=node[0-1] SLURM_LOCALID=1 SLURM_MPI_TYPE=pmix SLURM_NNODES=2 \
               SLURM_NODEID=1 SLURM_NTASKS=4 SLURM_PMIX_MAPPING_SERV=(vector,(0,2,2)) SLURM_PROCID=3 SLURM_STEP_ID=3 \
               SLURM_STEP_NODELIST=node[0-1] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 \
               SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_TASKS_PER_NODE=2(x2)",
        place: (3, 4, 1, 2),
        master: ("node0", 23028),
        run_id: "slurm-1.3",
    },
    // The script of sbatch, Slurm 22.05.8
    Recorded {
        vars: "ENVIRONMENT=BATCH SLURM_JOB_ID=1 SLURM_JOB_NODELIST=node[0-1] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 \
               SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NPROCS=8 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=4(x2)",
        place: (0, 1, 0, 1),
        master: ("127.0.0.1", 29500),
        run_id: "slurm-1.batch",
    },
];

#[test]
fn reads_the_variables_of_every_launcher() {
    for Recorded { vars, place, master, run_id } in RECORDED {
        let vars: Vec<_> = vars.split_whitespace().map(|var| var.split_once('=').unwrap()).collect();
        let env = read(&vars).unwrap();
        assert_eq!((env.rank, env.world_size, env.local_rank, env.local_world_size), place, "{vars:?}");
        assert_eq!((env.master_addr.as_str(), env.master_port), master, "{vars:?}");
        assert_eq!(env.run_id, run_id, "{vars:?}");
        // A variable of the user takes precedence.
        let env = read(&[&[("TORCHELASTIC_RUN_ID", "none")][..], &vars].concat()).unwrap();
        assert_eq!(env.run_id, "none");
        let own = [("MASTER_ADDR", "m"), ("MASTER_PORT", "7"), ("TORCHELASTIC_RUN_ID", "mine")];
        let env = read(&[&own[..], &vars].concat()).unwrap();
        assert_eq!((env.master_addr.as_str(), env.master_port, env.run_id.as_str()), ("m", 7, "mine"));
    }
}

#[test]
fn without_variables_the_world_is_one_rank() {
    assert_eq!(read(&[]).unwrap(), RankEnv::single());
    assert_eq!(read(&[("SLURM_NTASKS", "8")]).unwrap(), RankEnv::single());
}

#[test]
fn needs_four_variables_at_most() {
    for launcher in LAUNCHERS {
        for size in launcher.size {
            let vars = [(launcher.rank, "5"), (*size, "8"), (launcher.local_rank, "1"), (launcher.local_size, "4")];
            let env = read(&vars).unwrap();
            assert_eq!((env.rank, env.world_size, env.local_rank, env.local_world_size), (5, 8, 1, 4));
            // Without local ranks, all ranks are on one host.
            let env = read(&vars[..2]).unwrap();
            assert_eq!((env.local_rank, env.local_world_size), (5, 8));
        }
    }
}

#[test]
fn counts_hosts_unless_a_variable_gives_them() {
    let of_two = [("RANK", "5"), ("WORLD_SIZE", "7"), ("LOCAL_WORLD_SIZE", "3")];
    assert_eq!(read(&of_two).unwrap().hosts, 3);
    assert_eq!(read(&[&of_two[..], &[("FSDP_HOSTS", "1")]].concat()).unwrap().hosts, 1);
    // Slurm's hosts may have different numbers of ranks.
    let steps = [("SLURM_STEP_TASKS_PER_NODE", "3,1"), ("SLURM_STEP_NUM_NODES", "2")];
    let of_slurm = [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4"), ("SLURM_NODEID", "1"), steps[0], steps[1]];
    let env = read(&of_slurm).unwrap();
    assert_eq!((env.local_world_size, env.hosts), (1, 2));
    // FSDP_HOSTS is inherited from a launcher above `mpirun`.
    let below = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
    assert_eq!(read(&[&below[..], &[("FSDP_HOSTS", "1")]].concat()).unwrap().hosts, 2);
    let error = read(&[&of_two[..], &[("FSDP_HOSTS", "x")]].concat()).unwrap_err().to_string();
    assert!(error.contains("FSDP_HOSTS=\"x\""), "{error}");
}

#[test]
fn steps_and_jobs_have_their_own_ids_and_ports() {
    let step = |job: &str, step: &str| {
        let vars = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step)];
        let env = read(&vars).unwrap();
        assert!((20_000..30_000).contains(&env.master_port));
        (env.run_id, env.master_port)
    };
    let all = [step("7", "0"), step("7", "1"), step("8", "0"), step("4294967293", "0")];
    for (i, one) in all.iter().enumerate() {
        for other in &all[..i] {
            assert!(one.0 != other.0 && one.1 != other.1, "{one:?} {other:?}");
        }
    }
}

#[test]
fn a_descriptor_that_is_not_a_socket_gives_no_run_id() {
    let vars = [("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("HYDI_CONTROL_FD", "6")];
    assert_eq!(read(&vars).unwrap().run_id, "none");
    for descriptor in ["", "-1", "x", "../0", "4000000000"] {
        assert_eq!(socket_inode(descriptor), None);
    }
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&socket).to_string();
    assert!(socket_inode(&descriptor).unwrap().parse::<u64>().is_ok());
}

#[test]
fn errors_name_the_variables() {
    const RANK: [(&str, &str); 2] = [("RANK", "0"), ("WORLD_SIZE", "4")];
    const TASK: [(&str, &str); 2] = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
    for (base, more, part) in [
        (&[][..], &[("RANK", "2"), ("WORLD_SIZE", "2")][..], "RANK=2 is outside"),
        (&[], &[("RANK", "0")], "WORLD_SIZE is not"),
        (&[], &[("WORLD_SIZE", "1")], "RANK is not"),
        (&[], &[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK=\"x\""),
        (&[], &[("RANK", ""), ("WORLD_SIZE", "2")], "RANK=\"\" is not a number"),
        (&[], &[("RANK", "-1"), ("WORLD_SIZE", "2")], "RANK=\"-1\" is not a number"),
        (&[], &[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE=0 is not a number of ranks: expected 1 to 1048576"),
        (&[], &[("RANK", "0"), ("WORLD_SIZE", "9999999999999999")], "WORLD_SIZE=9999999999999999 is not a number of"),
        (&[], &[("RANK", "0"), ("WORLD_SIZE", "99999999999999999999")], "WORLD_SIZE=\"99999999999999999999\""),
        (&RANK, &[("MASTER_PORT", "70000")], "MASTER_PORT=\"70000\" is not a port"),
        (&RANK, &[("MASTER_PORT", "0")], "MASTER_PORT=\"0\" is not a port: set it to the same free port"),
        (&RANK, &[("MASTER_PORT", "-5")], "MASTER_PORT=\"-5\" is not a port"),
        (&RANK, &[("MASTER_PORT", "")], "MASTER_PORT=\"\" is not a port"),
        (&[], &[("MASTER_PORT", "0")], "MASTER_PORT=\"0\" is not a port"),
        (&RANK, &[("MASTER_ADDR", " ")], "MASTER_ADDR=\" \" is empty"),
        (&RANK, &[("FSDP_HOSTS", "0")], "FSDP_HOSTS=0: expected 1 to the number of ranks, which is 4"),
        (&RANK, &[("FSDP_HOSTS", "5")], "FSDP_HOSTS=5: expected 1 to"),
        (&RANK, &[("LOCAL_RANK", "-1")], "LOCAL_RANK=\"-1\""),
        (&RANK, &[("LOCAL_WORLD_SIZE", "0")], "LOCAL_WORLD_SIZE gives 0"),
        (&RANK, &[("LOCAL_WORLD_SIZE", "5")], "WORLD_SIZE=4"),
        (&RANK, &[("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "2")], "LOCAL_RANK=2 is outside the 2"),
        (&TASK, &[("SLURM_STEP_TASKS_PER_NODE", "2(x")], "SLURM_STEP_TASKS_PER_NODE=\"2(x\" is malformed"),
        (&TASK, &[("SLURM_TASKS_PER_NODE", "")], "SLURM_TASKS_PER_NODE=\"\" is malformed"),
        (&TASK, &[("SLURM_STEP_TASKS_PER_NODE", "2(x2)")], "SLURM_NODEID is not set"),
        (&TASK, &[("SLURM_STEP_TASKS_PER_NODE", "2(x2)"), ("SLURM_NODEID", "2")], "SLURM_NODEID=2 is not among the 2"),
        (&TASK, &[("SLURM_STEP_TASKS_PER_NODE", "2"), ("SLURM_LOCALID", "2")], "SLURM_LOCALID=2"),
        (&TASK, &[("SLURM_STEP_NODELIST", "n[1-")], "SLURM_STEP_NODELIST=\"n[1-\" is malformed"),
        (&TASK, &[("SLURM_JOB_ID", "seven")], "SLURM_JOB_ID=\"seven\""),
        (&TASK, &[("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "-2")], "SLURM_STEP_ID=\"-2\""),
    ] {
        let error = read(&[base, more].concat()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn numbers_of_threads_are_checked() {
    let of = |name: &'static str, text: &'static str, cores| {
        check_thread_counts(&|asked| (asked == name).then(|| text.to_string()), cores)
    };
    for name in THREADS {
        for text in ["", "0", "1", "256"] {
            of(name, text, 2).unwrap();
        }
        of(name, "1024", 256).unwrap();
        for text in ["100000", "257", "-1", "two", "2.5", " ", "99999999999999999999"] {
            let error = of(name, text, 2).unwrap_err().to_string();
            let told = format!("{name}={text:?} is not a number of threads from 1 to 256: ");
            assert!(error.starts_with(&told) && error.contains("unset it. This host has 2 cores"), "{error}");
        }
    }
}
