use std::collections::HashSet;

use proptest::prelude::*;
use prost::Message;

use super::{Buckets, Catalogue, ChunkSpan, Declaration, DeclarationMessage, Name, Parameter, Topology, TotalPart};
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{ChunkIndex, ParameterIndex, ServerIndex, ShardId, ShardIndex, TrainerId};
use crate::limits::{FRAME_CONTROL_BYTES_MAX, PARAMETER_BYTES_MAX, PARAMETER_CONFIG_BYTES_MAX};

/// Declares parameters as a script says, and compares where their chunks are.
///
/// The first step is the topology (`shards 2,1 chunk 4096`), each other one a parameter (`w float32 100` in bytes, with
/// `whole` or `home=1` after it or not). The answer is `name=server.shard,server.shard` in chunk order, then the bytes
/// by server.
fn check(script: &str, expected: &str) {
    let mut steps = script.split("; ");
    let cluster: Vec<&str> = steps.next().expect("the topology").split(' ').collect();
    let shards: Vec<u16> = cluster[1].split(',').map(|count| count.parse().expect("shards")).collect();
    let mut catalogue = empty(&shards, cluster[3].parse().expect("chunk bytes"));
    for step in steps {
        let words: Vec<&str> = step.split(' ').collect();
        let element_type = ElementType::ALL.into_iter().find(|kind| kind.name() == words[1]).expect("a type");
        let bytes = words[2].parse().expect("bytes");
        let whole = words.get(3) == Some(&"whole");
        let home = words.get(3).and_then(|word| word.strip_prefix("home="));
        let home = home.map(|home| ServerIndex(home.parse().expect("a server")));
        let declared = Declaration { element_type, whole, owner: home, ..declaration(words[0], bytes) };
        catalogue.declare(declared).expect("the script is legal");
    }
    let mut placements: Vec<String> = catalogue.iter().map(placement_text).collect();
    let bytes = (0..catalogue.topology().servers()).map(|server| catalogue.bytes_on(ServerIndex(server)).to_string());
    placements.push(bytes.collect::<Vec<_>>().join(","));
    assert_eq!(placements.join(" "), expected, "{script}");
}

fn placement_text(parameter: &Parameter) -> String {
    let shards = parameter.chunks().map(|(chunk, _)| parameter.shard_of(chunk));
    let shards: Vec<String> = shards.map(|shard| format!("{}.{}", shard.server, shard.shard)).collect();
    format!("{}={}", parameter.declaration().name, shards.join(","))
}

/// Declares `declaration` after one parameter named `taken`, and compares the refusal. Nothing may have changed.
fn check_refused(declaration: Declaration, expected: &str) {
    let mut catalogue = empty(&[2, 2], 4096);
    catalogue.declare(self::declaration("taken", 4)).expect("it is legal");
    let before = (catalogue.len(), catalogue.bytes(), catalogue.digest());
    assert_eq!(catalogue.declare(declaration), Err(Failure::call(expected)));
    assert_eq!((catalogue.len(), catalogue.bytes(), catalogue.digest()), before);
    assert_eq!(catalogue.bytes_on(ServerIndex(0)) + catalogue.bytes_on(ServerIndex(1)), 4);
    let next = catalogue.declare(self::declaration("next", 4)).expect("it is legal");
    assert_eq!(next, ParameterIndex(1));
}

fn check_name_refused(name: &[u8], expected: &str) {
    assert_eq!(Name::new(name), Err(Failure::call(expected)));
}

fn empty(shards: &[u16], chunk_bytes: u32) -> Catalogue {
    let topology = Topology::new(shards.to_vec()).expect("a legal topology");
    Catalogue::new(topology, chunk_bytes).expect("a legal chunk size")
}

fn declaration(name: &str, bytes: u64) -> Declaration {
    Declaration {
        name: Name::new(name.as_bytes()).expect("a legal name"),
        element_type: ElementType::Float32,
        bytes,
        shape: Vec::new(),
        whole: false,
        config: Vec::new(),
        buckets: None,
        owner: None,
        sender: None,
        total_part: None,
        hosted: None,
    }
}

fn catalogue_of(shards: &[u16], chunk_bytes: u32, sizes: &[(u64, bool)]) -> Catalogue {
    let mut catalogue = empty(shards, chunk_bytes);
    for (index, (bytes, whole)) in sizes.iter().enumerate() {
        let declared = Declaration { whole: *whole, ..declaration(&format!("p{index}"), *bytes) };
        catalogue.declare(declared).expect("a legal parameter");
    }
    catalogue
}

/// The bytes of the fullest and of the emptiest server.
fn extremes(catalogue: &Catalogue) -> (u64, u64) {
    let loads = (0..catalogue.topology().servers()).map(|server| catalogue.bytes_on(ServerIndex(server)));
    loads.fold((0, u64::MAX), |(most, least), load| (most.max(load), least.min(load)))
}

