//! Graphs of attention through the C functions, beside plain sums.

mod attention;
mod graphs;
mod refusals;

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use super::attributes::{self as at, Attribute, Kind, Type};
use super::descriptor::plan_and_pack;
use super::execute::operation;
use super::refusal::{Result, SUCCESS};
use super::*;
use crate::streams::{Operation, Progress};

const F32: i64 = 0;
const I32: i64 = 4;
const BF16: i64 = 9;

/// A descriptor, which is destroyed when it is dropped.
#[derive(Debug)]
struct Made(*mut c_void);

impl Drop for Made {
    fn drop(&mut self) {
        assert_eq!(cudnnBackendDestroyDescriptor(self.0), SUCCESS);
    }
}

impl Made {
    fn new(kind: Kind) -> Self {
        let number = (0..64).find(|number| Kind::of(*number) == Some(kind)).unwrap();
        let mut made = std::ptr::null_mut();
        // SAFETY: `made` is a pointer.
        assert_eq!(unsafe { cudnnBackendCreateDescriptor(number, &mut made) }, SUCCESS);
        Self(made)
    }

    fn set(&self, attribute: &Attribute, values: &[i64]) -> c_int {
        let mut buffer = vec![0i64; values.len()];
        // SAFETY: no element is larger than 8 bytes.
        unsafe {
            attribute.of.write(buffer.as_mut_ptr().cast(), values);
            let (of, count) = (attribute.of as c_int, values.len() as i64);
            cudnnBackendSetAttribute(self.0, attribute.number, of, count, buffer.as_ptr().cast())
        }
    }

    /// Sets an attribute that must be accepted.
    fn with(self, attribute: &Attribute, values: &[i64]) -> Self {
        assert_eq!(self.set(attribute, values), SUCCESS, "{attribute:?} {values:?}");
        self
    }

    fn of(self, attribute: &Attribute, others: &[&Self]) -> Self {
        let others: Vec<i64> = others.iter().map(|other| other.0 as i64).collect();
        self.with(attribute, &others)
    }

    fn finalize(&self) -> c_int {
        cudnnBackendFinalize(self.0)
    }

    fn done(self) -> Self {
        assert_eq!(self.finalize(), SUCCESS);
        self
    }

    /// Gets at most `wanted` numbers or, with descriptors, fills those given.
    fn get(&self, attribute: &Attribute, values: &mut [i64]) -> (c_int, i64) {
        let (mut buffer, mut count) = (values.to_vec(), -1);
        let (of, wanted) = (attribute.of as c_int, values.len() as i64);
        let to = buffer.as_mut_ptr().cast();
        // SAFETY: no element is larger than 8 bytes.
        let status = unsafe { cudnnBackendGetAttribute(self.0, attribute.number, of, wanted, &mut count, to) };
        // SAFETY: the buffer has these elements.
        values.copy_from_slice(&unsafe { attribute.of.read(to.cast(), values.len()) });
        (status, count)
    }

    fn number(&self, attribute: &Attribute) -> i64 {
        let mut number = [-1];
        assert_eq!(self.get(attribute, &mut number), (SUCCESS, 1));
        number[0]
    }
}

/// Returns this thread's last message.
fn last_error() -> String {
    let mut message = [0u8; 2048];
    // SAFETY: the buffer has this size.
    unsafe { cudnnGetLastErrorString(message.as_mut_ptr().cast(), message.len()) };
    std::ffi::CStr::from_bytes_until_nul(&message).unwrap().to_str().unwrap().into()
}

/// Returns the plan of the heuristics, if they have any.
fn heuristic_plan(graph: &Made) -> Option<Made> {
    let heuristics = Made::new(Kind::Heuristics).of(&at::ENGINEHEUR_OPERATION_GRAPH, &[graph]);
    let heuristics = heuristics.with(&at::ENGINEHEUR_MODE, &[3]).done();
    assert_eq!(heuristics.get(&at::ENGINEHEUR_RESULTS, &mut []), (SUCCESS, 1));
    let config = Made::new(Kind::EngineConfig);
    let (status, count) = heuristics.get(&at::ENGINEHEUR_RESULTS, &mut [config.0 as i64]);
    assert_eq!(status, SUCCESS);
    (count == 1).then(|| Made::new(Kind::Plan).of(&at::EXECUTION_PLAN_ENGINE_CONFIG, &[&config]).done())
}

/// Returns a variant pack.
fn pack(places: &[(i64, u64)], workspace: u64) -> Made {
    let (uids, pointers): (Vec<i64>, Vec<i64>) = places.iter().map(|(uid, at)| (*uid, *at as i64)).unzip();
    let pack = Made::new(Kind::Pack).with(&at::VARIANT_PACK_UNIQUE_IDS, &uids);
    let pack = pack.with(&at::VARIANT_PACK_DATA_POINTERS, &pointers);
    pack.with(&at::VARIANT_PACK_WORKSPACE, &[workspace as i64]).done()
}

/// Returns the operation of an execution.
fn execution(plan: &Made, pack: &Made) -> Result<Operation> {
    let (plan, pack) = plan_and_pack(plan.0 as usize, pack.0 as usize)?;
    // SAFETY: the tests pass addresses of numbers.
    unsafe { operation(&Arc::clone(&plan), &pack) }
}

fn run(mut operation: Operation) {
    assert_eq!((operation.run)(), Progress::Done);
}

/// Returns random numbers from -1 to 1, rounded to bf16.
fn random(len: usize, seed: u64) -> Vec<half::bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1 << 23) - 1.0
    };
    (0..len).map(|_| half::bf16::from_f64(next())).collect()
}
