//! Masking of tokens for masked language models.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use fsdp_candle::nn::IGNORED;
use rand_philox::philox4x32_10;

use crate::data::sft::read_json;
use crate::data::text::Text;

/// Separates these random numbers from others with the same seed.
const STREAM: u32 = u32::from_be_bytes(*b"mask");
/// Share of the chosen tokens that become the mask token, and that share plus the share of random ones.
const MASKED: f64 = 0.8;
const CHANGED: f64 = 0.9;

/// Choice of masked tokens as in BERT (Devlin et al., 2018, arXiv:1810.04805): of the chosen tokens, 80 % become the
/// mask token, 10 % a random token, and 10 % stay.
///
/// The choice depends only on the seed, the index of the sequence in the run, and the position in it. It is therefore
/// the same for any number of ranks and after resuming, and differs between epochs. Philox4x32-10 with the key `seed`
/// and the counter `[index, position, "mask"]` provides the random words: whether a token is chosen, its replacement,
/// and the random token.
///
/// ```
/// use fsdp_candle::nn::IGNORED;
/// use fsdp_train::data::Masking;
///
/// let masking = Masking { probability: 0.15, mask_token: 103, vocabulary: 30_522, seed: 42 };
/// let ids: Vec<u32> = (1000..1128).collect();
/// let (inputs, targets) = masking.apply(7, 128, ids.clone());
/// let chosen: Vec<usize> = (0..128).filter(|&i| targets[i] != IGNORED).collect();
/// assert_eq!(chosen.len() as u64, masking.count(7, 128, 128));
/// assert!(chosen.iter().all(|&i| targets[i] == ids[i]));
/// assert!((0..128).all(|i| inputs[i] == ids[i] || chosen.contains(&i)));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Masking {
    /// Share of tokens that are chosen, above 0 and at most 1.
    pub probability: f64,
    /// Id of the mask token.
    pub mask_token: u32,
    /// Number of token ids.
    pub vocabulary: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Masking {
    /// Returns the random words of a token.
    fn words(&self, sequence: u64, place: usize) -> [u32; 4] {
        philox4x32_10(
            [sequence as u32, (sequence >> 32) as u32, place as u32, STREAM],
            [self.seed as u32, (self.seed >> 32) as u32],
        )
    }

    /// Returns the random words of each token in sequences from index `first` on, or `None` for tokens that are not
    /// chosen.
    fn choice(&self, first: u64, seq_len: usize) -> impl Iterator<Item = Option<[u32; 4]>> + '_ {
        (0..).flat_map(move |sequence| (0..seq_len).map(move |place| (first.wrapping_add(sequence), place))).map(
            |(sequence, place)| Some(self.words(sequence, place)).filter(|words| below(words[0], self.probability)),
        )
    }

    /// Returns inputs and targets of sequences from index `first` on. Targets are the chosen tokens, and [`IGNORED`]
    /// elsewhere.
    pub fn apply(&self, first: u64, seq_len: usize, mut ids: Vec<u32>) -> (Vec<u32>, Vec<u32>) {
        let mut targets = vec![IGNORED; ids.len()];
        for ((id, target), choice) in ids.iter_mut().zip(&mut targets).zip(self.choice(first, seq_len)) {
            let Some([_, kind, random, _]) = choice else { continue };
            *target = *id;
            if below(kind, MASKED) {
                *id = self.mask_token;
            } else if below(kind, CHANGED) {
                *id = ((u128::from(random) * self.vocabulary as u128) >> 32) as u32;
            }
        }
        (ids, targets)
    }

    /// Returns the number of chosen tokens among the first `tokens` ones.
    pub fn count(&self, first: u64, seq_len: usize, tokens: u64) -> u64 {
        self.choice(first, seq_len).take(tokens as usize).flatten().count() as u64
    }
}

/// Returns whether a word is in the lowest `share` of all words.
fn below(word: u32, share: f64) -> bool {
    f64::from(word) < share * (1u64 << 32) as f64
}

/// Returns the mask token of a model: `given`, or the one in its tokenizer, named in `tokenizer_config.json` or
/// `[MASK]`.
pub fn mask_token(given: Option<u32>, model: Option<&Path>, text: &Text, vocabulary: usize) -> Result<u32> {
    if let Some(id) = given {
        ensure!(
            (id as usize) < vocabulary,
            "--mask-token {id} is beyond the model's vocabulary of {vocabulary} ids, 0 to {}",
            vocabulary.saturating_sub(1)
        );
        return Ok(id);
    }
    let name = named(model)?.unwrap_or_else(|| "[MASK]".into());
    match text.id_of(&name) {
        Some(id) if (id as usize) < vocabulary => Ok(id),
        Some(id) => bail!(
            "the tokenizer's mask token \"{name}\" has the id {id}, but config.json's vocab_size is {vocabulary}: use \
             the tokenizer that belongs to this model, or pass --mask-token ID"
        ),
        None => bail!(
            "a masked language model needs a mask token, and no tokenizer.json beside the model has one called \
             \"{name}\": pass its id as --mask-token ID"
        ),
    }
}

