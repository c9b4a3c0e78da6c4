use super::*;
use NumaBinding::{CoreComplex, Exclusive, Node, Socket};

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("{text}\n")).unwrap();
}

/// A host with two sockets of two NUMA nodes each. Node n has the physical cores 2n and 2n + 1, whose second threads
/// are 8 higher. The cores of a node share a cache, except that the cores of node 3 have one each. GPUs are on nodes 2,
/// 0 and -1.
fn host() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for node in 0..4 {
        let cores = format!("{0}-{1},{2}-{3}", 2 * node, 2 * node + 1, 2 * node + 8, 2 * node + 9);
        write(root, &format!("sys/devices/system/node/node{node}/cpulist"), &cores);
        for core in [2 * node, 2 * node + 1, 2 * node + 8, 2 * node + 9] {
            let cpu = format!("sys/devices/system/cpu/cpu{core}");
            let siblings = format!("{},{}", core % 8, core % 8 + 8);
            write(root, &format!("{cpu}/topology/thread_siblings_list"), &siblings);
            write(root, &format!("{cpu}/topology/physical_package_id"), &(node / 2).to_string());
            let last = if node == 3 { &siblings } else { &cores };
            for (index, level, kind, shared) in [
                (0, 1, "Data", &siblings),
                (1, 4, "Instruction", &siblings),
                (2, 2, "Unified", &siblings),
                (3, 3, "Unified", last),
            ] {
                let cache = format!("{cpu}/cache/index{index}");
                write(root, &format!("{cache}/level"), &level.to_string());
                write(root, &format!("{cache}/type"), kind);
                write(root, &format!("{cache}/shared_cpu_list"), shared);
            }
        }
    }
    // A node with memory only.
    write(root, "sys/devices/system/node/node4/cpulist", "");
    write(root, "sys/devices/system/node/possible", "0-4");
    dir
}

fn add_gpus(root: &Path) {
    for (address, node, uuid) in
        [("0000:41:00.0", "2", "GPU-aaaa"), ("0000:81:00.0", "0", "GPU-bbbb"), ("0000:c1:00.0", "-1", "GPU-cccc")]
    {
        write(root, &format!("sys/bus/pci/drivers/nvidia/{address}/vendor"), "0x10de");
        write(root, &format!("sys/bus/pci/devices/{address}/numa_node"), node);
        write(
            root,
            &format!("proc/driver/nvidia/gpus/{address}/information"),
            &format!("Model: X\nGPU UUID: \t {uuid}-1234"),
        );
    }
    write(root, "sys/bus/pci/drivers/nvidia/module/version", "1");
}

fn all() -> Vec<usize> {
    (0..16).collect()
}

