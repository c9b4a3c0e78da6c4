use super::*;

fn llama(more: &str) -> String {
    format!(
        r#"{{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 4, "vocab_size": 4, {more}}}"#
    )
}

const LLAMA3: &str = r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192}"#;

#[test]
fn llama3_frequencies_are_transformers() {
    let text = llama(&format!(r#""head_dim": 128, "rope_theta": 500000.0, "rope_scaling": {LLAMA3}"#));
    let Ok(ModelConfig::Llama(config)) = ModelConfig::parse(&text) else { panic!("{text}") };
    let frequencies = config.frequencies().unwrap().unwrap();
    assert_eq!(frequencies.len(), 64);
    let plain = |i: i32| 500000f64.powf(-f64::from(i) / 64.);
    // 1 turns 1304 times over 8192 positions, 500000^(-28/64) 4.19 times: both stay.
    assert_eq!(frequencies[0], 1.);
    assert_eq!(frequencies[28], plain(28) as f32);
    // The 32nd is 1 / sqrt(500000) = 1.414214e-3: 1.843848 turns, 0.281283 of the way from 1 to 4; 0.718717 / 8 +
    // 0.281283 = 0.371122 of it stays.
    assert!((f64::from(frequencies[32]) - 5.24846e-4).abs() < 1e-9, "{}", frequencies[32]);
    // 500000^(-35/64) turns 0.9969 times, the last 0.0032 times: an eighth of both stays.
    for i in [35, 63] {
        assert_eq!(frequencies[i as usize], (plain(i) / 8.) as f32);
    }
}

#[test]
fn both_names_of_the_rotary_embedding_may_be_there() {
    let parse = |more: &str| match ModelConfig::parse(&llama(more)).unwrap() {
        ModelConfig::Llama(config) => config,
        ModelConfig::Gpt2(_) => panic!("{more}"),
    };
    let both = parse(&format!(r#""rope_parameters": {LLAMA3}, "rope_scaling": {{"type": "default"}}"#));
    assert!(both.frequencies().unwrap().is_some());
    let null = parse(r#""rope_theta": 10.0, "rope_scaling": null"#);
    assert_eq!((null.theta(), null.frequencies().unwrap()), (10., None));
}

#[test]
fn what_gpt2_does_not_support_is_refused() {
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

#[test]
fn a_number_of_things_is_at_least_one() {
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

/// Nothing is made as large as a configuration says before somebody has looked whether there is room.
#[test]
fn a_configuration_of_any_size_can_be_read() {
    let rope = LLAMA3;
    for huge in [format!(r#""head_dim": {}, "rope_scaling": {rope}"#, 1u64 << 62), format!(r#""head_dim": {}"#, 2)] {
        ModelConfig::parse(&llama(&huge).replace("\"vocab_size\": 4", "\"vocab_size\": 18446744073709551615")).unwrap();
    }
}

#[test]
fn both_ways_to_write_the_rotary_base_are_read() {
    let base = r#""model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 4"#;
    for rope in [r#""rope_theta": 500000.0"#, r#""rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}"#]
    {
        let Ok(ModelConfig::Llama(config)) = ModelConfig::parse(&format!("{{{base}, {rope}}}")) else {
            panic!("{rope}")
        };
        assert_eq!(config.theta(), 500000.);
    }
}

#[test]
fn what_is_not_known_is_named() {
    for (text, part) in [
        (r#"{"model_type": "mamba"}"#.to_string(), "\"mamba\" is not known"),
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
        (llama(r#""rope_parameters": {"rope_type": "yarn"}"#), "\"yarn\" is not known"),
        (llama(r#""rope_scaling": {"type": "linear", "factor": 2.0}"#), "\"linear\" is not known"),
        (llama(r#""rope_scaling": {"rope_type": "llama3"}"#), "needs factor"),
        (llama(&format!(r#""rope_scaling": {}"#, LLAMA3.replace("4.0", "1.0"))), "must be below high_freq_factor"),
        (llama(r#""hidden_act": "relu""#), "\"relu\" is not known"),
    ] {
        let error = format!("{:#}", ModelConfig::parse(&text).unwrap_err());
        assert!(error.contains(part), "{error}");
    }
}
