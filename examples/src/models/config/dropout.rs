//! How much a model drops while it trains.

/// The probabilities, below 1, with which elements become 0 while a model trains.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout {
    /// Of embeddings. Decoders have none.
    pub embedding: f64,
    /// Of a query's weights of keys.
    pub attention: f64,
    /// Of what attention and MLP add to the residual stream. Decoders have none.
    pub hidden: f64,
}

impl Dropout {
    /// The same probability everywhere.
    pub fn everywhere(probability: f64) -> Self {
        Dropout { embedding: probability, attention: probability, hidden: probability }
    }
}
