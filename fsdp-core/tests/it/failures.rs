//! What ranks are told when something goes wrong, with ranks as threads.

use std::{sync::Arc, time::Duration};

use fsdp_core::{
    Allocator, Buffer, DType, DeviceMesh, Error, ExchangePart, GatherPart, Heap, ProcessGroup, Readable, ReduceOp,
    ScatterPart, Work,
    process_group::{Options, Signature, Subject, local},
};

fn gather(group: &ProcessGroup, counts: Vec<usize>) -> Work {
    let input = Buffer::zeros(DType::F32, counts[group.rank()]);
    group.all_gather(vec![GatherPart { input: Arc::new(input), counts }], Heap::shared())
}

fn error(work: Work) -> Error {
    work.wait().unwrap_err()
}

/// Errors of a later collective are those of the first.
fn assert_poisoned(group: &ProcessGroup, first: &Error) {
    assert_eq!(error(group.barrier()).to_string(), first.to_string());
}

#[test]
fn everybody_learns_who_issued_what_when_ranks_disagree() {
    let different: [fn(&ProcessGroup) -> Work; 7] = [
        |group| gather(group, vec![10, 11, 10]),
        |group| group.barrier(),
        |group| group.broadcast(vec![Buffer::zeros(DType::F32, 100_000)], 2),
        |group| group.broadcast(vec![Buffer::zeros(DType::F32, 100_000)], 1),
        |group| group.all_reduce(vec![Buffer::zeros(DType::F32, 100_000)], ReduceOp::Sum),
        |group| group.all_reduce(vec![Buffer::zeros(DType::F32, 100_000)], ReduceOp::Max),
        |group| group.all_to_all(Vec::new(), Heap::shared()),
    ];
    for odd in 0..3 {
        for (index, issue) in different.iter().enumerate() {
            let errors = local::run(3, |group| {
                group.barrier().wait().unwrap();
                let error = error(match group.rank() == odd {
                    true => issue(&group),
                    false => different[(index + 1) % different.len()](&group),
                });
                assert_poisoned(&group, &error);
                error
            });
            for (rank, error) in errors.iter().enumerate() {
                let Error::Mismatch { rank: by, sequence: 1, details, .. } = error else {
                    panic!("rank {rank}: {error}")
                };
                assert_eq!(*by, rank);
                assert!(details.contains(&format!("rank(s) [{odd}] issued ")), "{details}");
                assert_eq!(details.matches("issued").count(), 2, "{details}");
            }
        }
    }
}

