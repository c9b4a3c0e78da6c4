//! The objects under a prefix.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, RetryConfig};

use crate::store::object::metadata::Connector;
use crate::store::object::request::{Failure, limit, wait};
use crate::store::object::transfer::{ObjectFile, Upload};
use crate::store::{Append, ReadAt, Store};
use crate::{Error, Result};

/// Separates a save's tag in the names of its files.
pub(super) const SAVE_TAG: &str = ".save-";
pub(super) const TENSORS: &str = ".safetensors";

/// The objects under a prefix.
#[derive(Debug)]
pub(super) struct ObjectDir {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) url: PathBuf,
    pub(super) prefix: Key,
    /// Tag for new files; empty when reading.
    pub(super) tag: String,
    /// Sizes of the objects, listed once.
    sizes: OnceLock<BTreeMap<String, u64>>,
}

/// The objects and prefixes directly under a prefix.
pub(super) struct Listing {
    pub(super) files: BTreeMap<String, u64>,
    pub(super) dirs: Vec<String>,
}

impl ObjectDir {
    /// Creates the value for a URL, without a request.
    pub(super) fn new(url: &str) -> Result<Self> {
        Self::with_tag(url, "")
    }

    /// Creates the value for a save, whose new files get its tag.
    pub(super) fn with_tag(url: &str, tag: &str) -> Result<Self> {
        let (store, prefix) = connect(url)?;
        Ok(ObjectDir { store, url: PathBuf::from(url), prefix, tag: tag.to_string(), sizes: OnceLock::new() })
    }

    /// Returns whether the URL is an object. A prefix with objects below it is not.
    pub(super) fn is_object(url: &str) -> Result<bool> {
        let dir = Self::new(url)?;
        let below = dir.listing()?;
        if dir.prefix.as_ref().is_empty() || !below.files.is_empty() || !below.dirs.is_empty() {
            return Ok(false);
        }
        let (store, key) = (dir.store, dir.prefix);
        match wait(async move { store.head(&key).await.map(drop) }) {
            Ok(()) => Ok(true),
            Err(failure) if failure.is_not_found() => Ok(false),
            Err(failure) => Err(failure.at("open", &dir.url)),
        }
    }

    pub(super) fn key(&self, name: &str) -> Result<Key> {
        let text = match self.prefix.as_ref() {
            "" => name.to_string(),
            prefix => format!("{prefix}/{name}"),
        };
        parse(&text, &self.url.join(name))
    }

    pub(super) fn listing(&self) -> Result<Listing> {
        let (store, prefix) = (Arc::clone(&self.store), self.prefix.clone());
        let listed = wait(async move { store.list_with_delimiter(Some(&prefix)).await });
        let listed = listed.map_err(|failure| failure.at("list", &self.url))?;
        let name = |key: &Key| key.filename().map(str::to_string);
        let files = listed.objects.iter().filter_map(|object| Some((name(&object.location)?, object.size))).collect();
        let mut dirs: Vec<String> = listed.common_prefixes.iter().filter_map(name).collect();
        dirs.sort_unstable();
        Ok(Listing { files, dirs })
    }

    /// Lists the prefix; an empty prefix is an error.
    fn something(&self) -> Result<Listing> {
        let listing = self.listing()?;
        if listing.files.is_empty() && listing.dirs.is_empty() {
            let looked_for = "checkpoint: no object with this prefix".into();
            return Err(Error::NotFound { path: self.url.clone(), looked_for });
        }
        Ok(listing)
    }
}

impl Store for ObjectDir {
    fn path(&self) -> &Path {
        &self.url
    }

    fn list(&self) -> Result<Vec<String>> {
        Ok(self.something()?.files.into_keys().collect())
    }

    fn dirs(&self) -> Result<Vec<String>> {
        Ok(self.something()?.dirs)
    }

    fn size(&self, name: &str) -> Result<Option<u64>> {
        let sizes = match self.sizes.get() {
            Some(sizes) => sizes,
            None => {
                let files = self.listing()?.files;
                self.sizes.get_or_init(|| files)
            }
        };
        Ok(sizes.get(name).copied())
    }

    fn open(&self, name: &str) -> Result<Box<dyn ReadAt>> {
        let url = self.url.join(name);
        let Some(bytes) = self.size(name)? else {
            return Err(Error::NotFound { path: self.url.clone(), looked_for: format!("object {name:?}") });
        };
        Ok(Box::new(ObjectFile::new(Arc::clone(&self.store), self.key(name)?, url, bytes)))
    }

    fn unique_name(&self, name: &str) -> String {
        match name.strip_suffix(TENSORS) {
            Some(stem) if !self.tag.is_empty() => format!("{stem}{SAVE_TAG}{}{TENSORS}", self.tag),
            _ => name.to_string(),
        }
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn Append>> {
        Ok(Box::new(Upload::new(Arc::clone(&self.store), self.key(name)?, self.url.join(name), bytes)))
    }

    fn read(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let (store, key) = (Arc::clone(&self.store), self.key(name)?);
        let read = wait(async move {
            let got = store.get(&key).await?;
            match got.meta.size {
                bytes if bytes > most => Ok(Err(bytes)),
                _ => Ok(Ok(got.bytes().await?)),
            }
        });
        match read {
            Ok(Ok(contents)) => Ok(Some(contents.into())),
            Ok(Err(bytes)) => Err(Error::TooLarge { path: self.url.join(name), bytes, most }),
            Err(failure) if failure.is_not_found() => Ok(None),
            Err(failure) => Err(failure.at("read", &self.url.join(name))),
        }
    }
}

/// Returns whether a name has a save's tag.
pub(super) fn has_save_tag(name: &str) -> bool {
    name.ends_with(TENSORS) && name.contains(SAVE_TAG)
}

fn parse(key: &str, url: &Path) -> Result<Key> {
    Key::parse(key).map_err(|error| Error::Argument(format!("{} is not a valid object name: {error}", url.display())))
}

/// Returns the client of a URL's bucket and the key in it. Clients are shared by bucket, to reuse connections. Settings
/// come from the environment.
fn connect(url: &str) -> Result<(Arc<dyn ObjectStore>, Key)> {
    static CLIENTS: Mutex<Option<HashMap<String, Arc<dyn ObjectStore>>>> = Mutex::new(None);
    let bad = |reason: &str| Error::Argument(format!("{url} {reason}"));
    let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(bad(&format!("has no bucket; expected {scheme}://bucket/path")));
    }
    let key = parse(key, Path::new(url))?;
    let root = format!("{scheme}://{bucket}");
    // A panic leaves the map consistent.
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    let clients = clients.get_or_insert_default();
    if let Some(client) = clients.get(&root) {
        return Ok((Arc::clone(client), key));
    }
    // Fails if the program has already chosen a TLS provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { retry_timeout: limit()?, ..RetryConfig::default() };
    let http = Connector::of(scheme);
    macro_rules! built {
        ($builder:ty) => {
            <$builder>::from_env().with_url(&root).with_retry(retry).with_http_connector(http).build().map(shared)
        };
    }
    let built = match scheme {
        "s3" | "s3a" => built!(AmazonS3Builder),
        "gs" => built!(GoogleCloudStorageBuilder),
        _ => built!(MicrosoftAzureBuilder),
    };
    let client = built.map_err(|error| Failure::Settings(error).at("connect to", Path::new(&root)))?;
    clients.insert(root, Arc::clone(&client));
    Ok((client, key))
}

fn shared(store: impl ObjectStore) -> Arc<dyn ObjectStore> {
    Arc::new(store)
}
