//! The attributes of descriptors: their numbers, types, counts, and the descriptors that they may refer to.

use std::ffi::{c_int, c_void};

use super::refusal::{BAD_TYPE, Refusal, Result, bad};

/// A `cudnnBackendDescriptorType_t` that is known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Pointwise,
    Engine,
    EngineConfig,
    Heuristics,
    Plan,
    Knob,
    PointwiseOperation,
    Graph,
    Pack,
    Tensor,
    Matmul,
    MatmulOperation,
    Reduction,
    ReductionOperation,
    Reshape,
    Attention,
    Mask,
    Softmax,
}

impl Kind {
    pub(super) fn of(number: c_int) -> Option<Self> {
        Some(match number {
            0 => Self::Pointwise,
            2 => Self::Engine,
            3 => Self::EngineConfig,
            4 => Self::Heuristics,
            5 => Self::Plan,
            7 => Self::Knob,
            13 => Self::PointwiseOperation,
            15 => Self::Graph,
            16 => Self::Pack,
            17 => Self::Tensor,
            18 => Self::Matmul,
            19 => Self::MatmulOperation,
            21 => Self::Reduction,
            22 => Self::ReductionOperation,
            31 => Self::Reshape,
            41 => Self::Attention,
            44 => Self::Mask,
            45 => Self::Softmax,
            _ => return None,
        })
    }
}

/// A `cudnnBackendAttributeType_t` that is known here, with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Handle = 0,
    Data = 1,
    Boolean = 2,
    Int64 = 3,
    Pointer = 6,
    HeuristicMode = 8,
    Knob = 9,
    Note = 11,
    PointwiseMode = 14,
    Descriptor = 15,
    ReductionOperator = 18,
}

impl Type {
    /// Returns the elements of an array as integers.
    ///
    /// `from` points to `count` elements of this type.
    pub(super) unsafe fn read(self, from: *const c_void, count: usize) -> Vec<i64> {
        // SAFETY: ensured by the caller.
        let read = |i| unsafe {
            match self {
                Self::Boolean => i64::from(from.cast::<u8>().add(i).read()),
                Self::Handle | Self::Int64 | Self::Pointer | Self::Descriptor => from.cast::<i64>().add(i).read(),
                _ => i64::from(from.cast::<c_int>().add(i).read()),
            }
        };
        (0..count).map(read).collect()
    }

    /// Writes integers as elements of an array.
    ///
    /// `to` has room for as many elements of this type.
    pub(super) unsafe fn write(self, to: *mut c_void, values: &[i64]) {
        for (i, value) in values.iter().enumerate() {
            // SAFETY: ensured by the caller.
            unsafe {
                match self {
                    Self::Boolean => to.cast::<u8>().add(i).write(*value as u8),
                    Self::Handle | Self::Int64 | Self::Pointer | Self::Descriptor => {
                        to.cast::<i64>().add(i).write(*value);
                    }
                    _ => to.cast::<c_int>().add(i).write(*value as c_int),
                }
            }
        }
    }
}

/// An attribute of a kind of descriptor.
#[derive(Debug)]
pub(super) struct Attribute {
    pub(super) kind: Kind,
    pub(super) number: c_int,
    /// Name without `CUDNN_ATTR_`.
    pub(super) name: &'static str,
    pub(super) of: Type,
    /// Most elements of the array.
    most: i64,
    /// The kinds that descriptors may have.
    pub(super) refers: &'static [Kind],
}

impl Attribute {
    const fn new(kind: Kind, number: c_int, name: &'static str, of: Type, most: i64) -> Self {
        Self { kind, number, name, of, most, refers: &[] }
    }

    const fn to(kind: Kind, number: c_int, name: &'static str, most: i64, refers: &'static [Kind]) -> Self {
        Self { kind, number, name, of: Type::Descriptor, most, refers }
    }

    const fn tensor(kind: Kind, number: c_int, name: &'static str) -> Self {
        Self::to(kind, number, name, 1, &[Kind::Tensor])
    }

    /// Fails for another type or count.
    pub(super) fn check(&self, of: c_int, count: i64) -> Result<()> {
        let Self { name, of: expected, most, .. } = self;
        if of != *expected as c_int {
            let why = format!("CUDNN_ATTR_{name} is of type {}, not {of}", *expected as c_int);
            return Err(Refusal { status: BAD_TYPE, why });
        }
        if !(1..=*most).contains(&count) {
            return Err(bad(format!("CUDNN_ATTR_{name} has 1 to {most} elements, not {count}")));
        }
        Ok(())
    }
}

