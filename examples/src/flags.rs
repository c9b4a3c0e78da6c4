//! Values of flags that several programs have.

use fsdp_candle::ReshardAfterForward;

/// Parses `--reshard-after-forward`.
pub fn reshard(text: &str) -> Result<ReshardAfterForward, String> {
    match text {
        "default" => Ok(ReshardAfterForward::Default),
        "always" => Ok(ReshardAfterForward::Always),
        "never" => Ok(ReshardAfterForward::Never),
        number => match number.parse() {
            Ok(ranks) => Ok(ReshardAfterForward::To(ranks)),
            Err(_) => Err("it must be default, always, never, or a number of processes".into()),
        },
    }
}

/// Parses a finite number that is `wanted`, which `what` describes.
pub fn number(text: &str, what: &str, wanted: impl Fn(f64) -> bool) -> Result<f64, String> {
    text.trim().parse().ok().filter(|&x: &f64| x.is_finite() && wanted(x)).ok_or_else(|| format!("it must be {what}"))
}

/// Parses a number above 0.
pub fn positive(text: &str) -> Result<f64, String> {
    number(text, "a number above 0, such as 3e-4", |x| x > 0.0)
}

/// Parses a number of at least 0.
pub fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0, such as 0.1", |x| x >= 0.0)
}
