use std::fs;
use std::path::PathBuf;

use pserver_core::prng::Prng;
use pserver_program::{Elements, Program};
use tempfile::TempDir;

use super::*;

/// A program with an image of three numbers and a label.
fn graph() -> Graph {
    let text = "block 0 {\n data image: float32[batch, 3]\n data label: int64[batch]\n forward y = relu(image)\n}";
    let (program, positions) = Program::read(text, None).expect("it is a program");
    Graph::located(program, positions).expect("it is right")
}

/// Columns of these labels, with images that begin with them.
fn columns(labels: &[i64]) -> Vec<(String, Tensor)> {
    let rows = labels.len() as u64;
    let numbers = labels.iter().flat_map(|label| (0_u8..3).map(|place| *label as f32 + f32::from(place) / 8.0));
    let image = Tensor::new([rows, 3], Elements::Float32(numbers.collect()));
    let label = Tensor::new([rows], Elements::Int64(labels.to_vec()));
    vec![("image".to_owned(), image), ("label".to_owned(), label)]
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().expect("there is a place for it"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The error of reading a file of these columns.
    fn refused(&self, tensors: &[(String, Tensor)]) -> String {
        let path = self.path("refused.safetensors");
        write_tensors(&path, tensors).expect("it is written");
        let text = DataSet::read(&path, &graph()).expect_err("it cannot be used").to_string();
        assert!(text.contains("refused.safetensors"), "{text}");
        text
    }

    /// The error of reading a table.
    fn refused_table(&self, text: &str) -> String {
        let path = self.path("refused.csv");
        fs::write(&path, text).expect("it is written");
        DataSet::read(&path, &graph()).expect_err("it cannot be used").to_string()
    }
}

fn says(text: &str, words: &[&str]) {
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

#[test]
fn every_format_gives_back_the_columns_that_were_written() {
    let folder = Folder::new();
    for labels in [vec![], vec![5], vec![i64::MIN, -1, 0, 1, i64::MAX], (0..1000).collect()] {
        let mut written = columns(&labels);
        // Columns that no variable names are not read.
        written
            .push(("other".to_owned(), Tensor::new([labels.len() as u64], Elements::Float64(vec![0.5; labels.len()]))));
        for name in ["data.safetensors", "data.npz", "data.csv"] {
            let path = folder.path(name);
            write_tensors(&path, &written).expect("it is written");
            let read = DataSet::read(&path, &graph()).expect("it is data");
            assert_eq!(read, DataSet { columns: columns(&labels), rows: labels.len() }, "{name}");
        }
    }
}

#[test]
fn a_batch_has_the_rows_that_are_asked_for_in_their_order() {
    let labels: Vec<i64> = (0..50).collect();
    let mut data = DataSet::of(columns(&labels)).expect("its columns are of one length");
    let mut prng = Prng(3);
    for count in [0, 1, 2, 50, 120] {
        let rows: Vec<usize> = (0..count).map(|_| prng.index(50)).collect();
        let wanted: Vec<i64> = rows.iter().map(|row| labels[*row]).collect();
        let expected = columns(&wanted);
        let batch: Vec<_> = data.batch(&rows).into_iter().map(|(name, one)| (name.to_owned(), one)).collect();
        assert_eq!(batch, expected);
    }
    let last = data.split_off(20);
    assert_eq!(data, DataSet { columns: columns(&labels[..30]), rows: 30 });
    assert_eq!(last, DataSet { columns: columns(&labels[30..]), rows: 20 });
}

#[test]
fn numbers_of_other_types_are_converted_where_the_type_has_them() {
    let folder = Folder::new();
    let read = |image: Elements, label: Elements| {
        let path = folder.path("converted.npz");
        let tensors = [("image", vec![2, 3], image), ("label", vec![2], label)];
        let tensors = tensors.map(|(name, shape, elements)| (name.to_owned(), Tensor::new(shape, elements)));
        write_tensors(&path, &tensors).expect("it is written");
        DataSet::read(&path, &graph())
    };
    let found = read(Elements::Int32(vec![1, 2, 3, 4, 5, 6]), Elements::Float64(vec![7.0, -8.0])).expect("it has them");
    assert_eq!(found.columns[0].1, Tensor::new([2, 3], Elements::Float32(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0])));
    assert_eq!(found.columns[1].1, Tensor::new([2], Elements::Int64(vec![7, -8])));
    // Floats are rounded once to nearest.
    let found = read(Elements::Float64(vec![0.1; 6]), Elements::Uint32(vec![1, 2])).expect("it has them");
    assert_eq!(found.columns[0].1, Tensor::new([2, 3], Elements::Float32(vec![0.1; 6])));
    let text =
        read(Elements::Float64(vec![0.0; 6]), Elements::Float64(vec![1.0, 1.5])).expect_err("a half is no label");
    says(&text.to_string(), &["label", "1.5", "int64"]);
    let text = read(Elements::Float64(vec![0.0; 6]), Elements::Uint64(vec![1, u64::MAX])).expect_err("it is too large");
    says(&text.to_string(), &["label", &u64::MAX.to_string(), "int64"]);
}

#[test]
fn data_that_does_not_fit_its_program_is_refused_with_what_was_expected() {
    let folder = Folder::new();
    let [image, label] = <[_; 2]>::try_from(columns(&[1, 2])).expect("there are two");
    says(&folder.refused(std::slice::from_ref(&image)), &["\"label\"", "int64[batch]", "no column"]);
    let wide = ("image".to_owned(), Tensor::new([2, 4], Elements::Float32(vec![0.0; 8])));
    says(&folder.refused(&[wide, label.clone()]), &["\"image\"", "[2, 4]", "float32[batch, 3]"]);
    let longer = columns(&[1, 2, 3]).remove(1);
    says(&folder.refused(&[image, longer]), &["\"label\" has 3 rows", "expected 2", "\"image\""]);
    says(&folder.refused_table("image.0,image.1,image.2,label\n1,2,3,x\n"), &["line 2", "\"label\"", "\"x\"", "int64"]);
    says(&folder.refused_table("image.0,image.1,image.2,label\n1,inf,3,4\n"), &["line 2", "\"image.1\"", "float32"]);
    says(&folder.refused_table("image.0,image.1,label\n1,2,3\n"), &["2 columns", "\"image\"", "image.0 to image.2"]);
    says(&folder.refused_table("image.0,image.1,image.2,image.3,label\n"), &["4 columns", "image.0 to image.2"]);
    says(&folder.refused_table("label,label,image.0,image.1,image.2\n"), &["\"label\" twice"]);
}

#[test]
fn a_path_that_is_no_file_of_a_known_format_is_refused_by_name() {
    let folder = Folder::new();
    let read = |name: &str| DataSet::read(&folder.path(name), &graph()).expect_err("it is no data").to_string();
    fs::write(folder.path("data.txt"), "").expect("it is written");
    says(&read("data.txt"), &["data.txt", "\"txt\"", ".safetensors, .npz or .csv"]);
    says(&read("missing.csv"), &["missing.csv"]);
    let device = DataSet::read(Path::new("/dev/zero"), &graph()).expect_err("it has no end").to_string();
    says(&device, &["/dev/zero", "ordinary file"]);
    for name in ["short.safetensors", "short.npz"] {
        write_tensors(&folder.path(name), &columns(&[1, 2, 3])).expect("it is written");
        let whole = fs::read(folder.path(name)).expect("it is there");
        // A file that is truncated anywhere is refused, and never read in part.
        for length in (0..whole.len()).step_by(7) {
            fs::write(folder.path(name), &whole[..length]).expect("it is written");
            says(&read(name), &[name]);
        }
    }
}
