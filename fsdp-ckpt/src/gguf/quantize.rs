//! Types of tensors, as llama.cpp's quantizer chooses them, and encoding.

use std::path::Path;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::Result;
use crate::gguf::config::{Architecture, Config};
use crate::gguf::k_quants;
use crate::text_file::malformed;

/// Types of a model's matrices. Norms, biases and routers of experts are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantization {
    /// 32 bits.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain floating point, 16 bits.
    BF16,
    /// 8.5 bits for each weight.
    Q8_0,
    /// 4.5 bits for each weight.
    Q4_0,
    /// About 4.8 bits for each weight: a mix of Q4_K and, for tensors that need it, Q6_K.
    Q4KM,
    /// 6.6 bits for each weight.
    Q6K,
}

impl Quantization {
    /// All quantizations.
    pub const ALL: [Quantization; 7] = [
        Quantization::F32,
        Quantization::F16,
        Quantization::BF16,
        Quantization::Q8_0,
        Quantization::Q4_0,
        Quantization::Q4KM,
        Quantization::Q6K,
    ];

    /// Returns llama.cpp's name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Quantization::F32 => "f32",
            Quantization::F16 => "f16",
            Quantization::BF16 => "bf16",
            Quantization::Q8_0 => "q8_0",
            Quantization::Q4_0 => "q4_0",
            Quantization::Q4KM => "q4_k_m",
            Quantization::Q6K => "q6_k",
        }
    }

    /// Returns the quantization with llama.cpp's name, in lower case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|quantization| quantization.name() == name)
    }

    /// Returns the number of `general.file_type`.
    pub(super) fn file_type(self) -> usize {
        match self {
            Quantization::F32 => 0,
            Quantization::F16 => 1,
            Quantization::Q4_0 => 2,
            Quantization::Q8_0 => 7,
            Quantization::Q4KM => 15,
            Quantization::Q6K => 18,
            Quantization::BF16 => 32,
        }
    }

    fn usual_type(self) -> GgmlDType {
        match self {
            Quantization::F32 => GgmlDType::F32,
            Quantization::F16 => GgmlDType::F16,
            Quantization::BF16 => GgmlDType::BF16,
            Quantization::Q8_0 => GgmlDType::Q8_0,
            Quantization::Q4_0 => GgmlDType::Q4_0,
            Quantization::Q4KM => GgmlDType::Q4K,
            Quantization::Q6K => GgmlDType::Q6K,
        }
    }

    /// Returns the type of a tensor. `has_output` says whether the head has its own weights.
    pub(super) fn of_tensor(self, name: &str, shape: &[usize], config: &Config, has_output: bool) -> GgmlDType {
        const ALWAYS_F32: [&str; 4] =
            ["_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight"];
        let [.., columns] = shape else { return GgmlDType::F32 };
        if shape.len() < 2 || !name.ends_with(".weight") || ALWAYS_F32.iter().any(|end| name.ends_with(end)) {
            return GgmlDType::F32;
        }
        let usual = self.usual_type();
        let block = usual.block_size();
        if block == 1 {
            return usual;
        }
        let is_output = name == "output.weight" || (name == "token_embd.weight" && !has_output);
        let dtype = match (usual, is_output) {
            (GgmlDType::Q8_0, _) => usual,
            (_, true) if !columns.is_multiple_of(block) => GgmlDType::Q8_0,
            (_, true) => GgmlDType::Q6K,
            (_, false) => self.of_layer(name, config).unwrap_or(usual),
        };
        fallback(dtype, *columns)
    }

    /// Returns the type of a layer's matrix, if it differs from the usual one.
    fn of_layer(self, name: &str, config: &Config) -> Option<GgmlDType> {
        let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
        let more_bits = self == Quantization::Q4KM && needs_more_bits(layer.parse().ok()?, config.layers);
        let of_eight = config.experts.is_some_and(|experts| experts.count == 8);
        match part {
            // A few bits more for small tensors.
            "attn_v.weight" | "attn_qkv.weight" | "attn_k.weight" if of_eight => Some(GgmlDType::Q8_0),
            "attn_v.weight" | "attn_qkv.weight" if more_bits => Some(GgmlDType::Q6K),
            "attn_v.weight" | "attn_qkv.weight" if self == Quantization::Q4KM && is_70b(config) => Some(GgmlDType::Q5K),
            "attn_output.weight" if of_eight && self == Quantization::Q4KM => Some(GgmlDType::Q5K),
            "ffn_down.weight" | "ffn_down_exps.weight" if more_bits => Some(GgmlDType::Q6K),
            _ => None,
        }
    }
}

