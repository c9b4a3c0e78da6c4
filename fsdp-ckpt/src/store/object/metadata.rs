//! The address at which a cloud's machines ask for their credentials. Clients ask it where no others are set; that is
//! not wanted everywhere, and where there is no such machine nobody answers. So it is asked once, for a short time, and
//! not at all where that is turned off.

use std::pin::Pin;
use std::time::Duration;

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

/// That of AWS and Azure, that of AWS in networks of IPv6, and Google's.
const HOSTS: [&str; 3] = ["169.254.169.254", "[fd00:ec2::254]", "metadata.google.internal"];
/// Variables that name another one for the clients.
const OTHERS: [&str; 6] = [
    "AWS_METADATA_ENDPOINT",
    "GCE_METADATA_HOST",
    "GCE_METADATA_ROOT",
    "GCE_METADATA_IP",
    "AZURE_MSI_ENDPOINT",
    "IDENTITY_ENDPOINT",
];
/// On a machine that has it, it is on the same host.
const LIMIT: Duration = Duration::from_secs(3);

/// What errors say where it is turned off, and where it gives nothing.
pub(super) const OFF: &str = "asking the cloud's metadata address is turned off";
pub(super) const NO_ANSWER: &str = "the cloud's metadata address does not answer";

/// Makes the clients of one kind of store.
#[derive(Debug)]
pub(super) struct Connector {
    is_off: bool,
}

impl Connector {
    /// That of the stores with URLs of this scheme. `FSDP_STORE_METADATA=off` turns the address off for all, and for
    /// each what its own tools know.
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

/// The host and port of a URL, or of a URL without its scheme.
fn authority(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split('/').next().unwrap_or(rest)
}

/// A client that knows the address.
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
        // Of no kind that is tried again.
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
    fn urls_have_authorities() {
        for url in ["http://host:1/a/b", "host:1", "host:1/a"] {
            assert_eq!(authority(url), "host:1");
        }
    }
}
