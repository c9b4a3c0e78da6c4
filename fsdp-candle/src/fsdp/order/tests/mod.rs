//! Random models on simulated ranks. The simulation records the order's actions and checks its guarantees.

mod log;
mod model;
mod rank;

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use log::{Log, assert_alike};
use model::{Model, Tape};
use rank::Rank;

/// Runs a model on one rank for each of `losses`, a tape that decides what the rank's loss reaches. It skips one call
/// in `odds`.
fn run(model: &Model, losses: Vec<Vec<u8>>, odds: usize) -> Vec<Rc<RefCell<Log>>> {
    let mut ranks: Vec<Rank> = losses.iter().map(|_| Rank::new(model)).collect();
    let mut tapes: Vec<Tape> = losses.into_iter().map(|loss| Tape(loss.into())).collect();
    for iteration in &model.iterations {
        let forwards =
            ranks.iter_mut().zip(&mut tapes).map(|(rank, tape)| rank.forwards(iteration, &mut || !tape.once_in(odds)));
        // All ranks fail alike.
        let forwards: Vec<_> = forwards.collect();
        let Some(forwards) = forwards.into_iter().collect::<Option<Vec<_>>>().filter(|all| !all[0].is_empty()) else {
            continue;
        };
        for backward in 0..iteration.backwards {
            let reached: Vec<_> = (ranks.iter().zip(&mut tapes).zip(&forwards))
                .map(|((rank, tape), forwards)| rank.reached(forwards, &mut || !tape.once_in(odds)))
                .collect();
            let reach: Vec<_> = (ranks.iter_mut().zip(&forwards).zip(&reached))
                .map(|((rank, forwards), reached)| rank.backward_begins(forwards, reached))
                .collect();
            if model.fixed {
                let keys = ranks.iter_mut().zip(&reach).map(|(rank, reach)| rank.order().keys(reach));
                let order = Order::in_order(&largest(keys));
                let lasts = largest(reach.iter().map(|reach| Order::lasts(&order, reach)));
                ranks.iter_mut().for_each(|rank| rank.order().plan_units(&order, &lasts));
            }
            for ((rank, forwards), reached) in ranks.iter_mut().zip(&forwards).zip(&reached) {
                rank.backward(forwards, reached, iteration.is_last, backward > 0);
            }
            if iteration.fails_after.is_some() {
                break; // the backward may have failed
            }
        }
    }
    ranks.into_iter().map(|rank| rank.log).collect()
}

/// Returns the largest of all ranks' numbers, element by element.
fn largest(all: impl Iterator<Item = Vec<usize>>) -> Vec<usize> {
    all.reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn ranks_issue_the_same_collectives_within_the_memory_bound(
        tape in prop::collection::vec(any::<u8>(), 0..400),
        loss in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let model = Tape(tape.into()).model(false);
        assert_alike(&run(&model, vec![loss.clone(), loss], 9));
    }

    #[test]
    fn ranks_with_different_losses_issue_the_same_collectives(
        tape in prop::collection::vec(any::<u8>(), 0..400),
        losses in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 2..5),
    ) {
        assert_alike(&run(&Tape(tape.into()).model(true), losses, 3));
    }
}

/// Makes a root with `blocks` inside it that run one after the other. Each unit has one parameter.
fn chain(blocks: usize) -> (Order, usize) {
    let mut order = Order::default();
    for _ in 0..=blocks {
        order.add(UnitInfo::default(), &[]);
    }
    (order, blocks)
}

/// The parameters of each unit of a chain.
fn one(_: usize) -> ParamCounts {
    ParamCounts { trainable: 1, frozen: 0 }
}

fn fresh(_: usize) -> bool {
    false
}

fn forward(order: &mut Order, root: usize) -> Vec<Action> {
    forward_of(order, root, None)
}

fn forward_of(order: &mut Order, root: usize, exists: Option<GraphExists>) -> Vec<Action> {
    let (outer, mut all) = order.pre_forward(root, true, fresh).unwrap();
    for block in 0..root {
        let (forward, actions) = order.pre_forward(block, true, fresh).unwrap();
        all.extend(actions);
        let (hook, actions) = order.post_forward(block, forward, 1);
        assert!(hook);
        all.extend(actions);
        order.end_forward(forward, None);
    }
    let (hook, actions) = order.post_forward(root, outer, 1);
    assert!(!hook && actions.is_empty(), "a root keeps its parameters");
    order.end_forward(outer, exists);
    all
}

#[test]
fn passes_of_graphs_that_ended_are_forgotten() {
    let (mut order, root) = chain(2);
    for run in 0..1000 {
        forward_of(&mut order, root, Some(Box::new(move || run % 100 == 0)));
    }
    // A graph that exists has three passes, and at most half of the others are remembered.
    let passes: Vec<usize> = order.step.passes.iter().map(|pass| pass.pass).collect();
    assert!(passes.len() < 200, "{} passes", passes.len());
    for run in (0..1000).step_by(100) {
        assert!((1..=3).all(|pass| passes.contains(&(3 * run + pass))), "run {run}: {passes:?}");
    }
}