#[test]
fn chunks_are_placed_on_the_emptiest_servers_first() {
    check("shards 2,2 chunk 4096; a float32 10000; b float32 100", "a=0.0,1.0,0.1 b=1.1 5904,4196");
    check("shards 1,1,1 chunk 4096; a float64 8; b float64 8; c int32 4; d int32 4", "a=0.0 b=1.0 c=2.0 d=2.0 8,8,8");
    check("shards 1,1 chunk 4096; a float32 4; b float32 8192; c float32 4", "a=0.0 b=1.0,0.0 c=1.0 4100,4100");
}

#[test]
fn chunks_on_one_server_take_turns_over_its_shards() {
    check("shards 3 chunk 4096; a float32 20480", "a=0.0,0.1,0.2,0.0,0.1 20480");
    check("shards 3 chunk 4096; a float32 4; b float32 8192; c float32 4", "a=0.0 b=0.1,0.2 c=0.0 8200");
    check("shards 1,2 chunk 4096; a float32 20480", "a=0.0,1.0,0.0,1.1,0.0 12288,8192");
}

#[test]
fn a_whole_parameter_stays_on_the_emptiest_shard() {
    check(
        "shards 2,2 chunk 4096; a float32 4; w float32 12288 whole; b float32 8192",
        "a=0.0 w=1.0,1.0,1.0 b=0.1,1.1 4100,16384",
    );
}

#[test]
fn a_home_keeps_every_chunk_and_its_shards_take_turns() {
    check("shards 2,2 chunk 4096; a float32 10000 home=1; b float32 100", "a=1.0,1.1,1.0 b=0.0 100,10000");
    check(
        "shards 1,3 chunk 4096; a float32 4 home=1; b float32 8192 home=1; c float32 4",
        "a=1.0 b=1.1,1.2 c=0.0 4,8196",
    );
    check(
        "shards 1,1 chunk 4096; a float32 8192 home=0; b float32 8192; c float32 4",
        "a=0.0,0.0 b=1.0,0.0 c=1.0 12288,4100",
    );
}

#[test]
fn a_home_that_is_no_server_is_refused_by_name_and_changes_nothing() {
    let homely = Declaration { owner: Some(ServerIndex(2)), ..declaration("w", 4) };
    check_refused(homely, "parameter \"w\": its home is server 2; expected one below 2");
    let page = |home| DeclarationMessage { home, ..DeclarationMessage::from(&declaration("w", 4)) };
    assert_eq!(Declaration::try_from(page(Some(3))).map(|read| read.owner), Ok(Some(ServerIndex(3))));
    let refused = Declaration::try_from(page(Some(1 << 16))).map(|read| read.owner);
    assert_eq!(refused, Err(Failure::call("parameter \"w\": its home is server 65536; expected one below 4096")));
}

#[test]
fn a_sender_that_is_no_trainer_is_refused_by_name() {
    let page = |sender| DeclarationMessage { sender, ..DeclarationMessage::from(&declaration("w", 4)) };
    assert_eq!(Declaration::try_from(page(Some(3))).map(|read| read.sender), Ok(Some(TrainerId(3))));
    let refused = Declaration::try_from(page(Some(4096))).map(|read| read.sender);
    assert_eq!(refused, Err(Failure::call("parameter \"w\": its sender is 4096; expected one below 4096")));
    let rows = Some(Buckets { rows: 1, count: 1 });
    let sparse = Declaration { buckets: rows, shape: vec![1, 1], sender: Some(TrainerId(0)), ..declaration("w", 4) };
    check_refused(sparse, "parameter \"w\": sparse with one sender; expected a dense parameter");
}

#[test]
fn a_share_and_a_total_are_beside_the_parameter_that_reads_the_total() {
    let part = |name: &str, part| Declaration {
        element_type: ElementType::Float64,
        total_part: Some(part),
        ..declaration(name, 8)
    };
    let [share, total] = [part("share", TotalPart::Share), part("total", TotalPart::Total)];
    let mut catalogue = catalogue_of(&[2, 3], 4096, &[(4096, true), (40_000, true)]);
    let reader = ParameterIndex(1);
    for declaration in [share.clone(), total.clone()] {
        let index = catalogue.declare(declaration).expect("it is legal");
        let shard = |index| catalogue.parameter(index).expect("it is declared").shard_of(ChunkIndex(0));
        assert_eq!(shard(index), shard(reader));
    }
    assert_eq!(Catalogue::from_pages(catalogue.pages(64)).expect("its own").digest(), catalogue.digest());
    let refuse = |sizes: &[(u64, bool)], declaration: &Declaration| {
        let text = catalogue_of(&[1, 1], 4096, sizes).declare(declaration.clone()).expect_err("refused").to_string();
        let expected = "; expected it after a whole parameter or a table, first its share, then its total";
        assert!(text.contains(expected), "{text}");
    };
    refuse(&[], &share);
    refuse(&[(8192, false)], &share);
    refuse(&[(8192, true)], &total);
    refuse(&[(8192, true), (8, false)], &total);
    let wide = Declaration { bytes: 16, ..share.clone() };
    let refused = catalogue_of(&[1, 1], 4096, &[(8192, true)]).declare(wide).expect_err("refused").to_string();
    assert!(refused.contains("a part of a total with 16 bytes; expected 8: one float64"), "{refused}");
    check_refused(
        Declaration { element_type: ElementType::Float32, ..share },
        "parameter \"share\": part of a total with 8 bytes of float32; expected float64 and no sender",
    );
    let other = DeclarationMessage { total_part: 3, ..DeclarationMessage::from(&total) };
    let refused = Declaration::try_from(other).map(|read| read.total_part);
    assert_eq!(refused, Err(Failure::call("parameter \"total\": part 3 of a total; expected 0 to 2")));
}

