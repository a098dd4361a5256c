use std::thread;
use std::time::{Duration, Instant};

use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::{CallEnd, Failure};
use pserver_core::wire::Kind;

use super::servers::TestJob;
use crate::{Client, ClientOptions, DestinationSlice, GradientSlice};

fn gradient<'a>(name: &'a str, values: &'a [f32]) -> GradientSlice<'a> {
    GradientSlice { name, element_type: Float32, content: bytemuck::cast_slice(values) }
}

fn pull(client: &Client, name: &str, elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    let content = bytemuck::cast_slice_mut(&mut values);
    client.pull(&mut [DestinationSlice::new(name, content)]).expect("the value is there");
    values
}

fn ends_with(outcome: Result<(), Failure>, end: CallEnd) -> String {
    let failure = outcome.expect_err("the call cannot end well");
    assert_eq!(failure.end(), end, "{failure}");
    failure.to_string()
}

#[test]
fn gradients_of_two_trainers_are_added_in_one_round_on_every_shard() {
    let job = TestJob::start(2, 2, 2);
    // Of one chunk, of several, and of a part of one.
    let sizes = [1024, 4000, 3];
    let names = ["a", "b", "c"];
    let parameters: Vec<_> = names.iter().zip(sizes).map(|(name, size)| (*name, vec![8.0; size])).collect();
    let clients = [job.begin(&parameters), job.client(1)];
    thread::scope(|scope| {
        for (client, number) in clients.iter().zip([1.0_f32, 2.0]) {
            scope.spawn(move || {
                for round in 1..=3_u8 {
                    let given: Vec<Vec<f32>> = sizes.iter().map(|size| vec![number; *size]).collect();
                    let mut values: Vec<Vec<f32>> = sizes.iter().map(|size| vec![0.0; *size]).collect();
                    let gradients: Vec<_> = names.iter().zip(&given).map(|(name, one)| gradient(name, one)).collect();
                    let places = names.iter().zip(&mut values);
                    let mut places: Vec<_> =
                        places.map(|(name, one)| DestinationSlice::new(name, bytemuck::cast_slice_mut(one))).collect();
                    client.push_pull(&gradients, None, &mut places).expect("a round");
                    let expected = 8.0 - 3.0 * f32::from(round);
                    assert!(values.iter().flatten().all(|value| *value == expected), "round {round}: {values:?}");
                }
            });
        }
    });
}

#[test]
fn a_trainer_whose_gradients_came_too_late_goes_on_with_the_open_round() {
    let job = TestJob::start(2, 2, 3);
    // Of several chunks on all shards.
    let names = ["w", "x"];
    let one = job.begin_with(
        &names.map(|name| (name, vec![0.0; 5000])),
        "optimizer: SGD const_lr { learning_rate: 1.0 } backup_trainers: 2",
    );
    let step = |client: &Client| {
        let given = vec![1.0_f32; 5000];
        let gradients = names.map(|name| gradient(name, &given));
        let mut values = vec![0.0_f32; 10_000];
        let (first, second) = values.split_at_mut(5000);
        let places = [("w", first), ("x", second)];
        let mut places = places.map(|(name, values)| DestinationSlice::new(name, bytemuck::cast_slice_mut(values)));
        client.push_pull(&gradients, None, &mut places).expect("a round");
        assert!(values.iter().all(|value| *value == values[0]), "chunks differ");
        values[0]
    };
    for round in 1..=5_u8 {
        assert_eq!(step(&one), -f32::from(round));
    }
    let late = job.client(1);
    pull(&late, "w", 5000);
    assert_eq!([step(&late), step(&late)], [-6.0, -7.0], "it has learned of five rounds");
    assert_eq!(step(&one), -7.0, "its sixth round was complete");
    assert_eq!(step(&one), -8.0);
    assert_eq!([step(&late), step(&late)], [-8.0, -9.0]);
    let given = vec![1.0_f32; 5000];
    let push = |client: &Client| client.push(&names.map(|name| gradient(name, &given)), None).expect("it is answered");
    push(&one);
    assert_eq!(pull(&one, "x", 5000)[0], -9.0, "the push was late, and a pull is not");
    push(&one);
    assert_eq!(pull(&late, "x", 5000)[0], -10.0);
    assert_eq!(step(&job.client(2)), -11.0, "a new client learns the round");
}

