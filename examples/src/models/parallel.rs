//! Decoders whose layers several ranks compute together: which numbers have to be divided, and by which layers.

use anyhow::{bail, ensure};

use super::config::{DecoderConfig, ModelConfig};

/// Fails unless `tensor` ranks can compute the layers of such a model together.
///
/// # Errors
/// The model's family has no plan for it, or one of its numbers can't be divided so.
pub fn check(config: &ModelConfig, tensor: usize) -> anyhow::Result<()> {
    if tensor == 1 {
        return Ok(());
    }
    let config = decoder(config, tensor)?;
    let numbers = numbers(config);
    let odd = numbers.iter().filter(|(_, number)| !number.is_multiple_of(tensor));
    let odd = odd.map(|(name, number)| format!("{name} = {number}")).collect::<Vec<_>>();
    let common = numbers.iter().fold(0, |common, (_, number)| gcd(common, *number));
    let way_out = match divisors(common) {
        of if of.is_empty() => "no number but 1 divides all that has to be divided: leave it out".to_owned(),
        of => format!("what divides all that has to be divided is {}", of.join(", ")),
    };
    ensure!(odd.is_empty(), "--tensor-parallel {tensor} does not divide the model's {}; {way_out}", odd.join(" and "));
    Ok(())
}

fn decoder(config: &ModelConfig, tensor: usize) -> anyhow::Result<&DecoderConfig> {
    let refused = |family: &str, why: &str| {
        format!("--tensor-parallel {tensor} is not for {family}: {why}. Leave it out, and let the processes shard the model")
    };
    match config {
        ModelConfig::Decoder(config) if config.fused => {
            bail!(refused("phi3", "its queries, keys and values are one matrix, and so are its gates and inner layers"))
        }
        ModelConfig::Decoder(config) => Ok(config),
        ModelConfig::Gpt2(_) => bail!(refused("gpt2", "its queries, keys and values are one matrix")),
        ModelConfig::Bert(_) => bail!(refused("bert", "it is for decoders")),
    }
}

/// What is shared out, by the names of `config.json`.
fn numbers(config: &DecoderConfig) -> Vec<(&'static str, usize)> {
    let mut numbers = vec![
        ("num_attention_heads", config.heads),
        ("num_key_value_heads", config.kv_heads),
        ("vocab_size", config.vocabulary),
    ];
    let layers = || 0..config.layers;
    if layers().any(|layer| config.experts(layer).is_none()) {
        numbers.push(("intermediate_size", config.inner));
    }
    if let Some(experts) = layers().find_map(|layer| config.experts(layer)) {
        numbers.push((experts.width_name, experts.inner));
    }
    numbers
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The divisors of a number above 1, the least first.
fn divisors(number: usize) -> Vec<String> {
    /// More processes than this share no layer.
    const MOST: usize = 64;
    (2..=number.min(MOST)).filter(|divisor| number.is_multiple_of(*divisor)).map(|divisor| divisor.to_string()).collect()
}
