//! Rules that are not shipped: compiled where there is a compiler, cached, and refused where there is none.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use pserver_core::dtype::ElementType::Float32;
use pserver_core::optim::Formula;
use pserver_core::port::{Accelerator, DeviceCode, NotAdopted, Resident};

use super::job::{self, CHUNK_BYTES, Fate};
use super::standin::{compiler, each, is_inside, kernels, skip};
use crate::cuda::safe::Compiler;
use crate::cuda::{Cuda, CudaSettings, ModuleSource, sys};

fn open(cache: Option<&str>) -> Cuda {
    let gradient_bytes = 4 * u64::from(CHUNK_BYTES);
    let cache = cache.map(Into::into);
    let settings = CudaSettings { gradient_bytes, chunk_bytes: CHUNK_BYTES, cache, ..CudaSettings::of(0) };
    Cuda::open(settings).expect("the stand-in is there")
}

/// The kernels that every module has, and none for a rule.
fn fixed() -> Option<String> {
    Some(kernels(&ModuleSource::new([], [], &[]))?.display().to_string())
}

#[test]
fn a_rule_is_compiled_once_and_kept() {
    let (Some(library), Some(compiler)) = (fixed(), compiler()) else { return };
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (cache, compiled) = (path("cache"), path("compiled"));
    let mut settings = vec![("PSERVER_STANDIN_KERNELS", library.as_str()), ("PSERVER_STANDIN_COMPILED", &compiled)];
    settings.extend(compiler.iter().map(|(name, value)| (*name, value.as_str())));
    settings.push(("PSERVER_TEST_CACHE", &cache));
    let check = |expected| {
        each(&[&settings], || {
            let cache = std::env::var("PSERVER_TEST_CACHE").expect("it was set");
            assert_eq!(job::run(&mut open(Some(&cache))), Fate::default());
        });
        if !is_inside() {
            let lines = fs::read_to_string(&compiled).expect("something was compiled").lines().count();
            assert_eq!(lines, expected, "compilations so far");
        }
    };
    // Adam for f32, descent and momentum for f64.
    check(3);
    check(3);
    if is_inside() {
        return;
    }
    damage(Path::new(&cache));
    check(6);
    check(6);
}

/// Parameters whose rules differ in numbers alone, each with code of its own.
#[test]
fn rules_of_one_text_are_compiled_once_for_a_job() {
    let (Some(library), Some(compiler)) = (fixed(), compiler()) else { return };
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let compiled = folder.path().join("compiled").display().to_string();
    let mut settings = vec![("PSERVER_STANDIN_KERNELS", library.as_str()), ("PSERVER_STANDIN_COMPILED", &compiled)];
    settings.extend(compiler.iter().map(|(name, value)| (*name, value.as_str())));
    each(&[&settings], || {
        let compilations = || {
            let file = std::env::var("PSERVER_STANDIN_COMPILED").expect("it was set");
            fs::read_to_string(file).map_or(0, |text| text.lines().count())
        };
        let mut device = open(None);
        let adopt = |device: &mut Cuda, bytes| {
            let rule = job::rule("adam").expect("it is a rule");
            let mut scalars = Vec::new();
            let Formula::Rule { code, .. } = rule.formula(&job::step(1), &mut scalars) else { panic!("it has code") };
            let code = DeviceCode::Rule(Arc::new((**code).clone()));
            device.adopt(&Resident { element_type: Float32, bytes, code, keeps_sum: false }).expect("there is room")
        };
        for count in 1..=5 {
            adopt(&mut device, 64 * count);
        }
        assert_eq!(compilations(), 1);
        device.clear();
        adopt(&mut device, 64);
        assert_eq!(compilations(), 2, "a job that is over leaves nothing");
    });
}

#[test]
fn a_compiler_that_is_newer_than_the_driver_is_not_used() {
    let (Some(library), Some(compiler)) = (fixed(), compiler()) else { return };
    let mut settings = vec![("PSERVER_STANDIN_KERNELS", library.as_str()), ("PSERVER_STANDIN_NVRTC", "13")];
    settings.extend(compiler.iter().map(|(name, value)| (*name, value.as_str())));
    let newer = [&settings[..], &[("PSERVER_STANDIN_VERSION", "13000")]].concat();
    each(&[&settings, &newer], || match (Compiler::find(), std::env::var("PSERVER_STANDIN_VERSION")) {
        (Ok(compiler), Ok(_)) => assert_eq!(compiler.version().0, 13),
        // The host may have a compiler under another name.
        (Ok(compiler), Err(_)) => assert_eq!(compiler.version().0, 12),
        (Err(why), _) => assert_eq!(
            why,
            "libnvrtc is of CUDA 13.4, and the driver of CUDA 12.4 does not load what it compiles; expected \
             libnvrtc.so.12"
        ),
    });
}

