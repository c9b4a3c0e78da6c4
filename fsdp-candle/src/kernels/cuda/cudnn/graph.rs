//! Graphs of operations on tensors, and their plans: kernels that cuDNN chose for a graph on a device.

use std::collections::BTreeSet;
use std::ffi::c_void;

use super::library::{Descriptor, Handle, Library, Refused, Values};
use super::names::{DataType, Heuristics, Kind, Knob, Name, Pointwise, Reduction};

/// Bytes that the addresses of tensors are multiples of.
pub(super) const ALIGNMENT: i64 = 16;
/// The first number of tensors that are not in memory.
const FIRST_VIRTUAL: i64 = 100;
/// Most configurations that cuDNN is asked for, the fastest first.
const MOST_CONFIGURATIONS: usize = 8;

/// Where the elements of a tensor are. Tensors that a caller names have numbers below 100.
#[derive(Clone, Copy)]
pub(super) enum Place {
    /// In memory of the device.
    Memory(i64),
    /// In memory of the host, read when a plan begins.
    Value(i64),
    /// Between two operations, within a kernel.
    Virtual,
}

/// A tensor of four dimensions.
pub(super) struct Tensor {
    descriptor: Descriptor,
    number: i64,
}

/// A device that plans are made for.
#[derive(Clone, Copy)]
pub(super) enum Target<'a> {
    Handle(&'a Handle),
    /// The properties of a device that need not be here.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests plan for devices that are not here"))]
    Properties(&'a Descriptor),
}

/// An engine with its settings, instead of the fastest one.
pub(super) struct Engine {
    pub(super) number: i64,
    pub(super) knobs: Vec<(Knob, i64)>,
}

/// The operations of a graph.
pub(super) struct Graph {
    library: &'static Library,
    operations: Vec<Descriptor>,
    /// The numbers that callers named.
    named: BTreeSet<i64>,
    next: i64,
}

impl Graph {
    pub(super) fn new(library: &'static Library) -> Self {
        Graph { library, operations: vec![], named: BTreeSet::new(), next: FIRST_VIRTUAL }
    }

    /// Returns a graph of operations within one of this graph's. Its tensors have other numbers.
    pub(super) fn within(&self) -> Self {
        Graph { library: self.library, operations: vec![], named: BTreeSet::new(), next: self.next }
    }

    fn descriptor(&self, kind: Kind) -> Result<Descriptor, Refused> {
        Descriptor::new(self.library, kind)
    }

    pub(super) fn tensor(
        &mut self,
        place: Place,
        dtype: DataType,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<Tensor, Refused> {
        let number = match place {
            Place::Memory(number) | Place::Value(number) => {
                self.named.insert(number);
                number
            }
            Place::Virtual => {
                self.next += 1;
                self.next
            }
        };
        let mut tensor = self.descriptor(Kind::Tensor)?;
        tensor
            .set(Name::TensorDataType, Values::DataType(dtype))?
            .set(Name::TensorDimensions, Values::Longs(&dims))?
            .set(Name::TensorStrides, Values::Longs(&strides))?
            .set(Name::TensorUniqueId, Values::Longs(&[number]))?
            .set(Name::TensorByteAlignment, Values::Longs(&[ALIGNMENT]))?
            .set(Name::TensorIsVirtual, Values::Flag(matches!(place, Place::Virtual)))?
            .set(Name::TensorIsByValue, Values::Flag(matches!(place, Place::Value(_))))?;
        Ok(Tensor { descriptor: tensor.finalize()?, number })
    }

    /// Returns a tensor between operations, whose strides are those of its dimensions.
    pub(super) fn between(&mut self, dtype: DataType, dims: [i64; 4]) -> Result<Tensor, Refused> {
        self.tensor(Place::Virtual, dtype, dims, contiguous(dims))
    }

    /// Returns a number that is passed when a plan begins.
    pub(super) fn value(&mut self, number: i64, dtype: DataType) -> Result<Tensor, Refused> {
        self.tensor(Place::Value(number), dtype, [1; 4], [1; 4])
    }

    fn push(&mut self, operation: Descriptor) -> Result<(), Refused> {
        self.operations.push(operation.finalize()?);
        Ok(())
    }

    /// Adds `to = mode(x)` or `to = mode(x, by)`, where `by` is broadcast.
    pub(super) fn pointwise(
        &mut self,
        mode: Pointwise,
        x: &Tensor,
        by: Option<&Tensor>,
        to: &Tensor,
    ) -> Result<(), Refused> {
        let mut how = self.descriptor(Kind::Pointwise)?;
        how.set(Name::PointwiseMode, Values::Pointwise(mode))?
            .set(Name::PointwiseMathPrec, Values::DataType(DataType::Float))?;
        let how = how.finalize()?;
        let mut operation = self.descriptor(Kind::OperationPointwise)?;
        operation
            .set(Name::OperationPointwisePwDescriptor, Values::Descriptors(&[&how]))?
            .set(Name::OperationPointwiseXDesc, Values::Descriptors(&[&x.descriptor]))?
            .set(Name::OperationPointwiseYDesc, Values::Descriptors(&[&to.descriptor]))?;
        if let Some(by) = by {
            operation.set(Name::OperationPointwiseBDesc, Values::Descriptors(&[&by.descriptor]))?;
        }
        self.push(operation)
    }

    /// Adds products of the last two dimensions. `right` may have fewer heads, each of which serves adjacent ones.
    pub(super) fn product(&mut self, left: &Tensor, right: &Tensor, to: &Tensor) -> Result<(), Refused> {
        let mut how = self.descriptor(Kind::Matmul)?;
        how.set(Name::MatmulCompType, Values::DataType(DataType::Float))?;
        let how = how.finalize()?;
        let mut operation = self.descriptor(Kind::OperationMatmul)?;
        operation
            .set(Name::OperationMatmulADesc, Values::Descriptors(&[&left.descriptor]))?
            .set(Name::OperationMatmulBDesc, Values::Descriptors(&[&right.descriptor]))?
            .set(Name::OperationMatmulCDesc, Values::Descriptors(&[&to.descriptor]))?
            .set(Name::OperationMatmulDesc, Values::Descriptors(&[&how]))?;
        self.push(operation)
    }

    /// Adds sums over dimensions that are shorter in `to`.
    pub(super) fn sum(&mut self, x: &Tensor, to: &Tensor) -> Result<(), Refused> {
        let mut how = self.descriptor(Kind::Reduction)?;
        how.set(Name::ReductionOperator, Values::Reduction(Reduction::Add))?
            .set(Name::ReductionCompType, Values::DataType(DataType::Float))?;
        let how = how.finalize()?;
        let mut operation = self.descriptor(Kind::OperationReduction)?;
        operation
            .set(Name::OperationReductionXDesc, Values::Descriptors(&[&x.descriptor]))?
            .set(Name::OperationReductionYDesc, Values::Descriptors(&[&to.descriptor]))?
            .set(Name::OperationReductionDesc, Values::Descriptors(&[&how]))?;
        self.push(operation)
    }

    /// Adds another view of the same elements.
    pub(super) fn reshape(&mut self, x: &Tensor, to: &Tensor) -> Result<(), Refused> {
        let mut operation = self.descriptor(Kind::OperationReshape)?;
        operation
            .set(Name::OperationReshapeXDesc, Values::Descriptors(&[&x.descriptor]))?
            .set(Name::OperationReshapeYDesc, Values::Descriptors(&[&to.descriptor]))?;
        self.push(operation)
    }

    /// Adds a mask of scores: `fill` where the key comes after the query. `shift` is the position of the first query.
    pub(super) fn causal_mask(
        &mut self,
        scores: &Tensor,
        fill: &Tensor,
        shift: Option<&Tensor>,
        to: &Tensor,
    ) -> Result<(), Refused> {
        let mut operation = self.mask(Pointwise::CmpGe, scores, fill, to)?;
        if let Some(shift) = shift {
            let name = Name::OperationDiagonalBandMaskShiftRightBoundDesc;
            operation.set(name, Values::Descriptors(&[&shift.descriptor]))?;
        }
        self.push(operation)
    }

    /// Adds a mask of scores: `fill` where `key + left <= query`, both counted from 0.
    pub(super) fn window_mask(
        &mut self,
        scores: &Tensor,
        fill: &Tensor,
        left: &Tensor,
        to: &Tensor,
    ) -> Result<(), Refused> {
        let mut operation = self.mask(Pointwise::CmpGt, scores, fill, to)?;
        let name = Name::OperationDiagonalBandMaskLeftBoundDesc;
        operation.set(name, Values::Descriptors(&[&left.descriptor]))?;
        self.push(operation)
    }

    fn mask(&self, comparison: Pointwise, scores: &Tensor, fill: &Tensor, to: &Tensor) -> Result<Descriptor, Refused> {
        let mut operation = self.descriptor(Kind::OperationDiagonalBandMask)?;
        operation
            .set(Name::OperationDiagonalBandMaskXDesc, Values::Descriptors(&[&scores.descriptor]))?
            .set(Name::OperationDiagonalBandMaskBDesc, Values::Descriptors(&[&fill.descriptor]))?
            .set(Name::OperationDiagonalBandMaskYDesc, Values::Descriptors(&[&to.descriptor]))?
            .set(Name::OperationDiagonalBandMaskComparisonMode, Values::Pointwise(comparison))?;
        Ok(operation)
    }

    /// Adds an attention: `out = softmax(masks(scale q k^T)) v`, and the logarithms of the sums.
    pub(super) fn attention(
        &mut self,
        [q, k, v]: [&Tensor; 3],
        scale: &Tensor,
        masks: Option<Masks>,
        scores: [&Tensor; 2],
        out: &Tensor,
        log_sums: &Tensor,
    ) -> Result<(), Refused> {
        let mut softmax = self.descriptor(Kind::OperationSoftmax)?;
        softmax
            .set(Name::OperationSoftmaxXDesc, Values::Descriptors(&[&scores[0].descriptor]))?
            .set(Name::OperationSoftmaxYDesc, Values::Descriptors(&[&scores[1].descriptor]))?
            .set(Name::OperationSoftmaxStatsDesc, Values::Descriptors(&[&log_sums.descriptor]))?;
        let softmax = softmax.finalize()?;
        let mut operation = self.descriptor(Kind::OperationSdpaFwd)?;
        operation
            .set(Name::OperationSdpaFwdQDesc, Values::Descriptors(&[&q.descriptor]))?
            .set(Name::OperationSdpaFwdKDesc, Values::Descriptors(&[&k.descriptor]))?
            .set(Name::OperationSdpaFwdVDesc, Values::Descriptors(&[&v.descriptor]))?
            .set(Name::OperationSdpaFwdODesc, Values::Descriptors(&[&out.descriptor]))?
            .set(Name::OperationSdpaFwdSoftmaxDesc, Values::Descriptors(&[&softmax]))?
            .set(Name::OperationSdpaFwdScaleDesc, Values::Descriptors(&[&scale.descriptor]))?;
        if let Some(Masks { mut graph, from, to }) = masks {
            self.named.append(&mut graph.named);
            let masks = graph.finalize(None)?;
            operation
                .set(Name::OperationSdpaFwdSubgraph, Values::Descriptors(&[&masks]))?
                .set(Name::OperationSdpaFwdSubgraphInputUid, Values::Longs(&[from]))?
                .set(Name::OperationSdpaFwdSubgraphOutputUid, Values::Longs(&[to]))?;
        }
        self.push(operation)
    }

    fn finalize(&self, target: Option<Target<'_>>) -> Result<Descriptor, Refused> {
        let mut graph = self.descriptor(Kind::OperationGraph)?;
        let operations: Vec<&Descriptor> = self.operations.iter().collect();
        graph.set(Name::OperationGraphOps, Values::Descriptors(&operations))?;
        if let Some(Target::Handle(handle)) = target {
            graph.set(Name::OperationGraphHandle, Values::Handle(handle))?;
        }
        graph.finalize()
    }

    /// Returns a plan by an engine, or by the fastest engine that cuDNN knows.
    pub(super) fn plan(self, target: Target<'_>, engine: Option<Engine>) -> Result<Plan, Refused> {
        let library = self.library;
        let graph = self.finalize(Some(target))?;
        let configurations = match engine {
            Some(engine) => vec![engine.configuration(library, &graph, target)?],
            None => fastest(library, &graph, target)?,
        };
        let mut refused = None;
        for configuration in configurations {
            match Plan::new(library, configuration, target, self.named.clone()) {
                Ok(plan) => return Ok(plan),
                Err(error) if error.is_unsupported() => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(Refused::no_engine))
    }
}

/// Masks within an attention: a graph without a target, and the numbers of its first and last tensor.
pub(super) struct Masks {
    pub(super) graph: Graph,
    pub(super) from: i64,
    pub(super) to: i64,
}

impl Tensor {
    pub(super) fn number(&self) -> i64 {
        self.number
    }
}

impl Engine {
    fn configuration(
        self,
        library: &'static Library,
        graph: &Descriptor,
        target: Target<'_>,
    ) -> Result<Descriptor, Refused> {
        let mut engine = Descriptor::new(library, Kind::Engine)?;
        engine
            .set(Name::EngineOperationGraph, Values::Descriptors(&[graph]))?
            .set(Name::EngineGlobalIndex, Values::Longs(&[self.number]))?;
        target.set(&mut engine, Name::EngineDeviceProp)?;
        let engine = engine.finalize()?;
        let choices = self.knobs.into_iter().map(|(knob, value)| {
            let mut choice = Descriptor::new(library, Kind::KnobChoice)?;
            choice
                .set(Name::KnobChoiceKnobType, Values::Knob(knob))?
                .set(Name::KnobChoiceKnobValue, Values::Longs(&[value]))?;
            choice.finalize()
        });
        let choices = choices.collect::<Result<Vec<_>, Refused>>()?;
        let choices: Vec<&Descriptor> = choices.iter().collect();
        let mut configuration = Descriptor::new(library, Kind::EngineCfg)?;
        configuration
            .set(Name::EngineCfgEngine, Values::Descriptors(&[&engine]))?
            .set(Name::EngineCfgKnobChoices, Values::Descriptors(&choices))?;
        configuration.finalize()
    }
}

impl Target<'_> {
    /// Sets the attribute that names the device, unless the target has a handle.
    fn set(self, descriptor: &mut Descriptor, name: Name) -> Result<(), Refused> {
        if let Target::Properties(properties) = self {
            descriptor.set(name, Values::Descriptors(&[properties]))?;
        }
        Ok(())
    }
}

/// Returns configurations for a graph, the fastest first.
fn fastest(library: &'static Library, graph: &Descriptor, target: Target<'_>) -> Result<Vec<Descriptor>, Refused> {
    let mut heuristics = Descriptor::new(library, Kind::EngineHeur)?;
    heuristics
        .set(Name::EngineHeurOperationGraph, Values::Descriptors(&[graph]))?
        .set(Name::EngineHeurMode, Values::Heuristics(Heuristics::A))?;
    target.set(&mut heuristics, Name::EngineHeurDeviceProp)?;
    heuristics.finalize()?.descriptors(Name::EngineHeurResults, Kind::EngineCfg, MOST_CONFIGURATIONS)
}

/// Returns the strides of adjacent elements.
pub(super) fn contiguous(dims: [i64; 4]) -> [i64; 4] {
    [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1]
}

/// A graph's kernels.
pub(super) struct Plan {
    library: &'static Library,
    descriptor: Descriptor,
    named: BTreeSet<i64>,
    /// Bytes of memory that it needs while it runs.
    pub(super) workspace: usize,
}

impl Plan {
    fn new(
        library: &'static Library,
        configuration: Descriptor,
        target: Target<'_>,
        named: BTreeSet<i64>,
    ) -> Result<Self, Refused> {
        let mut plan = Descriptor::new(library, Kind::ExecutionPlan)?;
        plan.set(Name::ExecutionPlanEngineConfig, Values::Descriptors(&[&configuration]))?;
        match target {
            Target::Handle(handle) => {
                plan.set(Name::ExecutionPlanHandle, Values::Handle(handle))?;
            }
            Target::Properties(_) => target.set(&mut plan, Name::ExecutionPlanDeviceProp)?,
        }
        let descriptor = plan.finalize()?;
        let workspace = descriptor.long(Name::ExecutionPlanWorkspaceSize)?;
        Ok(Plan { library, descriptor, named, workspace: usize::try_from(workspace).unwrap_or(0) })
    }

    /// Returns whether the graph has a tensor of this number.
    pub(super) fn has(&self, number: i64) -> bool {
        self.named.contains(&number)
    }

    /// Runs the plan on the handle's stream.
    ///
    /// # Safety
    /// Each number of a tensor in memory has an address with the tensor's elements, on the handle's device. Each number
    /// of a value has the address of one. `workspace` has the plan's bytes. All live until the stream has run the plan,
    /// values until this function returns.
    pub(super) unsafe fn run(&self, handle: &Handle, variables: &[(i64, u64)], workspace: u64) -> Result<(), Refused> {
        let (numbers, addresses): (Vec<i64>, Vec<_>) =
            variables.iter().map(|&(number, address)| (number, address as *mut c_void)).unzip();
        let mut pack = Descriptor::new(self.library, Kind::VariantPack)?;
        pack.set(Name::VariantPackUniqueIds, Values::Longs(&numbers))?
            .set(Name::VariantPackDataPointers, Values::Pointers(&addresses))?
            .set(Name::VariantPackWorkspace, Values::Pointers(&[workspace as *mut _]))?;
        let pack = pack.finalize()?;
        // SAFETY: ensured by the caller.
        unsafe { handle.execute(&self.descriptor, &pack) }
    }
}
