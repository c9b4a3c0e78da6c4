//! Sizes of a model's layers per token, from its configuration.

use anyhow::ensure;
use fsdp_train::models::ModelConfig;
use fsdp_train::models::config::Activation;
use fsdp_train::models::config::latent::LatentConfig;
use fsdp_train::models::config::{BertConfig, DecoderConfig, Gpt2Config};

/// A block. Widths are elements per token.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    /// Parameters.
    pub(super) parameters: f64,
    /// Parameter tensors, without those of other ranks' experts.
    pub(super) tensors: f64,
    /// Parameters of the experts that this rank gathers, a part of `parameters`.
    pub(super) own_experts: f64,
    /// Parameters of the experts that are on other ranks, a part of `parameters`.
    pub(super) other_experts: f64,
    /// Elements of the tokens that are sent to experts on other ranks or received, in each of four exchanges.
    pub(super) dispatched: f64,
    /// Width of the residual stream.
    pub(super) width: f64,
    /// Width of a rank's part of the residual stream. Smaller if tensor-parallel ranks split sequences.
    pub(super) residual: f64,
    /// Elements that tensor-parallel ranks add up in forward, and as many in backward.
    pub(super) exchanged: f64,
    /// Elements of whole sequences that are kept, if ranks split sequences.
    pub(super) whole: f64,
    /// Width of queries and of the output of attention.
    pub(super) queries: f64,
    /// Width of keys and of values.
    pub(super) keys: f64,
    pub(super) heads: f64,
    /// Mean number of keys that a query sees.
    pub(super) reach: f64,
    /// Elements of a query's scores over all heads and all keys.
    pub(super) scores: f64,
    /// Number of norms over the residual stream.
    pub(super) norms: f64,
    pub(super) norm: Norm,
    /// Whether each head's queries and keys have norms.
    pub(super) head_norms: bool,
    /// Whether queries and keys have rotary embeddings.
    pub(super) rotary: bool,
    /// Whether one product makes queries, keys and values.
    pub(super) joined: bool,
    pub(super) mlp: Mlp,
    /// Fully connected layers in forward order.
    pub(super) linears: Vec<Linear>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Norm {
    Rms,
    Layer,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Mlp {
    /// Width inside the MLP or expert.
    pub(super) inner: f64,
    pub(super) kind: MlpKind,
    /// Fully connected layers of an MLP or expert.
    pub(super) linears: f64,
    /// Number of MLPs that a token passes.
    pub(super) times: f64,
    /// Number of experts of this rank, or 0.
    pub(super) experts: f64,
    /// Number of experts of other ranks.
    pub(super) other_experts: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MlpKind {
    /// `activation(up)`
    Plain,
    /// `activation(gate) * up`
    Gated,
    /// `silu(gate) * up`, one fused operation in candle-fsdp
    SiluMul,
    /// [`MlpKind::SiluMul`] and its products, one fused operation in candle-fsdp on a CPU without tensor parallelism
    SwiGlu,
}

/// A fully connected layer, which a token passes `times` times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    pub(super) inputs: f64,
    pub(super) outputs: f64,
    pub(super) times: f64,
}

impl Linear {
    fn new(inputs: f64, outputs: f64) -> Self {
        Linear { inputs, outputs, times: 1. }
    }

    pub(super) fn products(&self) -> f64 {
        self.inputs * self.outputs * self.times
    }
}

impl Layer {
    /// Returns the matrix elements that a token is multiplied with.
    pub(super) fn products(&self) -> f64 {
        self.linears.iter().map(Linear::products).sum()
    }
}

/// The layers outside the blocks.
#[derive(Clone, Debug)]
pub(super) struct Root {
    /// Parameters.
    pub(super) parameters: f64,
    /// Parameter tensors.
    pub(super) tensors: f64,
    /// Parameters of the head, whose gradient is complete before backward reaches the blocks. An embedding that is not tied
    /// has as many.
    pub(super) head: f64,
    /// Whether the head shares the embedding's weights.
    pub(super) tied: bool,
    /// Matrix elements that a token is multiplied with.
    pub(super) products: f64,
    pub(super) width: f64,
    pub(super) vocabulary: f64,
    /// Whether the vocabulary is a part that tensor-parallel ranks have.
    pub(super) shared: bool,
    /// Kept elements.
    pub(super) kept: f64,
    /// Elements of the rotary tables per position.
    pub(super) rotary: f64,
}

/// Memory of the head and its loss, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logits {
    /// Kept from forward to backward.
    pub(super) kept: f64,
    /// Additional during the loss.
    pub(super) loss: f64,
    /// Additional during the backward of the head.
    pub(super) slopes: f64,
    /// Moved in forward and backward.
    pub(super) moved: f64,
    /// Whether backward computes the logits again.
    pub(super) again: bool,
}