/// Only a missing kernel is compiled; other errors of the driver about a kernel are reported.
#[test]
fn a_kernel_that_cannot_be_looked_up_is_not_taken_for_one_that_is_not_shipped() {
    let (Some(library), Some(compiler)) = (fixed(), compiler()) else { return };
    let mut settings = vec![("PSERVER_STANDIN_KERNELS", library.as_str())];
    settings.push(("PSERVER_STANDIN_FAIL", "cuModuleGetFunction:1:700"));
    settings.extend(compiler.iter().map(|(name, value)| (*name, value.as_str())));
    each(&[&settings], || {
        let mut device = open(None);
        let rule = job::rule("adam").expect("it is a rule");
        let mut scalars = Vec::new();
        let Formula::Rule { code, .. } = rule.formula(&job::step(1), &mut scalars) else { panic!("it has code") };
        let mut adopt = || {
            device.adopt(&Resident {
                element_type: Float32,
                bytes: 64,
                code: DeviceCode::Rule(code.clone()),
                keeps_sum: false,
            })
        };
        let refused = format!("{:?}", adopt().expect_err("the driver fails"));
        assert!(refused.contains("cuModuleGetFunction: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{refused}");
        assert!(adopt().is_ok(), "it was not kept");
    });
}

/// A module takes device memory too: compiled now, cached by an earlier run, or loaded lazily.
#[test]
fn a_rule_whose_kernel_does_not_fit_the_device_is_refused_with_its_bytes() {
    let (Some(library), Some(compiler)) = (fixed(), compiler()) else { return };
    let folder = tempfile::tempdir().expect("there is a folder for tests");
    let (cache, words) = (folder.path().join("cache").display().to_string(), "bytes of kernels were to be loaded, ");
    // The first module is the shipped one.
    let cases = [
        ("cuModuleLoadData:2:2", words),
        ("cuModuleLoadData:2:2", words),
        ("cuModuleGetFunction:1:2", "found no room, "),
        ("cuModuleGetFunction:2:2", "found no room, "),
    ];
    let all = cases.map(|(failing, words)| {
        let mut settings = vec![("PSERVER_STANDIN_KERNELS", library.as_str()), ("PSERVER_TEST_CACHE", &cache)];
        settings.extend(compiler.iter().map(|(name, value)| (*name, value.as_str())));
        settings.extend([("PSERVER_STANDIN_FAIL", failing), ("PSERVER_TEST_WORDS", words)]);
        settings
    });
    each(&all.each_ref().map(Vec::as_slice), || {
        let of = |name| std::env::var(name).expect("it was set");
        let mut device = open(Some(&of("PSERVER_TEST_CACHE")));
        let rule = job::rule("adam").expect("it is a rule");
        let mut scalars = Vec::new();
        let Formula::Rule { code, .. } = rule.formula(&job::step(1), &mut scalars) else { panic!("it has code") };
        let code = DeviceCode::Rule(code.clone());
        let resident = Resident { element_type: Float32, bytes: 64, code, keeps_sum: false };
        let refused = device.adopt(&resident).expect_err("there is no room");
        let NotAdopted::Full(text) = &refused else { panic!("{refused:?}") };
        let is_said = |words: &str| text.contains(words);
        assert!(is_said(&of("PSERVER_TEST_WORDS")) && is_said(" of 268435456 are free: cuModule"), "{text}");
        assert!(is_said("memory of CUDA device 0: kernel pserver_update_f32_"), "{text}");
        assert!(device.adopt(&resident).is_ok(), "it was not kept");
    });
}

/// Damages one byte of every file.
fn damage(folder: &Path) {
    for entry in fs::read_dir(folder).expect("rules were kept") {
        let path = entry.expect("it can be listed").path();
        let mut bytes = fs::read(&path).expect("it is there");
        *bytes.last_mut().expect("it is not empty") ^= 1;
        fs::write(&path, bytes).expect("it can be written");
    }
}

#[test]
fn a_rule_that_no_compiler_accepts_is_refused_with_the_reason() {
    let Some(library) = fixed() else { return };
    if sys::compilers().next().is_some() && !is_inside() {
        return skip("a host without libnvrtc", "this one has it");
    }
    each(&[&[("PSERVER_STANDIN_KERNELS", &library)]], || {
        let mut device = open(None);
        let rule = job::rule("adam").expect("it is a rule");
        let mut scalars = Vec::new();
        let Formula::Rule { code, .. } = rule.formula(&job::step(1), &mut scalars) else { panic!("it has code") };
        let mut adopt = |code| device.adopt(&Resident { element_type: Float32, bytes: 64, code, keeps_sum: false });
        let refused = adopt(DeviceCode::Rule(code.clone())).expect_err("there is no compiler");
        let expected = "the rule has no shipped kernel, and cannot be compiled: \
            libnvrtc, which compiles rules for the device, was not found; \
            looked for libnvrtc.so, libnvrtc.so.13, libnvrtc.so.12";
        assert_eq!(refused, NotAdopted::Unfit(expected.to_owned()));
        assert!(adopt(DeviceCode::Add).is_ok(), "chunks without a rule go on");
    });
}

#[test]
fn a_rule_becomes_a_cubin_where_there_is_a_compiler() {
    if is_inside() {
        return;
    }
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(why) => return skip("nvrtc", &why),
    };
    let text = ModuleSource::new([&job::emitted(&job::rule("adam").expect("it is a rule"))], [], &[Float32]);
    let options = ["--gpu-architecture=sm_90", "--fmad=false", "--std=c++17"].map(String::from);
    let image = compiler.compile(text.text(), &options).expect("it compiles");
    assert!(image.starts_with(b"\x7fELF"), "a cubin is an ELF file");
    let refused = compiler.compile("what is this", &options).expect_err("it is no text");
    assert!(refused.contains("rule.cu(1)"), "{refused}");
}
