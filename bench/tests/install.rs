//! `bench/peers/install.sh` on a machine whose `mpicc` is not Open MPI's.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/install.sh");

/// A program that prints the name of its MPI library, or as a compiler writes that name instead of a program.
fn program(folder: &Path, name: &str, library: &str) {
    let text = format!(
        "#!/bin/sh\ncase $1 in --version | --showme:version) echo '{name} ({library}) 4.1'; exit;; esac\n\
         while [ $# -gt 1 ]; do [ \"$1\" != -o ] || echo '{library}' > \"$2\"; shift; done\n"
    );
    let path = folder.join(name);
    fs::write(&path, text).expect("there is room");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
}

/// The programs of this machine without those of MPI.
fn link_others(folder: &Path) {
    for from in ["/usr/bin", "/bin"] {
        for entry in fs::read_dir(from).expect("every machine has it").flatten() {
            if !entry.file_name().to_string_lossy().starts_with("mpi") {
                // A name that is in both folders is linked once.
                let _ = symlink(entry.path(), folder.join(entry.file_name()));
            }
        }
    }
}

#[test]
fn the_kit_of_open_mpi_takes_its_own_compiler_and_launcher() {
    for (mpi, other) in [("mpicc.openmpi mpirun.openmpi", "mpicc mpirun"), ("mpicc mpirun", "")] {
        let folder = tempfile::tempdir().expect("there is a place for temporary files");
        let [programs, others, kits] = ["programs", "others", "kits"].map(|name| folder.path().join(name));
        [&programs, &others].iter().for_each(|folder| fs::create_dir_all(folder).expect("there is room"));
        link_others(&others);
        mpi.split_whitespace().for_each(|name| program(&programs, name, "Open MPI"));
        other.split_whitespace().for_each(|name| program(&programs, name, "MPICH"));
        let path = format!("{}:{}", programs.display(), others.display());
        let mut script = Command::new("sh");
        script.args([SCRIPT, "openmpi"]).arg(&kits).env("PATH", path);
        let ended = script.output().expect("there is a shell");
        assert!(ended.status.success(), "{ended:?}");
        let read = |name: &str| fs::read_to_string(kits.join("openmpi").join(name)).expect("the kit has it");
        assert_eq!(read("openmpi"), "Open MPI\n");
        let launcher = mpi.split_whitespace().last().expect("there is one");
        assert!(read("mpirun").contains(&format!("exec {launcher} ")), "{}", read("mpirun"));
    }
}
