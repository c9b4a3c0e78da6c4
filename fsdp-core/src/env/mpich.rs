//! What tells the jobs of MPICH's `mpirun` (Hydra) apart: no variable does.

type Var<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The processes of a job on one host inherit one socket of their common parent; `socket` tells which it is. Another
/// job has another parent, and another socket.
pub(super) fn run_id(var: Var<'_>, socket: Var<'_>) -> Option<String> {
    Some(format!("mpich-{}", socket(&var("HYDI_CONTROL_FD")?)?))
}

/// The number of the socket that this file descriptor of ours is, if it is one.
pub(super) fn socket(descriptor: &str) -> Option<String> {
    let descriptor: u32 = descriptor.trim().parse().ok()?;
    let target = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
    Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
}
