use candle_core::{Device, Tensor};
use fsdp_candle::World;
use fsdp_candle::initializer::Philox;
use fsdp_candle::nn::{Documents, IGNORED, LoraConfig, is_adapter};

use crate::models::*;

mod context_parallel;

/// Returns a small model with random weights on one rank.
fn model(config: &str, activation_checkpoint: bool) -> (ShardedVarMap, FsdpModule<LanguageModel>) {
    let config = ModelConfig::parse(config).unwrap();
    let world = World::single().unwrap();
    let vars = ShardedVarMap::of_world(&world).unwrap();
    vars.init_with(Philox::new(1)).unwrap();
    let checkpoints = CheckpointPolicy::every(activation_checkpoint.into());
    let dropout = Dropout::default();
    let options = ModelOptions { dtype: DType::F32, positions: 16, checkpoints, dropout, parallel: None };
    let model = build(&config, &FullyShard::new(&vars), &vars, options).unwrap();
    (vars, model)
}

#[test]
fn unmatched_block_patterns_are_refused() {
    let (decoder, gpt2) = (
        r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 11, "max_position_embeddings": 16}"#,
        r#"{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": 11}"#,
    );
    let built = |config: &str, patterns: &[&str]| {
        let world = World::single().unwrap();
        let vars = ShardedVarMap::of_world(&world).unwrap();
        vars.init_with(Philox::new(1)).unwrap();
        let checkpoints = CheckpointPolicy::named(patterns).unwrap();
        let dropout = Dropout::default();
        let options = ModelOptions { dtype: DType::F32, positions: 16, checkpoints, dropout, parallel: None };
        build(&ModelConfig::parse(config).unwrap(), &FullyShard::new(&vars), &vars, options).map(drop)
    };
    for (config, idle, names) in [
        (decoder, "model.layers.2", "its blocks are model.layers.0 to model.layers.1"),
        (decoder, "h.0", "its blocks are model.layers.0"),
        (gpt2, "layers.*", "its blocks are transformer.h.0 to transformer.h.1"),
    ] {
        let error = built(config, &["*.1", idle]).unwrap_err().to_string();
        assert!(error.contains(&format!("--activation-checkpoint: `{idle}` matches no block")), "{error}");
        assert!(error.contains(names), "{error}");
    }
    built(decoder, &["layers.[01]", "model.layers.1"]).unwrap();
    built(gpt2, &["h.0"]).unwrap();
}

#[test]
fn models_of_classes_have_no_loss_over_a_vocabulary() {
    let llama = r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 11}"#;
    let bert = r#"{"model_type": "bert", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 11, "max_position_embeddings": 16}"#;
    for config in [llama, bert] {
        let world = World::single().unwrap();
        let vars = ShardedVarMap::of_world(&world).unwrap();
        vars.init_with(Philox::new(1)).unwrap();
        let checkpoints = CheckpointPolicy::every(0);
        let options =
            ModelOptions { dtype: DType::F32, positions: 16, checkpoints, dropout: Dropout::default(), parallel: None };
        let (config, opts) = (ModelConfig::parse(config).unwrap(), FullyShard::new(&vars));
        let model = build_with_head(&config, &opts, &vars, options, Head::Classes(3)).unwrap();
        let ids = Tensor::new(&[[1u32, 2]], &Device::Cpu).unwrap();
        let batch = Batch { targets: ids.clone(), ids, counted: 2, pairs: None, rows: Rows::default() };
        let error = cross_entropy(&model, &batch).unwrap_err().to_string();
        assert!(error.contains("has no loss over a vocabulary"), "{error}");
    }
}

/// Returns the loss of one batch, with its first target ignored, and the gradients by name.
fn learns(vars: &ShardedVarMap, model: &FsdpModule<LanguageModel>, batches: &[Batch]) -> (f32, Vec<(String, Tensor)>) {
    let losses: Vec<Tensor> = batches.iter().map(|batch| cross_entropy_sum(model, batch).unwrap()).collect();
    let loss = losses.iter().skip(1).fold(losses[0].clone(), |sum, loss| (sum + loss).unwrap());
    let grads = model.backward(&loss).unwrap();
    let of = |param: &std::sync::Arc<fsdp_candle::FsdpParam>| {
        (param.name().to_owned(), grads.get(param.var()).unwrap().clone())
    };
    (loss.to_scalar().unwrap(), vars.trainable().iter().map(of).collect())
}

