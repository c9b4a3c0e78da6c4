//! What a stream does one after the other: the form in which every library of the double asks for work.

/// How an operation uses an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It reads.
    Read,
    /// It writes, and perhaps reads.
    Write,
}

/// Device memory that an operation uses. Races are looked for by whole allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    /// Any address inside the allocation. Null is no memory.
    pub(crate) at: u64,
    pub(crate) access: Access,
}

/// What came of a call of [`Operation::run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// It waits for other processes: call again later. Other streams go on.
    Waits,
}

/// Something to do on a stream.
pub(crate) struct Operation {
    /// As messages and counts name it: `kernel badd_f32`, `ncclAllGather`.
    pub(crate) name: String,
    pub(crate) touches: Vec<Touch>,
    /// Does it, when its turn has come.
    pub(crate) run: Box<dyn FnMut() -> Progress + Send>,
}