#[test]
fn the_numbers_of_a_tables_total_are_beside_its_buckets() {
    for shards in [&[2, 3][..], &[1]] {
        let mut catalogue = catalogue_of(shards, 4096, &[(4096, false), (40_000, false)]);
        let table = catalogue.declare(sparse(100, 100, 4, 7)).expect("it is legal");
        for (name, part) in [("share", TotalPart::Share), ("total", TotalPart::Total)] {
            assert_eq!(catalogue.numbers_of_part(part), 7);
            let part =
                Declaration { element_type: ElementType::Float64, total_part: Some(part), ..declaration(name, 56) };
            let lone = Declaration { bytes: 8, ..part.clone() };
            assert!(catalogue.declare(lone).expect_err("refused").to_string().contains("8 bytes; expected 56"));
            let index = catalogue.declare(part).expect("it is legal");
            let [table, part] = [table, index].map(|index| catalogue.parameter(index).expect("it is declared"));
            assert_eq!(part.chunk_count(), 7);
            for (bucket, span) in part.chunks() {
                assert_eq!((span.offset, span.bytes), (8 * bucket.0, 8));
                assert_eq!(part.shard_of(bucket), table.shard_of(bucket));
            }
        }
        let bytes: u64 =
            (0..catalogue.topology().servers()).map(|server| catalogue.bytes_on(ServerIndex(server))).sum();
        assert_eq!(bytes, 4096 + 40_000 + 7 * 229 + 2 * 56, "buckets of 1,600 bytes are of 229 each");
        assert_eq!(Catalogue::from_pages(catalogue.pages(64)).expect("its own").digest(), catalogue.digest());
    }
}

#[test]
fn catalogues_that_differ_in_a_home_have_other_digests() {
    let digest = |home| {
        let mut catalogue = empty(&[1, 1], 4096);
        catalogue.declare(Declaration { owner: home, ..declaration("w", 4) }).expect("it is legal");
        catalogue.digest()
    };
    let all = [digest(None), digest(Some(ServerIndex(0))), digest(Some(ServerIndex(1)))];
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
}

#[test]
fn a_zero_length_parameter_is_refused_by_name() {
    check_refused(declaration("w", 0), "parameter \"w\": length 0 bytes; expected at least one element");
}

#[test]
fn a_broken_declaration_is_refused_by_name_and_changes_nothing() {
    check_refused(declaration("w", 6), "parameter \"w\": length 6 bytes; expected a multiple of 4 (float32)");
    check_refused(
        declaration("w", PARAMETER_BYTES_MAX + 4),
        "parameter \"w\": length 281474976710660 bytes; expected at most 281474976710656",
    );
    check_refused(declaration("taken", 8), "parameter \"taken\": declared already, as number 0; expected a new name");
    check_refused(
        Declaration { element_type: ElementType::Bfloat16, ..declaration("w", 4) },
        "parameter \"w\": element type bfloat16; expected a type of 32 or 64 bits (halves are for gradients)",
    );
    check_refused(
        Declaration { config: vec![0; PARAMETER_CONFIG_BYTES_MAX + 1], ..declaration("w", 4) },
        "parameter \"w\": configuration of 65537 bytes; expected at most 65536",
    );
    let shaped = |shape| Declaration { shape, ..declaration("w", 24) };
    check_refused(shaped(vec![2, 2]), "parameter \"w\": shape [2, 2]; expected a product of 6 elements");
    check_refused(shaped(vec![6, 0]), "parameter \"w\": shape [6, 0]; expected a product of 6 elements");
    check_refused(
        shaped(vec![1 << 63, 2]),
        "parameter \"w\": shape [9223372036854775808, 2]; expected a product of 6 elements",
    );
    check_refused(shaped(vec![1; 65]), "parameter \"w\": shape of 65 dimensions; expected at most 64");
}

