//! Checkpoints in an S3 server: a process of its own, which is this program in another role.
//!
//! The program starts the server and then itself again with the server's address in the environment, where the library
//! looks for it.
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
                ("only_the_wanted_ranges_are_asked_for", saves::only_the_wanted_ranges_are_asked_for),
                ("a_large_tensor_goes_in_parts", saves::a_large_tensor_goes_in_parts),
                ("of_two_writers_one_wins", saves::of_two_writers_one_wins),
                ("what_is_not_ours_is_left_alone", saves::what_is_not_ours_is_left_alone),
                ("a_failed_save_leaves_nothing", saves::a_failed_save_leaves_nothing),
                ("a_single_object_is_a_model", saves::a_single_object_is_a_model),
                ("old_checkpoints_are_removed", saves::old_checkpoints_are_removed),
                ("a_damaged_checkpoint_is_set_aside", saves::a_damaged_checkpoint_is_set_aside),
                ("converted_there_and_back", saves::converted_there_and_back),
                ("file_urls_are_directories", saves::file_urls_are_directories),
                ("what_a_killed_writer_leaves", trouble::what_a_killed_writer_leaves),
                ("a_server_that_dies_in_an_upload", trouble::a_server_that_dies_in_an_upload),
                ("errors_say_what_to_do", trouble::errors_say_what_to_do),
                (
                    "the_clouds_metadata_address_is_asked_unless_it_is_turned_off",
                    trouble::the_clouds_metadata_address_is_asked_unless_it_is_turned_off,
                ),
                ("every_flipped_byte_is_seen", saves::every_flipped_byte_is_seen),
                ("other_clouds_say_what_they_need", trouble::other_clouds_say_what_they_need),
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

/// Where the server of the tests keeps its objects.
fn server_root() -> PathBuf {
    std::env::var_os("SERVER_ROOT").unwrap().into()
}
