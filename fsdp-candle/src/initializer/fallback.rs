//! Values from one source, and from another for what the first does not have.

use super::request::{Initializer, ShardRequest};
use crate::error::Result;

/// Asks `first`; parameters that it [does not contain](Initializer::contains) and whose names `accepts` come from
/// `second`. All others that `first` lacks are an error, as without the fallback.
///
/// For a pretrained model with new adapters:
/// `Fallback::new(Pretrained::open(dir)?, Philox::new(seed), nn::is_adapter)`.
pub struct Fallback<A, B> {
    first: A,
    second: B,
    accepts: Box<dyn Fn(&str) -> bool + Send + Sync>,
}

impl<A, B> Fallback<A, B> {
    /// `first`, and `second` for the missing names that `accepts` is true of.
    pub fn new(first: A, second: B, accepts: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Fallback { first, second, accepts: Box::new(accepts) }
    }
}

impl<A: Initializer, B: Initializer> Fallback<A, B> {
    fn source(&self, name: &str) -> &dyn Initializer {
        if !self.first.contains(name) && (self.accepts)(name) { &self.second } else { &self.first }
    }
}

impl<A: Initializer, B: Initializer> Initializer for Fallback<A, B> {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
        self.source(request.name).fill(request, shard)
    }

    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        self.source(request.name).check(request)
    }

    fn contains(&self, name: &str) -> bool {
        self.first.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use fsdp_core::layout::Region;

    struct Ones;

    impl Initializer for Ones {
        fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
            if !self.contains(request.name) {
                return Err(Error::Parameter { name: request.name.into(), message: "not here".into() });
            }
            shard.fill(1);
            Ok(())
        }

        fn contains(&self, name: &str) -> bool {
            name.starts_with("old")
        }
    }

    struct Twos;

    impl Initializer for Twos {
        fn fill(&self, _: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
            shard.fill(2);
            Ok(())
        }
    }

    #[test]
    fn only_accepted_names_that_are_missing_fall_back() {
        let both = Fallback::new(Ones, Twos, |name| name.contains(".lora_"));
        let fill = |name: &str| {
            let (mut shard, region) = ([0], Region::whole(&[1]));
            let init = candle_nn::Init::Const(0.);
            let request = ShardRequest { name, shape: &[1], dtype: candle_core::DType::F32, region: &region, init };
            both.fill(&request, &mut shard).map(|()| shard[0])
        };
        assert_eq!(fill("old.weight").unwrap(), 1);
        assert_eq!(fill("old.lora_A.weight").unwrap(), 1, "a file that has adapters");
        assert_eq!(fill("new.lora_B.weight").unwrap(), 2);
        let error = fill("new.weight").unwrap_err().to_string();
        assert!(error.contains("`new.weight`") && error.contains("not here"), "{error}");
        assert!(both.contains("old.weight") && !both.contains("new.lora_A.weight"));
    }
}