#[test]
fn a_parameter_without_a_shape_has_one_dimension() {
    let mut catalogue = empty(&[1], 4096);
    let plain = catalogue.declare(declaration("plain", 24)).expect("it is legal");
    let shaped = Declaration { shape: vec![2, 3], ..declaration("shaped", 24) };
    let shaped = catalogue.declare(shaped).expect("it is legal");
    let shape = |index| catalogue.parameter(index).expect("just declared").declaration().shape.clone();
    assert_eq!((shape(plain), shape(shaped)), (vec![6], vec![2, 3]));
}

#[test]
fn a_sum_of_lengths_beyond_64_bits_is_refused() {
    let mut catalogue = empty(&[1], 4096);
    for index in 0..(1 << 16) - 1 {
        catalogue.declare(declaration(&format!("p{index}"), PARAMETER_BYTES_MAX)).expect("it fits");
    }
    let refused = catalogue.declare(declaration("last", PARAMETER_BYTES_MAX)).expect_err("2^64 bytes do not fit");
    let expected = "parameter \"last\": the sum of all lengths exceeds 18446744073709551615 bytes";
    assert_eq!(refused.to_string(), expected);
    assert_eq!(catalogue.bytes_on(ServerIndex(0)), catalogue.bytes());
}

#[test]
fn a_bad_name_is_refused_and_shown_in_part() {
    check_name_refused(b"", "parameter name \"\": empty; expected at least one character");
    check_name_refused(b"a\0b", "parameter name \"a\\0b\": control character \\u{0} at byte 1; expected none");
    check_name_refused(b"a\nb", "parameter name \"a\\nb\": control character \\u{a} at byte 1; expected none");
    check_name_refused(b"ab\xff", "parameter name \"ab\u{fffd}\": not UTF-8 at byte 2; expected UTF-8");
    let shown = "x".repeat(40);
    check_name_refused(&[b'x'; 1025], &format!("parameter name \"{shown}\"...: 1025 bytes; expected at most 1024"));
    assert_eq!(Name::new("größe".as_bytes()).as_ref().map(Name::as_str), Ok("größe"));
    assert!(Name::new(&[b'x'; 1024]).is_ok());
}

#[test]
fn an_invalid_topology_or_chunk_size_is_refused() {
    let refused = |shards| Topology::new(shards).expect_err("an impossible topology").to_string();
    assert_eq!(refused(vec![]), "topology: 0 servers; expected 1 to 4096");
    assert_eq!(refused(vec![1; 4097]), "topology: 4097 servers; expected 1 to 4096");
    assert_eq!(refused(vec![1, 0]), "server 1: 0 shards; expected 1 to 256");
    assert_eq!(refused(vec![257]), "server 0: 257 shards; expected 1 to 256");
    for chunk_bytes in [0, 2048, 5000, 32 * 1024 * 1024] {
        let topology = Topology::new(vec![1]).expect("a legal topology");
        let refused = Catalogue::new(topology, chunk_bytes).expect_err("an impossible chunk").to_string();
        let expected = format!("chunks of {chunk_bytes} bytes; expected a power of two from 4096 to 16777216");
        assert_eq!(refused, expected);
    }
}

#[test]
fn a_chunk_past_the_end_has_no_span() {
    let catalogue = catalogue_of(&[1], 4096, &[(8192, false), (8196, false)]);
    let span = |parameter, chunk| {
        let parameter = catalogue.parameter(ParameterIndex(parameter)).expect("there are two");
        parameter.span(ChunkIndex(chunk)).map(|ChunkSpan { offset, bytes }| (offset, bytes))
    };
    assert_eq!((span(0, 1), span(0, 2), span(1, 2)), (Some((4096, 4096)), None, Some((8192, 4))));
    assert_eq!((span(0, u64::MAX), span(0, 1 << 52)), (None, None));
}

#[test]
fn ten_thousand_small_parameters_are_spread_evenly_and_found_by_name() {
    let catalogue = catalogue_of(&[4, 4, 4], 1 << 20, &vec![(1024, false); 10_000]);
    let (most, least) = extremes(&catalogue);
    assert_eq!(most - least, 1024);
    assert_eq!(catalogue.find("p9999"), Some(ParameterIndex(9999)));
    assert_eq!(catalogue.find("p10000"), None);
    let held: Vec<usize> = catalogue.topology().shard_ids().map(|shard| catalogue.chunks_on(shard).count()).collect();
    assert_eq!(held.iter().sum::<usize>(), 10_000);
    assert!(held.iter().all(|count| (833..=834).contains(count)), "{held:?}");
}

#[test]
fn a_parameter_of_three_gibibytes_is_spread_evenly() {
    let catalogue = catalogue_of(&[2, 2, 2, 2, 2], 1 << 20, &[(3 << 30, false)]);
    let (most, least) = extremes(&catalogue);
    assert_eq!(most - least, 1 << 20);
    // 3,072 chunks over five servers: two get one more than the others.
    assert_eq!(2 * most + 3 * least, 3 << 30);
}

