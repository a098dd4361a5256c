//! Tables at the end of a training: which of their rows leave the servers.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::cluster::job::{Job, TCP};
use crate::cluster::ports::free_port;
use crate::cluster::process::Processes;
use crate::trainings::{Place, floats};

/// Rows of 16 numbers: 32 MiB, which three calls fetch.
const ROWS: usize = (32 << 20) / 64 + 1;
/// Rows of the data, each with one id.
const EXAMPLES: usize = 32;

fn place() -> Place {
    let place = Place::new();
    let program = format!(
        "block 0 {{
            data id: int64[batch]
            data target: float32[batch, 16]
            parameter table: float32[{ROWS}, 16]
            initialise table = uniform(low=-0.3, high=0.3, seed=7)
            forward row = lookup_table(table, id)
            forward difference = sub(row, target)
            forward square = mul(difference, difference)
            forward loss = mean(square)
        }}"
    );
    place.write("table.program", &program);
    let mut rows = (0..16).fold("id".to_owned(), |line, column| line + &format!(",target.{column}")) + "\n";
    for example in 0..EXAMPLES {
        let id = example * (ROWS - 1) / (EXAMPLES - 1);
        writeln!(rows, "{id}{}", ",0.5".repeat(16)).expect("a string takes everything");
    }
    place.write("rows.csv", &rows);
    place
}

/// Trains one epoch on servers of its own, and returns the payload bytes that these have sent.
fn sent_bytes(place: &Place, more: &[&str]) -> u64 {
    let http = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let processes = Processes::start(Job { bind: TCP, ..Job::new(1, 1).with("--http", http) });
    let coordinator = processes.coordinator().to_string();
    let arguments = ["train", "table.program", "--data", "rows.csv", "--batch", "8", "--epochs", "1"];
    let optimizer = ["--optimizer", "const_lr { learning_rate: 64.0 }", "--connect", &coordinator, "--rank", "0"];
    place.succeed(&[&arguments[..], &optimizer, more].concat());
    let mut stream = TcpStream::connect(http).expect("it listens");
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    processes.terminate();
    let lines = answer.lines().filter(|line| line.starts_with("pserver_sent_bytes_total"));
    let numbers = lines.map(|line| line.rsplit(' ').next().expect("a number").parse::<f64>().expect("a number"));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is a count")]
    let sum = numbers.sum::<f64>() as u64;
    sum
}

#[test]
fn a_table_leaves_the_servers_in_the_end_only_where_it_is_wanted_and_then_once() {
    let place = place();
    let table = (ROWS * 64) as u64;
    // Rows of the steps, and of the first of them once more.
    let kept = sent_bytes(&place, &[]);
    assert!(0 < kept && kept < table / 100, "{kept} of {table} bytes were sent");
    for (more, file) in [(&["--save", "model.safetensors"][..], "model"), (&["--validation", "rows.csv"], "")] {
        let sent = sent_bytes(&place, more);
        assert!((table..table + table / 100).contains(&sent), "{more:?}: {sent} of {table} bytes were sent");
        if !file.is_empty() {
            let model = place.model("model.safetensors");
            let table = &model["table"];
            assert!(model.len() == 1 && table.shape() == [ROWS as u64, 16], "{:?}", table.shape());
            // By this rate one step goes all the way, for rows at both ends; the one after the first has had none.
            let moved = |row: usize| floats(table)[row * 16..][..16].iter().all(|number| (*number - 0.5).abs() < 1e-6);
            assert!(moved(0) && moved(ROWS - 1) && !moved(1));
        }
    }
}
