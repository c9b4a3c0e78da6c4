//! What lets a rank into the store of its run.

use std::{fmt, io};

use fsdp_core::channel::random_secret;
use serde::{Deserialize, Serialize};

/// A secret that the coordinator makes up, which launchers pass to their ranks in the environment and nowhere else.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Secret(String);

impl Secret {
    /// A new one.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Secret(hex(&random_secret()?)))
    }

    /// The text for ranks; none where there is nothing to be kept.
    pub(crate) fn text(&self) -> Option<&str> {
        Some(self.0.as_str()).filter(|text| !text.is_empty())
    }
}

/// An id that no other run has.
pub(crate) fn new_id() -> io::Result<String> {
    Ok(hex(&random_secret()?[..8]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Says nothing of it.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_long_new_and_not_printed() {
        let secret = Secret::new().unwrap();
        assert_eq!(secret.text().unwrap().len(), 64);
        assert_ne!(secret, Secret::new().unwrap());
        assert!(new_id().unwrap().len() == 16 && new_id().unwrap() != new_id().unwrap());
        assert_eq!((format!("{secret:?}"), Secret::default().text()), ("Secret".to_owned(), None));
    }
}
