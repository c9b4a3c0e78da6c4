//! Errors of ranks that are threads.

use std::sync::Arc;

use fsdp_core::{
    Buffer, DType, DeviceMesh, Error, ExchangePart, GatherPart, Heap, ProcessGroup, Readable, ReduceOp, ScatterPart,
    Work,
    process_group::{Signature, Subject, local},
};

fn gather(group: &ProcessGroup, counts: Vec<usize>) -> Work {
    let input = Buffer::zeros(DType::F32, counts[group.rank()]);
    group.all_gather(vec![GatherPart { input: Arc::new(input), counts }], Heap::shared())
}

fn error(work: Work) -> Error {
    work.wait().unwrap_err()
}

/// Checks that later collectives return the first error.
fn assert_stays_failed(group: &ProcessGroup, first: &Error) {
    assert_eq!(error(group.barrier()).to_string(), first.to_string());
}

#[test]
fn all_ranks_learn_what_each_rank_issued() {
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
                assert_stays_failed(&group, &error);
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

// Also where the texts of the calls are equal.
#[test]
fn mismatches_name_every_kind_of_difference() {
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
            "; the names differ, or their order: 20 on rank(s) [0, 2], 20 on rank(s) [1]",
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
            "; they differ after the end of these texts: their fingerprints are ",
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
fn signed_handles_are_of_the_same_group() {
    local::run(3, |group| {
        let subject = Subject::new("unit `x`", ["a".to_string(), "b".to_string()]);
        let signed = group.signed(Signature::new(&subject, [0]));
        // The remaining handle keeps the group.
        drop(group);
        signed.barrier().wait().unwrap();
        assert_eq!(signed.split(0, 0).unwrap().size(), 3);
        // A signed and an unsigned collective differ.
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
fn outputs_larger_than_memory_fail_all_ranks() {
    let errors = local::run(2, |group| {
        let huge = 1 << 55;
        let counts = vec![huge, 4];
        /// Claims more elements than memory can hold.
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
fn dropping_a_group_ends_after_a_peer_has_left() {
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
fn bad_arguments_fail_at_once_and_fail_all_ranks() {
    type Issue = fn(&ProcessGroup) -> Work;
    let bad: [(Issue, &str); 9] = [
        (|group| gather(group, vec![1, 1, 1]), "counts has 3 entries, expected 2"),
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
            "more elements than memory can hold",
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
        (|group| group.broadcast(Vec::new(), 2), "root 2 is not a rank of a group of 2"),
        (
            |group| {
                let input = Buffer::zeros(DType::F32, 2);
                let part = ExchangePart { input, send_counts: vec![1, 1], recv_counts: vec![2, 1] };
                group.all_to_all(vec![part], Heap::shared())
            },
            "make them equal",
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
                assert_stays_failed(&group, &error);
            } else {
                let error = error(group.barrier());
                assert!(matches!(error, Error::PeerLost { peer: 0, .. }), "{error}");
                assert!(error.to_string().contains(text), "{error}");
            }
            assert_eq!(before.wait().unwrap(), [Buffer::U32(vec![2])]);
        });
    }
}

#[test]
fn panics_are_reported_with_the_rank() {
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
fn different_meshes_are_errors() {
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
