//! The engines against the suite that every backend passes.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use fsdp_core::{
    ProcessGroup, Result,
    process_group::{Guarantees, HostStaging, Nccl, Options},
};
use fsdp_test_support::conformance;

use crate::{
    over_host::over_host,
    ranks::{host, own, start},
};

const NCCL: Guarantees = Guarantees { fixed_order: false, f32_accumulation: false, ..Guarantees::ALL };

/// A rank's part in a trial.
pub(crate) fn take_part(engine: &str, trial: &str, compute: &Arc<CudaStream>) -> String {
    let join = |options: Options| -> Result<ProcessGroup> {
        let host = host(options)?;
        match engine {
            "nccl" => {
                let engine = Nccl::new(&host, compute)?;
                over_host(host, Box::new(engine), compute)
            }
            _ => over_host(host, Box::new(HostStaging::new(compute)?), compute),
        }
    };
    conformance::take_part(trial, &join)
}

#[test]
fn nccl_conforms_where_it_compares() {
    conformance::run(NCCL, &|trial| {
        start(&format!("nccl conforms {}", trial.name), &own(trial.size), &[("FSDP_NCCL_CHECK", "always")]).outcomes()
    });
}

#[test]
fn going_through_the_host_conforms_also_on_one_device() {
    for devices in [own, |ranks| vec![0; ranks]] {
        conformance::run(Guarantees::ALL, &|trial| {
            start(&format!("host conforms {}", trial.name), &devices(trial.size), &[]).outcomes()
        });
    }
}
