//! Versions of the CUDA toolkit, the driver and the device that differ.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, golden_flags_of, program, run};

/// Trains two steps on one device, with settings of the double.
fn train_with(settings: &[(&str, &str)]) -> Run {
    train_model("gpt2_tiny", &[], settings)
}

fn train_model(name: &str, flags: &[&str], settings: &[(&str, &str)]) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(program("train"));
    command.args(golden_flags_of(name, 2)).args(["--batch-size", "4", "--device", "cuda"]).args(flags);
    command.envs(settings.iter().copied()).current_dir(dir.path());
    run(command, Duration::from_secs(120))
}

/// Checks that training fails without a panic, with a message that contains all of `parts`.
fn refused(settings: &[(&str, &str)], parts: &[&str]) {
    let error = train_with(settings).failed();
    println!("{settings:?}: {error}");
    assert!(!error.contains("panicked") && parts.iter().all(|part| error.contains(part)), "{settings:?}: {error}");
}

/// The double's nvcc and NVRTC are of CUDA 13.0, and Candle's kernels are built for `sm_80`.
#[test]
fn a_toolkit_that_does_not_fit_is_told_at_the_start() {
    let driver = ["CUDA device 0: loading Candle's kernels", "PTX 9.0", "CUDA 12.4", "Update the driver"];
    refused(&[("GPU_DOUBLE_DRIVER", "12040")], &driver);
    let build = ["built for sm_80", "the device, sm_75, does not run", "CUDA_COMPUTE_CAP=75"];
    refused(&[("GPU_DOUBLE_CAPABILITY", "75")], &build);
}

#[test]
fn devices_without_8_bit_products_are_told_so() {
    let error = |compute, capability| {
        let flags = ["--compute", compute];
        train_model("llama_float8_tiny", &flags, &[("GPU_DOUBLE_CAPABILITY", capability)]).failed()
    };
    let old = error("float8", "80");
    assert!(old.contains("capability 8.9 or later") && old.contains("this one has 8.0"), "{old}");
    let rows = error("float8-rowwise", "89");
    assert!(rows.contains("capability 9.0 or later and cuBLAS 12.9") && rows.contains("Found 8.9"), "{rows}");
}

#[test]
fn attention_that_cudnn_cannot_compute_is_told_so() {
    let train = |backend, settings: &[(&str, &str)]| {
        let settings = [&[("FSDP_ATTENTION_BACKEND", backend)], settings].concat();
        train_model("llama_tiny", &["--param-dtype", "bf16"], &settings)
    };
    let old = train("cudnn", &[("GPU_DOUBLE_CAPABILITY", "80")]).failed();
    let parts = ["FSDP_ATTENTION_BACKEND=cudnn", "the GPU has compute capability 8.0", "Unset it"];
    assert!(parts.iter().all(|part| old.contains(part)), "{old}");
    let version = train("cudnn", &[("GPU_DOUBLE_CUDNN", "91900")]).failed();
    assert!(version.contains("cuDNN 9.19 is installed, and attention needs 9.25"), "{version}");
    let unknown = train("flash", &[]).failed();
    assert!(unknown.contains("FSDP_ATTENTION_BACKEND=flash: expected cudnn or own"), "{unknown}");
    // By default, a GPU that cuDNN is not used on is said once.
    let said = train("", &[("GPU_DOUBLE_CAPABILITY", "80")]).ok();
    assert_eq!(said.stderr.matches("attention uses this project's kernels, not cuDNN's").count(), 1, "{said:?}");
    assert!(train("own", &[]).ok().stderr.matches("cuDNN").count() == 0);
}

#[test]
fn a_device_that_nvrtc_does_not_know_runs_the_ptx_of_an_older_one() {
    let known = train_with(&[]).ok();
    let unknown = train_with(&[("GPU_DOUBLE_CAPABILITY", "130")]).ok();
    // A sample of the trained model.
    assert!(known.stdout.contains("sample: "), "{known:?}");
    assert_eq!(known.stdout, unknown.stdout);
}
