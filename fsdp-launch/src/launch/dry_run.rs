//! `--dry-run`: prints the launch as shell commands.

use std::{ffi::OsStr, fmt::Write, os::unix::ffi::OsStrExt, path::Path};

use crate::{
    LaunchSpec, Result,
    launch::{master_port, run_id},
    rank::{affinity, environment::Job},
    rendezvous::Assignment,
};

/// Returns one shell command for each rank of this host, with its environment. Does not start anything. Port and run id
/// are examples. Other hosts are assumed to have as many ranks.
///
/// # Errors
/// As [`launch`](crate::launch), for errors before a rank starts.
pub fn dry_run(spec: &LaunchSpec) -> Result<String> {
    let mut assignment = Assignment::single_node(&run_id(spec)?, spec.nproc_per_node, master_port(spec)?);
    let mut text = String::new();
    if let Some(rendezvous) = &spec.rendezvous {
        let hosts = rendezvous.nnodes.1 as usize;
        assignment.group_rank = rendezvous.node_rank.unwrap_or(0) as usize;
        (assignment.group_world_size, assignment.machines) = (hosts, hosts);
        assignment.first_rank = assignment.group_rank * spec.nproc_per_node;
        assignment.first_role_rank = assignment.first_rank;
        assignment.world_size = hosts * spec.nproc_per_node;
        assignment.role_world_size = assignment.world_size;
        assignment.master_addr.clone_from(&rendezvous.endpoint.host);
        line(&mut text, format_args!("# host {} of {hosts}, if all are like this one", assignment.group_rank));
    }
    if let Some(address) = &spec.master_addr {
        assignment.master_addr.clone_from(address);
    }
    let job = Job { spec, assignment: &assignment, launch_id: "", log_dir: None, error_dir: Path::new("") };
    for rank in 0..spec.nproc_per_node {
        line(&mut text, format_args!("# rank {}", job.rank(rank)));
        for (name, value) in job.variables(rank)? {
            // The launcher creates the directory of this file, and reads it.
            if name != "TORCHELASTIC_ERROR_FILE" {
                line(&mut text, format_args!("{name}={} \\", quoted(&value)));
            }
        }
        let mut words: Vec<String> = Vec::new();
        if let Some(cores) = affinity::cores_of_rank(spec, rank)? {
            let cores: Vec<String> = cores.iter().map(usize::to_string).collect();
            words.extend(["taskset".into(), "--cpu-list".into(), cores.join(",")]);
        }
        words.push(quoted(spec.program.as_os_str()));
        words.extend(spec.args.iter().map(|arg| quoted(arg)));
        line(&mut text, format_args!("{}", words.join(" ")));
    }
    Ok(text)
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    writeln!(text, "{arguments}").ok();
}

fn quoted(word: &OsStr) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_./:,=@%+".contains(byte);
    let text = word.to_string_lossy();
    if !word.is_empty() && word.as_bytes().iter().all(plain) {
        return text.into_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoting_survives_a_shell() {
        for word in ["plain", "", "two words", "it's", "$HOME `x` \"y\"", "a\nb", "*"] {
            let script = format!("printf %s {}", quoted(OsStr::new(word)));
            let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }
}