/// Neighbouring ranks that compute each layer together.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorRanks {
    pub(super) count: usize,
    /// Whether they split sequences.
    pub(super) sequence: bool,
}

/// Layers and sizes of a model, or of a tensor-parallel rank's part of it.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) root: Root,
    pub(super) layers: Vec<Layer>,
    pub(super) positions: usize,
}

/// Upper limit of the number of blocks, and of experts in a block.
const MOST_LAYERS: usize = 1000;
const MOST_EXPERTS: usize = 100_000;

impl Model {
    /// Reads the sizes of one rank's part of a model, for sequences of `seq` tokens. `ranks` must divide the model's
    /// sizes.
    pub(super) fn of_rank(config: &ModelConfig, seq: usize, ranks: TensorRanks) -> anyhow::Result<Self> {
        let ModelConfig::Decoder(whole) = config else { return Model::new(config, seq) };
        let mut part = whole.clone();
        for size in [&mut part.heads, &mut part.kv_heads, &mut part.vocabulary, &mut part.inner] {
            *size /= ranks.count;
        }
        if let Some(experts) = &mut part.experts {
            experts.inner /= ranks.count;
        }
        let mut model = Model::new(&ModelConfig::Decoder(part), seq)?;
        if ranks.count > 1 {
            model.exchange(ranks);
        }
        Ok(model)
    }

    /// Adds what tensor-parallel ranks exchange to each layer.
    fn exchange(&mut self, ranks: TensorRanks) {
        for layer in &mut self.layers {
            // The outputs of attention and MLP, or of each expert.
            layer.exchanged = (1. + layer.mlp.times) * layer.width;
            if layer.mlp.kind == MlpKind::SwiGlu {
                layer.mlp.kind = MlpKind::SiluMul;
            }
            if !ranks.sequence {
                continue;
            }
            layer.residual /= ranks.count as f64;
            // The inputs of attention and MLP.
            layer.whole = 2. * layer.width;
            if layer.mlp.experts > 0. {
                // Experts see whole sequences: their input is gathered, half of a sum, and so is their output's gradient.
                // The output is kept.
                layer.exchanged += layer.width / 2.;
                layer.whole += layer.width;
            }
        }
        self.root.shared = true;
        if ranks.sequence {
            self.root.kept = self.root.kept / ranks.count as f64 + self.root.width;
        }
    }

    /// Spreads the experts over `ranks` ranks.
    pub(super) fn place_experts(&mut self, ranks: usize) {
        if ranks == 1 {
            return;
        }
        for layer in self.layers.iter_mut().filter(|layer| layer.mlp.experts > 0.) {
            let experts = layer.own_experts;
            layer.own_experts = experts / ranks as f64;
            layer.other_experts = experts - layer.own_experts;
            layer.dispatched = layer.mlp.times * layer.width;
            let others = layer.mlp.experts * (1. - 1. / ranks as f64);
            layer.mlp.experts -= others;
            layer.mlp.other_experts = others;
            layer.tensors -= others * layer.mlp.linears;
        }
    }

