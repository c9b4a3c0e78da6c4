//! How large a model is, before anything of it is made.

use super::config::{BertConfig, DecoderConfig, Gpt2Config, ModelConfig};

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
            ModelConfig::Decoder(config) => decoder(config, lora),
            ModelConfig::Gpt2(config) => gpt2(config, lora),
            ModelConfig::Bert(config) => bert(config, lora),
        }
    }
}

fn decoder(config: &DecoderConfig, lora: Option<usize>) -> ModelSize {
    let [width, inner, vocabulary, head] =
        [config.width, config.inner, config.vocabulary, config.head_dim].map(|n| n as f64);
    let (queries, keys) = (config.heads as f64 * head, config.kv_heads as f64 * head);
    let (mut block, mut adapters, mut root) = (Part::default(), Part::default(), Part::default());
    let biases = config.biases;
    if config.fused {
        block.linear(width, queries + 2. * keys, biases.qkv);
        adapters.adapter(width, queries + 2. * keys, lora);
    } else {
        for outputs in [queries, keys, keys] {
            block.linear(width, outputs, biases.qkv);
        }
        adapters.adapter(width, queries, lora);
        adapters.adapter(width, keys, lora);
    }
    block.linear(queries, width, biases.output);
    for _ in 0..if config.norms.behind { 4 } else { 2 } {
        block.matrix(1., width);
    }
    if config.norms.heads {
        block.matrix(1., head);
        block.matrix(1., head);
    }
    let mut dense = block;
    if config.fused {
        dense.linear(width, 2. * inner, biases.mlp);
    } else {
        dense.linear(width, inner, biases.mlp);
        dense.linear(width, inner, biases.mlp);
    }
    dense.linear(inner, width, biases.mlp);
    root.matrix(vocabulary, width);
    root.matrix(1., width);
    if !config.tied {
        root.matrix(vocabulary, width);
    }
    // The layers that have experts, and those that do not.
    let mut blocks = vec![(config.layers, dense)];
    if let Some(experts) = &config.experts {
        let sparse_layers = experts.layers(config.layers);
        let (count, inner) = (experts.count as f64, experts.inner as f64);
        block.matrix(count, width);
        block.elements += 3. * count * width * inner;
        block.tensors += 3. * count;
        blocks = vec![(config.layers - sparse_layers, dense), (sparse_layers, block)];
    }
    // How many tokens an expert sees, nobody knows before.
    let widest = if config.experts.is_some() { vocabulary.max(queries) } else { vocabulary.max(inner).max(queries) };
    // Sines and cosines, for the device and for the host.
    let ropes = [Some(&config.rope), config.local_rope.as_ref()];
    let rotary = ropes.into_iter().flatten().map(|rope| 2. * rope.width as f64 * rope.tables()).sum();
    ModelSize { widest, rotary, ..sum(&blocks, adapters, root) }
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
    ModelSize { widest: vocabulary.max(inner).max(3. * width), ..sum(&[(config.n_layer, block)], adapters, root) }
}

fn bert(config: &BertConfig, lora: Option<usize>) -> ModelSize {
    let [width, inner, vocabulary, positions, types] = [
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.max_position_embeddings,
        config.type_vocab_size,
    ]
    .map(|n| n as f64);
    let (mut block, mut adapters, mut root) = (Part::default(), Part::default(), Part::default());
    for _ in 0..4 {
        block.linear(width, width, true);
    }
    // The MLP, and two norms.
    for (inputs, outputs) in [(width, inner), (inner, width), (1., width), (1., width)] {
        block.linear(inputs, outputs, true);
    }
    adapters.adapter(width, width, lora);
    adapters.adapter(width, width, lora);
    for rows in [vocabulary, positions, types] {
        root.matrix(rows, width);
    }
    // The embedding's norm, the head's layer, its norm and its bias.
    for inputs in [1., width, 1.] {
        root.linear(inputs, width, true);
    }
    root.matrix(1., vocabulary);
    ModelSize { widest: vocabulary.max(inner), ..sum(&[(config.num_hidden_layers, block)], adapters, root) }
}

fn sum(blocks: &[(usize, Part)], adapters: Part, root: Part) -> ModelSize {
    let mut size =
        ModelSize { base: root.elements, largest_unit: root.elements, tensors: root.tensors, ..ModelSize::default() };
    for (layers, block) in blocks.iter().filter(|(layers, _)| *layers > 0) {
        let layers = *layers as f64;
        size.base += layers * block.elements;
        size.adapters += layers * adapters.elements;
        size.largest_unit = size.largest_unit.max(block.elements + adapters.elements);
        size.tensors += layers * (block.tensors + adapters.tensors);
    }
    size
}
