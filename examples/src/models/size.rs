//! Size of a model, computed from its configuration.

use fsdp_ckpt::hf::ExpertNames;

use crate::models::config::latent::LatentConfig;
use crate::models::config::{BertConfig, DecoderConfig, Gpt2Config, ModelConfig};
use crate::models::heads::Head;
use crate::models::parameter_names::Lora;

/// Sizes of a model. They are floats because products of a configuration's numbers may overflow any integer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelSize {
    /// Parameters without adapters.
    pub base: f64,
    /// Parameters of adapters.
    pub adapters: f64,
    /// Parameters of the largest unit, adapters included.
    pub largest_unit: f64,
    /// Parameter tensors.
    pub tensors: f64,
    /// Elements per token of the widest activation.
    pub widest: f64,
    /// Elements of the rotary tables per position.
    pub rotary: f64,
}

/// Size of a block, or of the layers outside blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UnitSize {
    /// Parameters, adapters included.
    pub elements: f64,
    /// Parameter tensors.
    pub tensors: f64,
    /// Adapters' part of `elements`.
    pub adapters: f64,
    /// Elements of the matrices that each token is multiplied with. Forward takes twice as many operations per token,
    /// backward four times. Includes a tied head and the chosen experts, and excludes embeddings.
    pub products: f64,
}

impl UnitSize {
    fn matrix(&mut self, rows: f64, columns: f64) {
        self.elements += rows * columns;
        self.tensors += 1.;
    }
}

/// Layers of a module, whose names start with the module's name.
struct Module<'a> {
    name: String,
    lora: Option<&'a Lora>,
    part: UnitSize,
    /// Share of the tokens that the next layers see.
    seen: f64,
}

impl<'a> Module<'a> {
    fn new(name: impl Into<String>, lora: Option<&'a Lora>) -> Self {
        Module { name: name.into(), lora, part: UnitSize::default(), seen: 1. }
    }

    fn linear(&mut self, name: &str, inputs: f64, outputs: f64, bias: bool) {
        self.part.matrix(inputs, outputs);
        self.part.products += self.seen * inputs * outputs;
        if bias {
            self.part.matrix(1., outputs);
        }
        if let Some(Lora { config, targets }) = self.lora
            && targets.matches(&format!("{}{name}", self.name))
        {
            let before = self.part.elements;
            self.part.matrix(config.rank as f64, inputs);
            self.part.matrix(outputs, config.rank as f64);
            self.part.adapters += self.part.elements - before;
            self.part.products += self.seen * (self.part.elements - before);
        }
    }

    fn norm(&mut self, width: f64) {
        self.part.matrix(1., width);
    }
}

/// Number of blocks that are computed one by one. The others are assumed to be alike.
const MOST_BLOCKS: usize = 10_000;

/// Parts of a model.
struct Parts<'a> {
    layers: usize,
    block: Box<dyn Fn(usize) -> UnitSize + 'a>,
    /// The layers outside blocks.
    outside: UnitSize,
    /// Parameters of an embedding that is a unit of its own.
    embedding: f64,
    widest: f64,
    rotary: f64,
}

impl ModelConfig {
    /// Returns the size of the model, with adapters if any.
    pub fn size(&self, lora: Option<&Lora>) -> ModelSize {
        self.parts(lora).sum()
    }

    /// Returns [`size`](ModelConfig::size) of the model with another output, up to the classifier's few parameters.
    pub fn size_with_head(&self, head: Head, lora: Option<&Lora>) -> ModelSize {
        let mut size = self.size(lora);
        if head == Head::Vocabulary {
            return size;
        }
        let own_head = match self {
            ModelConfig::Decoder(config) if !config.tied => config.width as f64 * config.vocabulary as f64,
            _ => 0.,
        };
        size.base -= own_head;
        size.widest = match self {
            ModelConfig::Decoder(config) => config.heads as f64 * config.head_dim as f64,
            ModelConfig::Gpt2(config) => config.inner() as f64,
            ModelConfig::Bert(config) => config.intermediate_size as f64,
        };
        size
    }

