//! What layers say of a parameter: that they hold it, and that they are about to use it.

use std::ops::Range;
use std::sync::Weak;
use std::sync::atomic::Ordering;

use candle_core::Result;

use super::param::FsdpParam;
use super::uses::Uses;
use crate::error::Error;

impl FsdpParam {
    /// Notes that a layer of `nn` holds the parameter.
    pub(crate) fn note_layer(&self) {
        self.has_layer.store(true, Ordering::Relaxed);
    }

    /// Notes that a layer holds the parameter which says so before it uses it.
    pub(crate) fn claim(&self) {
        self.claimed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Relaxed)
    }

    pub(super) fn tell_uses(&self, to: Weak<dyn Uses>) {
        // Set once, by the call that made the unit.
        let _ = self.uses.set(to);
    }

    /// Says that a layer is about to use the parameter's values.
    ///
    /// # Errors
    /// Those of a gather, and when the full tensor can't be used now.
    pub(crate) fn used(&self) -> Result<()> {
        self.tell_use()?;
        self.check_unsharded()
    }

    /// Says that a layer is about to use the parameter's values, which the caller then looks for.
    ///
    /// # Errors
    /// Those of a gather.
    pub(crate) fn tell_use(&self) -> Result<()> {
        self.tell(!self.is_unsharded())
    }

    /// Says that a layer is about to leave a gradient with the parameter, whose values may be gone.
    ///
    /// # Errors
    /// Those of a gather.
    pub(crate) fn tell_gradient(&self) -> Result<()> {
        self.tell(false)
    }

    fn tell(&self, misses: bool) -> Result<()> {
        match self.uses.get().and_then(Weak::upgrade) {
            Some(uses) => uses.used(self.unit()?.0, misses),
            None => Ok(()),
        }
    }

    /// Notes that a closure which uses the parameter runs again in backward; see [`Uses::replays`]. Returns whether
    /// the parameter tells of its uses.
    pub(crate) fn replays(&self, made: Range<usize>, node: usize) -> bool {
        let uses = self.uses.get().and_then(Weak::upgrade);
        uses.map(|uses| uses.replays(made, node)).is_some()
    }

    /// An error that says why the full tensor can't be used now, unless it can.
    fn check_unsharded(&self) -> Result<()> {
        if self.is_unsharded() {
            return Ok(());
        }
        let unit = self.unit.get().map_or("(being built)", |place| &place.unit.name);
        let message = match self.uses.get() {
            Some(_) => format!(
                "its values are sharded and not gathered here: unit `{unit}` is gathered inside a forward of the model \
                 alone. Call the model through its FsdpModule (`forward`, `call` or `call_mut`), which runs the hooks"
            ),
            None => format!(
                "its values are sharded and not gathered here: unit `{unit}` is not inside a forward of its own. Call \
                 the unit through its FsdpModule (`forward` or `call`), which runs the hooks, or `unshard()` it first"
            ),
        };
        Err(Error::Parameter { name: self.name().into(), message }.into())
    }
}
