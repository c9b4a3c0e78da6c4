//! Roles of the processes that the tests start.

use crate::{conformance, memory, nccl, padded, ranks, values};

/// No test.
#[test]
fn run_as_a_rank() {
    let Ok(role) = std::env::var("FSDP_TEST_ROLE") else { return };
    let compute = ranks::compute();
    let said = match role.split_once(" conforms ") {
        Some((engine, trial)) => conformance::take_part(engine, trial, &compute),
        None => {
            let known = nccl::run(&role, &compute).or_else(|| values::run(&role, &compute));
            known.or_else(|| memory::run(&role, &compute)).or_else(|| padded::run(&role, &compute)).unwrap()
        }
    };
    println!("says: {said}");
}
