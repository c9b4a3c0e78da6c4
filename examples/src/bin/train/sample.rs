//! What the model says, for people to see.

use anyhow::Context;
use fsdp_candle::{FsdpModule, World, no_grad};
use fsdp_examples::data::{Batches, Text};
use fsdp_examples::generate::{SampleOptions, fill, sample};
use fsdp_examples::models::LanguageModel;

/// Ids of the data that start the sample of a run on a stream, and ids that continue them.
const PROMPT_TOKENS: usize = 16;
const SAMPLE_TOKENS: usize = 48;
/// Ids that the model sees when it continues them.
pub(crate) const CONTEXT: usize = 64;
/// A masked model tells every so many-th of them.
const MASKED: usize = 8;
/// The most ids of an answer.
const ANSWER_TOKENS: usize = 128;

/// What is continued, and by whom.
pub(crate) struct Speaker<'a> {
    pub(crate) model: &'a FsdpModule<LanguageModel>,
    pub(crate) text: &'a Text,
    /// Positions that the model has.
    pub(crate) positions: usize,
}

impl Speaker<'_> {
    /// A continuation of the stream's first words, or, of a masked model, what it takes some of them for. Collective.
    pub(crate) fn continues(&self, batches: &Batches, world: &World) -> anyhow::Result<String> {
        let context = self.positions.min(CONTEXT);
        if let Some(masking) = batches.masking() {
            let prompt = batches.prompt(context)?;
            let hidden: Vec<usize> = (MASKED / 2..prompt.len()).step_by(MASKED).collect();
            let filled = no_grad(|| fill(self.model, &prompt, &hidden, masking.mask_token, world.device()))
                .context("can't fill in a sample")?;
            let starts = std::iter::once(0).chain(hidden.iter().map(|at| at + 1));
            let ends = hidden.iter().copied().chain([prompt.len()]);
            let seen = starts.zip(ends).map(|(start, end)| self.text.decode(&prompt[start..end]));
            let seen = seen.collect::<anyhow::Result<Vec<_>>>()?.join("[MASK]");
            return Ok(format!("{seen:?} -> {:?}", self.text.decode(&filled)?));
        }
        let options = SampleOptions { tokens: SAMPLE_TOKENS, context, temperature: 0.8, seed: 0, stops: &[] };
        self.say(&batches.prompt(PROMPT_TOKENS)?, &options, world)
    }

    /// The likeliest answer to the first example's prompt. Collective.
    pub(crate) fn answers(&self, batches: &Batches, world: &World) -> anyhow::Result<String> {
        let options = SampleOptions {
            tokens: ANSWER_TOKENS,
            context: self.positions,
            temperature: 0.,
            seed: 0,
            stops: batches.stops(),
        };
        self.say(&batches.prompt(0)?, &options, world)
    }

    fn say(&self, prompt: &[u32], options: &SampleOptions<'_>, world: &World) -> anyhow::Result<String> {
        let ids = no_grad(|| sample(self.model, prompt, options, world.device())).context("can't generate a sample")?;
        Ok(format!("{:?} -> {:?}", self.text.decode(prompt)?, self.text.decode(&ids)?))
    }
}
