//! The geometry of pictures, read from the SVG that is drawn.

use crate::transpile::{Cluster, Columns, CostModel, ParameterServer, ProgramPart, Transpiler, dot, html, svg};
use crate::{Builder, Dim, Graph};
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::prng::Prng;
use pserver_core::rows::Initializer;

use super::networks::{self, SGD, cutting, trained};

/// A rectangle: left, top, right, bottom.
type Rectangle = [f64; 4];

/// The numbers of one attribute.
fn numbers(line: &str, name: &str) -> Vec<f64> {
    let begin = format!(" {name}=\"");
    let Some((_, rest)) = line.split_once(&begin) else { panic!("no {name} in {line}") };
    let text = rest.split('"').next().expect("it is quoted");
    text.split([' ', ',']).map(|number| number.parse().expect("a number")).collect()
}

fn rectangles(picture: &str, class: &str) -> Vec<Rectangle> {
    let mark = format!("class=\"{class}\"");
    let lines = picture.lines().filter(|line| line.starts_with("<rect") && line.contains(&mark));
    lines
        .map(|line| {
            let number = |name| numbers(line, name)[0];
            let (left, top) = (number("x"), number("y"));
            [left, top, left + number("width"), top + number("height")]
        })
        .collect()
}

/// Whether a segment meets the inside of a rectangle: the part of it that is within all four sides is not empty.
fn meets([from, to]: [(f64, f64); 2], [left, top, right, bottom]: Rectangle) -> bool {
    let (mut first, mut last) = (0.0_f64, 1.0_f64);
    let sides = [(from.0, to.0 - from.0, left, right), (from.1, to.1 - from.1, top, bottom)];
    for (start, step, low, high) in sides {
        if step.abs() < 1e-9 {
            if start <= low || start >= high {
                return false;
            }
            continue;
        }
        let (one, other) = ((low - start) / step, (high - start) / step);
        first = first.max(one.min(other));
        last = last.min(one.max(other));
    }
    first + 1e-9 < last
}

fn overlap(one: Rectangle, other: Rectangle) -> bool {
    one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3]
}

/// Checks the geometry of a picture, and returns its width and its number of nodes.
fn check(name: &str, parts: &[ProgramPart]) -> (f64, usize) {
    let picture = svg(parts);
    let nodes = rectangles(&picture, "node");
    for (place, node) in nodes.iter().enumerate() {
        for other in &nodes[..place] {
            assert!(!overlap(*node, *other), "{name}: nodes {node:?} and {other:?} overlap");
        }
        let frames = rectangles(&picture, "frame");
        let within = |frame: &&Rectangle| {
            frame[0] <= node[0] && frame[1] <= node[1] && node[2] <= frame[2] && node[3] <= frame[3]
        };
        assert_eq!(frames.iter().filter(within).count(), 1, "{name}: node {node:?} is in one frame of {frames:?}");
    }
    for edge in picture.lines().filter(|line| line.starts_with("<polyline")) {
        let ends = numbers(edge, "data-ends");
        let points: Vec<(f64, f64)> = numbers(edge, "points").chunks(2).map(|pair| (pair[0], pair[1])).collect();
        for (place, node) in nodes.iter().enumerate() {
            let is_end = ends.iter().any(|end| (end - place as f64).abs() < 0.5);
            let is_met = points.windows(2).any(|pair| meets([pair[0], pair[1]], *node));
            assert!(is_end || !is_met, "{name}: {edge} meets node {place}, {node:?}");
        }
    }
    check_labels(name, &picture, &nodes);
    let size = numbers(picture.lines().next().expect("it has a first line"), "viewBox");
    for rectangle in nodes.iter().chain(&rectangles(&picture, "legend")) {
        assert!(rectangle[2] <= size[2] && rectangle[3] <= size[3], "{name}: {rectangle:?} is outside {size:?}");
    }
    (size[2], nodes.len())
}

/// Each label's letters, each 0.602 of the font's size as in common fixed-width fonts, are within its box.
fn check_labels(name: &str, picture: &str, nodes: &[Rectangle]) {
    let mut node = 0;
    for line in picture.lines() {
        if line.starts_with("<rect class=\"node\"") {
            node += 1;
        }
        if line.starts_with("<text class=\"label\"") {
            let size = if line.contains("font-size=\"9\"") { 9.0 } else { 11.0 };
            let text = line.split_once('>').expect("it has a text").1.trim_end_matches("</text>");
            let width = text.replace("&lt;", "<").replace("&gt;", ">").chars().count() as f64 * 0.602 * size;
            let [left, top, right, bottom] = nodes[node - 1];
            assert!(width <= right - left, "{name}: {text:?} is {width} wide in {left} to {right}");
            let y = numbers(line, "y")[0];
            assert!(top < y && y < bottom, "{name}: {text:?} at {y} is not in {top} to {bottom}");
        }
    }
}

