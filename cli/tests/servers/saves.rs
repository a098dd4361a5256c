//! Trainers that save one path at once all succeed, and the file is always a whole model of one of them. Three saves of
//! four trainers by default, fifty of sixteen with `PSERVER_FULL=1`.

use std::path::Path;
use std::sync::Barrier;

use crate::cluster::asked::is_full;
use crate::cluster::job::{Job, Local, client, folder};
use crate::cluster::training::{Tensor, begin};
use pserver_client::Client;
use pserver_core::checkpoint::inspect;
use pserver_core::checkpoint::storage::Directory;
use pserver_core::dtype::ElementType::Float32;

/// Large enough that saves overlap: a model is fetched in many frames and written in two pieces.
const ELEMENTS: usize = 1024 * 1024;

/// The file's bytes, which are a whole model.
fn whole(models: &Path, path: &str) -> Vec<u8> {
    let storage = Directory::open(models).expect("the folder is there");
    let report = inspect(&storage, path).expect("the file is a model").to_string();
    assert!(report.contains("2 tensors in "), "{report}");
    std::fs::read(models.join(path)).expect("it is there")
}

#[test]
fn concurrent_saves_to_one_path_leave_a_complete_file() {
    let (trainers, saves) = if is_full() { (16, 50) } else { (4, 3) };
    let models = folder();
    let abandoned = models.path().join("saving-0123456789abcdef.partial");
    std::fs::write(&abandoned, "a server was killed").expect("it can be written");
    let servers = Local::start(&Job::new(2, trainers).with("--model-dir", models.path().display()));
    assert!(!abandoned.exists(), "server 0 removes it at its start");
    let clients: Vec<Client> = (0..trainers).map(|rank| client(&servers.coordinator(), rank)).collect();
    let tensors = [Tensor::new("w", Float32, ELEMENTS, ""), Tensor::new("b", Float32, 3, "")];
    let initialised = |client: &Client| begin(client, &tensors).map(drop);
    std::thread::scope(|threads| {
        let all: Vec<_> = clients.iter().map(|client| threads.spawn(|| initialised(client))).collect();
        all.into_iter().for_each(|one| one.join().expect("no panic").expect("the tensors are initialised"));
    });
    let (alone, bytes) = clients[0].save_model("alone").expect("one trainer saves");
    let expected = std::fs::read(alone).expect("it is there");
    let together = Barrier::new(clients.len());
    let mut succeeded = 0;
    for save in 0..saves {
        let path = format!("run/{save}");
        let saved: Vec<_> = std::thread::scope(|threads| {
            let save = |client| {
                together.wait();
                Client::save_model(client, &path)
            };
            let all: Vec<_> = clients.iter().map(|client| threads.spawn(move || save(client))).collect();
            all.into_iter().map(|one| one.join().expect("no panic")).collect()
        });
        for one in saved {
            assert_eq!(one.expect("every trainer's save succeeds").1, bytes);
            succeeded += 1;
        }
        assert!(whole(models.path(), &path) == expected, "save {save}: the file is not the model");
    }
    println!("{succeeded} saves of {trainers} trainers succeeded, {saves} files are whole");
    let left: Vec<_> = std::fs::read_dir(models.path().join("run")).expect("it is there").collect();
    assert_eq!(left.len(), saves, "nothing unfinished is left: {left:?}");
    servers.stop();
}
