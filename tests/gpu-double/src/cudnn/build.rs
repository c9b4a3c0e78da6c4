//! Finalization: reads the attributes of an open descriptor, and builds the value that it describes.

use std::{collections::BTreeMap, sync::Arc};

use super::attributes::{self as at, Attribute, Kind};
use super::descriptor::{Open, Part, missing};
use super::engine::{Config, Engine, closed};
use super::execute::Pack;
use super::graph::{Attention, Band, Graph, Mode, Modifier, Operation, Softmax};
use super::refusal::{Result, bad};
use super::tensor::{DataType, Tensor};

// cudnnPointwiseMode_t.
const CMP_GT: i64 = 302;
const CMP_GE: i64 = 303;
// cudnnBackendHeurMode_t.
const FALLBACK: i64 = 2;
const HEURISTIC_MODES: std::ops::RangeInclusive<i64> = 0..=3;
/// `CUDNN_REDUCE_TENSOR_ADD`.
const ADD: i64 = 0;

/// Returns a finalized descriptor.
pub(super) fn part(kind: Kind, open: &Open) -> Result<Part> {
    Ok(match kind {
        Kind::Tensor => Part::Tensor(Arc::new(tensor(open)?)),
        Kind::Pointwise => {
            in_f32(open, &at::POINTWISE_MATH_PREC)?;
            Part::Pointwise(match open.number(&at::POINTWISE_MODE)? {
                1 => Mode::Multiply,
                9 => Mode::Subtract,
                13 => Mode::Exp,
                21 => Mode::Identity,
                other => return Err(bad(format!("cudnnPointwiseMode_t {other} is not emulated"))),
            })
        }
        Kind::Matmul => {
            in_f32(open, &at::MATMUL_COMP_TYPE)?;
            Part::Described
        }
        Kind::Reduction => {
            in_f32(open, &at::REDUCTION_COMP_TYPE)?;
            match open.number(&at::REDUCTION_OPERATOR)? {
                ADD => Part::Described,
                other => return Err(bad(format!("cudnnReduceTensorOp_t {other} is not emulated"))),
            }
        }
        Kind::Softmax => {
            let (x, y) = (open.tensor(&at::OPERATION_SOFTMAX_XDESC)?, open.tensor(&at::OPERATION_SOFTMAX_YDESC)?);
            Part::Softmax(Arc::new(Softmax { x, y, stats: open.optional_tensor(&at::OPERATION_SOFTMAX_STATS_DESC) }))
        }
        Kind::PointwiseOperation
        | Kind::MatmulOperation
        | Kind::ReductionOperation
        | Kind::Reshape
        | Kind::Mask
        | Kind::Attention => Part::Operation(Arc::new(operation(kind, open)?.checked()?)),
        Kind::Graph => {
            let operations = open.parts(&at::OPERATIONGRAPH_OPS).iter().filter_map(|part| match part {
                Part::Operation(operation) => Some(operation.clone()),
                _ => None,
            });
            let operations: Vec<_> = operations.collect();
            if operations.is_empty() {
                return Err(missing(&at::OPERATIONGRAPH_OPS));
            }
            Part::Graph(Arc::new(Graph::new(operations)?))
        }
        Kind::Heuristics => {
            let graph = open.graph(&at::ENGINEHEUR_OPERATION_GRAPH)?;
            let mode = open.number(&at::ENGINEHEUR_MODE)?;
            if !HEURISTIC_MODES.contains(&mode) {
                return Err(bad(format!("cudnnBackendHeurMode_t {mode} is not known")));
            }
            closed(&graph)?;
            Part::Heuristics(graph, mode == FALLBACK)
        }
        Kind::Engine => {
            let graph = open.graph(&at::ENGINE_OPERATION_GRAPH)?;
            Part::Engine(Engine::new(graph, open.number(&at::ENGINE_GLOBAL_INDEX)?)?)
        }
        Kind::Knob => {
            let [kind, value] = [&at::KNOB_CHOICE_KNOB_TYPE, &at::KNOB_CHOICE_KNOB_VALUE];
            Part::Knob((open.number(kind)?, open.number(value)?))
        }
        Kind::EngineConfig => {
            let Part::Engine(engine) = open.part(&at::ENGINECFG_ENGINE)? else {
                return Err(missing(&at::ENGINECFG_ENGINE));
            };
            let knobs = open.parts(&at::ENGINECFG_KNOB_CHOICES).iter().filter_map(|part| match part {
                Part::Knob(knob) => Some(*knob),
                _ => None,
            });
            Part::Config(Arc::new(Config::new(engine, knobs.collect())?))
        }
        Kind::Plan => match open.part(&at::EXECUTION_PLAN_ENGINE_CONFIG)? {
            Part::Config(config) => Part::Plan(config),
            _ => return Err(missing(&at::EXECUTION_PLAN_ENGINE_CONFIG)),
        },
        Kind::Pack => Part::Pack(Arc::new(pack(open)?)),
    })
}

/// Fails unless an operation computes in f32.
fn in_f32(open: &Open, attribute: &Attribute) -> Result<()> {
    match DataType::of(open.number(attribute)?)? {
        DataType::F32 => Ok(()),
        other => Err(bad(format!("CUDNN_ATTR_{} is {other:?}; only f32 is emulated", attribute.name))),
    }
}

