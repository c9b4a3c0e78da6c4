//! Slurm's variables beyond ranks: processes of this host, the first host, job and step.

use super::{RankEnv, Var, number};
use crate::{Error, Result};

/// Range of the default `MASTER_PORT`: below Linux's ephemeral ports (32768 and up).
const PORTS: std::ops::Range<u64> = 20_000..30_000;
/// Distance of the ports of two steps of a job. It is coprime to the number of ports, so that steps get different
/// ports.
const STEP_PORT_STRIDE: u64 = 1009;

/// Returns whether this process is the script that `sbatch` runs, not a task that `srun` started.
pub(super) fn is_batch_script(var: Var<'_>) -> bool {
    var("ENVIRONMENT").as_deref() == Some("BATCH") && var("SLURM_STEP_ID").is_none()
}

/// Sets the address of rank 0: the first host, and a port that other steps are unlikely to have.
pub(super) fn set_master(env: &mut RankEnv, var: Var<'_>) -> Result<()> {
    let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].into_iter().find_map(|name| Some((name, var(name)?)));
    if let Some((name, list)) = nodes {
        env.master_addr = first_host(&list).ok_or_else(|| {
            Error::Env(format!(
                "{name}={list:?} is malformed: Slurm writes a list of hosts such as node[01-04,07],other"
            ))
        })?;
    }
    if let Some(job) = var("SLURM_JOB_ID") {
        let step = var("SLURM_STEP_ID").map_or(Ok(0), |step| number::<u64>("SLURM_STEP_ID", &step))?;
        let job: u64 = number("SLURM_JOB_ID", &job)?;
        let port = PORTS.start + job.wrapping_add(step.wrapping_mul(STEP_PORT_STRIDE)) % (PORTS.end - PORTS.start);
        env.master_port = number("SLURM_JOB_ID", &port.to_string())?;
    }
    Ok(())
}

/// Returns the number of hosts, which may have different numbers of processes.
pub(super) fn hosts(var: Var<'_>) -> Result<Option<usize>> {
    const STEP: &str = "SLURM_STEP_NUM_NODES";
    var(STEP).map(|count| number(STEP, &count)).transpose()
}

/// Returns the run id. It includes the step: two steps of a job may run at once.
pub(super) fn run_id(var: Var<'_>) -> Option<String> {
    let step = var("SLURM_STEP_ID").unwrap_or_else(|| "batch".into());
    Some(format!("slurm-{}.{step}", var("SLURM_JOB_ID")?))
}

/// Returns the number of processes on this host, and the variable that gives it. `SLURM_NTASKS_PER_NODE` is set only if
/// the user asked for it.
pub(super) fn local_size(var: Var<'_>) -> Result<Option<(&'static str, usize)>> {
    const STEP: &str = "SLURM_STEP_TASKS_PER_NODE";
    const JOB: &str = "SLURM_TASKS_PER_NODE";
    let (name, list) = match (var(STEP), var("SLURM_NTASKS_PER_NODE"), var(JOB)) {
        (Some(list), ..) => (STEP, list),
        (None, None, Some(list)) => (JOB, list),
        _ => return Ok(None),
    };
    let groups = tasks_per_node(&list).ok_or_else(|| {
        Error::Env(format!("{name}={list:?} is malformed: Slurm writes the tasks of each node such as 2(x3),1"))
    })?;
    let nodes = groups.iter().fold(0u64, |sum, group| sum.saturating_add(group.1));
    let node = match var("SLURM_NODEID") {
        Some(node) => number::<u64>("SLURM_NODEID", &node)?,
        None if nodes == 1 => 0,
        None => {
            return Err(Error::Env(format!(
                "{name}={list:?} names {nodes} nodes, but SLURM_NODEID is not set: set it to the index of this node"
            )));
        }
    };
    let mut before = 0u64;
    for (tasks, nodes) in groups {
        before = before.saturating_add(nodes);
        if node < before {
            return Ok(Some((name, tasks)));
        }
    }
    Err(Error::Env(format!("SLURM_NODEID={node} is not among the {nodes} nodes of {name}={list:?}")))
}

/// Parses `2(x3),1` as [(2, 3), (1, 1)]: tasks, and the number of consecutive nodes with as many.
fn tasks_per_node(list: &str) -> Option<Vec<(usize, u64)>> {
    let group = |text: &str| match text.split_once('(') {
        None => Some((text.parse().ok()?, 1)),
        Some((tasks, nodes)) => {
            Some((tasks.parse().ok()?, nodes.strip_prefix('x')?.strip_suffix(')')?.parse().ok().filter(|&n| n > 0)?))
        }
    };
    list.trim().split(',').map(group).collect()
}

/// Returns the first name of a list of hosts: node01 for `node[01-04,07],x`.
fn first_host(list: &str) -> Option<String> {
    let mut rest = list.trim();
    let mut name = String::new();
    loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        name.push_str(&rest[..end]);
        rest = &rest[end..];
        if !rest.starts_with('[') {
            break;
        }
        let (numbers, after) = rest[1..].split_once(']')?;
        let first = numbers.split([',', '-']).next().filter(|first| !first.is_empty())?;
        name.push_str(first);
        rest = after;
    }
    let is_name = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c.is_control() || c == '[');
    (is_name && !rest.starts_with(']')).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_first_host_of_a_list() {
        for (list, first) in [
            ("node[01-04,07],x", "node01"),
            ("alone", "alone"),
            ("a.example.org,b", "a.example.org"),
            ("n7,n[1-2]", "n7"),
            ("rack[2-3]n[05,06]", "rack2n05"),
            ("tux[9]-ib", "tux9-ib"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for list in ["", ",a", "node[", "node[01-04", "node[]", "node[-4]", "node]", "a b", "n[[1]]"] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    #[test]
    fn reads_the_tasks_of_each_node() {
        assert_eq!(tasks_per_node("2(x3),1"), Some(vec![(2, 3), (1, 1)]));
        assert_eq!(tasks_per_node("8"), Some(vec![(8, 1)]));
        for list in ["", "2,", "2(x3", "2(3)", "2(x0)", "(x3)", "two", "-1", "2(x3)1"] {
            assert_eq!(tasks_per_node(list), None, "{list}");
        }
    }
}
