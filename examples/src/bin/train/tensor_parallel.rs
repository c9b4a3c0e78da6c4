//! What is in the way of `--tensor-parallel`.

use anyhow::ensure;

use crate::args::Args;

/// Fails where flags are in each other's way, whatever the model.
pub(crate) fn check_flags(args: &Args) -> anyhow::Result<()> {
    let (tensor, sequence) = (args.tensor_parallel, args.seq_len);
    ensure!(
        tensor > 1 || !args.sequence_parallel,
        "--sequence-parallel shares out what is between the layers of --tensor-parallel: pass that as well, or leave \
         it out"
    );
    ensure!(
        !args.sequence_parallel || sequence.is_multiple_of(tensor),
        "--seq-len {sequence} can't be shared out over the {tensor} processes of --tensor-parallel: pass a multiple \
         of {tensor}, or leave out --sequence-parallel"
    );
    Ok(())
}
