//! What keeps a collective that does not end: what each rank shows that it is at, and what follows.

use std::time::Duration;

use super::{
    super::{collective::Collective, lookout::Lookout},
    failure::device_error,
};
use crate::{DeviceId, Error};

/// What a rank shows of itself.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shown {
    /// The number behind that of the last collective that it enqueued.
    issued: u64,
    /// The one that it waits in, as it announced it. Nothing, where it waits in none.
    announced: Vec<u8>,
}

impl Shown {
    pub(super) fn of(issued: u64, first: Option<&Collective<'_>>) -> Self {
        let announced = first.map_or(vec![], |collective| {
            let mut bytes = vec![0; Collective::announcement_len(collective.group().size)];
            collective.announce(&mut bytes);
            bytes
        });
        Shown { issued, announced }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        [&self.issued.to_le_bytes()[..], &self.announced].concat()
    }

    /// Reads what [`Shown::to_bytes`] made in a group of `ranks` ranks.
    fn from_bytes(bytes: &[u8], ranks: usize) -> Option<Self> {
        let (issued, announced) = bytes.split_first_chunk::<8>()?;
        let is_whole = announced.is_empty() || announced.len() == Collective::announcement_len(ranks);
        let issued = u64::from_le_bytes(*issued);
        is_whole.then(|| Shown { issued, announced: announced.to_vec() })
    }
}

/// The error of a rank that waited for `waited` in a collective of a device that did not end. Without a lookout nobody
/// knows who came.
pub(super) fn of(
    collective: &Collective<'_>,
    device: DeviceId,
    waited: Duration,
    lookout: Option<&dyn Lookout>,
) -> Error {
    let group = collective.group();
    let peers = (0..group.size).filter(|peer| *peer != group.rank);
    let Some(lookout) = lookout else {
        return collective.timed_out(peers.collect(), waited);
    };
    let own = Shown::of(0, Some(collective)).announced;
    // A rank that shows nothing has issued nothing.
    let shown: Vec<Shown> = (0..group.size)
        .map(|rank| {
            let shown = lookout.shown(rank).and_then(|bytes| Shown::from_bytes(&bytes, group.size));
            shown.unwrap_or(Shown { issued: 0, announced: vec![] })
        })
        .collect();
    let number = |announced: &[u8]| announced.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let is_in_it = |rank: usize| number(&shown[rank].announced) == Some(collective.sequence());
    let issued = |rank: usize| if is_in_it(rank) { &shown[rank].announced[..] } else { &own[..] };
    // Elsewhere: not yet there, or in an earlier one.
    let is_missing = |rank: &usize| {
        shown[*rank].issued <= collective.sequence()
            || number(&shown[*rank].announced).is_some_and(|number| number < collective.sequence())
    };
    let missing: Vec<_> = peers.filter(is_missing).collect();
    if let Err(mut mismatch) = collective.compare(issued) {
        if let Error::Mismatch { details, .. } = &mut mismatch
            && !missing.is_empty()
        {
            details.push_str(&format!("; rank(s) {missing:?} are elsewhere, and are taken to have issued the same"));
        }
        return mismatch;
    }
    if !missing.is_empty() {
        return collective.timed_out(missing, waited);
    }
    let cause = format!(
        "it does not end although all ranks have issued it, for {:.1} s now: a link or a device does not get on, or \
         ranks issued the collectives of several groups in different orders. NCCL_DEBUG=INFO says more, and \
         FSDP_NCCL_CHECK=always compares every collective before it runs",
        waited.as_secs_f64()
    );
    device_error(device, &format!("rank {}: {collective} in group \"{}\"", group.rank, group.name), cause)
}

/// The error of a collective that has not begun for `waited`, though all before it have ended: the device still does
/// what was issued before. Peers have no part in that.
pub(super) fn not_begun(collective: &Collective<'_>, device: DeviceId, waited: Duration) -> Error {
    let group = collective.group();
    let cause = format!(
        "it has not begun for {:.1} s, because the device has not finished what this rank computes before it: a kernel \
         does not end, or takes longer than three times FSDP_TIMEOUT_S. CUDA_LAUNCH_BLOCKING=1 shows which call it is; \
         raise FSDP_TIMEOUT_S if it may take so long",
        waited.as_secs_f64()
    );
    device_error(device, &format!("rank {}: {collective} in group \"{}\"", group.rank, group.name), cause)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::{
        super::super::{call::Call, failure::Failure, lookout::Gone, membership::Membership},
        *,
    };
    use crate::DType;

    /// What three ranks show.
    struct Boards(Mutex<[Option<Vec<u8>>; 3]>);

    impl Lookout for Boards {
        fn gone(&self) -> Option<(usize, Gone)> {
            None
        }
        fn fail(&self, _: &Failure) {}
        fn show(&self, _: &[u8]) {}
        fn shown(&self, peer: usize) -> Option<Vec<u8>> {
            self.0.lock().unwrap()[peer].clone()
        }
    }

    #[test]
    fn a_rank_that_is_elsewhere_is_named_and_so_is_one_that_issued_something_else() {
        let group = Membership::world(0, 3, Duration::from_secs(1));
        let call = |name, count: usize| Call::new(name, "", [(DType::F32, &[count][..])].into_iter());
        let (sum, other) = (call("all_reduce", 8), call("broadcast", 8));
        let at = |call, sequence| Shown::of(sequence + 1, Some(&Collective::new(call, &group, sequence, false)));
        let idle = |issued| Shown { issued, announced: vec![] };
        let error = |second: Option<Shown>, third: Option<Shown>| {
            let boards = [Some(at(&sum, 7)), second, third].map(|shown| shown.map(|shown| shown.to_bytes()));
            let collective = Collective::new(&sum, &group, 7, false);
            of(&collective, DeviceId::Cuda(0), group.timeout, Some(&Boards(Mutex::new(boards))))
        };
        let is_missing = |error: &Error, ranks: &[usize]| match error {
            Error::Timeout { missing, what, .. } => missing == ranks && what.contains("collective 7"),
            _ => false,
        };
        for absent in [None, Some(idle(7)), Some(at(&other, 5))] {
            let error = error(Some(at(&sum, 7)), absent);
            assert!(is_missing(&error, &[2]), "{error}");
        }
        let mismatch = error(Some(at(&other, 7)), Some(idle(3))).to_string();
        let parts = ["rank(s) [1] issued broadcast(", "rank(s) [2] are elsewhere"];
        assert!(parts.iter().all(|part| mismatch.contains(part)), "{mismatch}");
        // Who is through with it is not missing, nor is one that shows something unreadable issued anything.
        let stuck = error(Some(at(&sum, 7)), Some(idle(9))).to_string();
        assert!(stuck.contains("although all ranks have issued it"), "{stuck}");
        assert_eq!(Shown::from_bytes(&[1; 9], 3), None);
    }
}