#[test]
fn a_step_of_a_chain() {
    use Action::{Reshard, ReshardParam, Unshard, WaitForUnshard};
    let (mut order, root) = chain(2);
    let first = [
        Unshard(2),
        WaitForUnshard(2),
        Unshard(0),
        WaitForUnshard(0),
        Reshard(0),
        Unshard(1),
        WaitForUnshard(1),
        Reshard(1),
    ];
    assert_eq!(forward(&mut order, root), first);
    order.begin_backward(one).unwrap();
    assert_eq!(order.pre_forward(0, true, fresh).unwrap_err(), OrderError::InBackward);
    // The root keeps its parameters, and has no hook.
    assert_eq!(order.root_pre_backward().1, [Unshard(2), WaitForUnshard(2), Unshard(1), Unshard(2), WaitForUnshard(2)]);
    let complete = |unit| (true, vec![ReshardParam { unit, position: 0 }, Action::Reduce(unit)]);
    assert_eq!(order.post_accumulate_grad(root, 0).unwrap(), complete(2));
    assert_eq!(order.pre_backward(1, None).unwrap(), [Unshard(1), WaitForUnshard(1), Unshard(0)]);
    assert_eq!(order.post_accumulate_grad(1, 0).unwrap(), complete(1));
    assert_eq!(order.pre_backward(0, None).unwrap(), [Unshard(0), WaitForUnshard(0)]);
    assert_eq!(order.post_accumulate_grad(0, 0).unwrap(), complete(0));
    assert_eq!(order.root_post_backward(), [Reshard(0), Reshard(1), Reshard(2)]);
    order.end_backward();
    assert_eq!(order.pre_backward(0, None).unwrap_err(), OrderError::NoBackward);
    // The next step prefetches in the order of the last step.
    let next = [
        Unshard(2),
        WaitForUnshard(2),
        Unshard(0),
        Unshard(0),
        WaitForUnshard(0),
        Unshard(1),
        Reshard(0),
        Unshard(1),
        WaitForUnshard(1),
        Reshard(1),
    ];
    assert_eq!(forward(&mut order, root), next);
    // Without a backward, the next forward reshards the blocks, and the root only if it may be stale.
    let (again, actions) = order.pre_forward(root, true, fresh).unwrap();
    assert_eq!(
        actions[..4],
        [Reshard(0), Reshard(1), Action::BeginPass { unit: 2, pass: Some(again.pass) }, Unshard(2)]
    );
    order.post_forward(root, again, 1);
    order.end_forward(again, None);
    let (_, actions) = order.pre_forward(root, true, |_| true).unwrap();
    assert_eq!(actions[..2], [Reshard(0), Reshard(2)]);
}

#[test]
fn forwards_without_a_graph_leave_what_was_unsharded_by_hand() {
    use Action::Reshard;
    let (mut order, root) = chain(1);
    order.unshard_by_hand(root);
    let run = |order: &mut Order, unit: usize, graph: bool| {
        let (forward, _) = order.pre_forward(unit, graph, fresh).unwrap();
        let (_, actions) = order.post_forward(unit, forward, 1);
        order.end_forward(forward, None);
        actions
    };
    assert_eq!((run(&mut order, root, false), run(&mut order, 0, false)), (vec![], vec![Reshard(0)]));
    assert!(order.is_unsharded_by_hand(root) && !order.is_unsharded_by_hand(0));
    // A forward with a graph does as the unit's policy says.
    order.unshard_by_hand(0);
    order.unit(0).unwrap().settings.reshard_after_forward = ReshardAfterForward::Always;
    assert_eq!(run(&mut order, 0, true), [Reshard(0)]);
    assert!(!order.is_unsharded_by_hand(0));
    order.begin_backward(one).unwrap();
    order.root_post_backward();
    order.end_backward();
    assert!(!order.is_unsharded_by_hand(root));
}

#[test]
fn held_units_do_not_train() {
    let (mut order, root) = chain(1);
    order.unit(0).unwrap().holds = 1;
    assert_eq!(order.pre_forward(0, true, fresh).unwrap_err(), OrderError::Held);
    // Another model of the map trains, and leaves the unit unsharded.
    let (forward, _) = order.pre_forward(root, true, fresh).unwrap();
    order.post_forward(root, forward, 1);
    order.end_forward(forward, None);
    order.begin_backward(one).unwrap();
    assert_eq!(order.root_post_backward(), [Action::Reduce(0), Action::Reduce(1), Action::Reshard(1)]);
}

#[test]
fn all_ranks_reduce_the_units_of_any_rank() {
    use Action::{Reduce, Reshard, Unshard, WaitForUnshard};
    let (mut order, root) = chain(3);
    order.settings.fixed_order = true;
    forward(&mut order, root);
    order.begin_backward(one).unwrap();
    // This rank comes to block 0, another rank to blocks 2 and 1. The root has no hook.
    order.plan_units(&[3, 2, 1, 0], &[0, 1, 2, 3]);
    assert_eq!(order.root_pre_backward().1, [Unshard(3), Unshard(2), WaitForUnshard(3)]);
    let between = [
        Reduce(3),
        Reshard(3),
        Unshard(1),
        Reduce(2),
        Reshard(2),
        Unshard(0),
        Reduce(1),
        Reshard(1),
        WaitForUnshard(0),
    ];
    assert_eq!(order.pre_backward(0, None).unwrap(), between);
    assert_eq!(order.root_post_backward(), [Reduce(0), Reshard(0), Reshard(0), Reshard(1), Reshard(2), Reshard(3)]);
}

#[test]
fn truncate_removes_units_from_all_lists() {
    let (mut order, _) = chain(3);
    order.unit(0).unwrap().settings.forward_prefetch = vec![1, 3];
    forward(&mut order, 3);
    order.truncate(2);
    assert_eq!(order.unit(0).unwrap().settings.forward_prefetch, [1]);
    assert!(order.unit(2).is_none());
    order.begin_backward(one).unwrap();
    assert_eq!(order.root_pre_backward().1[0], Action::Unshard(1));
}