#[test]
fn without_gpus_ranks_are_spread_over_nodes() {
    let host = host();
    let topology = Topology::read(host.path(), &all());
    let cores = |binding, rank, ranks| topology.cores_of(binding, rank, ranks, None).unwrap();
    assert_eq!(cores(Node, 0, 4), [0, 1, 8, 9]);
    assert_eq!(cores(Node, 3, 4), [6, 7, 14, 15]);
    assert_eq!((cores(Node, 0, 2), cores(Node, 1, 2)), (vec![0, 1, 8, 9], vec![4, 5, 12, 13]));
    assert_eq!((cores(Node, 1, 8), cores(Node, 2, 8)), (vec![0, 1, 8, 9], vec![2, 3, 10, 11]));
    assert_eq!(cores(Socket, 1, 4), [0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(cores(Socket, 1, 2), [4, 5, 6, 7, 12, 13, 14, 15]);
    assert_eq!(cores(Exclusive, 0, 4), cores(Node, 0, 4));
    // Physical cores are not split.
    assert_eq!((cores(Exclusive, 0, 8), cores(Exclusive, 1, 8)), (vec![0, 8], vec![1, 9]));
    assert_eq!(cores(CoreComplex, 0, 8), cores(CoreComplex, 1, 8));
    assert_eq!((cores(CoreComplex, 6, 8), cores(CoreComplex, 7, 8)), (vec![6, 14], vec![7, 15]));
    let error = topology.cores_of(Exclusive, 0, 12, None).unwrap_err();
    assert!(error.contains("NUMA node 0 has 2 physical cores") && error.contains("3 ranks"), "{error}");
}

#[test]
fn shares_are_disjoint_complete_and_of_allowed_cores() {
    let host = host();
    let allowed = [0, 1, 2, 3, 8, 9, 10];
    let topology = Topology::read(host.path(), &allowed);
    // Nodes without allowed cores are ignored.
    assert_eq!(topology.nodes.len(), 2);
    for ranks in 1..=4 {
        let mut shares: Vec<_> =
            (0..ranks).flat_map(|rank| topology.cores_of(Exclusive, rank, ranks, None).unwrap()).collect();
        shares.sort_unstable();
        let expected: &[usize] = if ranks == 1 { &[0, 1, 8, 9] } else { &allowed };
        assert_eq!(shares, expected, "{ranks}");
    }
    assert_eq!(topology.cores_of(Socket, 0, 1, None).unwrap(), allowed);
}

#[test]
fn ranks_run_near_their_gpus() {
    let host = host();
    add_gpus(host.path());
    let topology = Topology::read(host.path(), &all());
    let node = |rank, visible: Option<&[&str]>| {
        let visible = visible.map(|names| names.iter().map(|name| name.to_string()).collect::<Vec<_>>());
        topology.cores_of(Node, rank, 4, visible.as_deref()).map(|cores| cores[0] / 2)
    };
    assert_eq!([0, 1, 2, 3].map(|rank| node(rank, None).unwrap()), [2, 0, 0, 2]);
    assert_eq!([0, 1].map(|rank| node(rank, Some(&["1", "0"])).unwrap()), [0, 2]);
    assert_eq!([0, 1].map(|rank| node(rank, Some(&["GPU-bbbb-12", "GPU-aaaa-1234"])).unwrap()), [0, 2]);
    // Two ranks of one node share its cores.
    let exclusive = |rank| topology.cores_of(Exclusive, rank, 3, None).unwrap();
    assert_eq!([exclusive(0), exclusive(1), exclusive(2)], [vec![4, 5, 12, 13], vec![0, 8], vec![1, 9]]);
    // With all GPUs hidden, ranks are spread over the nodes.
    assert_eq!(node(3, Some(&[])), Ok(3));
    for unknown in ["3", "MIG-1", "GPU-dddd", "x"] {
        let error = node(0, Some(&[unknown])).unwrap_err();
        assert!(error.contains(unknown) && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
    }
    let narrow = Topology::read(host.path(), &[0, 1]);
    let error = narrow.cores_of(Node, 0, 1, None).unwrap_err();
    assert!(error.contains("NUMA node 2") && error.contains("no core may be used"), "{error}");
}

#[test]
fn missing_information_means_one_node() {
    let dir = tempfile::tempdir().unwrap();
    let topology = Topology::read(dir.path(), &[3, 5, 7]);
    for binding in [Node, Socket, CoreComplex] {
        assert_eq!(topology.cores_of(binding, 1, 2, None).unwrap(), [3, 5, 7]);
    }
    assert_eq!(topology.cores_of(Exclusive, 0, 2, Some(&[])).unwrap(), [3, 5]);
    assert_eq!(topology.cores_of(Exclusive, 1, 2, None).unwrap(), [7]);
}

#[test]
fn parses_core_lists() {
    assert_eq!(ranges("0-2,8\n"), Some(BTreeSet::from([0, 1, 2, 8])));
    assert_eq!(ranges("\n"), Some(BTreeSet::new()));
    for text in ["a", "1-", "-1", "1,,2", "0-99999999999", "0-4000000000"] {
        assert_eq!(ranges(text), None, "{text}");
    }
}

#[test]
fn core_shares_are_disjoint_and_complete() {
    let cores = [0, 1, 2, 5, 7];
    assert_eq!([share(&cores, 0, 2), share(&cores, 1, 2)].concat(), cores);
    assert_eq!(share(&cores, 0, 2), [0, 1]);
    assert_eq!(share(&cores, 4, 5), [7]);
    assert_eq!((share(&cores, 1, 6), share(&cores, 5, 6)), (vec![1], vec![0]));
    assert!(share(&[], 0, 2).is_empty());
}