#[test]
fn the_largest_parameter_costs_no_more_than_a_small_one() {
    let catalogue = catalogue_of(&[3, 5], 32 * 1024, &[(PARAMETER_BYTES_MAX, false), (PARAMETER_BYTES_MAX, true)]);
    let parameter = catalogue.parameter(ParameterIndex(0)).expect("it was declared");
    assert_eq!(parameter.chunk_count(), 1 << 33);
    assert_eq!(parameter.heap_bytes_max(), 2 * 6 + 8 + (2 + 16));
    let last = ChunkIndex((1 << 33) - 1);
    // The last chunk is number 2^32 - 1 of those on server 1, which has five shards: 2^32 - 1 is a multiple of five.
    assert_eq!(parameter.shard_of(last), ShardId { server: ServerIndex(1), shard: ShardIndex(0) });
    assert_eq!(parameter.span(last), Some(ChunkSpan { offset: PARAMETER_BYTES_MAX - 32 * 1024, bytes: 32 * 1024 }));
    let shard = ShardId { server: ServerIndex(1), shard: ShardIndex(3) };
    let first: Vec<u64> = parameter.chunks_on(shard).take(2).map(|(chunk, _)| chunk.chunk.0).collect();
    assert_eq!(first, [7, 17]);
}

#[test]
fn a_million_small_parameters_take_less_than_a_kilobyte_each() {
    let mut catalogue = empty(&[8, 8], 1 << 20);
    for index in 0..1_000_000 {
        let name = format!("tower/layers.{index}/attention/weight");
        catalogue.declare(declaration(&name, 1024)).expect("it is legal");
    }
    let bytes = catalogue.heap_bytes_max();
    assert!(bytes < 400 * 1_000_000, "{} bytes each", bytes / 1_000_000);
    assert_eq!(catalogue.find("tower/layers.999999/attention/weight"), Some(ParameterIndex(999_999)));
}

#[test]
fn a_catalogue_survives_its_pages() {
    let mut catalogue = catalogue_of(&[2, 3], 4096, &[(10_000, false), (4096, true), (40_000, false), (4, false)]);
    let rich = Declaration {
        element_type: ElementType::Uint64,
        shape: vec![3, 5],
        config: vec![0, 1, 255],
        owner: Some(ServerIndex(1)),
        sender: Some(TrainerId(0)),
        total_part: None,
        hosted: None,
        ..declaration("größe", 120)
    };
    catalogue.declare(rich).expect("it is legal");
    for bytes_max in [0, 40, 64, FRAME_CONTROL_BYTES_MAX] {
        let pages = catalogue.pages(bytes_max);
        for page in &pages {
            assert!(page.declarations.len() == 1 || page.encoded_len() <= bytes_max as usize);
        }
        assert_eq!(pages.len() == 1, bytes_max == FRAME_CONTROL_BYTES_MAX, "{bytes_max}");
        let bytes: Vec<Vec<u8>> = pages.iter().map(Message::encode_to_vec).collect();
        let pages = bytes.iter().map(|page| Message::decode(page.as_slice()).expect("just encoded"));
        let copy = Catalogue::from_pages(pages).expect("just encoded");
        assert_eq!(copy.digest(), catalogue.digest());
        assert!(copy.iter().eq(catalogue.iter()));
    }
}

#[test]
fn pages_that_do_not_make_one_catalogue_are_refused() {
    let catalogue = catalogue_of(&[2], 4096, &[(4, false), (8, false), (12, false)]);
    let pages = catalogue.pages(0);
    let refused = |pages: Vec<_>| Catalogue::from_pages(pages).expect_err("it is no catalogue").to_string();
    assert_eq!(refused(vec![]), "catalogue of no pages; expected at least one");
    assert_eq!(refused(pages[..2].to_vec()), "catalogue of 2 parameters; expected 3");
    assert_eq!(refused(vec![pages[0].clone(), pages[2].clone()]), "catalogue page at 2; expected the one at 1");
    let mut mixed = pages.clone();
    mixed[1].chunk_bytes = 8192;
    assert_eq!(refused(mixed), "catalogue page at 1: from another catalogue");
    let mut wide = pages.clone();
    wide[0].shards = vec![70_000];
    assert_eq!(refused(wide), "a server of 70000 shards; expected at most 256");
    let mut strange = pages;
    strange[1].declarations[0] = DeclarationMessage { element_type: 99, ..strange[1].declarations[0].clone() };
    assert_eq!(refused(strange), "parameter \"p1\": element type number 99; expected 0 to 5");
}