    /// Reads the sizes of a model for sequences of `seq` tokens.
    pub(super) fn new(config: &ModelConfig, seq: usize) -> anyhow::Result<Self> {
        let count = match config {
            ModelConfig::Decoder(config) => config.layers,
            ModelConfig::Gpt2(config) => config.n_layer,
            ModelConfig::Bert(config) => config.num_hidden_layers,
        };
        ensure!(count <= MOST_LAYERS, "{count} blocks are more than `bench plan` takes, which is {MOST_LAYERS}");
        let experts = match config {
            ModelConfig::Decoder(config) => config.experts.as_ref().map_or(0, |experts| experts.count),
            _ => 0,
        };
        ensure!(experts <= MOST_EXPERTS, "{experts} experts are more than `bench plan` takes, which is {MOST_EXPERTS}");
        let (root, units) = config.units(None);
        let mut layers: Vec<Layer> = match config {
            ModelConfig::Decoder(config) => (0..units.len()).map(|layer| decoder(config, layer, seq)).collect(),
            ModelConfig::Gpt2(config) => units.iter().map(|_| gpt2(config, seq)).collect(),
            ModelConfig::Bert(config) => units.iter().map(|_| bert(config, seq)).collect(),
        };
        for (layer, unit) in layers.iter_mut().zip(&units) {
            (layer.parameters, layer.tensors) = (unit.elements, unit.tensors);
        }
        let (width, kept) = match config {
            // The input and output of the last norm, and those of BERT's embeddings' norm and of its head's layers.
            ModelConfig::Decoder(config) => (config.width as f64, 2.),
            ModelConfig::Gpt2(config) => (config.n_embd as f64, 2.),
            ModelConfig::Bert(config) => (config.hidden_size as f64, 5.),
        };
        let vocabulary = config.vocab_size() as f64;
        Ok(Model {
            root: Root {
                parameters: root.elements,
                tensors: root.tensors,
                head: vocabulary * width,
                tied: !matches!(config, ModelConfig::Decoder(config) if !config.tied),
                products: root.products,
                width,
                vocabulary,
                shared: false,
                kept: kept * width,
                rotary: config.size(None).rotary,
            },
            layers,
            positions: config.max_positions(),
        })
    }

    /// Returns the number of parameters.
    pub(super) fn parameters(&self) -> f64 {
        self.root.parameters + self.layers.iter().map(|layer| layer.parameters).sum::<f64>()
    }

    /// Returns the floating point operations per token, forward and backward, without recomputation: six per matrix
    /// element, and attention between visible tokens.
    pub(super) fn operations(&self) -> f64 {
        let layers = self.layers.iter().map(|layer| 6. * layer.products() + 3. * layer.attention());
        6. * self.root.products + layers.sum::<f64>()
    }
}

impl Layer {
    /// Returns the parameters that this rank gathers.
    pub(super) fn gathered(&self) -> f64 {
        self.parameters - self.other_experts
    }

    /// Returns the elements per token of the widest output of a matrix product.
    pub(super) fn widest(&self) -> f64 {
        self.linears.iter().map(|linear| linear.outputs * linear.times).fold(0., f64::max)
    }

    /// Returns the operations per token of attention's forward: queries times keys, and weights times values.
    pub(super) fn attention(&self) -> f64 {
        4. * self.queries * self.reach
    }
}

/// Returns the projections of latent attention, without that of the output.
fn latent_linears(config: &DecoderConfig, latent: &LatentConfig) -> Vec<Linear> {
    let [width, heads, rank, rotated] = [config.width, config.heads, latent.rank, latent.rotated].map(|n| n as f64);
    let [queries, of_heads] = [latent.head_dim(), latent.plain + latent.value].map(|n| heads * n as f64);
    let query = match latent.query_rank.map(|rank| rank as f64) {
        None => vec![Linear::new(width, queries)],
        Some(rank) => vec![Linear::new(width, rank), Linear::new(rank, queries)],
    };
    [query, vec![Linear::new(width, rank + rotated), Linear::new(rank, of_heads)]].concat()
}

/// Returns the mean number of positions up to a token's own, at most `window`.
fn causal_reach(seq: usize, window: Option<usize>) -> f64 {
    let (seq, window) = (seq as f64, window.unwrap_or(seq).min(seq) as f64);
    window - window * (window - 1.) / (2. * seq)
}