/// Where the texts of the calls are the same, what differs is said all the same.
#[test]
fn what_differs_is_spelled_out_for_everything_that_is_compared() {
    type Issue = fn(&ProcessGroup, bool) -> Work;
    fn parts(group: &ProcessGroup, count: usize, odd: impl Fn(usize, &mut Buffer)) -> Work {
        let mut buffers = vec![Buffer::zeros(DType::F32, 4); count];
        buffers.iter_mut().enumerate().for_each(|(at, buffer)| odd(at, buffer));
        group.all_reduce(buffers, ReduceOp::Sum)
    }
    fn names(group: &ProcessGroup, names: impl Iterator<Item = usize>, members: impl Iterator<Item = usize>) -> Work {
        let subject = Subject::new("unit `x`", names.map(|name| format!("p{name}")));
        group.signed(Signature::new(&subject, members)).barrier()
    }
    let cases: [(Issue, &str); 8] = [
        (
            |group, odd| {
                parts(group, 9, |at, b| {
                    if odd && at == 7 {
                        *b = Buffer::zeros(DType::F32, 5)
                    }
                })
            },
            "; part 7 is 4 F32 on rank(s) [0, 2], 5 F32 on rank(s) [1]",
        ),
        (
            |group, odd| {
                parts(group, 9, |at, b| {
                    if odd && at == 8 {
                        *b = Buffer::zeros(DType::BF16, 4)
                    }
                })
            },
            "; part 8 is 4 F32 on rank(s) [0, 2], 4 BF16 on rank(s) [1]",
        ),
        (
            |group, odd| {
                let counts = |at: usize| if odd && at == 6 { vec![2, 1, 1] } else { vec![1, 1, 2] };
                let part = |at| ScatterPart { input: Buffer::zeros(DType::F32, 4), counts: counts(at) };
                group.reduce_scatter((0..8).map(part).collect(), ReduceOp::Sum, Heap::shared())
            },
            "; part 6 is 4 F32 (split ",
        ),
        (
            |group, odd| {
                parts(group, 400, |at, b| {
                    if odd && at == 399 {
                        *b = Buffer::zeros(DType::F32, 5)
                    }
                })
            },
            "; they differ after part 191: their fingerprints are ",
        ),
        (
            |group, odd| names(group, 0..20, if odd { 9..19 } else { 8..18 }),
            "; `p8` is on rank(s) [0, 2] only, `p18` on rank(s) [1] only",
        ),
        (
            |group, odd| names(group, (0..19).chain(Some(if odd { 99 } else { 19 })), 0..20),
            "; they list other names by that, or in another order: 20 on rank(s) [0, 2], 20 on rank(s) [1]",
        ),
        (
            |group, odd| names(group, 0..5000, (0..7).chain(Some(if odd { 4500 } else { 4501 }))),
            "; they differ after the 4096th name: their fingerprints are ",
        ),
        (
            |group, odd| {
                let how = "h".repeat(2000) + if odd { "1" } else { "2" };
                group.signed(Signature::new(&Subject::new("unit `x`", []), []).with_how(how)).barrier()
            },
            "; they differ behind the end of these texts: their fingerprints are ",
        ),
    ];
    for (issue, text) in cases {
        let errors = local::run(3, |group| error(issue(&group, group.rank() == 1)));
        for (rank, error) in errors.iter().enumerate() {
            assert!(matches!(error, Error::Mismatch { rank: by, .. } if *by == rank), "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

#[test]
fn a_signature_costs_nothing_where_ranks_agree_and_goes_where_the_group_goes() {
    local::run(3, |group| {
        let subject = Subject::new("unit `x`", ["a".to_string(), "b".to_string()]);
        let signed = group.signed(Signature::new(&subject, [1]));
        assert_eq!((signed.rank(), signed.size(), signed.name()), (group.rank(), 3, group.name()));
        let sum = |group: &ProcessGroup| group.all_reduce(vec![Buffer::U32(vec![1])], ReduceOp::Sum);
        let (first, second) = (sum(&signed), sum(&group));
        drop(signed);
        assert_eq!(
            (first.wait().unwrap(), second.wait().unwrap()),
            (vec![Buffer::U32(vec![3])], vec![Buffer::U32(vec![3])])
        );
        // The handle that stays behind keeps the group.
        let signed = group.signed(Signature::new(&subject, [0]));
        drop(group);
        signed.barrier().wait().unwrap();
        assert_eq!(signed.split(0, 0).unwrap().size(), 3);
        // One that is signed and one that is not are two.
        let other = if signed.rank() == 0 { signed.signed(Signature::new(&subject, [])) } else { signed };
        let error = error(other.barrier());
        assert!(
            error
                .to_string()
                .contains("rank(s) [0] issued barrier(unit `x`); rank(s) [1, 2] issued barrier(unit `x`: a)"),
            "{error}"
        );
    });
}

#[test]
fn an_output_that_there_is_no_memory_for_is_an_error_for_everybody() {
    let errors = local::run(2, |group| {
        let huge = 1 << 55;
        let counts = vec![huge, 4];
        /// Says that it has more than there is.
        struct Huge(usize);
        impl Readable for Huge {
            fn dtype(&self) -> DType {
                DType::F32
            }
            fn len(&self) -> usize {
                self.0
            }
            fn read(&self, _: &mut dyn FnMut(&[u8])) -> Result<(), String> {
                Err("there is nothing".into())
            }
        }
        let input = Arc::new(Huge(counts[group.rank()]));
        error(group.all_gather(vec![GatherPart { input, counts }], Heap::shared()))
    });
    for error in errors {
        assert!(error.to_string().contains("no memory for 36028797018963972 elements of F32"), "{error}");
    }
}

#[test]
fn the_two_ends_of_an_exchange_must_agree() {
    let errors = local::run(3, |group| {
        let rank = group.rank();
        let mut recv_counts = vec![1; 3];
        if rank == 2 {
            recv_counts[0] = 5;
        }
        let part = ExchangePart { input: Buffer::zeros(DType::F32, 3), send_counts: vec![1; 3], recv_counts };
        error(group.all_to_all(vec![part], Heap::shared()))
    });
    for error in errors {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("what rank 0 sends to rank 2"), "{error}");
    }
}

#[test]
fn a_timeout_names_the_ranks_that_did_not_come() {
    let options = Options::default().with_timeout(Duration::from_millis(300));
    let given_up = std::sync::Barrier::new(4);
    let errors = local::run_with(4, options, |group| {
        let issue = || error(group.all_reduce(vec![Buffer::zeros(DType::F32, 10)], ReduceOp::Sum));
        // Ranks 1 and 3 stay in the group but don't take part until the others gave up.
        if group.rank() % 2 == 0 {
            let error = issue();
            assert_poisoned(&group, &error);
            given_up.wait();
            (error, None)
        } else {
            given_up.wait();
            (issue(), Some(()))
        }
    });
    for (rank, (error, late)) in errors.into_iter().enumerate() {
        match (error, late) {
            (Error::Timeout { missing, what, .. }, None) => {
                assert_eq!(missing, [1, 3], "rank {rank}");
                assert_eq!(what, "all_reduce (collective 0)");
            }
            (Error::PeerLost { peer, how, .. }, Some(())) => {
                assert!(peer % 2 == 0 && how.contains("came too late"), "{how}");
            }
            (error, _) => panic!("rank {rank}: {error}"),
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let errors = local::run(3, |group| {
        let first = group.barrier();
        if group.rank() == 1 {
            // Dropping the group lets what was issued finish.
            return None;
        }
        first.wait().unwrap();
        Some(error(group.barrier()))
    });
    for error in errors.into_iter().flatten() {
        let Error::PeerLost { peer: 1, how, .. } = &error else { panic!("{error}") };
        assert_eq!(how, "left the group");
    }
}

#[test]
fn dropping_a_group_with_collectives_in_its_queue_ends_also_when_a_peer_has_left() {
    let errors = local::run(3, |group| {
        if group.rank() == 2 {
            return Vec::new();
        }
        let works: Vec<_> = (0..5).map(|_| group.barrier()).collect();
        drop(group);
        works.into_iter().map(|mut work| work.is_done().then(|| error(work))).collect()
    });
    assert_eq!(errors.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 0]);
    for error in errors.into_iter().flatten() {
        assert!(matches!(error, Some(Error::PeerLost { peer: 2, .. })), "{error:?}");
    }
}

#[test]
fn bad_arguments_fail_at_once_and_for_everybody_after_what_was_issued_before() {
    type Issue = fn(&ProcessGroup) -> Work;
    let bad: [(Issue, &str); 9] = [
        (|group| gather(group, vec![1, 1, 1]), "counts has 3 entries but the group has 2 ranks"),
        (
            |group| {
                let input = Arc::new(Buffer::zeros(DType::F32, 3));
                group.all_gather(vec![GatherPart { input, counts: vec![2, 2] }], Heap::shared())
            },
            "the input has 3 elements but counts[0] is 2",
        ),
        (
            |group| {
                let input = Arc::new(Buffer::zeros(DType::F32, 3));
                group.all_gather(vec![GatherPart { input, counts: vec![3, usize::MAX] }], Heap::shared())
            },
            "more than memory can hold",
        ),
        (
            |group| {
                let part = ScatterPart { input: Buffer::zeros(DType::F32, 3), counts: vec![2, 2] };
                group.reduce_scatter(vec![part], ReduceOp::Sum, Heap::shared())
            },
            "the input has 3 elements but counts add up to 4",
        ),
        (
            |group| {
                let part = ScatterPart { input: Buffer::zeros(DType::I64, 4), counts: vec![2, 2] };
                group.reduce_scatter(vec![part], ReduceOp::Avg, Heap::shared())
            },
            "the average of I64",
        ),
        (|group| group.all_reduce(vec![Buffer::zeros(DType::U8, 1)], ReduceOp::Avg), "the average of U8"),
        (|group| group.broadcast(Vec::new(), 2), "root 2 is no rank of a group of 2"),
        (
            |group| {
                let input = Buffer::zeros(DType::F32, 2);
                let part = ExchangePart { input, send_counts: vec![1, 1], recv_counts: vec![2, 1] };
                group.all_to_all(vec![part], Heap::shared())
            },
            "both are what stays here",
        ),
        (
            |group| {
                let input = Buffer::zeros(DType::F32, 2);
                let part = ExchangePart { input, send_counts: vec![1, 1], recv_counts: vec![1] };
                group.all_to_all(vec![part], Heap::shared())
            },
            "recv_counts has 1 entries",
        ),
    ];
    for (issue, text) in bad {
        local::run(2, |group| {
            let before = group.all_reduce(vec![Buffer::U32(vec![1])], ReduceOp::Sum);
            if group.rank() == 0 {
                let mut work = issue(&group);
                assert!(work.is_done());
                let error = error(work);
                assert!(matches!(error, Error::Argument { rank: 0, .. }), "{error}");
                assert!(error.to_string().contains(text), "{error}");
                assert_poisoned(&group, &error);
            } else {
                let error = error(group.barrier());
                assert!(matches!(error, Error::PeerLost { peer: 0, .. }), "{error}");
                assert!(error.to_string().contains(text), "{error}");
            }
            assert_eq!(before.wait().unwrap(), [Buffer::U32(vec![2])]);
        });
    }
}

type Read = fn(&mut dyn FnMut(&[u8])) -> Result<(), String>;

/// An input that misbehaves when it is read.
struct Bad(Read);

impl Readable for Bad {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn len(&self) -> usize {
        4
    }
    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        self.0(f)
    }
}

#[test]
fn inputs_that_misbehave_fail_the_group_instead_of_hanging_it() {
    let bad: [(Read, &str); 4] = [
        (|_| Err("it is on another device".into()), "it is on another device"),
        (|_| Ok(()), "fewer bytes"),
        (
            |f| {
                f(&[0; 15]);
                Ok(())
            },
            "fewer bytes",
        ),
        (|_| panic!("poisoned lock"), "all_gather panicked: poisoned lock"),
    ];
    for (read, text) in bad {
        for size in 1..3 {
            local::run(size, |group| {
                let input: Arc<dyn Readable> =
                    if group.rank() == 0 { Arc::new(Bad(read)) } else { Arc::new(Buffer::zeros(DType::F32, 4)) };
                let error = error(group.all_gather(vec![GatherPart { input, counts: vec![4; size] }], Heap::shared()));
                assert!(error.to_string().contains(text), "{error}");
                assert_poisoned(&group, &error);
            });
        }
    }
}

/// An allocator that gives something else.
struct Stingy;

impl Allocator for Stingy {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer, Error> {
        Buffer::try_zeros(dtype, len - 1)
    }
    fn give(&self, _: Buffer) {}
}

#[test]
fn an_allocator_that_gives_something_else_is_an_error_for_everybody() {
    local::run(2, |group| {
        let memory: Arc<dyn Allocator> = if group.rank() == 1 { Arc::new(Stingy) } else { Heap::shared() };
        let part = ScatterPart { input: Buffer::zeros(DType::F32, 4), counts: vec![2, 2] };
        let error = error(group.reduce_scatter(vec![part], ReduceOp::Sum, memory));
        assert!(error.to_string().contains("the allocator gave a buffer of 1 F32 where 2 F32"), "{error}");
    });
}

#[test]
fn a_panic_of_a_rank_is_reported_with_its_number() {
    let panic = std::panic::catch_unwind(|| {
        local::run(3, |group| {
            assert!(group.rank() != 1, "on purpose");
            group.barrier().wait().is_err()
        })
    })
    .unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("rank 1 panicked: on purpose") && !text.contains("rank 0"), "{text}");
}

#[test]
fn ranks_that_lay_out_different_meshes_are_told_so() {
    let outcomes = local::run(4, |world| {
        let names = if world.rank() == 2 { ["tp", "dp"] } else { ["dp", "tp"] };
        DeviceMesh::new(&world, &names.map(|name| (name, 2))).map(drop)
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Mesh(_)), "{error}");
        let others = if rank == 2 { "[0, 1, 3]" } else { "[2]" };
        assert!(error.to_string().contains(&format!("rank(s) {others} another")), "{error}");
    }
}

#[test]
fn a_split_that_one_rank_does_not_join_is_a_mismatch() {
    for error in local::run(2, |group| match group.rank() {
        0 => group.split(0, 0).map(drop).unwrap_err(),
        _ => error(group.barrier()),
    }) {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("issued split()"), "{error}");
    }
}
