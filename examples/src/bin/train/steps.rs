//! The names of a run's checkpoints.

/// The name of the checkpoint at a step.
pub(crate) fn step_name(step: usize) -> String {
    format!("step-{step:08}")
}

/// The step of a checkpoint's name.
pub(crate) fn step_of(name: &str) -> Option<usize> {
    name.strip_prefix("step-")?.parse().ok().filter(|&step| step_name(step) == name)
}
