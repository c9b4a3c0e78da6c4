//! Copies to a device that all layers of a model share.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use parking_lot::Mutex;

use crate::upload;

/// The words that a device was last asked for, there. All layers ask for the same words in a step, and each copy to a
/// device takes time.
#[derive(Clone, Debug, Default)]
pub(in crate::nn) struct LastUpload(Arc<Mutex<Option<Upload>>>);

#[derive(Debug)]
struct Upload {
    words: Arc<[u32]>,
    on_device: Tensor,
}

impl LastUpload {
    /// Returns the words on a device. Copies them if they are not there yet.
    pub(in crate::nn) fn get(&self, words: &Arc<[u32]>, device: &Device) -> Result<Tensor> {
        let mut last = self.0.lock();
        if let Some(last) = &*last
            && last.on_device.device().same_device(device)
            && (Arc::ptr_eq(&last.words, words) || last.words == *words)
        {
            return Ok(last.on_device.clone());
        }
        let on_device = upload(&Tensor::from_slice(words, words.len(), &Device::Cpu)?, device)?;
        *last = Some(Upload { words: words.clone(), on_device: on_device.clone() });
        Ok(on_device)
    }
}

/// A copy follows from what it was made of, which its owner compares.
impl PartialEq for LastUpload {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