fn decoder(config: &DecoderConfig, layer: usize, seq: usize) -> Layer {
    let [width, inner] = [config.width, config.inner].map(|n| n as f64);
    let [queries, keys] = [config.heads, config.kv_heads].map(|heads| heads as f64 * config.head_dim as f64);
    let experts = config.experts(layer);
    let inner = experts.map_or(inner, |experts| experts.inner as f64);
    let times = experts.map_or(1., |experts| experts.per_token as f64);
    let count = experts.map_or(0., |experts| experts.count as f64);
    let mut linears = match (&config.latent, config.fused) {
        (Some(latent), _) => latent_linears(config, latent),
        (None, true) => vec![Linear::new(width, queries + 2. * keys)],
        (None, false) => [queries, keys, keys].map(|outputs| Linear::new(width, outputs)).into(),
    };
    linears.push(Linear::new(config.heads as f64 * config.value_dim() as f64, width));
    if experts.is_some() {
        linears.push(Linear::new(width, count));
    }
    let inputs: &[f64] = if config.fused { &[2. * inner] } else { &[inner, inner] };
    linears.extend(inputs.iter().map(|&outputs| Linear { inputs: width, outputs, times }));
    linears.push(Linear { inputs: inner, outputs: width, times });
    if let Some(shared) = experts.and_then(|experts| experts.shared) {
        let shared = shared as f64;
        linears.extend([(width, shared), (width, shared), (shared, width)].map(|(from, to)| Linear::new(from, to)));
    }
    Layer {
        parameters: 0.,
        tensors: 0.,
        own_experts: count * (inputs.iter().sum::<f64>() + inner) * width,
        other_experts: 0.,
        dispatched: 0.,
        width,
        residual: width,
        exchanged: 0.,
        whole: 0.,
        queries,
        keys,
        heads: config.heads as f64,
        reach: causal_reach(seq, config.attention(layer).window),
        scores: config.heads as f64 * seq as f64,
        norms: if config.norms.post { 4. } else { 2. },
        norm: Norm::Rms,
        head_norms: config.norms.heads,
        rotary: true,
        joined: config.fused,
        mlp: Mlp {
            inner,
            kind: match config.activation {
                Activation::Silu if config.fused || config.biases.mlp => MlpKind::SiluMul,
                Activation::Silu => MlpKind::SwiGlu,
                _ => MlpKind::Gated,
            },
            linears: inputs.len() as f64 + 1.,
            times,
            experts: count,
            other_experts: 0.,
        },
        linears,
    }
}

fn gpt2(config: &Gpt2Config, seq: usize) -> Layer {
    let (width, inner) = (config.n_embd as f64, config.inner() as f64);
    let linears = [(width, 3. * width), (width, width), (width, inner), (inner, width)];
    plain(width, inner, config.n_head, [causal_reach(seq, None), seq as f64], &linears)
}

fn bert(config: &BertConfig, seq: usize) -> Layer {
    let (width, inner) = (config.hidden_size as f64, config.intermediate_size as f64);
    let square = (width, width);
    let linears = [square, square, square, square, (width, inner), (inner, width)];
    plain(width, inner, config.num_attention_heads, [seq as f64; 2], &linears)
}

/// Returns a block whose queries see `reach` of the `seq` positions on average.
fn plain(width: f64, inner: f64, heads: usize, [reach, seq]: [f64; 2], linears: &[(f64, f64)]) -> Layer {
    Layer {
        parameters: 0.,
        tensors: 0.,
        own_experts: 0.,
        other_experts: 0.,
        dispatched: 0.,
        width,
        residual: width,
        exchanged: 0.,
        whole: 0.,
        queries: width,
        keys: width,
        heads: heads as f64,
        reach,
        scores: heads as f64 * seq,
        norms: 2.,
        norm: Norm::Layer,
        head_norms: false,
        rotary: false,
        joined: false,
        mlp: Mlp { inner, kind: MlpKind::Plain, linears: 2., times: 1., experts: 0., other_experts: 0. },
        linears: linears.iter().map(|&(inputs, outputs)| Linear::new(inputs, outputs)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_products_match_the_model() {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden");
        let mut seen = 0;
        for dir in std::fs::read_dir(golden).unwrap() {
            let path = dir.unwrap().path().join("config.json");
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            if !text.contains("model_type") {
                continue;
            }
            let config = ModelConfig::from_file(&path).unwrap();
            let model = Model::new(&config, 32).unwrap();
            let (_, units) = config.units(None);
            for (layer, unit) in model.layers.iter().zip(&units) {
                let (own, counted) = (layer.products(), unit.products);
                assert!((own - counted).abs() < 1e-9 * counted, "{}: {own}, not {counted}", path.display());
            }
            assert_eq!(model.parameters(), config.size(None).base, "{}", path.display());
            seen += 1;
        }
        assert!(seen >= 10, "{seen}");
    }

    #[test]
    fn window_bounds_the_reach() {
        // 1, 2, 3, 4 positions; with a window 1, 2, 2, 2.
        assert_eq!((causal_reach(4, None), causal_reach(4, Some(2)), causal_reach(4, Some(9))), (2.5, 1.75, 2.5));
    }

    #[test]
    fn llama_3_1_8b_matches_published_sizes() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/llama-3.1-8b/config.json");
        let model = Model::new(&ModelConfig::from_file(&path).unwrap(), 8192).unwrap();
        assert_eq!(model.parameters(), 8_030_261_248.);
        assert_eq!(model.root.products + 32. * model.layers[0].products(), 8_030_261_248. - 525_336_576. - 65. * 4096.);
    }
}
