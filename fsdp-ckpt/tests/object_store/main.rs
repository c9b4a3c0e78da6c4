//! Checkpoints in an S3 server, which is this program in another role.
//!
//! The program starts the server, and then itself again with the server's address in the environment.
#![allow(clippy::unwrap_used, missing_docs)]

mod saves;
mod server;
mod train;
mod trouble;
#[allow(dead_code)]
#[path = "../it/world.rs"]
mod world;

use std::path::PathBuf;
use std::process::Command;

use libtest_mimic::{Arguments, Trial};

use server::Server;

const ROLE: &str = "OBJECT_STORE_TEST_ROLE";
const STALLED: &str = "PUT /bucket/killed/step-00000002/checkpoint.json";

fn main() {
    match std::env::var(ROLE).as_deref() {
        Ok("server") => server::serve(),
        Ok("saver") => trouble::saver(),
        Ok("tests") => {
            let tests: [(&str, fn()); 17] = [
                ("saved_by_two_loaded_by_three", saves::saved_by_two_loaded_by_three),
                ("requests_only_needed_ranges", saves::requests_only_needed_ranges),
                ("uploads_a_large_tensor_in_parts", saves::uploads_a_large_tensor_in_parts),
                ("one_of_two_writers_succeeds", saves::one_of_two_writers_succeeds),
                ("keeps_other_objects", saves::keeps_other_objects),
                ("failed_save_leaves_no_objects", saves::failed_save_leaves_no_objects),
                ("opens_a_single_object", saves::opens_a_single_object),
                ("removes_old_checkpoints", saves::removes_old_checkpoints),
                ("quarantines_a_damaged_checkpoint", saves::quarantines_a_damaged_checkpoint),
                ("converts_there_and_back", saves::converts_there_and_back),
                ("file_urls_are_directories", saves::file_urls_are_directories),
                (
                    "killed_writer_leaves_an_unfinished_checkpoint",
                    trouble::killed_writer_leaves_an_unfinished_checkpoint,
                ),
                ("server_dies_during_an_upload", trouble::server_dies_during_an_upload),
                ("errors_name_the_fix", trouble::errors_name_the_fix),
                ("metadata_address_can_be_turned_off", trouble::metadata_address_can_be_turned_off),
                ("detects_flipped_bytes", saves::detects_flipped_bytes),
                ("other_clouds_name_missing_settings", trouble::other_clouds_name_missing_settings),
            ];
            let trials = tests.map(|(name, test)| {
                Trial::test(name, move || {
                    test();
                    Ok(())
                })
            });
            let trials = trials.into_iter().chain([train::trial()]).collect();
            libtest_mimic::run(&Arguments::from_args(), trials).exit()
        }
        _ => {
            let root = tempfile::tempdir().unwrap();
            let server = Server::start(root.path(), STALLED);
            let mut tests = Command::new(std::env::current_exe().unwrap());
            tests.args(std::env::args_os().skip(1)).env(ROLE, "tests").env("SERVER_ROOT", root.path());
            let status = server.address_for(&mut tests).status().unwrap();
            drop(server);
            drop(root);
            std::process::exit(status.code().unwrap_or(101));
        }
    }
}

/// Returns the directory in which the server keeps its objects.
fn server_root() -> PathBuf {
    std::env::var_os("SERVER_ROOT").unwrap().into()
}
