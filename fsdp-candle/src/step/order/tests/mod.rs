//! Made-up models on made-up ranks: what the order says is written down and held against what must be true.

mod log;
mod model;
mod rank;

use proptest::prelude::*;

use super::*;
use crate::policy::ReshardAfterForward::Default;
use log::assert_alike;
use model::Tape;
use rank::Rank;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn all_ranks_issue_the_same_and_gather_no_more_than_they_need(
        tape in prop::collection::vec(any::<u8>(), 0..400),
        loss in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let model = Tape(tape.into()).model(false);
        let logs: Vec<_> = (0..2)
            .map(|_| {
                let (mut rank, mut loss) = (Rank::new(&model), Tape(loss.clone().into()));
                model.iterations.iter().for_each(|iteration| rank.run(iteration, || !loss.once_in(9)));
                rank.log
            })
            .collect();
        assert_alike(&logs);
    }

    #[test]
    fn ranks_whose_losses_reach_different_units_issue_the_same(
        tape in prop::collection::vec(any::<u8>(), 0..400),
        losses in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 2..5),
    ) {
        let mut model = Tape(tape.into()).model(true);
        // Lists of units to gather name units that other ranks do not come to.
        for unit in &mut model.units {
            unit.rules.backward_prefetch.clear();
        }
        let logs: Vec<_> = losses
            .into_iter()
            .map(|loss| {
                let (mut rank, mut loss) = (Rank::new(&model), Tape(loss.into()));
                model.iterations.iter().for_each(|iteration| rank.run(iteration, || !loss.once_in(3)));
                rank.log
            })
            .collect();
        assert_alike(&logs);
    }
}

/// A root with `blocks` inside it, all with one parameter, which run one after the other.
fn chain(blocks: usize) -> (Order, usize) {
    let mut order = Order::default();
    for _ in 0..=blocks {
        order.add(UnitRules::new(1, Default), &[]);
    }
    (order, blocks)
}

fn forward(order: &mut Order, root: usize) -> Vec<Action> {
    let (outer, mut all) = order.forward_begins(root, true).unwrap();
    for block in 0..root {
        let (forward, actions) = order.forward_begins(block, true).unwrap();
        all.extend(actions);
        let (hook, actions) = order.forward_ends(block, forward, 1);
        assert!(hook);
        all.extend(actions);
        order.forward_is_over();
    }
    let (hook, actions) = order.forward_ends(root, outer, 1);
    assert!(!hook && actions.is_empty(), "a root keeps its parameters");
    order.forward_is_over();
    all
}

#[test]
fn a_step_of_a_chain() {
    use Action::{Await, Free, FreeParameter, Gather};
    let (mut order, root) = chain(2);
    let first = [Gather(2), Await(2), Gather(0), Await(0), Free(0), Gather(1), Await(1), Free(1)];
    assert_eq!(forward(&mut order, root), first);
    assert_eq!(order.backward_begins(None), Ok(Some(root)));
    assert_eq!(order.forward_begins(0, true).unwrap_err(), Refused::InBackward);
    assert_eq!(order.before_unit(root).unwrap(), [Gather(2), Await(2), Gather(1)]);
    assert_eq!(order.before_the_graph(), [Gather(2), Await(2)]);
    let reduce = |unit| [FreeParameter { unit, position: 0 }, Action::Reduce { unit, apart: false }];
    assert_eq!(order.gradient_complete(root, 0).unwrap(), reduce(2));
    assert_eq!(order.before_unit(1).unwrap(), [Gather(1), Await(1), Gather(0)]);
    assert_eq!(order.gradient_complete(1, 0).unwrap(), reduce(1));
    assert_eq!(order.before_unit(0).unwrap(), [Gather(0), Await(0)]);
    assert_eq!(order.gradient_complete(0, 0).unwrap(), reduce(0));
    assert_eq!(order.backward_ends(), [Free(0), Free(1), Free(2)]);
    order.backward_is_over();
    assert_eq!(order.before_unit(0).unwrap_err(), Refused::NoBackward);
    // The next step knows who follows whom.
    let next = [Gather(2), Await(2), Gather(0), Gather(0), Await(0), Gather(1), Free(0), Gather(1), Await(1), Free(1)];
    assert_eq!(forward(&mut order, root), next);
    // Without a backward, the next forward frees what it left.
    let (_, actions) = order.forward_begins(root, true).unwrap();
    assert_eq!(actions[..3], [Free(0), Free(1), Free(2)]);
}

#[test]
fn reductions_of_a_fixed_order_wait_for_their_turn() {
    use Action::{Gather, Reduce};
    let (mut order, root) = chain(2);
    forward(&mut order, root);
    order.backward_begins(Some(&[Some(2), Some(2), None])).unwrap();
    // A loss that reaches block 0 alone: block 1 and the root have nothing to wait for.
    let actions = order.backward_reaches(&[1, 0, 0]);
    let expected = [Gather(2), Gather(1), Reduce { unit: 1, apart: true }];
    assert_eq!(actions, expected);
    let actions = order.gradient_complete(0, 0).unwrap();
    let turn = [Gather(0), Reduce { unit: 0, apart: true }, Reduce { unit: 2, apart: true }];
    assert_eq!(actions[1..], turn);
}

#[test]
fn units_that_failed_to_build_are_in_no_list() {
    let (mut order, _) = chain(3);
    order.rules(0).unwrap().forward_prefetch = vec![1, 3];
    forward(&mut order, 3);
    order.truncate(2);
    assert_eq!(order.rules(0).unwrap().forward_prefetch, [1]);
    assert!(order.rules(2).is_none());
    assert_eq!(order.backward_begins(None), Ok(Some(1)));
}
