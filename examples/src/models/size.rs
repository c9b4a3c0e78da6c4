//! How large a model is, before anything of it is made.

use super::config::{Gpt2Config, LlamaConfig, ModelConfig};

/// Numbers of elements and of tensors. They are floats because a configuration may say anything: products of its
/// numbers need not fit any integer.
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
    /// The widest activation of a token.
    pub widest: f64,
    /// Of the rotary tables, for each position.
    pub rotary: f64,
}

/// A block, or what is outside of them.
#[derive(Clone, Copy, Default)]
struct Part {
    elements: f64,
    tensors: f64,
}

impl Part {
    fn matrix(&mut self, rows: f64, columns: f64) {
        self.elements += rows * columns;
        self.tensors += 1.;
    }

    fn linear(&mut self, inputs: f64, outputs: f64, bias: bool) {
        self.matrix(inputs, outputs);
        if bias {
            self.matrix(1., outputs);
        }
    }

    fn adapter(&mut self, inputs: f64, outputs: f64, rank: Option<usize>) {
        if let Some(rank) = rank {
            self.matrix(rank as f64, inputs);
            self.matrix(outputs, rank as f64);
        }
    }
}

impl ModelConfig {
    /// The size of the model, with adapters of rank `lora` if any.
    pub fn size(&self, lora: Option<usize>) -> ModelSize {
        match self {
            ModelConfig::Llama(config) => llama(config, lora),
            ModelConfig::Gpt2(config) => gpt2(config, lora),
        }
    }
}

fn llama(config: &LlamaConfig, lora: Option<usize>) -> ModelSize {
    let [width, inner, vocabulary, head] =
        [config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim()].map(|n| n as f64);
    let (queries, keys) = (config.num_attention_heads as f64 * head, config.kv_heads() as f64 * head);
    let (mut block, mut adapters, mut root) = (Part::default(), Part::default(), Part::default());
    for (inputs, outputs) in [(width, queries), (width, keys), (width, keys), (queries, width)] {
        block.linear(inputs, outputs, config.attention_bias);
    }
    for (inputs, outputs) in [(width, inner), (width, inner), (inner, width)] {
        block.linear(inputs, outputs, config.mlp_bias);
    }
    block.matrix(1., width);
    block.matrix(1., width);
    adapters.adapter(width, queries, lora);
    adapters.adapter(width, keys, lora);
    root.matrix(vocabulary, width);
    root.matrix(1., width);
    if !config.tie_word_embeddings {
        root.matrix(vocabulary, width);
    }
    let widest = vocabulary.max(inner).max(queries);
    // Sines and cosines, for the device and for the host.
    ModelSize { widest, rotary: 2. * head, ..sum(config.num_hidden_layers, block, adapters, root) }
}

fn gpt2(config: &Gpt2Config, lora: Option<usize>) -> ModelSize {
    let [width, inner, vocabulary, positions] =
        [config.n_embd, config.inner(), config.vocab_size, config.n_positions].map(|n| n as f64);
    let (mut block, mut adapters, mut root) = (Part::default(), Part::default(), Part::default());
    for (inputs, outputs) in
        [(width, 3. * width), (width, width), (width, inner), (inner, width), (1., width), (1., width)]
    {
        block.linear(inputs, outputs, true);
    }
    adapters.adapter(width, 3. * width, lora);
    root.matrix(vocabulary, width);
    root.matrix(positions, width);
    root.linear(1., width, true);
    ModelSize { widest: vocabulary.max(inner).max(3. * width), ..sum(config.n_layer, block, adapters, root) }
}

fn sum(layers: usize, block: Part, adapters: Part, root: Part) -> ModelSize {
    let layers = layers as f64;
    ModelSize {
        base: layers * block.elements + root.elements,
        adapters: layers * adapters.elements,
        largest_unit: root.elements.max(block.elements + adapters.elements),
        tensors: layers * (block.tensors + adapters.tensors) + root.tensors,
        ..ModelSize::default()
    }
}
