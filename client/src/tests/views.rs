use pserver_core::dtype::ElementType::Float32;

use super::servers::TestJob;
use crate::{GradientSlice, View};

fn elements(view: &View, parameter: usize) -> Vec<f32> {
    let bytes = view.pieces(parameter).collect::<Vec<_>>().concat();
    bytes.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)).collect()
}

#[test]
fn a_view_keeps_its_values_while_later_rounds_replace_them() {
    let job = TestJob::start(1, 2, 1);
    let client = job.begin(&[("w", vec![5.0; 2800]), ("v", vec![7.0; 2])]);
    let first = client.pull_view(&["v", "w"]).expect("the values are there");
    assert_eq!(first.len(), 2);
    let ones = [1.0_f32; 2800];
    let given = GradientSlice { name: "w", element_type: Float32, content: bytemuck::cast_slice(&ones) };
    for _ in 0..3 {
        client.push(&[given], None).expect("a round");
    }
    let text = client.pull_view(&["w"]).err().expect("there is one").to_string();
    assert!(text.contains("\"w\""), "{text}");
    assert_eq!((elements(&first, 0), elements(&first, 1)), (vec![7.0; 2], vec![5.0; 2800]));
    first.release().expect("it is this client's");
    let next = client.push_pull_view(&[given], None).expect("a round");
    assert_eq!(elements(&next, 0), [1.0; 2800]);
    // A view outlives its client.
    drop(client);
    assert_eq!(elements(&next, 0), [1.0; 2800]);
}