#[test]
fn a_call_ends_at_its_deadline_and_its_gradient_counts_once() {
    let job = TestJob::start(1, 1, 1);
    drop(job.begin(&[("w", vec![0.0; 4])]));
    let deadline = Duration::from_millis(300);
    let client = job.client_with(|options| ClientOptions { trainer: Some(0), deadline, ..options });
    assert_eq!(pull(&client, "w", 4), [0.0; 4]);
    job.pause_shards(true);
    let begun = Instant::now();
    let text = ends_with(client.push(&[gradient("w", &[1.0; 4])], None), CallEnd::Timeout);
    assert!(deadline <= begun.elapsed() && text.contains("server-0"), "{text}");
    job.pause_shards(false);
    // The repeated call resends the same gradient.
    client.push(&[gradient("w", &[1.0; 4])], None).expect("the server answers again");
    assert_eq!(pull(&client, "w", 4), [-1.0; 4]);
}

#[test]
fn a_cancelled_call_ends_at_once_and_the_client_goes_on() {
    let job = TestJob::start(1, 2, 1);
    let client = job.begin(&[("w", vec![0.0; 3000])]);
    job.pause_shards(true);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| client.push(&[gradient("w", &[1.0; 3000])], None));
        while !waiting.is_finished() {
            client.cancel();
            thread::sleep(Duration::from_millis(1)); // tidy: allow sleep: a call that has not begun is not cancelled
        }
        ends_with(waiting.join().expect("it does not panic"), CallEnd::Cancelled);
    });
    job.pause_shards(false);
    client.push(&[gradient("w", &[1.0; 3000])], None).expect("a later call is not cancelled");
    assert!(pull(&client, "w", 3000).iter().all(|value| *value == -1.0));
}

#[test]
fn started_calls_on_one_parameter_run_in_order_and_others_do_not_wait() {
    static ONES: [f32; 4] = [1.0; 4];
    let job = TestJob::start(1, 1, 1);
    let client = job.begin(&[("w", vec![0.0; 4]), ("v", vec![0.0; 4])]);
    job.take_seen(Kind::Push);
    let push = |name| client.start_push(&[gradient(name, &ONES)], None).expect("it starts");
    let calls = ["w", "w", "v", "w"].map(push);
    calls.into_iter().for_each(|call| client.wait(call).expect("it ends well"));
    assert_eq!((pull(&client, "w", 4), pull(&client, "v", 4)), (vec![-3.0; 4], vec![-1.0; 4]));
    let order: Vec<u32> = job.take_seen(Kind::Push).iter().map(|frame| frame.chunks[0].0).collect();
    assert_eq!(order, [0, 1, 0, 0], "the second call about w leaves when the first is answered");
}

#[test]
fn unanswered_chunks_are_resent_after_a_reconnect_and_count_once() {
    let job = TestJob::start(1, 2, 1);
    let client = job.begin(&[("w", vec![0.0; 9000])]);
    let mut expected = 0.0;
    for _ in 0..10 {
        job.hang_up();
        job.take_seen(Kind::Push);
        client.push(&[gradient("w", &[1.0; 9000])], None).expect("the client connects again");
        expected -= 1.0;
        let chunks: Vec<_> = job.take_seen(Kind::Push).into_iter().flat_map(|frame| frame.chunks).collect();
        assert!(chunks.len() > 9, "a chunk came twice: {chunks:?}");
        let values = pull(&client, "w", 9000);
        assert!(values.iter().all(|value| *value == expected), "{expected}: {values:?}");
    }
}

#[test]
fn a_refused_call_names_what_is_wrong_and_sends_nothing() {
    let job = TestJob::start(1, 1, 1);
    let client = job.begin(&[("w", vec![0.0; 4])]);
    job.take_seen(Kind::Push);
    let check = |given: &[GradientSlice<'_>], words: &[&str]| {
        let text = ends_with(client.push(given, None), CallEnd::Refused);
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    let right = gradient("w", &[1.0; 4]);
    check(&[right, gradient("x", &[1.0])], &["\"x\""]);
    check(&[gradient("w", &[1.0; 3])], &["\"w\"", "12", "16"]);
    check(&[right, right], &["\"w\"", "twice"]);
    let halves = GradientSlice { element_type: pserver_core::dtype::ElementType::Float64, ..right };
    check(&[halves], &["\"w\"", "float64", "float32"]);
    assert_eq!(job.take_seen(Kind::Push), []);
    assert_eq!(pull(&client, "w", 4), [0.0; 4]);
}
