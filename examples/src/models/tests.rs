use fsdp_candle::World;
use fsdp_candle::nn::is_adapter;

use super::*;

#[test]
fn sizes_are_those_of_the_model_that_is_built() {
    let gpt2 = r#"{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "n_positions": 16, "vocab_size": 11"#;
    let llama = r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 13"#;
    let bert = r#"{"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 5, "max_position_embeddings": 16, "vocab_size": 11"#;
    let (biases, inner) = (", \"attention_bias\": true, \"mlp_bias\": true", ", \"n_inner\": 5");
    let tied = ", \"tie_word_embeddings\": true";
    let of = |name: &str| llama.replace("\"llama\"", &format!("\"{name}\""));
    let families = ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"].map(of);
    let experts = r#", "num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5"#;
    let dense = format!("{experts}, \"mlp_only_layers\": [1]");
    let mut texts = vec![(gpt2, ""), (gpt2, inner), (llama, ""), (llama, biases), (llama, tied)];
    texts.extend(families.iter().map(|text| (text.as_str(), experts)));
    texts.extend([(bert, ""), (bert, ", \"type_vocab_size\": 3")]);
    texts.extend([(families[7].as_str(), dense.as_str()), (families[5].as_str(), tied)]);
    for text in texts {
        for lora in [None, Some(3)] {
            let config = ModelConfig::parse(&format!("{}{}}}", text.0, text.1)).unwrap();
            let world = World::single().unwrap();
            let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)]).unwrap(), world.device());
            let options = ModelOptions {
                dtype: DType::F32,
                positions: 4,
                activation_checkpoint: false,
                lora: lora.map(|rank| LoraConfig { rank, alpha: 1. }),
            };
            build(&config, &FullyShard::new(&vars), &vars, options).unwrap();
            let (adapters, base): (Vec<_>, Vec<_>) =
                vars.params().into_iter().partition(|param| is_adapter(param.name()));
            let elements = |params: &[std::sync::Arc<fsdp_candle::FsdpParam>]| {
                params.iter().map(|param| param.shape().elem_count()).sum::<usize>() as f64
            };
            let size = config.size(lora);
            assert_eq!((size.base, size.adapters), (elements(&base), elements(&adapters)), "{text:?} {lora:?}");
            let block_of = |name: &str| name.split('.').find_map(|word| word.parse::<usize>().ok());
            let largest = [None, Some(0), Some(1), Some(2)].map(|block| {
                let of_unit = base.iter().chain(&adapters).filter(|param| block_of(param.name()) == block);
                of_unit.map(|param| param.shape().elem_count()).sum::<usize>()
            });
            assert_eq!(size.largest_unit, largest.into_iter().max().unwrap() as f64, "{text:?} {lora:?}");
            assert_eq!(size.tensors, (base.len() + adapters.len()) as f64, "{text:?} {lora:?}");
        }
    }
}