/// Returns the mask token's name in `tokenizer_config.json`: text, or an object with `content`.
fn named(model: Option<&Path>) -> Result<Option<String>> {
    let Some(config) = read_json(model, "tokenizer_config.json")? else { return Ok(None) };
    let token = &config["mask_token"];
    Ok(token.as_str().or_else(|| token["content"].as_str()).map(String::from))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;
    use crate::data::text::tests::TOKENIZER;

    const MASKING: Masking = Masking { probability: 0.15, mask_token: 4, vocabulary: 1000, seed: 42 };

    proptest! {
        #[test]
        fn masking_does_not_depend_on_batching(
            first in any::<u64>(), sequences in 1..5_usize, seq_len in 1..40_usize,
        ) {
            let ids: Vec<u32> = (0..(sequences * seq_len) as u32).collect();
            let together = MASKING.apply(first, seq_len, ids.clone());
            let mut apart = (vec![], vec![]);
            for (i, ids) in ids.chunks(seq_len).enumerate() {
                let (inputs, targets) = MASKING.apply(first.wrapping_add(i as u64), seq_len, ids.to_vec());
                apart.0.extend(inputs);
                apart.1.extend(targets);
            }
            prop_assert_eq!(&together, &apart);
            let counted = together.1.iter().filter(|&&target| target != IGNORED).count();
            prop_assert_eq!(MASKING.count(first, seq_len, ids.len() as u64), counted as u64);
        }
    }

    #[test]
    fn shares_match_the_paper() {
        let ids = vec![1000; 1 << 18];
        let (inputs, targets) = MASKING.apply(3, 128, ids);
        let chosen: Vec<u32> =
            inputs.iter().zip(&targets).filter(|(_, target)| **target != IGNORED).map(|(id, _)| *id).collect();
        assert!(targets.iter().all(|&target| target == 1000 || target == IGNORED));
        let share = |found: usize, of: usize, expected: f64| {
            let found = found as f64 / of as f64;
            assert!((found - expected).abs() < 0.01, "{found} {expected}");
        };
        share(chosen.len(), 1 << 18, 0.15);
        let count = |of: &dyn Fn(u32) -> bool| chosen.iter().filter(|&&id| of(id)).count();
        share(count(&|id| id == 4), chosen.len(), 0.8);
        share(count(&|id| id == 1000), chosen.len(), 0.1);
        // Random tokens are uniform.
        let random: Vec<f64> = chosen.iter().filter(|&&id| id != 4 && id != 1000).map(|&id| f64::from(id)).collect();
        let mean = random.iter().sum::<f64>() / random.len() as f64;
        assert!((mean - 500.).abs() < 20. && random.iter().all(|&id| id < 1000.), "{mean}");
    }

    #[test]
    fn masking_depends_on_seed_and_index() {
        let ids: Vec<u32> = (0..128).collect();
        let usual = MASKING.apply(0, 128, ids.clone());
        for (seed, first) in [(43, 0), (42 + (1 << 32), 0), (42, 1), (42, 1 << 32)] {
            assert_ne!(Masking { seed, ..MASKING }.apply(first, 128, ids.clone()).1, usual.1);
        }
        let all = Masking { probability: 1., ..MASKING };
        assert_eq!((all.count(0, 128, 128), all.apply(0, 128, ids.clone()).1), (128, ids));
    }

    #[test]
    fn mask_token_is_given_or_from_the_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let model = Some(dir.path());
        let find = |given| mask_token(given, model, &Text::new(model).unwrap(), 20).map_err(|error| error.to_string());
        assert!(find(None).unwrap_err().contains("pass its id as --mask-token ID"));
        assert_eq!(find(Some(19)), Ok(19));
        let error = find(Some(20)).unwrap_err();
        assert!(error.contains("--mask-token 20 is beyond the model's vocabulary of 20 ids, 0 to 19"), "{error}");
        fs::write(dir.path().join("tokenizer.json"), TOKENIZER).unwrap();
        assert!(find(None).unwrap_err().contains("\"[MASK]\""));
        let config = |text: &str| fs::write(dir.path().join("tokenizer_config.json"), text).unwrap();
        for (text, expected) in [(r#"{"mask_token": "a"}"#, 1), (r#"{"mask_token": {"content": "b"}}"#, 2)] {
            config(text);
            assert_eq!(find(None), Ok(expected));
        }
        config(r#"{"mask_token": "rare"}"#);
        assert!(find(None).unwrap_err().contains("\"rare\" has the id 999"));
        config("{");
        assert!(format!("{:#}", Text::new(model).err().unwrap()).contains("tokenizer_config.json"));
        config("{}");
        fs::write(dir.path().join("tokenizer.json"), TOKENIZER.replace("\"b\"", "\"[MASK]\"")).unwrap();
        assert_eq!((find(None), find(Some(3))), (Ok(2), Ok(3)));
    }
}