#[test]
fn a_digest_tells_every_difference() {
    let base = [(10_000, false), (4096, false)];
    let digests = [
        catalogue_of(&[2, 2], 4096, &base),
        catalogue_of(&[2, 3], 4096, &base),
        catalogue_of(&[2, 2], 8192, &base),
        catalogue_of(&[2, 2], 4096, &[(10_000, false), (4096, true)]),
        catalogue_of(&[2, 2], 4096, &[(10_000, false), (4092, false)]),
        catalogue_of(&[2, 2], 4096, &base[..1]),
    ];
    let different: HashSet<[u8; 32]> = digests.iter().map(Catalogue::digest).collect();
    assert_eq!(different.len(), digests.len());
    assert_eq!(catalogue_of(&[2, 2], 4096, &base).digest(), digests[0].digest());
}

/// Sizes in elements of four bytes, up to forty chunks of 4096 bytes; mostly around whole chunks.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![1..=40_960_u64, (1..=40_u64).prop_map(|chunks| chunks * 1024), 1..=8_u64].prop_map(|count| count * 4)
}

proptest! {
    #[test]
    fn no_server_is_more_than_a_chunk_above_another(
        shards in prop::collection::vec(1..5_u16, 1..9),
        sizes in prop::collection::vec(bytes(), 1..60),
        // With large chunks, small parameters have smaller ones.
        scale in prop_oneof![Just(1), Just(256)],
    ) {
        let chunk_bytes = 4096 * scale;
        let mut catalogue = empty(&shards, chunk_bytes);
        for (index, bytes) in sizes.into_iter().enumerate() {
            let bytes = bytes * u64::from(scale);
            catalogue.declare(declaration(&format!("p{index}"), bytes)).expect("it is legal");
            let (most, least) = extremes(&catalogue);
            prop_assert!(most - least <= u64::from(chunk_bytes), "{most} and {least}");
            let mean = catalogue.bytes().div_ceil(u64::from(catalogue.topology().servers()));
            prop_assert!(most <= mean + u64::from(chunk_bytes));
        }
    }

    #[test]
    fn parameters_without_a_home_do_not_unbalance_the_servers(
        shards in prop::collection::vec(1..5_u16, 1..9),
        sizes in prop::collection::vec((bytes(), prop::option::of(0..9_u16)), 1..60),
    ) {
        let mut catalogue = empty(&shards, 4096);
        for (index, (bytes, home)) in sizes.into_iter().enumerate() {
            let owner = home.map(|home| ServerIndex(home % catalogue.topology().servers()));
            let (most, least) = extremes(&catalogue);
            let on_owner = owner.map(|owner| (owner, catalogue.bytes_on(owner)));
            let declared = Declaration { owner, ..declaration(&format!("p{index}"), bytes) };
            catalogue.declare(declared).expect("it is legal");
            match on_owner {
                Some((owner, before)) => prop_assert_eq!(catalogue.bytes_on(owner), before + bytes),
                None => {
                    let (most_now, least_now) = extremes(&catalogue);
                    prop_assert!(most_now - least_now <= (most - least).max(4096), "{most_now} and {least_now}");
                }
            }
        }
    }

    #[test]
    fn whole_parameters_unbalance_by_no_more_than_the_largest(
        shards in prop::collection::vec(1..5_u16, 1..9),
        sizes in prop::collection::vec((bytes(), any::<bool>()), 1..60),
    ) {
        let largest = sizes.iter().filter(|(_, whole)| *whole).map(|(bytes, _)| *bytes).max().unwrap_or(0);
        let (most, least) = extremes(&catalogue_of(&shards, 4096, &sizes));
        prop_assert!(most - least <= largest.max(4096), "{most} and {least}, whole {largest}");
    }

    #[test]
    fn every_chunk_is_held_once_and_chunks_tile_their_parameter(
        shards in prop::collection::vec(1..5_u16, 1..9),
        sizes in prop::collection::vec((bytes(), any::<bool>()), 1..30),
    ) {
        let catalogue = catalogue_of(&shards, 4096, &sizes);
        let mut seen = HashSet::new();
        let mut on_server = vec![0; shards.len()];
        for shard in catalogue.topology().shard_ids() {
            let mut before = None;
            for (id, span) in catalogue.chunks_on(shard) {
                let parameter = catalogue.parameter(id.parameter).expect("it is in the catalogue");
                prop_assert_eq!(parameter.shard_of(id.chunk), shard);
                prop_assert_eq!(parameter.span(id.chunk), Some(span));
                prop_assert!(seen.insert(id) && before < Some(id));
                before = Some(id);
                on_server[usize::from(shard.server.0)] += u64::from(span.bytes);
            }
        }
        for parameter in catalogue.iter() {
            let mut end = 0;
            for (chunk, span) in parameter.chunks() {
                prop_assert_eq!(span.offset, end);
                prop_assert!(span.bytes == 4096 || chunk.0 + 1 == parameter.chunk_count());
                end += u64::from(span.bytes);
            }
            prop_assert_eq!(end, parameter.declaration().bytes);
        }
        prop_assert_eq!(seen.len() as u64, catalogue.iter().map(Parameter::chunk_count).sum::<u64>());
        for (server, bytes) in (0..).zip(on_server) {
            prop_assert_eq!(catalogue.bytes_on(ServerIndex(server)), bytes);
            prop_assert_eq!(catalogue.shard_bytes(ServerIndex(server)), shard_bytes(&catalogue, ServerIndex(server)));
        }
    }

    #[test]
    fn the_same_declarations_give_the_same_placement(
        shards in prop::collection::vec(1..5_u16, 1..9),
        sizes in prop::collection::vec((bytes(), any::<bool>()), 1..30),
        bytes_max in 0..400_u32,
    ) {
        let one = catalogue_of(&shards, 4096, &sizes);
        let two = catalogue_of(&shards, 4096, &sizes);
        let sent = Catalogue::from_pages(one.pages(bytes_max)).expect("its own pages");
        prop_assert!(one.iter().eq(two.iter()) && one.iter().eq(sent.iter()));
        prop_assert_eq!(one.digest(), sent.digest());
    }
}

