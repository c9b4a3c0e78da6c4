//! `--nvtx`: spans and events as NVTX ranges and marks, which Nsight Systems shows beside the device's kernels
//! (<https://nvidia.github.io/NVTX/>).

use std::ffi::{CString, c_char, c_int};
use std::fmt;

use anyhow::bail;
use libloading::Library;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::trace::event_name;

/// The names of the library: since CUDA 12.9, and before.
const LIBRARIES: [&str; 2] = ["libnvtx3interop.so.1", "libnvToolsExt.so.1"];

/// A layer that passes spans and events to NVTX.
pub(crate) struct Nvtx {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
    mark: unsafe extern "C" fn(*const c_char),
}

impl Nvtx {
    /// Loads the library. Fails if neither is installed.
    pub(crate) fn load() -> anyhow::Result<Self> {
        let mut why = String::new();
        for name in LIBRARIES {
            // SAFETY: NVIDIA's library has no initializers that depend on the program.
            match unsafe { Library::new(name) } {
                // The functions are used until the process ends.
                Ok(library) => return Nvtx::of(Box::leak(Box::new(library))),
                Err(error) => why = format!("{:#}", anyhow::Error::from(error)),
            }
        }
        bail!(
            "--nvtx: can't load NVTX ({}): {why}. Install a CUDA toolkit, or add the folder of pip's nvidia-nvtx to \
             LD_LIBRARY_PATH",
            LIBRARIES.join(" or ")
        )
    }

    fn of(library: &'static Library) -> anyhow::Result<Self> {
        // SAFETY: the functions have these types since NVTX 1.
        unsafe {
            Ok(Nvtx {
                push: *library.get(b"nvtxRangePushA\0")?,
                pop: *library.get(b"nvtxRangePop\0")?,
                mark: *library.get(b"nvtxMarkA\0")?,
            })
        }
    }
}

/// The name of a span, with its operation and unit.
struct RangeName(CString);

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for Nvtx {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(RangeName(fields.name(attributes.metadata())));
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(RangeName(name)) = span.extensions().get() {
            // SAFETY: the name ends with a zero, and NVTX copies it.
            unsafe { (self.push)(name.as_ptr()) };
        }
    }

    fn on_exit(&self, _: &Id, _: Context<'_, S>) {
        // SAFETY: the function has no arguments.
        unsafe { (self.pop)() };
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let name = fields.name(event.metadata());
        // SAFETY: the name ends with a zero, and NVTX copies it.
        unsafe { (self.mark)(name.as_ptr()) };
    }
}

/// The fields of a span or an event.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    /// Returns the name that `--trace` gives.
    fn name(&self, metadata: &Metadata<'_>) -> CString {
        let name = event_name(metadata.name(), &self.0).replace('\0', "");
        CString::new(name).unwrap_or_default()
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().into(), format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::CStr;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    thread_local! {
        static CALLS: RefCell<Vec<String>> = const { RefCell::new(vec![]) };
    }

    /// # Safety
    /// The name ends with a zero.
    unsafe fn note(what: &str, name: *const c_char) {
        // SAFETY: ensured by the caller.
        let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
        CALLS.with_borrow_mut(|calls| calls.push(format!("{what}{name}")));
    }

    unsafe extern "C" fn push(name: *const c_char) -> c_int {
        // SAFETY: ensured by the caller.
        unsafe { note("> ", name) };
        0
    }

    unsafe extern "C" fn pop() -> c_int {
        CALLS.with_borrow_mut(|calls| calls.push("<".into()));
        0
    }

    unsafe extern "C" fn mark(name: *const c_char) {
        // SAFETY: ensured by the caller.
        unsafe { note("! ", name) };
    }

    #[test]
    fn ranges_have_operations_and_units() {
        let subscriber = tracing_subscriber::registry().with(Nvtx { push, pop, mark });
        tracing::subscriber::with_default(subscriber, || {
            let _step = tracing::debug_span!("step", number = 3u64).entered();
            tracing::debug_span!("forward", unit = "model.layers.1").in_scope(|| {
                tracing::debug!(unit = "model.layers.2", parameters = 9, "unshard");
            });
            let call = tracing::debug_span!("collective", op = "all_gather", group = "world", bytes = 7);
            (0..2).for_each(|_| call.in_scope(|| ()));
            tracing::debug!("zero\0inside");
        });
        let calls = CALLS.take();
        let expected = [
            "> step 3",
            "> forward model.layers.1",
            "! unshard model.layers.2",
            "<",
            "> all_gather",
            "<",
            "> all_gather",
            "<",
            "! zeroinside",
            "<",
        ];
        assert_eq!(calls, expected);
    }
}
