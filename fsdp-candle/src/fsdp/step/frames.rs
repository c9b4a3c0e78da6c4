//! The units whose forwards run: those that are called, and those made by name of which a parameter was used.

/// A forward that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) unit: usize,
    /// The pass that it belongs to.
    pub(super) pass: usize,
    /// Whether a backward may follow.
    pub(super) graph: bool,
    how: How,
}

#[derive(Clone, Copy, Debug)]
enum How {
    /// By a call, which tells its end.
    Called {
        /// Where units with a fixed order go on: those made by name inside this one come one after the other.
        next: usize,
    },
    /// By a use of a parameter: what follows tells the end.
    Used,
}

/// The innermost last.
#[derive(Default)]
pub(super) struct Frames(Vec<Frame>);

impl Frames {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn call(&mut self, unit: usize, pass: usize, graph: bool) {
        self.0.push(Frame { unit, pass, graph, how: How::Called { next: 0 } });
    }

    pub(super) fn open(&mut self, unit: usize, pass: usize, graph: bool) {
        self.0.push(Frame { unit, pass, graph, how: How::Used });
    }

    /// Whether the unit's forward runs. With `graph` a backward may follow from now on.
    pub(super) fn has(&mut self, unit: usize, graph: bool) -> bool {
        let frame = self.0.iter_mut().rev().find(|frame| frame.unit == unit);
        frame.map(|frame| frame.graph |= graph).is_some()
    }

    /// Ends the innermost forward that no call will end, unless `keeps` it.
    pub(super) fn close(&mut self, keeps: impl Fn(usize) -> bool) -> Option<Frame> {
        self.0.pop_if(|frame| matches!(frame.how, How::Used) && !keeps(frame.unit))
    }

    /// Ends the innermost call, and what was used inside it.
    pub(super) fn end_call(&mut self) {
        while self.0.pop().is_some_and(|frame| matches!(frame.how, How::Used)) {}
    }

    /// Where the innermost call of a unit is in the order of those made by name inside it.
    pub(super) fn next_of(&mut self, unit: usize) -> Option<&mut usize> {
        self.0.iter_mut().rev().find_map(|frame| match &mut frame.how {
            How::Called { next } if frame.unit == unit => Some(next),
            _ => None,
        })
    }
}