/// The bytes of each shard of a server, counted chunk by chunk.
fn shard_bytes(catalogue: &Catalogue, server: ServerIndex) -> Vec<u64> {
    let shards = catalogue.topology().shard_ids().filter(|shard| shard.server == server);
    shards.map(|shard| catalogue.chunks_on(shard).map(|(_, span)| u64::from(span.bytes)).sum()).collect()
}

#[test]
fn a_parameter_has_enough_chunks_to_overlap_their_transfers() {
    const KIB: u64 = 1024;
    let check = |largest: u64, bytes: u64, chunk_bytes: u64, chunks: u64| {
        let catalogue = catalogue_of(&[1], u32::try_from(largest).expect("a chunk"), &[(bytes, false)]);
        let parameter = catalogue.iter().next().expect("one was declared");
        assert_eq!(
            (u64::from(parameter.chunk_bytes()), parameter.chunk_count()),
            (chunk_bytes, chunks),
            "{bytes} bytes"
        );
    };
    check(1024 * KIB, 4, 256 * KIB, 1);
    check(1024 * KIB, 256 * KIB, 256 * KIB, 1);
    check(1024 * KIB, 1024 * KIB, 256 * KIB, 4);
    check(1024 * KIB, 1024 * KIB + 4, 512 * KIB, 3);
    check(1024 * KIB, 4096 * KIB, 1024 * KIB, 4);
    check(1024 * KIB, 1 << 30, 1024 * KIB, 1024);
    check(4 * KIB, 1024 * KIB, 4 * KIB, 256);
    check(16384 * KIB, 8192 * KIB, 2048 * KIB, 4);
}

#[test]
fn no_server_is_empty_when_a_parameter_has_64_kib_for_each() {
    const KIB: u64 = 1024;
    let catalogue = |servers: usize, sizes: &[u64]| {
        let sizes: Vec<(u64, bool)> = sizes.iter().map(|bytes| (*bytes, false)).collect();
        catalogue_of(&vec![2; servers], 1024 * 1024, &sizes)
    };
    let held = |catalogue: &Catalogue| -> Vec<u64> {
        (0..catalogue.topology().servers()).map(|server| catalogue.bytes_on(ServerIndex(server))).collect()
    };
    // A parameter of four chunks for eight servers has four on each.
    assert_eq!(held(&catalogue(8, &[4096 * KIB])), [512 * KIB; 8]);
    assert_eq!(held(&catalogue(8, &[512 * KIB])), [64 * KIB; 8]);
    // Below that two servers have all.
    assert_eq!(held(&catalogue(8, &[508 * KIB])).iter().filter(|bytes| **bytes > 0).count(), 2);
    // Up to four chunks of the job's size, which were on four servers.
    for bytes in (205..2600).map(|count| count * 1600) {
        let found = held(&catalogue(5, &[bytes]));
        let (most, least) = (found.iter().max().expect("five"), found.iter().min().expect("five"));
        assert!(*least > 0 && most - least <= (bytes / 20).max(64 * KIB), "{bytes}: {found:?}");
    }
    // Once each has something, a parameter has its usual chunks.
    let both = catalogue(8, &[4096 * KIB, 4096 * KIB]);
    let chunks: Vec<u64> = both.iter().map(Parameter::chunk_count).collect();
    assert_eq!(chunks, [32, 4]);
    // Beside small ones that are on some servers alone, too.
    let chunks: Vec<u64> = catalogue(8, &[4, 4096 * KIB]).iter().map(Parameter::chunk_count).collect();
    assert_eq!(chunks, [1, 32]);
}