fn tensor(open: &Open) -> Result<Tensor> {
    let flag = |attribute| open.numbers(attribute).is_some_and(|values| values[0] != 0);
    let list = |attribute| open.numbers(attribute).ok_or_else(|| missing(attribute));
    let tensor = Tensor {
        uid: open.number(&at::TENSOR_UNIQUE_ID)?,
        of: DataType::of(open.number(&at::TENSOR_DATA_TYPE)?)?,
        dims: [1; 4],
        strides: [1; 4],
        alignment: open.number(&at::TENSOR_BYTE_ALIGNMENT)?.try_into().unwrap_or(0),
        is_virtual: flag(&at::TENSOR_IS_VIRTUAL),
        is_by_value: flag(&at::TENSOR_IS_BY_VALUE),
    };
    tensor.with_shape(list(&at::TENSOR_DIMENSIONS)?, list(&at::TENSOR_STRIDES)?)
}

fn operation(kind: Kind, open: &Open) -> Result<Operation> {
    Ok(match kind {
        Kind::PointwiseOperation => {
            let Part::Pointwise(mode) = open.part(&at::OPERATION_POINTWISE_PW_DESCRIPTOR)? else {
                return Err(missing(&at::OPERATION_POINTWISE_PW_DESCRIPTOR));
            };
            let b = open.optional_tensor(&at::OPERATION_POINTWISE_BDESC);
            let (x, y) = (open.tensor(&at::OPERATION_POINTWISE_XDESC)?, open.tensor(&at::OPERATION_POINTWISE_YDESC)?);
            Operation::Pointwise { mode, x, b, y }
        }
        Kind::MatmulOperation => {
            open.part(&at::OPERATION_MATMUL_DESC)?;
            let [a, b, c] = [&at::OPERATION_MATMUL_ADESC, &at::OPERATION_MATMUL_BDESC, &at::OPERATION_MATMUL_CDESC];
            Operation::Matmul { a: open.tensor(a)?, b: open.tensor(b)?, c: open.tensor(c)? }
        }
        Kind::ReductionOperation => {
            open.part(&at::OPERATION_REDUCTION_DESC)?;
            let (x, y) = (open.tensor(&at::OPERATION_REDUCTION_XDESC)?, open.tensor(&at::OPERATION_REDUCTION_YDESC)?);
            Operation::Reduction { x, y }
        }
        Kind::Reshape => {
            let (x, y) = (open.tensor(&at::OPERATION_RESHAPE_XDESC)?, open.tensor(&at::OPERATION_RESHAPE_YDESC)?);
            Operation::Reshape { x, y }
        }
        Kind::Mask => Operation::Mask {
            x: open.tensor(&at::OPERATION_DIAGONAL_BAND_MASK_XDESC)?,
            fill: open.tensor(&at::OPERATION_DIAGONAL_BAND_MASK_BDESC)?,
            band: band(open)?,
            y: open.tensor(&at::OPERATION_DIAGONAL_BAND_MASK_YDESC)?,
        },
        _ => Operation::Attention(attention(open)?),
    })
}

fn band(open: &Open) -> Result<Band> {
    let left = open.optional_tensor(&at::OPERATION_DIAGONAL_BAND_MASK_LEFT_BOUND_DESC);
    let shift = open.optional_tensor(&at::OPERATION_DIAGONAL_BAND_MASK_SHIFT_RIGHT_BOUND_DESC);
    match (open.number(&at::OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE)?, left, shift) {
        (CMP_GE, None, shift) => Ok(Band::Right(shift)),
        (CMP_GT, Some(left), None) => Ok(Band::Left(left)),
        (mode, left, shift) => {
            let why = format!("a mask with cudnnPointwiseMode_t {mode}, a left bound: {}", left.is_some());
            Err(bad(format!("{why}, a shift: {}, is not emulated", shift.is_some())))
        }
    }
}

fn attention(open: &Open) -> Result<Attention> {
    let Part::Softmax(softmax) = open.part(&at::OPERATION_SDPA_FWD_SOFTMAX_DESC)? else {
        return Err(missing(&at::OPERATION_SDPA_FWD_SOFTMAX_DESC));
    };
    let [input, output] = [&at::OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, &at::OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID];
    let modifier = match open.graph(&at::OPERATION_SDPA_FWD_SUBGRAPH) {
        Ok(graph) => Some(Modifier { graph, input: open.number(input)?, output: open.number(output)? }),
        Err(_) if open.number(input).is_ok() || open.number(output).is_ok() => {
            return Err(missing(&at::OPERATION_SDPA_FWD_SUBGRAPH));
        }
        Err(_) => None,
    };
    Ok(Attention {
        q: open.tensor(&at::OPERATION_SDPA_FWD_QDESC)?,
        k: open.tensor(&at::OPERATION_SDPA_FWD_KDESC)?,
        v: open.tensor(&at::OPERATION_SDPA_FWD_VDESC)?,
        o: open.tensor(&at::OPERATION_SDPA_FWD_ODESC)?,
        scale: open.optional_tensor(&at::OPERATION_SDPA_FWD_SCALEDESC),
        softmax,
        modifier,
    })
}

fn pack(open: &Open) -> Result<Pack> {
    let list = |attribute| open.numbers(attribute).ok_or_else(|| missing(attribute));
    let (uids, pointers) = (list(&at::VARIANT_PACK_UNIQUE_IDS)?, list(&at::VARIANT_PACK_DATA_POINTERS)?);
    if uids.len() != pointers.len() {
        return Err(bad(format!("{} uids have {} pointers", uids.len(), pointers.len())));
    }
    let places: BTreeMap<i64, u64> = uids.iter().zip(pointers).map(|(uid, at)| (*uid, *at as u64)).collect();
    if places.len() != uids.len() {
        return Err(bad(format!("a uid is twice among {uids:?}")));
    }
    let workspace = open.numbers(&at::VARIANT_PACK_WORKSPACE).map_or(0, |at| at[0] as u64);
    Ok(Pack { places, workspace })
}
