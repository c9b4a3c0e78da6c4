//! What is said of gradients that are missing or wrong.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::cut::{GraphCut, listed};
use super::watch::GraphWatch;

/// What has been seen and said of one model.
pub(crate) struct Diagnostics {
    /// Looks for cuts of the graph.
    pub(crate) graph: GraphWatch,
    reported: Mutex<HashSet<String>>,
    /// Parameters that no rank's last backward reached.
    unused: Mutex<Vec<String>>,
    /// This process's rank in the mesh: the first speaks for all.
    rank: usize,
}

impl Diagnostics {
    pub(crate) fn of_rank(rank: usize) -> Self {
        Diagnostics { graph: GraphWatch::default(), reported: Mutex::default(), unused: Mutex::default(), rank }
    }

    fn reported(&self) -> MutexGuard<'_, HashSet<String>> {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says once what is wrong with gradients: on the first rank, for all others ran the same units, unless the model
    /// lets them run different ones.
    pub(crate) fn report(&self, without_gradient: Vec<String>, cuts: &[GraphCut], ranks_may_differ: bool) {
        let new: Vec<String> = {
            let mut reported = self.reported();
            without_gradient.into_iter().filter(|name| reported.insert(name.clone())).collect()
        };
        let Some(message) = message(&new, cuts) else { return };
        if self.rank != 0 && !ranks_may_differ {
            tracing::debug!("{message}");
        } else if tracing::dispatcher::has_been_set() {
            tracing::warn!("{message}");
        } else {
            // Too grave to go unheard in a program that has no subscriber.
            // `eprintln!` panics where stderr is on a full disk.
            let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("warning: {message}\n"));
        }
    }

    /// Notes what the last backward has not reached.
    pub(crate) fn set_unused(&self, names: Vec<String>) {
        *self.unused.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// What the last backward has not reached.
    pub(crate) fn unused(&self) -> Vec<String> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The names reported so far, sorted.
    pub(crate) fn without_gradient(&self) -> Vec<String> {
        let mut names: Vec<String> = self.reported().iter().cloned().collect();
        names.sort();
        names
    }
}

/// What a program's author is told about gradients that are missing or wrong, if any are.
fn message(without_gradient: &[String], cuts: &[GraphCut]) -> Option<String> {
    if without_gradient.is_empty() && cuts.is_empty() {
        return None;
    }
    let mut text = String::from("gradients are missing or wrong:");
    for cut in cuts {
        text += &format!("\n  - {cut}");
    }
    let mut before: Vec<String> = cuts.iter().flat_map(|cut| cut.before.clone()).collect();
    before.sort();
    before.dedup();
    if !before.is_empty() {
        text += &format!("\n  - wrong for what comes before these, {} parameters: {}", before.len(), listed(&before));
    }
    if !without_gradient.is_empty() {
        text += &format!(
            "\n  - these trainable parameters took part in forward and got no gradient: {}. Either they do not reach \
             the loss, or a layer cut the graph, and then the gradients of everything before it are wrong too",
            listed(without_gradient)
        );
    }
    text += "\n  candle_nn's LayerNorm, RmsNorm, softmax_last_dim and rotary_emb have no backward: use those of \
             fsdp_candle::nn. (What was detached on purpose is as it should be.)";
    Some(text)
}