/// Packed documents give the loss and gradients of separate ones, with and without activation checkpointing.
#[test]
fn packed_documents_learn_like_separate_ones() {
    let gpt2 = r#"{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": 11,
        "initializer_range": 0.5}"#;
    let of = |name: &str, more: &str| {
        format!(
            r#"{{"model_type": "{name}", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 11,
            "initializer_range": 0.5{more}}}"#
        )
    };
    let experts = ", \"num_local_experts\": 3, \"num_experts_per_tok\": 2";
    let deepseek_v3 = r#"{"model_type": "deepseek_v3", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 5, "kv_lora_rank": 6, "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4, "v_head_dim": 5, "first_k_dense_replace": 1, "n_routed_experts": 6, "n_group": 3,
        "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 5, "vocab_size": 11,
        "initializer_range": 0.5}"#;
    // The long factors apply to documents of more than four tokens.
    let long = r#", "pad_token_id": null, "max_position_embeddings": 16, "original_max_position_embeddings": 4,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0, 1.0], "long_factor": [2.0, 3.0, 4.0]}"#;
    let usual = vec![vec![3, 5, 1], vec![9]];
    let id = |row: usize, at: usize| ((7 * at + 3 * row + 1) % 11) as u32;
    let batch = |row: usize, first: usize, count: usize| {
        let tensor = |ids: Vec<u32>| Tensor::from_vec(ids, (1, count), &Device::Cpu).unwrap();
        Batch {
            ids: tensor((first..first + count).map(|at| id(row, at)).collect()),
            targets: tensor((first..first + count).map(|at| id(row, at + 1)).collect()),
            counted: count as u64,
            pairs: None,
            rows: Rows::default(),
        }
    };
    for (config, rows) in [
        (gpt2.to_owned(), &usual),
        (of("llama", ""), &usual),
        (of("gemma2", ", \"sliding_window\": 2, \"query_pre_attn_scalar\": 6"), &usual),
        (of("mixtral", experts), &usual),
        (of("phi3", long), &usual),
        (deepseek_v3.to_owned(), &usual),
        (of("gpt_oss", &format!("{experts}, \"sliding_window\": 3")), &usual),
    ] {
        for again in [false, true] {
            let (vars, model) = model(&config, again);
            let mut alone = vec![];
            for (row, lengths) in rows.iter().enumerate() {
                let mut first = 0;
                for &length in lengths {
                    alone.push(batch(row, first, length));
                    first += length;
                }
            }
            let cat = |of: fn(&Batch) -> &Tensor| {
                let flat: Vec<&Tensor> = alone.iter().map(of).collect();
                Tensor::cat(&flat, 1).unwrap().reshape((rows.len(), 9)).unwrap()
            };
            let documents = Some(Documents::new(rows.to_vec()).unwrap());
            let packed = Batch {
                ids: cat(|b| &b.ids),
                targets: cat(|b| &b.targets),
                counted: 9 * rows.len() as u64,
                pairs: None,
                rows: Rows { documents, ..Rows::default() },
            };
            let (loss, grads) = learns(&vars, &model, std::slice::from_ref(&packed));
            let (want, want_grads) = learns(&vars, &model, &alone);
            assert!((loss - want).abs() < 1e-5 * want, "{config}: {loss} for {want}");
            let norm = |x: &Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
            for ((name, grad), (_, want)) in grads.iter().zip(&want_grads) {
                let difference = norm(&(grad - want).unwrap());
                assert!(difference <= 1e-4 * norm(want) + 1e-6, "{config}: {name}: {difference} of {}", norm(want));
            }
            // Ends of documents matter.
            let (other, _) = learns(&vars, &model, &[Batch { rows: Rows::default(), ..packed }]);
            assert!((other - want).abs() > 1e-3 * want, "{config}: {other} for {want}");
        }
    }
}

/// The load-balancing loss counts data tokens only.
#[test]
fn expert_load_excludes_padding() {
    let config = r#"{"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 11, "initializer_range": 0.5,
        "num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": true, "router_aux_loss_coef": 10.0}"#;
    let batch = |ids: &[[u32; 8]], documents: &[Vec<usize>], filled: Option<&[usize]>| {
        let all: Vec<u32> = ids.concat();
        let shape = (ids.len(), 8);
        // 0 is padding.
        let targets: Vec<u32> = all.iter().map(|&id| if id == 0 { IGNORED } else { id % 7 }).collect();
        Batch {
            counted: targets.iter().filter(|&&target| target != IGNORED).count() as u64,
            pairs: None,
            ids: Tensor::from_vec(all, shape, &Device::Cpu).unwrap(),
            targets: Tensor::from_vec(targets, shape, &Device::Cpu).unwrap(),
            rows: Rows {
                documents: Some(Documents::new(documents.to_vec()).unwrap()),
                filled: filled.map(|filled| filled.into()),
                ..Rows::default()
            },
        }
    };
    let full = batch(&[[1, 2, 3, 4, 5, 6, 7, 8]], &[vec![3, 5]], None);
    let padded = [[1, 2, 3, 0, 0, 0, 0, 0], [0; 8], [4, 5, 6, 7, 8, 0, 0, 0]];
    let padded = batch(&padded, &[vec![3, 5], vec![8], vec![5, 3]], Some(&[3, 0, 5]));
    let nothing = batch(&[[0; 8]], &[vec![8]], Some(&[0]));
    for again in [false, true] {
        let (vars, model) = model(config, again);
        let learns = |batch: &Batch| {
            let loss = loss(&model, batch).unwrap();
            let grads = model.backward(&loss).unwrap();
            let of = |param: &std::sync::Arc<fsdp_candle::FsdpParam>| grads.get(param.var()).unwrap().clone();
            (loss.to_scalar::<f32>().unwrap(), vars.trainable().iter().map(of).collect::<Vec<_>>())
        };
        let ((found, grads), (want, want_grads)) = (learns(&padded), learns(&full));
        assert!((found - want).abs() < 1e-5 * want, "{found} for {want}");
        let norm = |x: &Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
        for (grad, want) in grads.iter().zip(&want_grads) {
            let difference = norm(&(grad - want).unwrap());
            assert!(difference <= 1e-4 * norm(want) + 1e-6, "{difference} of {}", norm(want));
        }
        assert_eq!(loss(&model, &nothing).unwrap().to_scalar::<f32>().unwrap(), 0.);
    }
}

