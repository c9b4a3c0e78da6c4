//! Descriptors: open ones, whose attributes are set, and finalized ones, which others refer to.
//!
//! A descriptor keeps shared ownership of the finalized descriptors that it refers to, so that the program may destroy
//! them.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    sync::{Arc, Mutex, PoisonError},
};

use super::attributes::{self as at, Attribute, Kind, Type};
use super::build;
use super::engine::{Config, Engine, Knob, NOTES};
use super::execute::Pack;
use super::graph::{Graph, Mode, Operation, Softmax};
use super::refusal::{BAD_PARAM, NOT_FINALIZED, NOT_INITIALIZED, NULL_POINTER, Refusal, Result, bad, tell};
use super::tensor::Tensor;

/// A finalized descriptor.
#[derive(Clone, Debug)]
pub(super) enum Part {
    Tensor(Arc<Tensor>),
    Pointwise(Mode),
    /// A product's or a reduction's description, which has no choice.
    Described,
    Softmax(Arc<Softmax>),
    Operation(Arc<Operation>),
    Graph(Arc<Graph>),
    /// With whether results are asked of the fallback mode, which has none.
    Heuristics(Arc<Graph>, bool),
    Engine(Engine),
    Knob(Knob),
    Config(Arc<Config>),
    Plan(Arc<Config>),
    Pack(Arc<Pack>),
}

/// A value of an attribute.
#[derive(Debug)]
enum Value {
    Numbers(Vec<i64>),
    Parts(Vec<Part>),
}

/// The attributes of a descriptor that is not finalized.
#[derive(Debug, Default)]
pub(super) struct Open(BTreeMap<c_int, Value>);

impl Open {
    pub(super) fn numbers(&self, attribute: &Attribute) -> Option<&[i64]> {
        match self.0.get(&attribute.number) {
            Some(Value::Numbers(numbers)) => Some(numbers),
            _ => None,
        }
    }

    pub(super) fn number(&self, attribute: &Attribute) -> Result<i64> {
        self.numbers(attribute).and_then(|all| all.first().copied()).ok_or_else(|| missing(attribute))
    }

    pub(super) fn parts(&self, attribute: &Attribute) -> &[Part] {
        match self.0.get(&attribute.number) {
            Some(Value::Parts(parts)) => parts,
            _ => &[],
        }
    }

    pub(super) fn part(&self, attribute: &Attribute) -> Result<Part> {
        self.parts(attribute).first().cloned().ok_or_else(|| missing(attribute))
    }

    pub(super) fn tensor(&self, attribute: &Attribute) -> Result<Arc<Tensor>> {
        self.optional_tensor(attribute).ok_or_else(|| missing(attribute))
    }

    pub(super) fn optional_tensor(&self, attribute: &Attribute) -> Option<Arc<Tensor>> {
        match self.parts(attribute) {
            [Part::Tensor(tensor)] => Some(tensor.clone()),
            _ => None,
        }
    }

    pub(super) fn graph(&self, attribute: &Attribute) -> Result<Arc<Graph>> {
        match self.parts(attribute) {
            [Part::Graph(graph)] => Ok(graph.clone()),
            _ => Err(missing(attribute)),
        }
    }
}

pub(super) fn missing(attribute: &Attribute) -> Refusal {
    bad(format!("CUDNN_ATTR_{} is not set", attribute.name))
}

#[derive(Debug)]
enum State {
    Open(Open),
    Final(Part),
}

#[derive(Debug)]
struct Descriptor {
    kind: Kind,
    state: State,
}

impl Descriptor {
    fn part(&self) -> Result<&Part> {
        match &self.state {
            State::Final(part) => Ok(part),
            State::Open(_) => {
                Err(Refusal { status: NOT_FINALIZED, why: format!("a {:?} is used that is not finalized", self.kind) })
            }
        }
    }
}

