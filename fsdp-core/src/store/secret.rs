//! What lets a rank into the store of its job, and nobody else.

use crate::{
    Error, RankEnv, Result,
    channel::{Key, LEAST_SECRET},
};

/// The variable of the secret.
const VARIABLE: &str = "FSDP_STORE_SECRET";

/// What the ranks of a job share that others do not know.
///
/// It is `FSDP_STORE_SECRET`, which `fsdp-launch` makes up for every run. Without one it is made of the job's id
/// ([`RankEnv::run_id`]): that keeps the ranks of other jobs out, which come by mistake. It keeps nobody out who knows
/// the id, and ids of jobs are no secrets.
#[derive(Clone, Debug)]
pub struct Secret {
    key: Key,
    pub(super) is_given: bool,
}

impl Secret {
    /// That of this process. It is good for one run and one attempt of it.
    ///
    /// # Errors
    /// [`Error::Env`] when `FSDP_STORE_SECRET` is shorter than 16 bytes.
    pub fn from_env(env: &RankEnv) -> Result<Self> {
        Self::new(env, std::env::var(VARIABLE).ok().as_deref())
    }

    /// That of a job, with this in `FSDP_STORE_SECRET`.
    ///
    /// # Errors
    /// As [`Secret::from_env`].
    pub fn new(env: &RankEnv, given: Option<&str>) -> Result<Self> {
        let purpose = format!("fsdp store 1\n{}\n{}", env.attempt, env.run_id);
        if let Some(short) = given.filter(|given| given.len() < LEAST_SECRET) {
            return Err(Error::Env(format!(
                "{VARIABLE} has {} bytes, and a secret has at least {LEAST_SECRET}: \
                 `head -c 32 /dev/urandom | base64` makes one. All ranks need the same",
                short.len()
            )));
        }
        let key = Key::of(&purpose, given.unwrap_or_default().as_bytes());
        Ok(Secret { key, is_given: given.is_some() })
    }

    pub(super) fn key(&self) -> &Key {
        &self.key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_of_one_job_and_one_attempt_and_is_not_printed() {
        let env = RankEnv { run_id: "job".into(), ..RankEnv::single() };
        let of = |env: &RankEnv, given| Secret::new(env, given).unwrap();
        let given = Some("0123456789abcdef");
        let secret = of(&env, given);
        assert_eq!(secret.key(), of(&env, given).key());
        let others = [
            of(&env, None),
            of(&env, Some("0123456789abcdeg")),
            of(&RankEnv { attempt: 1, ..env.clone() }, given),
            of(&RankEnv { run_id: "other".into(), ..env.clone() }, given),
        ];
        assert!(others.iter().all(|other| other.key() != secret.key()));
        assert_ne!(others[0].key(), of(&RankEnv { run_id: "other".into(), ..env.clone() }, None).key());
        assert_eq!(format!("{secret:?}"), "Secret { key: Key, is_given: true }");
        let error = Secret::new(&env, Some("short")).unwrap_err().to_string();
        assert!(error.contains("FSDP_STORE_SECRET has 5 bytes") && !error.contains("short\""), "{error}");
    }
}