/// Declares attributes as constants, and the list of all.
macro_rules! attributes {
    ($($name:ident = $make:ident($kind:ident, $number:expr $(, $more:expr)*);)*) => {
        $(pub(super) const $name: Attribute =
            Attribute::$make(Kind::$kind, $number, stringify!($name) $(, $more)*);)*
        const ALL: &[Attribute] = &[$($name),*];
    };
}

/// Most dimensions of a tensor. Only tensors by value have fewer.
const RANK: i64 = 4;
const MANY: i64 = 256;

attributes! {
    POINTWISE_MODE = new(Pointwise, 0, Type::PointwiseMode, 1);
    POINTWISE_MATH_PREC = new(Pointwise, 1, Type::Data, 1);
    ENGINEHEUR_MODE = new(Heuristics, 200, Type::HeuristicMode, 1);
    ENGINEHEUR_OPERATION_GRAPH = to(Heuristics, 201, 1, &[Kind::Graph]);
    ENGINEHEUR_RESULTS = to(Heuristics, 202, MANY, &[Kind::EngineConfig]);
    ENGINECFG_ENGINE = to(EngineConfig, 300, 1, &[Kind::Engine]);
    ENGINECFG_KNOB_CHOICES = to(EngineConfig, 302, MANY, &[Kind::Knob]);
    EXECUTION_PLAN_HANDLE = new(Plan, 400, Type::Handle, 1);
    EXECUTION_PLAN_ENGINE_CONFIG = to(Plan, 401, 1, &[Kind::EngineConfig]);
    EXECUTION_PLAN_WORKSPACE_SIZE = new(Plan, 402, Type::Int64, 1);
    KNOB_CHOICE_KNOB_TYPE = new(Knob, 600, Type::Knob, 1);
    KNOB_CHOICE_KNOB_VALUE = new(Knob, 601, Type::Int64, 1);
    OPERATION_POINTWISE_PW_DESCRIPTOR = to(PointwiseOperation, 750, 1, &[Kind::Pointwise]);
    OPERATION_POINTWISE_XDESC = tensor(PointwiseOperation, 751);
    OPERATION_POINTWISE_BDESC = tensor(PointwiseOperation, 752);
    OPERATION_POINTWISE_YDESC = tensor(PointwiseOperation, 753);
    OPERATIONGRAPH_HANDLE = new(Graph, 800, Type::Handle, 1);
    OPERATIONGRAPH_OPS = to(Graph, 801, MANY, &[
        Kind::PointwiseOperation,
        Kind::MatmulOperation,
        Kind::ReductionOperation,
        Kind::Reshape,
        Kind::Attention,
        Kind::Mask,
    ]);
    TENSOR_BYTE_ALIGNMENT = new(Tensor, 900, Type::Int64, 1);
    TENSOR_DATA_TYPE = new(Tensor, 901, Type::Data, 1);
    TENSOR_DIMENSIONS = new(Tensor, 902, Type::Int64, RANK);
    TENSOR_STRIDES = new(Tensor, 903, Type::Int64, RANK);
    TENSOR_UNIQUE_ID = new(Tensor, 906, Type::Int64, 1);
    TENSOR_IS_VIRTUAL = new(Tensor, 907, Type::Boolean, 1);
    TENSOR_IS_BY_VALUE = new(Tensor, 908, Type::Boolean, 1);
    VARIANT_PACK_UNIQUE_IDS = new(Pack, 1000, Type::Int64, MANY);
    VARIANT_PACK_DATA_POINTERS = new(Pack, 1001, Type::Pointer, MANY);
    VARIANT_PACK_WORKSPACE = new(Pack, 1003, Type::Pointer, 1);
    ENGINE_OPERATION_GRAPH = to(Engine, 1300, 1, &[Kind::Graph]);
    ENGINE_GLOBAL_INDEX = new(Engine, 1301, Type::Int64, 1);
    ENGINE_NUMERICAL_NOTE = new(Engine, 1303, Type::Note, MANY);
    MATMUL_COMP_TYPE = new(Matmul, 1500, Type::Data, 1);
    OPERATION_MATMUL_ADESC = tensor(MatmulOperation, 1520);
    OPERATION_MATMUL_BDESC = tensor(MatmulOperation, 1521);
    OPERATION_MATMUL_CDESC = tensor(MatmulOperation, 1522);
    OPERATION_MATMUL_DESC = to(MatmulOperation, 1523, 1, &[Kind::Matmul]);
    REDUCTION_OPERATOR = new(Reduction, 1600, Type::ReductionOperator, 1);
    REDUCTION_COMP_TYPE = new(Reduction, 1601, Type::Data, 1);
    OPERATION_REDUCTION_XDESC = tensor(ReductionOperation, 1610);
    OPERATION_REDUCTION_YDESC = tensor(ReductionOperation, 1611);
    OPERATION_REDUCTION_DESC = to(ReductionOperation, 1612, 1, &[Kind::Reduction]);
    OPERATION_RESHAPE_XDESC = tensor(Reshape, 2200);
    OPERATION_RESHAPE_YDESC = tensor(Reshape, 2201);
    OPERATION_SDPA_FWD_QDESC = tensor(Attention, 2800);
    OPERATION_SDPA_FWD_KDESC = tensor(Attention, 2801);
    OPERATION_SDPA_FWD_VDESC = tensor(Attention, 2802);
    OPERATION_SDPA_FWD_ODESC = tensor(Attention, 2803);
    OPERATION_SDPA_FWD_SCALEDESC = tensor(Attention, 2805);
    OPERATION_SDPA_FWD_SUBGRAPH = to(Attention, 2811, 1, &[Kind::Graph]);
    OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID = new(Attention, 2812, Type::Int64, 1);
    OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID = new(Attention, 2813, Type::Int64, 1);
    OPERATION_SDPA_FWD_SOFTMAX_DESC = to(Attention, 2814, 1, &[Kind::Softmax]);
    OPERATION_DIAGONAL_BAND_MASK_XDESC = tensor(Mask, 3000);
    OPERATION_DIAGONAL_BAND_MASK_LEFT_BOUND_DESC = tensor(Mask, 3003);
    OPERATION_DIAGONAL_BAND_MASK_SHIFT_RIGHT_BOUND_DESC = tensor(Mask, 3004);
    OPERATION_DIAGONAL_BAND_MASK_BDESC = tensor(Mask, 3005);
    OPERATION_DIAGONAL_BAND_MASK_YDESC = tensor(Mask, 3006);
    OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE = new(Mask, 3007, Type::PointwiseMode, 1);
    OPERATION_SOFTMAX_XDESC = tensor(Softmax, 3100);
    OPERATION_SOFTMAX_YDESC = tensor(Softmax, 3101);
    OPERATION_SOFTMAX_STATS_DESC = tensor(Softmax, 3102);
}

