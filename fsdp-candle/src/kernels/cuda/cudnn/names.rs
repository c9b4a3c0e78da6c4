//! Numbers of cuDNN's enumerations, as far as they are used here
//! (<https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html>). cudarc has them too, but links
//! programs to libcudnn, which need not be installed.

/// Names of attributes (`cudnnBackendAttributeName_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Name {
    PointwiseMode = 0,
    PointwiseMathPrec = 1,
    EngineHeurMode = 200,
    EngineHeurOperationGraph = 201,
    EngineHeurResults = 202,
    EngineHeurDeviceProp = 204,
    EngineCfgEngine = 300,
    EngineCfgKnobChoices = 302,
    ExecutionPlanHandle = 400,
    ExecutionPlanEngineConfig = 401,
    ExecutionPlanWorkspaceSize = 402,
    ExecutionPlanDeviceProp = 407,
    KnobChoiceKnobType = 600,
    KnobChoiceKnobValue = 601,
    OperationPointwisePwDescriptor = 750,
    OperationPointwiseXDesc = 751,
    OperationPointwiseBDesc = 752,
    OperationPointwiseYDesc = 753,
    OperationGraphHandle = 800,
    OperationGraphOps = 801,
    TensorByteAlignment = 900,
    TensorDataType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorUniqueId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    VariantPackUniqueIds = 1000,
    VariantPackDataPointers = 1001,
    VariantPackWorkspace = 1003,
    EngineOperationGraph = 1300,
    EngineGlobalIndex = 1301,
    EngineDeviceProp = 1307,
    MatmulCompType = 1500,
    OperationMatmulADesc = 1520,
    OperationMatmulBDesc = 1521,
    OperationMatmulCDesc = 1522,
    OperationMatmulDesc = 1523,
    ReductionOperator = 1600,
    ReductionCompType = 1601,
    OperationReductionXDesc = 1610,
    OperationReductionYDesc = 1611,
    OperationReductionDesc = 1612,
    OperationReshapeXDesc = 2200,
    OperationReshapeYDesc = 2201,
    #[cfg_attr(not(test), allow(dead_code, reason = "tests plan for devices that are not here"))]
    DevicePropJsonRepresentation = 2702,
    OperationSdpaFwdQDesc = 2800,
    OperationSdpaFwdKDesc = 2801,
    OperationSdpaFwdVDesc = 2802,
    OperationSdpaFwdODesc = 2803,
    OperationSdpaFwdScaleDesc = 2805,
    OperationSdpaFwdSubgraph = 2811,
    OperationSdpaFwdSubgraphInputUid = 2812,
    OperationSdpaFwdSubgraphOutputUid = 2813,
    OperationSdpaFwdSoftmaxDesc = 2814,
    OperationDiagonalBandMaskXDesc = 3000,
    OperationDiagonalBandMaskLeftBoundDesc = 3003,
    OperationDiagonalBandMaskShiftRightBoundDesc = 3004,
    OperationDiagonalBandMaskBDesc = 3005,
    OperationDiagonalBandMaskYDesc = 3006,
    OperationDiagonalBandMaskComparisonMode = 3007,
    OperationSoftmaxXDesc = 3100,
    OperationSoftmaxYDesc = 3101,
    OperationSoftmaxStatsDesc = 3102,
}

/// Kinds of descriptors (`cudnnBackendDescriptorType_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Kind {
    Pointwise = 0,
    Engine = 2,
    EngineCfg = 3,
    EngineHeur = 4,
    ExecutionPlan = 5,
    KnobChoice = 7,
    OperationPointwise = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    OperationMatmul = 19,
    Reduction = 21,
    OperationReduction = 22,
    OperationReshape = 31,
    OperationSdpaFwd = 41,
    #[cfg_attr(not(test), allow(dead_code, reason = "tests plan for devices that are not here"))]
    DeviceProp = 38,
    OperationDiagonalBandMask = 44,
    OperationSoftmax = 45,
}

/// Types of attributes (`cudnnBackendAttributeType_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum AttributeKind {
    Handle = 0,
    DataType = 1,
    Boolean = 2,
    Int64 = 3,
    VoidPtr = 6,
    HeurMode = 8,
    KnobType = 9,
    PointwiseMode = 14,
    BackendDescriptor = 15,
    ReductionOperatorType = 18,
    Char = 24,
}

/// Ways of finding an engine (`cudnnBackendHeurMode_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Heuristics {
    A = 3,
}

/// Settings of engines (`cudnnBackendKnobType_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Knob {
    Stages = 14,
    KernelCfg = 24,
    TileCgaM = 27,
    StreamK = 38,
    TileM = 40,
    TileN = 41,
}

/// Types of elements (`cudnnDataType_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum DataType {
    Float = 0,
    Half = 2,
    Int32 = 4,
    Bfloat16 = 9,
}

/// Operations by element (`cudnnPointwiseMode_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Pointwise {
    Mul = 1,
    Sub = 9,
    Exp = 13,
    Identity = 21,
    CmpGt = 302,
    CmpGe = 303,
}

/// Operations of a reduction (`cudnnReduceTensorOp_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Reduction {
    Add = 0,
}