/// Live descriptors by handle.
#[derive(Default)]
struct Table {
    live: BTreeMap<usize, Descriptor>,
    made: usize,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Table) -> T) -> T {
    f(TABLE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

impl Table {
    fn get(&mut self, handle: usize) -> Result<&mut Descriptor> {
        let status = if handle == 0 { NULL_POINTER } else { BAD_PARAM };
        self.live.get_mut(&handle).ok_or_else(|| Refusal { status, why: format!("no descriptor is at {handle:#x}") })
    }

    /// Returns the finalized descriptors of handles. Fails for other kinds.
    fn parts(&mut self, attribute: &Attribute, handles: &[i64]) -> Result<Vec<Part>> {
        let part = |handle: &i64| {
            let descriptor = self.get(*handle as usize)?;
            if !attribute.refers.contains(&descriptor.kind) {
                let why = format!("CUDNN_ATTR_{} is a {:?}, not a", attribute.name, attribute.refers);
                return Err(bad(format!("{why} {:?}", descriptor.kind)));
            }
            descriptor.part().cloned()
        };
        handles.iter().map(part).collect()
    }
}

pub(super) fn create(kind: c_int) -> Result<usize> {
    let kind = Kind::of(kind).ok_or_else(|| bad(format!("cudnnBackendDescriptorType_t {kind} is not emulated")))?;
    Ok(with(|table| {
        table.made += 1;
        // A multiple of 16, as of a pointer.
        let handle = 0x4400_0000 + 16 * table.made;
        table.live.insert(handle, Descriptor { kind, state: State::Open(Open::default()) });
        handle
    }))
}

pub(super) fn destroy(handle: usize) -> Result<()> {
    with(|table| table.get(handle).map(|_| ()).map(|()| drop(table.live.remove(&handle))))
}

/// Sets an attribute.
///
/// `values` points to `count` elements of the type `of`.
pub(super) unsafe fn set(handle: usize, number: c_int, of: c_int, count: i64, values: *const c_void) -> Result<()> {
    with(|table| {
        let descriptor = table.get(handle)?;
        let attribute = at::settable(descriptor.kind, number)?;
        if let State::Final(_) = descriptor.state {
            return Err(bad(format!("CUDNN_ATTR_{} is set after the descriptor is finalized", attribute.name)));
        }
        attribute.check(of, count)?;
        if values.is_null() {
            return Err(Refusal { status: NULL_POINTER, why: format!("CUDNN_ATTR_{} is set to null", attribute.name) });
        }
        // SAFETY: ensured by the caller.
        let numbers = unsafe { attribute.of.read(values, count as usize) };
        let value = match attribute.of {
            Type::Descriptor => Value::Parts(table.parts(attribute, &numbers)?),
            Type::Handle if !super::is_handle(numbers[0] as usize) => {
                return Err(bad(format!("CUDNN_ATTR_{} is not a live handle", attribute.name)));
            }
            _ => Value::Numbers(numbers),
        };
        if let State::Open(open) = &mut table.get(handle)?.state {
            open.0.insert(number, value);
        }
        Ok(())
    })
}

pub(super) fn finalize(handle: usize) -> Result<()> {
    with(|table| {
        let descriptor = table.get(handle)?;
        let State::Open(open) = &descriptor.state else { return Err(bad("the descriptor is finalized already")) };
        descriptor.state = State::Final(build::part(descriptor.kind, open)?);
        Ok(())
    })
}

/// Returns the plan and the pack of an execution.
pub(super) fn plan_and_pack(plan: usize, pack: usize) -> Result<(Arc<Config>, Arc<Pack>)> {
    with(|table| {
        let (plan, pack) = (table.get(plan)?.part()?.clone(), table.get(pack)?.part()?.clone());
        match (plan, pack) {
            (Part::Plan(plan), Part::Pack(pack)) => Ok((plan, pack)),
            other => Err(bad(format!("an execution takes a plan and a variant pack, not {other:?}"))),
        }
    })
}

/// Gets an attribute: at most `wanted` elements, and their number. Results that are
/// descriptors go into the descriptors that `values` lists.
///
/// `count` is null or points to a number, and `values` is null or has room for `wanted` elements of the type `of`.
pub(super) unsafe fn get(
    handle: usize,
    number: c_int,
    of: c_int,
    wanted: i64,
    count: *mut i64,
    values: *mut c_void,
) -> Result<()> {
    with(|table| {
        let descriptor = table.get(handle)?;
        let attribute = at::gettable(descriptor.kind, number)?;
        let Ok(part) = descriptor.part().cloned() else {
            let why = format!("CUDNN_ATTR_{} is read before the descriptor is finalized", attribute.name);
            return Err(Refusal { status: NOT_INITIALIZED, why });
        };
        let only_counts = values.is_null() || wanted == 0;
        if !only_counts {
            attribute.check(of, wanted)?;
        }
        let found = if attribute.of == Type::Descriptor {
            let parts = found_parts(&part, attribute, only_counts);
            if !only_counts {
                // SAFETY: ensured by the caller.
                let handles = unsafe { attribute.of.read(values, parts.len().min(wanted as usize)) };
                handles.iter().zip(&parts).try_for_each(|(handle, part)| table.fill(attribute, *handle, part))?;
            }
            parts.len()
        } else {
            let numbers = found_numbers(&part, attribute);
            if !only_counts {
                let most = numbers.len().min(wanted as usize);
                // SAFETY: ensured by the caller.
                unsafe { attribute.of.write(values, &numbers[..most]) };
            }
            numbers.len()
        };
        if !count.is_null() {
            let found = if only_counts { found as i64 } else { wanted.min(found as i64) };
            // SAFETY: ensured by the caller.
            unsafe { *count = found };
        }
        Ok(())
    })
}

impl Table {
    /// Finalizes a descriptor that the program made for a result.
    fn fill(&mut self, attribute: &Attribute, handle: i64, part: &Part) -> Result<()> {
        let descriptor = self.get(handle as usize)?;
        if !attribute.refers.contains(&descriptor.kind) || !matches!(descriptor.state, State::Open(_)) {
            let why = format!("a result of CUDNN_ATTR_{} goes to a new {:?}, not to", attribute.name, attribute.refers);
            return Err(bad(format!("{why} {descriptor:?}")));
        }
        descriptor.state = State::Final(part.clone());
        Ok(())
    }
}

/// As in cuDNN, heuristics say that they have a result, and then do not give it if no engine computes the graph.
fn found_parts(part: &Part, attribute: &Attribute, only_counts: bool) -> Vec<Part> {
    match part {
        Part::Heuristics(_, _) if only_counts => vec![Part::Described],
        Part::Heuristics(_, true) => Vec::new(),
        Part::Heuristics(graph, false) => match Config::best(graph.clone()) {
            Ok(config) => vec![Part::Config(Arc::new(config))],
            Err(refusal) => {
                tell("cudnnBackendGetAttribute", &refusal);
                Vec::new()
            }
        },
        Part::Config(config) if attribute.number == at::ENGINECFG_ENGINE.number => {
            vec![Part::Engine(config.engine.clone())]
        }
        Part::Config(config) => config.knobs.iter().map(|knob| Part::Knob(*knob)).collect(),
        _ => Vec::new(),
    }
}

fn found_numbers(part: &Part, attribute: &Attribute) -> Vec<i64> {
    match part {
        Part::Engine(engine) if attribute.number == at::ENGINE_GLOBAL_INDEX.number => vec![engine.index],
        Part::Engine(_) => NOTES.into(),
        Part::Knob((knob, _)) if attribute.number == at::KNOB_CHOICE_KNOB_TYPE.number => vec![*knob],
        Part::Knob((_, value)) => vec![*value],
        Part::Plan(config) => vec![config.workspace() as i64],
        _ => Vec::new(),
    }
}
