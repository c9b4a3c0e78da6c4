//! Meshes: ranks laid out in an n-dimensional grid with named dimensions, as in PyTorch's `torch.distributed.device_mesh`.

mod agreement;
mod device_mesh;
mod layout;

pub use device_mesh::DeviceMesh;
pub use layout::MeshLayout;