/// Wide & deep: a sparse linear model beside eight tables, whose rows are the input of three layers.
pub(super) fn wide_and_deep() -> Graph {
    let p = Builder::new();
    let uniform = Initializer::Uniform { low: -0.1, high: 0.1 };
    let label = p.data("click", Float32, [Dim::Batch, Dim::Fixed(1)]);
    let mut looked_up = Vec::new();
    let mut wide = Vec::new();
    for field in 0..8 {
        let ids = p.data(&format!("field{field}/ids"), Int64, [Dim::Batch]);
        let table = p.parameter(&format!("deep/embedding_of_field{field}"), Float32, &[10_000, 16], uniform, field);
        looked_up.push(p.lookup_table(table, ids));
        let weight = p.parameter(&format!("wide/weight_of_field{field}"), Float32, &[10_000, 1], uniform, 9 + field);
        wide.push(p.lookup_table(weight, ids));
    }
    let mut h = p.concat(&looked_up, 1);
    let mut width = 128;
    for (layer, next) in [(0, 64), (1, 32), (2, 1)] {
        let weight = p.parameter(&format!("deep/layer{layer}/weight"), Float32, &[width, next], uniform, 20 + layer);
        let bias = p.parameter(&format!("deep/layer{layer}/bias"), Float32, &[next], Initializer::Zeros, 30);
        h = p.add(p.matmul(h, weight), bias);
        if layer < 2 {
            h = p.relu(h);
        }
        width = next;
    }
    wide.push(h);
    let losses = p.sigmoid_cross_entropy(p.sum(&wide), label);
    p.named("loss", p.mean(losses));
    trained(p, SGD)
}

fn divided(graph: &Graph, trainers: u32, servers: u32, costs: &CostModel) -> Vec<ProgramPart> {
    let cluster = Cluster { trainers, servers };
    ParameterServer::default().transpile(graph, cluster, costs).expect("it can be divided")
}

#[test]
fn no_edge_meets_a_node_and_no_name_leaves_its_box() {
    let costs = CostModel::default();
    for graph in [networks::two_layers(networks::ADAM), networks::unbalanced(1000, 12, 64), wide_and_deep()] {
        check("whole", &[ProgramPart { peers: Vec::new(), graph: graph.clone() }]);
        for (trainers, servers) in [(1, 1), (2, 2), (3, 5), (8, 8)] {
            check("divided", &divided(&graph, trainers, servers, &costs));
            check("cut", &divided(&graph, trainers, servers, &cutting(64)));
        }
    }
    let columns = Columns.transpile(&networks::two_layers(SGD), Cluster { trainers: 3, servers: 2 }, &costs);
    check("columns", &columns.expect("it can be divided"));
    let mut prng = Prng(11);
    for _ in 0..20 {
        let graph = networks::random(&mut prng, true);
        check("random", &divided(&graph, 2, 3, &cutting(8)));
    }
}

#[test]
fn repeated_parts_of_a_picture_are_folded() {
    let graph = wide_and_deep();
    let parts = divided(&graph, 8, 8, &CostModel::default());
    let (width, nodes) = check("wide & deep", &parts);
    assert!(width < 4000.0, "{width} pixels");
    let all: usize =
        parts.iter().map(|part| part.graph.scopes().iter().map(|scope| scope.nodes.len()).sum::<usize>()).sum();
    assert!(nodes * 2 < all, "{nodes} nodes of {all} ops");
    let picture = svg(&parts);
    assert!(picture.contains("trainer:0 to trainer:7 \u{d7} 8"), "the trainers are one frame");
    assert!(picture.contains("lookup_table \u{d7} 8"), "the lookups of eight fields are one node");
    for field in 0..8 {
        assert!(picture.contains(&format!("field{field}/ids")), "every folded name is in a tooltip");
    }
    let cut = svg(&divided(&networks::unbalanced(4096, 0, 8), 4, 4, &cutting(256)));
    let heads: Vec<&str> = cut.lines().filter(|line| line.contains("class=\"head\"")).collect();
    assert!(cut.contains("server:0 to server:3 \u{d7} 4"), "equal servers are one frame: {heads:#?}");
}

#[test]
fn a_page_needs_nothing_from_elsewhere_and_every_picture_has_a_legend() {
    let parts = divided(&networks::two_layers(SGD), 2, 2, &CostModel::default());
    let page = html(&parts);
    let links = page.replace("http://www.w3.org/2000/svg", "");
    for mark in ["http:", "https:", "src=", "href=", "import", "@font-face"] {
        assert!(!links.contains(mark), "{mark}");
    }
    assert!(page.contains("addEventListener(\"wheel\"") && page.contains(&svg(&parts)));
    assert_eq!(rectangles(&svg(&parts), "legend").len(), 7);
    assert!(dot(&parts).contains("cluster_legend"));
}