/// Returns whether the mix of q4_k_m gives a layer more bits: the first and last eighth, and every third between them.
fn needs_more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// Returns whether llama.cpp takes the model for one of 70 B parameters, whose values are small beside queries.
fn is_70b(config: &Config) -> bool {
    config.layers == 80
        && match config.architecture {
            Architecture::Llama => config.heads != config.kv_heads,
            Architecture::Qwen2 => true,
            _ => false,
        }
}

/// Returns a type whose blocks divide the rows.
fn fallback(dtype: GgmlDType, columns: usize) -> GgmlDType {
    if columns.is_multiple_of(dtype.block_size()) {
        return dtype;
    }
    let smaller = match dtype {
        GgmlDType::Q4K => GgmlDType::Q5_0,
        GgmlDType::Q5K => GgmlDType::Q5_1,
        GgmlDType::Q6K => GgmlDType::Q8_0,
        other => other,
    };
    if columns.is_multiple_of(smaller.block_size()) { smaller } else { GgmlDType::F16 }
}

/// Returns the name of a type.
pub(super) fn name(dtype: GgmlDType) -> &'static str {
    match dtype {
        GgmlDType::F32 => "f32",
        GgmlDType::F16 => "f16",
        GgmlDType::BF16 => "bf16",
        GgmlDType::Q4_0 => "q4_0",
        GgmlDType::Q5_0 => "q5_0",
        GgmlDType::Q5_1 => "q5_1",
        GgmlDType::Q8_0 => "q8_0",
        GgmlDType::Q4K => "q4_k",
        GgmlDType::Q5K => "q5_k",
        GgmlDType::Q6K => "q6_k",
        // Never chosen.
        GgmlDType::Q4_1 | GgmlDType::Q8_1 | GgmlDType::Q2K | GgmlDType::Q3K | GgmlDType::Q8K => "other",
    }
}

/// Bytes in f32 that a thread quantizes at once.
const PIECE: usize = 256 << 10;

/// Encodes whole rows of a tensor, and counts finite numbers that overflow.
pub(super) fn encode(
    tensor: &str,
    path: &Path,
    values: &[f32],
    columns: usize,
    dtype: GgmlDType,
    overflowed: &mut u64,
) -> Result<Vec<u8>> {
    match dtype {
        GgmlDType::F32 => return Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        GgmlDType::BF16 => {
            return Ok(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect());
        }
        GgmlDType::F16 => {
            let halves = values.iter().map(|value| {
                let half = f16::from_f32(*value);
                *overflowed += u64::from(half.is_infinite() && value.is_finite());
                half.to_le_bytes()
            });
            return Ok(halves.flatten().collect());
        }
        _ => {}
    }
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        let reason = format!(
            "it has the number {}, which {} can't hold; `fsdp-ckpt verify --finite` lists such tensors",
            values[at],
            name(dtype)
        );
        return Err(malformed(path, Some(tensor), reason));
    }
    let rows = (PIECE / (4 * columns)).max(1);
    let pieces: Result<Vec<Vec<u8>>> = values
        .par_chunks(rows * columns)
        .map(|piece| {
            match dtype {
                GgmlDType::Q4K => return Ok(k_quants::q4_k(piece)),
                GgmlDType::Q5K => return Ok(k_quants::q5_k(piece)),
                GgmlDType::Q6K => return Ok(k_quants::q6_k(piece)),
                _ => {}
            }
            let mut storage = dtype.cpu_zeros(piece.len());
            storage.from_float(piece);
            let quantized =
                QTensor::new(QStorage::Cpu(storage), piece.len()).and_then(|tensor| Ok(tensor.data()?.to_vec()));
            quantized.map_err(|error| malformed(path, Some(tensor), format!("Candle can't quantize it: {error}")))
        })
        .collect();
    Ok(pieces?.concat())
}
