//! What is of one device stands in its folder of kernels, and in the layers.

use std::path::Path;

use fsdp_test_support::workspace;

/// Words of code that knows the host or another device from inside.
const OF_A_DEVICE: [&str; 14] = [
    "CpuStorage",
    "CudaStorage",
    "MetalStorage",
    "Storage::Cpu",
    "fn cpu_fwd",
    "fn cuda_fwd",
    "View::Host",
    "Buffer::U8(",
    "Buffer::U32(",
    "Buffer::I64(",
    "Buffer::BF16(",
    "Buffer::F16(",
    "Buffer::F32(",
    "Buffer::F64(",
];

/// The code of a file that is neither a test nor a comment.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().take_while(|line| line.trim() != "#[cfg(test)]").enumerate();
    lines.filter(|(_, line)| !line.trim_start().starts_with("//"))
}

/// The lines of the folder's files that are of a device, but for folders of these names; and how many files there are.
fn scan(folder: &Path, without: &[&str]) -> (Vec<String>, usize) {
    let (mut found, mut files) = (vec![], 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !without.iter().any(|name| path.ends_with(name)) {
            let (of_folder, count) = scan(&path, without);
            found.extend(of_folder);
            files += count;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files += 1;
            for (number, line) in code(&std::fs::read_to_string(&path).unwrap()) {
                if OF_A_DEVICE.iter().any(|word| line.contains(word)) {
                    found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
                }
            }
        }
    }
    (found, files)
}

#[test]
fn only_kernels_and_layers_know_devices() {
    let source = workspace().join("fsdp-candle/src");
    let (found, files) = scan(&source, &["kernels", "nn"]);
    assert!(files > 50, "{files} files in {}", source.display());
    assert!(found.is_empty(), "what is of one device belongs into src/kernels:\n{}", found.join("\n"));
    assert!(scan(&source.join("kernels"), &[]).0.len() > 20, "the words are not what the kernels are written in");
}
