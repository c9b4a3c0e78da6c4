//! The metadata address of a cloud's machines, which clients ask for credentials if none are set. Outside of a cloud
//! nobody answers it. So it is asked once, with a short timeout, and never if that is turned off.

use std::pin::Pin;
use std::time::Duration;

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

/// Metadata hosts: AWS and Azure, AWS over IPv6, Google.
const HOSTS: [&str; 3] = ["169.254.169.254", "[fd00:ec2::254]", "metadata.google.internal"];
/// Environment variables with other addresses.
const OTHERS: [&str; 6] = [
    "AWS_METADATA_ENDPOINT",
    "GCE_METADATA_HOST",
    "GCE_METADATA_ROOT",
    "GCE_METADATA_IP",
    "AZURE_MSI_ENDPOINT",
    "IDENTITY_ENDPOINT",
];
/// Timeout. The address is on the same machine.
const LIMIT: Duration = Duration::from_secs(3);

/// Reasons in error messages.
pub(super) const OFF: &str = "asking the cloud's metadata address is turned off";
pub(super) const NO_ANSWER: &str = "the cloud's metadata address does not answer";

/// Creates the HTTP clients of one kind of store.
#[derive(Debug)]
pub(super) struct Connector {
    is_off: bool,
}

impl Connector {
    /// Creates the connector for URLs of this scheme. `FSDP_STORE_METADATA=off`, or the variable of the cloud's own
    /// tools, turns the metadata address off.
    pub(super) fn of(scheme: &str) -> Self {
        let is = |name: &str, words: &[&str]| {
            std::env::var(name).is_ok_and(|value| words.iter().any(|word| value.eq_ignore_ascii_case(word)))
        };
        let theirs = match scheme {
            "s3" | "s3a" => "AWS_EC2_METADATA_DISABLED",
            "gs" => "NO_GCE_CHECK",
            _ => "",
        };
        Connector { is_off: is("FSDP_STORE_METADATA", &["off", "false", "0"]) || is(theirs, &["true", "1"]) }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let others = OTHERS.iter().filter_map(|name| std::env::var(name).ok());
        let others = others.map(|url| authority(&url).to_string()).collect();
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(MetadataGuard { client, is_off: self.is_off, others }))
    }
}

/// Returns the host and port of a URL with or without scheme.
fn authority(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split('/').next().unwrap_or(rest)
}

/// An HTTP client that intercepts requests to the metadata address.
#[derive(Debug)]
struct MetadataGuard {
    client: HttpClient,
    is_off: bool,
    others: Vec<String>,
}

impl MetadataGuard {
    fn is_metadata(&self, request: &HttpRequest) -> bool {
        let Some(authority) = request.uri().authority() else { return false };
        HOSTS.contains(&authority.host()) || self.others.iter().any(|other| other == authority.as_str())
    }

    async fn answer(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if !self.is_metadata(&request) {
            return self.client.execute(request).await;
        }
        // This kind of error is not retried.
        let failed = |reason: String| HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(reason));
        if self.is_off {
            return Err(failed(OFF.into()));
        }
        match tokio::time::timeout(LIMIT, self.client.execute(request)).await {
            Ok(answer) => answer.map_err(|error| failed(format!("{NO_ANSWER}: {error}"))),
            Err(_) => Err(failed(format!("{NO_ANSWER} within {} s", LIMIT.as_secs()))),
        }
    }
}

impl HttpService for MetadataGuard {
    fn call<'a, 'f>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'f>>
    where
        'a: 'f,
        Self: 'f,
    {
        Box::pin(self.answer(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_authority_of_a_url() {
        for url in ["http://host:1/a/b", "host:1", "host:1/a"] {
            assert_eq!(authority(url), "host:1");
        }
    }
}