    /// Returns the layers outside blocks, and the blocks in forward order (at most ten thousand).
    pub fn units(&self, lora: Option<&Lora>) -> (UnitSize, Vec<UnitSize>) {
        let Parts { layers, block, outside, .. } = self.parts(lora);
        (outside, (0..layers.min(MOST_BLOCKS)).map(block).collect())
    }

    fn parts<'a>(&'a self, lora: Option<&'a Lora>) -> Parts<'a> {
        match self {
            ModelConfig::Decoder(config) => decoder(config, lora),
            ModelConfig::Gpt2(config) => gpt2(config, lora),
            ModelConfig::Bert(config) => bert(config, lora),
        }
    }
}

fn decoder<'a>(config: &'a DecoderConfig, lora: Option<&'a Lora>) -> Parts<'a> {
    let [width, inner, vocabulary, head] =
        [config.width, config.inner, config.vocabulary, config.head_dim].map(|n| n as f64);
    let (queries, keys) = (config.heads as f64 * head, config.kv_heads as f64 * head);
    let biases = config.biases;
    let block = move |layer: usize| {
        let mut block = Module::new(format!("model.layers.{layer}."), lora);
        if let Some(latent) = &config.latent {
            latent_attention(&mut block, config, latent);
        } else if config.fused {
            block.linear("self_attn.qkv_proj", width, queries + 2. * keys, biases.qkv);
        } else {
            for (name, outputs) in [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)] {
                block.linear(&format!("self_attn.{name}"), width, outputs, biases.qkv);
            }
        }
        block.linear("self_attn.o_proj", config.heads as f64 * config.value_dim() as f64, width, biases.output);
        for _ in 0..if config.norms.post { 4 } else { 2 } {
            block.norm(width);
        }
        if config.norms.heads {
            block.norm(head);
            block.norm(head);
        }
        if config.has_sinks {
            block.norm(config.heads as f64);
        }
        if let Some(experts) = config.experts(layer) {
            let ExpertNames { module: name, router, projections: [gate, up, down] } = experts.names;
            let inner = experts.inner as f64;
            let count = experts.count as f64;
            match experts.router.in_f32 {
                true => {
                    block.part.matrix(count, width);
                    block.part.products += count * width;
                }
                false => block.linear(&format!("{name}.{router}"), width, count, experts.router.has_bias),
            }
            if let Some(shared) = experts.shared {
                mlp(&mut block, "mlp.shared_experts.", [width, shared as f64], biases.mlp);
            }
            block.seen = experts.per_token as f64 / experts.count as f64;
            for expert in 0..experts.count {
                block.linear(&format!("{name}.experts.{expert}.{gate}"), width, inner, experts.biases);
                block.linear(&format!("{name}.experts.{expert}.{up}"), width, inner, experts.biases);
                block.linear(&format!("{name}.experts.{expert}.{down}"), inner, width, experts.biases);
            }
        } else {
            if config.fused {
                block.linear("mlp.gate_up_proj", width, 2. * inner, biases.mlp);
                block.linear("mlp.down_proj", inner, width, biases.mlp);
            } else {
                mlp(&mut block, "mlp.", [width, inner], biases.mlp);
            }
        }
        block.part
    };
    let mut root = Module::new("", lora);
    root.part.matrix(vocabulary, width);
    root.norm(width);
    match config.tied {
        true => root.part.products += vocabulary * width,
        false => root.linear("lm_head", width, vocabulary, false),
    }
    // The number of tokens per expert is not known in advance.
    let widest = if config.experts.is_some() { vocabulary.max(queries) } else { vocabulary.max(inner).max(queries) };
    // Sines and cosines, on the device and on the host.
    let ropes = [Some(&config.rope), config.local_rope.as_ref()];
    let rotary = ropes.into_iter().flatten().map(|rope| 2. * rope.width as f64 * rope.tables()).sum();
    let embedding = if config.tied { 0. } else { vocabulary * width };
    Parts { layers: config.layers, block: Box::new(block), outside: root.part, embedding, widest, rotary }
}