#[test]
fn sizes_match_the_built_model() {
    let gpt2 = r#"{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "n_positions": 16, "vocab_size": 11"#;
    let llama = r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 13, "pad_token_id": null"#;
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
    let gpt_oss = of("gpt_oss");
    texts.push((gpt_oss.as_str(), experts));
    texts.extend([(bert, ""), (bert, ", \"type_vocab_size\": 3")]);
    let latent = r#"{"hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "first_k_dense_replace": 1, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 5, "vocab_size": 11, "attention_bias": true"#;
    let q_rank =
        [r#", "model_type": "deepseek_v3", "q_lora_rank": 5"#, r#", "model_type": "deepseek_v3", "q_lora_rank": null"#];
    let of_v2 = r#", "model_type": "deepseek_v2", "q_lora_rank": 5, "mlp_bias": true, "n_shared_experts": 3"#;
    texts.extend(q_rank.into_iter().chain([of_v2]).map(|more| (latent, more)));
    texts.extend([(families[7].as_str(), dense.as_str()), (families[5].as_str(), tied)]);
    for text in texts {
        for patterns in [&[][..], &["q_proj", "c_attn", "qkv_proj"], &["all-linear"], &["*.1.**", "lm_head"]] {
            let targets = Targets::new(patterns.iter().copied()).unwrap();
            let lora = Lora { config: LoraConfig { rank: 3, alpha: 1. }, targets };
            let config = ModelConfig::parse(&format!("{}{}}}", text.0, text.1)).unwrap();
            let world = World::single().unwrap();
            let vars = ShardedVarMap::of_world(&world).unwrap();
            let options = ModelOptions {
                dtype: DType::F32,
                positions: 4,
                checkpoints: CheckpointPolicy::none(),
                dropout: Dropout::default(),
                parallel: None,
            };
            let targets = lora.targets.clone();
            vars.adapt(lora.config, move |layer| targets.matches(layer)).unwrap();
            let model = build(&config, &FullyShard::new(&vars), &vars, options).unwrap();
            let (adapters, base): (Vec<_>, Vec<_>) =
                vars.params().into_iter().partition(|param| is_adapter(param.name()));
            // Parameters that float8 all-gathers apply to.
            let is_router = |name: &str| name.ends_with(".gate.weight") || name.ends_with(".router.weight");
            for param in base.iter().chain(&adapters) {
                let name = param.name();
                let of_block = name.split('.').any(|word| word.parse::<usize>().is_ok());
                let want = of_block && param.shape().rank() == 2 && !is_router(name) && !is_adapter(name);
                assert_eq!(is_block_matrix(name), want, "{name}");
            }
            let elements = |params: &[std::sync::Arc<fsdp_candle::FsdpParam>]| {
                params.iter().map(|param| param.shape().elem_count()).sum::<usize>() as f64
            };
            let size = config.size(Some(&lora));
            assert_eq!((size.base, size.adapters), (elements(&base), elements(&adapters)), "{text:?} {patterns:?}");
            let block_of = |name: &str| name.split('.').find_map(|word| word.parse::<usize>().ok());
            let largest = model.units().iter().map(|unit| elements(unit.params())).fold(0., f64::max);
            assert_eq!(size.largest_unit, largest, "{text:?} {patterns:?}");
            assert_eq!(size.tensors, (base.len() + adapters.len()) as f64, "{text:?} {patterns:?}");
            let (outside, blocks) = config.units(Some(&lora));
            for (block, unit) in
                std::iter::once(None).chain((0..blocks.len()).map(Some)).zip([&[outside], &blocks[..]].concat())
            {
                let of_unit = base.iter().chain(&adapters).filter(|param| block_of(param.name()) == block);
                let elements = of_unit.map(|param| param.shape().elem_count()).sum::<usize>() as f64;
                assert_eq!(unit.elements, elements, "{text:?} {patterns:?} {block:?}");
            }
        }
    }
}
