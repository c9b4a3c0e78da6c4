//! `examples/deploy/kubernetes.yaml` follows Kubernetes' schema.

use std::{fs, path::PathBuf, process::Command};

use fsdp_test_support::workspace;
use libtest_mimic::Trial;

use crate::need::{Need, trials};

pub(crate) fn trials() -> Vec<Trial> {
    trials![&[Need::Kubernetes] => manifests_follow_kubernetes_schema]
}

fn validate() -> PathBuf {
    workspace().join("target/kubernetes/bin/kubernetes-validate")
}

/// Checks that the validator is installed.
pub(crate) fn installed() -> Result<(), String> {
    let file = validate();
    file.exists().then_some(()).ok_or_else(|| format!("{} is missing (.ci/install installs it)", file.display()))
}

fn manifests_follow_kubernetes_schema() {
    let text = fs::read_to_string(workspace().join("examples/deploy/kubernetes.yaml")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write("kubernetes.yaml", &text);
    let mut wanted = vec![("kubernetes.yaml".to_owned(), true)];
    // The variants that its first lines describe.
    for line in text.lines().filter_map(|line| line.strip_prefix("#   sed ")) {
        assert!(
            Command::new("sh").args(["-c", &format!("sed {line}")]).current_dir(dir.path()).status().unwrap().success()
        );
        wanted.push((line.rsplit_once("> ").unwrap().1.to_owned(), true));
    }
    assert_eq!(wanted.len(), 3);
    // The validator finds mistakes.
    for (name, right, wrong) in
        [("name.yaml", "completionMode:", "mode:"), ("type.yaml", "completions: 2", "completions: two")]
    {
        write(name, &text.replacen(right, wrong, 1));
        wanted.push((name.to_owned(), false));
    }
    for (name, is_good) in wanted {
        let output = Command::new(validate()).arg("--strict").arg(dir.path().join(&name)).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.success(), is_good, "{name}: {said}");
    }
}