/// Adds the projections of latent attention, without that of the output.
fn latent_attention(block: &mut Module, config: &DecoderConfig, latent: &LatentConfig) {
    let bias = config.biases.qkv;
    let [width, heads, rank, plain, rotated, value] =
        [config.width, config.heads, latent.rank, latent.plain, latent.rotated, latent.value].map(|n| n as f64);
    let queries = heads * (plain + rotated);
    match latent.query_rank {
        None => block.linear("self_attn.q_proj", width, queries, false),
        Some(rank) => {
            block.linear("self_attn.q_a_proj", width, rank as f64, bias);
            block.norm(rank as f64);
            block.linear("self_attn.q_b_proj", rank as f64, queries, false);
        }
    }
    block.linear("self_attn.kv_a_proj_with_mqa", width, rank + rotated, bias);
    block.norm(rank);
    block.linear("self_attn.kv_b_proj", rank, heads * (plain + value), false);
}

/// Adds an MLP with three projections, whose names start with `prefix`.
fn mlp(block: &mut Module, prefix: &str, [width, inner]: [f64; 2], bias: bool) {
    for name in ["gate_proj", "up_proj"] {
        block.linear(&format!("{prefix}{name}"), width, inner, bias);
    }
    block.linear(&format!("{prefix}down_proj"), inner, width, bias);
}

fn gpt2<'a>(config: &'a Gpt2Config, lora: Option<&'a Lora>) -> Parts<'a> {
    let [width, inner, vocabulary, positions] =
        [config.n_embd, config.inner(), config.vocab_size, config.n_positions].map(|n| n as f64);
    let block = move |layer: usize| {
        let mut block = Module::new(format!("h.{layer}."), lora);
        block.linear("attn.c_attn", width, 3. * width, true);
        block.linear("attn.c_proj", width, width, true);
        block.linear("mlp.c_fc", width, inner, true);
        block.linear("mlp.c_proj", inner, width, true);
        // A norm has a weight and a bias.
        (0..4).for_each(|_| block.norm(width));
        block.part
    };
    let mut root = UnitSize { products: vocabulary * width, ..UnitSize::default() };
    root.matrix(vocabulary, width);
    root.matrix(positions, width);
    (0..2).for_each(|_| root.matrix(1., width));
    let widest = vocabulary.max(inner).max(3. * width);
    Parts { layers: config.n_layer, block: Box::new(block), outside: root, embedding: 0., widest, rotary: 0. }
}

fn bert<'a>(config: &'a BertConfig, lora: Option<&'a Lora>) -> Parts<'a> {
    let [width, inner, vocabulary, positions, types] = [
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.max_position_embeddings,
        config.type_vocab_size,
    ]
    .map(|n| n as f64);
    let block = move |layer: usize| {
        let mut block = Module::new(format!("bert.encoder.layer.{layer}."), lora);
        for name in ["self.query", "self.key", "self.value", "output.dense"] {
            block.linear(&format!("attention.{name}"), width, width, true);
        }
        block.linear("intermediate.dense", width, inner, true);
        block.linear("output.dense", inner, width, true);
        (0..4).for_each(|_| block.norm(width));
        block.part
    };
    let mut root = Module::new("", lora);
    for rows in [vocabulary, positions, types] {
        root.part.matrix(rows, width);
    }
    root.linear("cls.predictions.transform.dense", width, width, true);
    (0..4).for_each(|_| root.norm(width));
    root.part.matrix(1., vocabulary);
    root.part.products += vocabulary * width;
    let (layers, widest) = (config.num_hidden_layers, vocabulary.max(inner));
    Parts { layers, block: Box::new(block), outside: root.part, embedding: 0., widest, rotary: 0. }
}

impl Parts<'_> {
    fn sum(self) -> ModelSize {
        let Parts { layers, block, outside, embedding, widest, rotary } = self;
        let looked_at = layers.min(MOST_BLOCKS);
        let each = if looked_at == 0 { 0. } else { layers as f64 / looked_at as f64 };
        let mut size = ModelSize {
            base: outside.elements - outside.adapters,
            adapters: outside.adapters,
            largest_unit: embedding.max(outside.elements - embedding),
            tensors: outside.tensors,
            widest,
            rotary,
        };
        for block in (0..looked_at).map(block) {
            size.base += each * (block.elements - block.adapters);
            size.adapters += each * block.adapters;
            size.largest_unit = size.largest_unit.max(block.elements);
            size.tensors += each * block.tensors;
        }
        size
    }
}