fn sparse(height: u64, rows: u64, width: u64, count: u32) -> Declaration {
    let bytes = rows.saturating_mul(width).saturating_mul(4);
    Declaration { shape: vec![height, width], buckets: Some(Buckets { rows, count }), ..declaration("rows", bytes) }
}

#[test]
fn an_invalid_sparse_parameter_is_refused() {
    let check = |declared: Declaration, part: &str| {
        let refused = empty(&[2, 2], 4096).declare(declared).expect_err("it cannot be").to_string();
        assert!(refused.contains("parameter \"rows\"") && refused.contains(part), "{refused}; expected {part}");
    };
    check(Declaration { shape: vec![8], ..sparse(8, 8, 2, 1) }, "expected height and width");
    check(sparse(8, 9, 2, 1), "9 rows of a height of 8");
    check(sparse(8, 8, 2, 0), "0 buckets; expected 1 to 65536");
    check(sparse(8, 8, 2, 65537), "65537 buckets");
    check(Declaration { whole: true, ..sparse(8, 8, 2, 1) }, "sparse with a rule that needs the whole gradient");
    check(Declaration { bytes: 60, ..sparse(8, 8, 2, 1) }, "expected 8 rows of 2 elements");
    check(sparse(0, 1 << 32, 64, 16), "expected more buckets");
    let mut catalogue = empty(&[2, 2], 4096);
    catalogue.declare(sparse(0, 1 << 20, 64, 16)).expect("it is legal");
    let sent = Catalogue::from_pages(catalogue.pages(64)).expect("its own pages");
    assert!(catalogue.iter().eq(sent.iter()) && catalogue.digest() == sent.digest());
}

/// Ids drawn as words are: the k-th most frequent one k^-1.05 as often as the first.
fn zipf(count: usize, ids: u64) -> Vec<u64> {
    let mut state = 1_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(u32::try_from(state >> 32).expect("32 bits")) / 2.0_f64.powi(32)
    };
    // The inverse of the continuous distribution's sum; near enough for the least ids, where the load is.
    let most = (ids as f64).powf(-0.05);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is between 1 and the ids")]
    let draw = |_| (1.0 - random() * (1.0 - most)).powf(-20.0).min(ids as f64) as u64 - 1;
    (0..count).map(draw).collect()
}

/// A trainer moves each row once per batch, so no shard gets more than a quarter above its server's mean, whichever ids
/// are drawn most. Consecutive ids are no worse.
#[test]
fn skewed_ids_load_all_shards_alike() {
    let check = |shards: &[u16], ids: &[u64], most: f64| {
        let mut catalogue = empty(shards, 4096);
        let count = Buckets::suiting(catalogue.topology());
        let index = catalogue.declare(sparse(2_000_000, 2_000_000, 16, count)).expect("it is legal");
        let parameter = catalogue.parameter(index).expect("it was declared");
        let buckets = parameter.declaration().buckets.expect("it is sparse");
        let mut loads = std::collections::BTreeMap::<ShardId, u32>::new();
        let unique: HashSet<u64> = ids.iter().copied().collect();
        for id in &unique {
            *loads.entry(parameter.shard_of(ChunkIndex(buckets.of(*id).into()))).or_default() += 1;
        }
        assert_eq!(loads.len(), catalogue.topology().shard_ids().count(), "every shard has rows");
        // Servers are loaded alike, and the shards of each.
        let share = unique.len() as f64 / shards.len() as f64;
        for (shard, load) in &loads {
            let mean = share / f64::from(shards[usize::from(shard.server.0)]);
            let found = f64::from(*load) / mean;
            assert!(found <= most, "{shards:?} {shard:?}: {found} times the mean of {mean}; expected at most {most}");
        }
    };
    let skewed = zipf(65_536, 2_000_000);
    let hottest = skewed.iter().filter(|id| **id == 0).count();
    assert!(hottest > 1000, "the ids are skewed: {hottest} of them are the first");
    let row: Vec<u64> = (0..65_536).collect();
    let strides: Vec<u64> = (0..65_536).map(|id| id * 30).collect();
    for ids in [&skewed, &row, &strides] {
        check(&[1], ids, 1.0);
        check(&[2, 2], ids, 1.05);
        check(&[1, 3, 2], ids, 1.2);
        check(&[4; 8], ids, 1.25);
    }
}

#[test]
fn a_bucket_has_room_for_the_largest_likely_number_of_rows() {
    for (rows, count) in [(100, 16), (1000, 16), (100_000, 64), (1_000_000, 128)] {
        let buckets = Buckets { rows, count };
        let mut found = vec![0_u64; count as usize];
        (0..rows).for_each(|id| found[buckets.of(id) as usize] += 1);
        let most = found.into_iter().max().expect("there are buckets");
        assert!(most <= buckets.rows_in_each(), "{rows} rows: {most}; expected at most {}", buckets.rows_in_each());
        assert!(buckets.rows_in_each() <= rows);
    }
}
