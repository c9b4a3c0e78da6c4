use fsdp_candle::nn::SwiGluClamp;

use crate::models::config::Activation;
use crate::models::config::*;

fn llama(more: &str) -> String {
    format!(
        r#"{{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 4, "vocab_size": 4, {more}}}"#
    )
}

const LLAMA3: &str = r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}"#;

fn decoder(text: &str) -> DecoderConfig {
    match ModelConfig::parse(text) {
        Ok(ModelConfig::Decoder(config)) => *config,
        other => panic!("{text}: {other:?}"),
    }
}

/// Returns a decoder of a family with `more` fields.
fn family(name: &str, more: &str) -> DecoderConfig {
    decoder(&llama(more).replace("\"llama\"", &format!("\"{name}\"")))
}

#[test]
fn llama3_frequencies_match_transformers() {
    let config = decoder(&llama(&format!(r#""head_dim": 128, "rope_theta": 500000.0, "rope_scaling": {LLAMA3}"#)));
    let (frequencies, factor, long) = config.rope.frequencies();
    assert_eq!((frequencies.len(), factor, long), (64, 1., None));
    let plain = |i: i32| 500000f64.powf(-f64::from(i) / 64.);
    // 1 rotates 1304 times over 8192 positions, 500000^(-28/64) 4.19 times: both stay.
    assert_eq!(frequencies[0], 1.);
    assert_eq!(frequencies[28], plain(28) as f32);
    // The 32nd is 1 / sqrt(500000) = 1.414214e-3: 1.843848 rotations, 0.281283 of the way from 1 to 4; 0.718717 / 8 +
    // 0.281283 = 0.371122 of it stays.
    assert!((f64::from(frequencies[32]) - 5.24846e-4).abs() < 1e-9, "{}", frequencies[32]);
    // 500000^(-35/64) rotates 0.9969 times, the last 0.0032 times: both are divided by eight.
    for i in [35, 63] {
        assert_eq!(frequencies[i as usize], (plain(i) / 8.) as f32);
    }
}

/// Values of transformers' `ROPE_INIT_FUNCTIONS`.
#[test]
fn other_frequencies_match_transformers() {
    let rope = |more: &str| {
        let text =
            format!(r#""head_dim": 8, "rope_theta": 100.0, "max_position_embeddings": 256, "rope_scaling": {more}"#);
        decoder(&llama(&text)).rope.frequencies()
    };
    let near = |(found, factor, _): (Vec<f32>, f64, super::rope::LongFrequencies), want: [f64; 4], want_factor: f64| {
        let far = found.iter().zip(want).map(|(a, b)| (f64::from(*a) / b - 1.).abs()).fold(0., f64::max);
        assert!(found.len() == 4 && far < 1e-6 && (factor - want_factor).abs() < 1e-9, "{found:?} {factor}");
    };
    let plain = [1., 0.316_227_766_016_837_94, 0.1, 0.031_622_776_601_683_79];
    near(rope(r#"{"type": "linear", "factor": 4.0}"#), plain.map(|x| x / 4.), 1.);
    near(rope(r#"{"type": "dynamic", "factor": 4.0}"#), plain, 1.);
    // 64 / (32 * 2 pi) is below one rotation, so even the first pair rotates less than 32 times. One rotation is at 8
    // ln(64 / 2 pi) / (2 ln 100) = 2.016, rounded up to 3: thirds of the way from 1 to a quarter.
    let yarn = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0}"#;
    let part = |i: usize| 1. - 0.75 * i as f64 / 3.;
    near(rope(yarn), [0, 1, 2, 3].map(|i| plain[i] * part(i)), 0.1 * 4f64.ln() + 1.);
    near(
        rope(&yarn.replace("\"factor\"", "\"attention_factor\": 1.5, \"factor\"")),
        [0, 1, 2, 3].map(|i| plain[i] * part(i)),
        1.5,
    );
    let long = r#"{"rope_type": "longrope", "original_max_position_embeddings": 64.0,
        "short_factor": [1.0, 1.0, 2.0, 4.0], "long_factor": [2.0, 4.0, 8.0, 16.0]}"#;
    let (short, factor, other) = rope(long);
    let (above, other) = other.unwrap();
    assert_eq!(above, 64);
    // The context has grown to 256: sqrt(1 + ln 4 / ln 64) = sqrt(4 / 3).
    near((short, factor, None), [plain[0], plain[1], plain[2] / 2., plain[3] / 4.], (4f64 / 3.).sqrt());
    near((other, 0., None), [plain[0] / 2., plain[1] / 4., plain[2] / 8., plain[3] / 16.], 0.);
}

#[test]
fn old_and_new_rope_fields_may_both_exist() {
    let both =
        decoder(&llama(r#""rope_parameters": {"type": "linear", "factor": 2.0}, "rope_scaling": {"type": "default"}"#));
    assert_eq!((both.rope.theta, both.rope.frequencies().0[0]), (10000., 1.));
    let empty = decoder(&llama(r#""rope_parameters": {"type": "linear", "factor": 2.0}, "rope_scaling": {}"#));
    assert_eq!(empty.rope.frequencies().0[0], 0.5);
    let null = decoder(&llama(r#""rope_theta": 10.0, "rope_scaling": null"#));
    assert_eq!((null.rope.theta, null.rope.frequencies().1), (10., 1.));
}

#[test]
fn gemma3_has_two_rotary_embeddings() {
    let thetas = |config: &DecoderConfig| (config.rope.theta, config.local_rope.as_ref().unwrap().theta);
    assert_eq!(thetas(&family("gemma3_text", "\"head_dim\": 2")), (1e6, 1e4));
    let old = r#""head_dim": 2, "rope_theta": 5.0, "rope_local_base_freq": 3.0,
        "rope_scaling": {"factor": 2.0, "rope_type": "linear"}"#;
    let old = family("gemma3_text", old);
    assert_eq!(thetas(&old), (5., 3.));
    assert_eq!((old.rope.frequencies().0[0], old.local_rope.unwrap().frequencies().0[0]), (0.5, 1.));
    let new = r#""head_dim": 2, "rope_parameters": {"full_attention": {"rope_theta": 7.0},
        "sliding_attention": {"rope_theta": 9.0}}"#;
    assert_eq!(thetas(&family("gemma3_text", new)), (7., 9.));
    let error = ModelConfig::parse(&llama(new)).unwrap_err().to_string();
    assert!(error.contains("supported for gemma3_text only"), "{error}");
}

/// Values of transformers' configuration classes, for files with two names of a field.
#[test]
fn of_two_names_the_one_counts_that_transformers_reads() {
    let windows = |more: &str| {
        let more = format!("\"num_key_value_heads\": 2, \"head_dim\": 2, \"sliding_window\": 8, {more}");
        let text = llama(&more).replace("\"llama\"", "\"gemma3_text\"").replace("layers\": 1", "layers\": 6");
        let config = decoder(&text);
        (0..6).filter(|layer| config.attention(*layer).window.is_none()).collect::<Vec<_>>()
    };
    // As transformers 5 saves it.
    assert_eq!(windows("\"_sliding_window_pattern\": 3, \"sliding_window_pattern\": 3"), [2, 5]);
    assert_eq!(windows("\"_sliding_window_pattern\": 3, \"sliding_window_pattern\": 2"), [1, 3, 5]);
    assert_eq!(windows("\"_sliding_window_pattern\": 2"), [5]);
    let experts = |name: &str, more: &str| {
        family(name, &format!("\"num_key_value_heads\": 4, \"moe_intermediate_size\": 2, {more}"))
            .experts(0)
            .unwrap()
            .count
    };
    let both = "\"num_local_experts\": 8, \"num_experts\": 16";
    assert_eq!((experts("mixtral", both), experts("qwen3_moe", both)), (16, 8));
    assert_eq!((experts("mixtral", "\"num_local_experts\": 9"), experts("qwen3_moe", "\"num_experts\": 9")), (9, 9));
    let text = r#"{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 4, "num_hidden_layers": 3,
        "max_position_embeddings": 7, "hidden_size": 8, "hidden_size": 16}"#;
    let ModelConfig::Gpt2(config) = ModelConfig::parse(text).unwrap() else { panic!("not GPT-2") };
    assert_eq!((config.n_embd, config.n_layer, config.n_positions, config.n_head), (16, 3, 7, 2));
}

#[test]
fn files_with_nan_are_refused_by_line() {
    let error = format!("{:#}", ModelConfig::parse(&llama("\"unread\":\n Infinity")).unwrap_err());
    assert!(error.contains("has NaN or Infinity") && error.contains("remove the key"), "{error}");
}

#[test]
fn windows_follow_the_family() {
    let windows = |name: &str, more: &str| {
        let text = format!(r#""num_key_value_heads": 2, "head_dim": 2, {more}"#);
        let config =
            decoder(&llama(&text).replace("\"llama\"", &format!("\"{name}\"")).replace("layers\": 1", "layers\": 7"));
        (0..7).map(|layer| config.attention(layer).window.unwrap_or(0)).collect::<Vec<_>>()
    };
    let (all, none) = ([8; 7], [0; 7]);
    let window = "\"sliding_window\": 8";
    assert_eq!(windows("llama", window), none);
    assert_eq!(windows("mistral", window), all);
    assert_eq!(windows("mistral", "\"sliding_window\": null"), none);
    assert_eq!(windows("mistral", "\"vocab\": 0"), [4096; 7]);
    assert_eq!(windows("phi3", "\"sliding_window\": null, \"pad_token_id\": null"), none);
    assert_eq!(windows("mixtral", "\"vocab\": 0"), none);
    assert_eq!(windows("gemma2", window), [8, 0, 8, 0, 8, 0, 8]);
    assert_eq!(windows("gemma3_text", window), [8, 8, 8, 8, 8, 0, 8]);
    assert_eq!(windows("gemma3_text", "\"sliding_window\": 8, \"sliding_window_pattern\": 3"), [8, 8, 0, 8, 8, 0, 8]);
    assert_eq!(windows("qwen2", window), none);
    let some = "\"sliding_window\": 8, \"use_sliding_window\": true, \"max_window_layers\": 5";
    for name in ["qwen2", "qwen3"] {
        assert_eq!(windows(name, some), [0, 0, 0, 0, 0, 8, 8]);
    }
    let listed = r#""layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": true"#;
    assert_eq!(windows("qwen3", listed), [0, 8, 0, 0, 0, 0, 0]);
    assert_eq!(windows("qwen3_moe", &format!("{some}, \"moe_intermediate_size\": 2")), all);
}

#[test]
fn defaults_match_transformers() {
    let gemma2 = family("gemma2", "\"num_key_value_heads\": 2");
    assert_eq!((gemma2.head_dim, gemma2.logit_softcap, gemma2.attention(1).softcap), (256, Some(30.), Some(50.)));
    assert_eq!((gemma2.attention(0).window, gemma2.attention(0).scale, gemma2.tied), (Some(4096), 1. / 16., true));
    let null = family(
        "gemma2",
        r#""num_key_value_heads": 2, "final_logit_softcapping": null, "attn_logit_softcapping": null"#,
    );
    assert_eq!((null.logit_softcap, null.attention(0).softcap), (None, None));
    let mixtral = family("mixtral", "\"num_key_value_heads\": null");
    let experts = mixtral.experts(0).unwrap();
    assert_eq!((experts.count, experts.per_token, experts.router.renormalized, experts.auxiliary), (8, 2, true, None));
    assert_eq!((mixtral.kv_heads, mixtral.rope.theta, mixtral.norms.eps), (4, 1e6, 1e-5));
    assert_eq!(family("qwen3", "\"num_key_value_heads\": 4").head_dim, 128);
    let gpt_oss = family("gpt_oss", "\"num_key_value_heads\": 4");
    let experts = gpt_oss.experts(0).unwrap();
    assert_eq!((experts.count, experts.per_token, experts.biases, experts.router.has_bias), (128, 4, true, true));
    assert_eq!(experts.clamp, Some(SwiGluClamp { alpha: 1.702, limit: 7. }));
    assert_eq!((gpt_oss.head_dim, gpt_oss.norms.eps, gpt_oss.has_sinks, gpt_oss.biases.qkv), (64, 1e-5, true, true));
    assert_eq!((gpt_oss.attention(0).window, gpt_oss.attention(1).window), (Some(128), None));
    // YaRN with a factor of 32.
    assert_eq!((gpt_oss.rope.theta, gpt_oss.rope.frequencies().1), (1.5e5, 0.1 * 32f64.ln() + 1.));
    let plain = family("gpt_oss", r#""num_key_value_heads": 4, "rope_parameters": {"rope_theta": 10.0}"#);
    assert_eq!((plain.rope.theta, plain.rope.frequencies().1), (10., 1.));
    let v3 =
        decoder(&llama("\"num_key_value_heads\": 4, \"num_hidden_layers\": 4").replace("\"llama\"", "\"deepseek_v3\""));
    let latent = v3.latent.unwrap();
    assert_eq!(
        (latent.query_rank, latent.rank, latent.head_dim(), latent.rotated, latent.value),
        (Some(1536), 512, 192, 64, 128)
    );
    let experts = v3.experts.as_ref().unwrap();
    assert_eq!((experts.count, experts.per_token, experts.inner, experts.shared), (256, 8, 2048, Some(2048)));
    assert_eq!((experts.router.scale, experts.router.renormalized, experts.router.has_choice_bias), (2.5, true, true));
    let groups = experts.router.groups.unwrap();
    assert_eq!((groups.count, groups.per_token, groups.best), (8, 4, 2));
    assert_eq!((experts.are_in(2), experts.are_in(3), v3.is_prediction_layer(4)), (false, true, true));
    let v2 = family("deepseek_v2", "\"num_key_value_heads\": 4, \"num_experts_per_tok\": 6");
    let experts = v2.experts(0).unwrap();
    assert_eq!((experts.count, experts.inner, experts.shared), (64, 1407, Some(2 * 1407)));
    assert_eq!(
        (experts.router.scale, experts.router.renormalized, experts.router.groups.is_some()),
        (1., false, false)
    );
}

/// Defaults of transformers' configuration classes, as PyTorch's `nn.Embedding` reads them.
#[test]
fn padding_row_matches_transformers() {
    let of = |name: &str, more: &str| {
        let text = llama(&format!("\"num_key_value_heads\": 2, \"moe_intermediate_size\": 2{more}"));
        let text =
            text.replace("\"llama\"", &format!("\"{name}\"")).replace("\"vocab_size\": 4", "\"vocab_size\": 32001");
        ModelConfig::parse(&text).map(|config| match config {
            ModelConfig::Decoder(config) => config.padding,
            other => panic!("{other:?}"),
        })
    };
    for name in ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "gemma3_text", "phi3"] {
        let default = match name {
            "gemma2" | "gemma3_text" => Some(0),
            "phi3" => Some(32000),
            _ => None,
        };
        assert_eq!(of(name, "").unwrap(), default, "{name}");
        for (given, row) in
            [("null", None), ("7", Some(7)), ("32000", Some(32000)), ("-1", Some(32000)), ("-32001", Some(0))]
        {
            assert_eq!(of(name, &format!(", \"pad_token_id\": {given}")).unwrap(), row, "{name} {given}");
        }
        for outside in ["32001", "-32002", "9223372036854775807", "-9223372036854775808"] {
            let error = of(name, &format!(", \"pad_token_id\": {outside}")).unwrap_err().to_string();
            let expected = format!("pad_token_id = {outside} (which may be the default of this model_type) is not in");
            assert!(error.contains(&expected) && error.contains("32001 ids"), "{error}");
        }
    }
    let error = ModelConfig::parse(&llama("\"head_dim\": 2").replace("\"llama\"", "\"phi3\"")).unwrap_err().to_string();
    assert!(error.contains("pad_token_id = 32000") && error.contains("4 ids") && error.contains("null"), "{error}");
    for (more, row) in [("\"x\": 0", Some(0)), ("\"pad_token_id\": null", None), ("\"pad_token_id\": -1", Some(8))] {
        let ModelConfig::Bert(config) = bert(more).unwrap() else { panic!("not a BERT") };
        assert_eq!(config.padding, row, "{more}");
    }
}

#[test]
fn expert_layers_follow_the_configuration() {
    for (step, dense, expected) in
        [(1, vec![], 8), (1, vec![0, 3, 3, 90], 6), (2, vec![0, 1], 3), (3, vec![5], 1), (9, vec![], 0)]
    {
        let text = format!(
            r#""num_key_value_heads": 4, "moe_intermediate_size": 2, "decoder_sparse_step": {step},
                "mlp_only_layers": {dense:?}"#
        );
        let config = family("qwen3_moe", &text);
        let counted = (0..8).filter(|layer| config.experts(*layer).is_some()).count();
        assert_eq!(counted, expected, "{step} {dense:?}");
    }
}

#[test]
fn unsupported_gpt2_fields_are_refused() {
    let gpt2 = r#""model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": 4"#;
    assert!(ModelConfig::parse(&format!("{{{gpt2}}}")).is_ok());
    for (name, bad, good) in [
        ("scale_attn_weights", false, true),
        ("scale_attn_by_inverse_layer_idx", true, false),
        ("reorder_and_upcast_attn", true, false),
        ("tie_word_embeddings", false, true),
    ] {
        assert!(ModelConfig::parse(&format!("{{{gpt2}, \"{name}\": {good}}}")).is_ok());
        let error = ModelConfig::parse(&format!("{{{gpt2}, \"{name}\": {bad}}}")).unwrap_err().to_string();
        assert!(error.contains(&format!("{name} = {bad} is not supported")), "{error}");
    }
}

const BERT: &str = r#""model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
    "intermediate_size": 7, "vocab_size": 9"#;

fn bert(more: &str) -> anyhow::Result<ModelConfig> {
    ModelConfig::parse(&format!("{{{BERT}, {more}}}"))
}

#[test]
fn bert_matches_transformers() {
    let config = bert("\"hidden_dropout_prob\": 0.2").unwrap();
    assert_eq!(config.dropout(), Dropout { embedding: 0.2, attention: 0.1, hidden: 0.2 });
    let ModelConfig::Bert(config) = config else { panic!("not a BERT") };
    assert_eq!((config.max_position_embeddings, config.type_vocab_size), (512, 2));
    assert_eq!((config.layer_norm_eps, config.initializer_range), (1e-12, 0.02));
    assert_eq!(config.activation, Activation::GeluErf);
    for (name, activation) in [("gelu_new", Activation::Gelu), ("silu", Activation::Silu)] {
        let ModelConfig::Bert(config) = bert(&format!("\"hidden_act\": \"{name}\"")).unwrap() else { panic!("{name}") };
        assert_eq!(config.activation, activation);
    }
}

#[test]
fn unsupported_bert_fields_are_refused() {
    for (name, bad, good) in [
        ("is_decoder", "true", "false"),
        ("add_cross_attention", "true", "false"),
        ("tie_word_embeddings", "false", "true"),
        ("position_embedding_type", "\"relative_key\"", "\"absolute\""),
        ("hidden_act", "\"relu\"", "\"gelu\""),
    ] {
        bert(&format!("\"{name}\": {good}")).unwrap();
        let error = bert(&format!("\"{name}\": {bad}")).unwrap_err().to_string();
        assert!(error.contains(&format!("{name} = {bad} is not")) && error.contains(good), "{error}");
    }
    for field in ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"] {
        let mut config: serde_json::Value = serde_json::from_str(&format!("{{{BERT}}}")).unwrap();
        config[field] = 0.into();
        let error = ModelConfig::parse(&config.to_string()).unwrap_err().to_string();
        assert_eq!(error, format!("{field} = 0 must be at least 1"));
    }
    for field in ["max_position_embeddings", "type_vocab_size"] {
        assert!(bert(&format!("\"{field}\": 0")).unwrap_err().to_string().contains("must be at least 1"));
    }
    let heads =
        ModelConfig::parse(&format!("{{{BERT}}}").replace("\"num_attention_heads\": 2", "\"num_attention_heads\": 3"));
    assert!(heads.unwrap_err().to_string().contains("must be a multiple of num_attention_heads = 3"));
}

#[test]
fn zero_sizes_are_refused() {
    let gpt2 = |name: &str| {
        let fields = ["n_embd", "n_head", "n_layer", "n_positions", "n_inner", "vocab_size"];
        let fields = fields.map(|field| format!("\"{field}\": {}", if field == name { 0 } else { 2 }));
        format!("{{\"model_type\": \"gpt2\", {}}}", fields.join(", "))
    };
    let zero = |name: &str, text: &str| {
        let error = ModelConfig::parse(text).unwrap_err().to_string();
        assert_eq!(error, format!("{name} = 0 must be at least 1"));
    };
    for name in ["n_embd", "n_head", "n_layer", "n_positions", "n_inner", "vocab_size"] {
        zero(name, &gpt2(name));
    }
    ModelConfig::parse(&gpt2("none")).unwrap();
    let fields = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"];
    let more = ["num_key_value_heads", "max_position_embeddings"];
    for name in fields.iter().chain(&more) {
        let mut config: serde_json::Value = serde_json::from_str(BUILTIN).unwrap();
        config[name] = 0.into();
        zero(name, &config.to_string());
    }
}

/// Reading a configuration allocates nothing of its sizes.
#[test]
fn huge_sizes_are_read() {
    let rope = LLAMA3;
    for huge in [format!(r#""head_dim": {}, "rope_scaling": {rope}"#, 1u64 << 62), format!(r#""head_dim": {}"#, 2)] {
        ModelConfig::parse(&llama(&huge).replace("\"vocab_size\": 4", "\"vocab_size\": 18446744073709551615")).unwrap();
    }
}

#[test]
fn rope_theta_is_read_in_both_places() {
    for rope in [r#""rope_theta": 500000.0"#, r#""rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}"#]
    {
        assert_eq!(decoder(&llama(rope)).rope.theta, 500000.);
    }
}

#[test]
fn unknown_values_are_refused() {
    let of = |name: &str, more: &str| {
        llama(&format!("\"num_key_value_heads\": 4, {more}")).replace("\"llama\"", &format!("\"{name}\""))
    };
    for (text, part) in [
        (r#"{"model_type": "mamba"}"#.to_string(), "\"mamba\" is not supported; expected llama, mistral, qwen2,"),
        ("{}".to_string(), "model_type is missing"),
        ("[".to_string(), "not a JSON object"),
        (r#"{"model_type": "gpt2"}"#.to_string(), "missing field `n_embd`"),
        (llama(r#""num_key_value_heads": 3"#), "multiple of num_key_value_heads = 3"),
        (llama(r#""head_dim": 3"#), "head_dim = 3 must be even"),
        (llama(r#""rms_norm_eps": -1e-5"#), "rms_norm_eps = -0.00001 must be at least 0"),
        (llama(r#""rope_theta": 0.0"#), "rope_theta = 0 must be above 0"),
        (
            llama(r#""mlp_bias": false"#).replace("\"hidden_size\": 8", "\"hidden_size\": 6"),
            "hidden_size = 6 must be a multiple of",
        ),
        (
            llama(r#""rope_parameters": {"rope_type": "ntk"}"#),
            "\"ntk\" is not supported; expected \"default\", \"linear\"",
        ),
        (llama(r#""rope_scaling": {"type": "linear"}"#), "needs factor"),
        (llama(r#""rope_scaling": {"type": "longrope"}"#), "needs short_factor"),
        (llama(r#""attention_dropout": 1.0"#), "attention_dropout = 1 must be at least 0 and below 1"),
        (of("phi3", r#""resid_pdrop": 0.1"#), "resid_pdrop = 0.1 is not supported; expected 0"),
        (
            llama(r#""partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}"#),
            "partial_rotary_factor = 0.5 is not supported with rope_type \"linear\"",
        ),
        (llama(r#""rms_norm_eps": "small""#), "rms_norm_eps: invalid type: string \"small\""),
        (of("mistral", r#""sliding_window": 0"#), "sliding_window = 0 must be at least 1"),
        (of("qwen3", r#""layer_types": ["full_attention", "full_attention"]"#), "layer_types has 2 layers"),
        (of("qwen3", r#""layer_types": ["linear_attention"]"#), "layer_types has \"linear_attention\""),
        (of("qwen3", r#""layer_types": ["sliding_attention"]"#), "sliding_window is missing"),
        (of("gemma2", r#""hidden_activation": "relu""#), "hidden_activation = \"relu\" is not supported"),
        (of("gemma2", r#""attn_logit_softcapping": 0.0"#), "attn_logit_softcapping = 0 must be above 0"),
        (of("gemma3_text", r#""attn_logit_softcapping": 50.0"#), "attn_logit_softcapping = 50 is not supported"),
        (of("gemma3_text", r#""use_bidirectional_attention": true"#), "use_bidirectional_attention = true is not"),
        (of("mixtral", r#""num_experts_per_tok": 9"#), "num_experts_per_tok = 9 must be at most the 8 experts"),
        (of("mixtral", r#""hidden_act": "gelu""#), "hidden_act = \"gelu\" is not supported for experts"),
        (of("mixtral", r#""router_jitter_noise": 0.1"#), "router_jitter_noise = 0.1 is not supported"),
        (of("qwen3_moe", r#""norm_topk_prob": true"#), "missing field `moe_intermediate_size`"),
        (llama(r#""rope_scaling": {"rope_type": "llama3"}"#), "needs factor"),
        (of("deepseek_v2", r#""mlp_bias": false"#), "missing field `num_experts_per_tok`"),
        (of("deepseek_v2", r#""num_experts_per_tok": 65"#), "must be at most the 64 experts"),
        (of("deepseek_v2", r#""num_experts_per_tok": 2, "topk_method": "best""#), "expected \"greedy\" or"),
        (of("deepseek_v2", r#""num_experts_per_tok": 2, "topk_method": "group_limited_greedy""#), "field `n_group`"),
        (of("deepseek_v3", r#""scoring_func": "softmax""#), "scoring_func = \"softmax\" is not supported"),
        (of("deepseek_v3", r#""n_group": 7"#), "n_group = 7 must divide the 256 experts into groups of at least 2"),
        (of("deepseek_v3", r#""topk_group": 9"#), "topk_group = 9 must be at most n_group = 8"),
        (
            of("deepseek_v3", r#""topk_group": 1, "num_experts_per_tok": 33"#),
            "at most the 32 experts in topk_group = 1",
        ),
        (of("deepseek_v3", r#""moe_layer_freq": 2"#), "moe_layer_freq = 2 is not supported"),
        (of("deepseek_v3", r#""qk_rope_head_dim": 5"#), "qk_rope_head_dim = 5 must be even"),
        (
            of("deepseek_v3", "\"kv_lora_rank\": 2")
                .replace("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 2"),
            "num_key_value_heads = 2 must be num_attention_heads = 4",
        ),
        (
            of("deepseek_v3", r#""rope_scaling": {"rope_type": "yarn", "mscale_all_dim": 1.0}"#),
            "mscale_all_dim = 1 needs factor",
        ),
        (llama(&format!(r#""rope_scaling": {}"#, LLAMA3.replace("4.0", "1.0"))), "must be below high_freq_factor"),
        (llama(r#""hidden_act": "relu""#), "\"relu\" is not supported"),
    ] {
        let error = format!("{:#}", ModelConfig::parse(&text).unwrap_err());
        assert!(error.contains(part), "{error}");
    }
}