/// Attributes that a program can only read.
const READ_ONLY: [&Attribute; 3] = [&ENGINEHEUR_RESULTS, &EXECUTION_PLAN_WORKSPACE_SIZE, &ENGINE_NUMERICAL_NOTE];

/// Returns the attribute that a program may set.
pub(super) fn settable(kind: Kind, number: c_int) -> Result<&'static Attribute> {
    let found = ALL.iter().find(|one| one.kind == kind && one.number == number);
    let is_read_only = READ_ONLY.iter().any(|one| one.number == number);
    found.filter(|_| !is_read_only).ok_or_else(|| bad(format!("attribute {number} of a {kind:?} is not emulated")))
}

/// Returns the attribute that a program may get.
pub(super) fn gettable(kind: Kind, number: c_int) -> Result<&'static Attribute> {
    let more = [
        &ENGINECFG_ENGINE,
        &ENGINECFG_KNOB_CHOICES,
        &ENGINE_GLOBAL_INDEX,
        &KNOB_CHOICE_KNOB_TYPE,
        &KNOB_CHOICE_KNOB_VALUE,
    ];
    let all = READ_ONLY.into_iter().chain(more);
    let found = all.into_iter().find(|one| one.kind == kind && one.number == number);
    let found = found.and_then(|found| ALL.iter().find(|one| one.number == found.number));
    found.ok_or_else(|| bad(format!("reading attribute {number} of a {kind:?} is not emulated")))
}
