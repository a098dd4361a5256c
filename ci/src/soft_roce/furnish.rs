//! Puts a guest's files together: Debian's kernel and tools, its modules, and the programs of this workspace.
//!
//! Not here: the archive's format ([`super::image`]), downloads ([`crate::debian`]).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::debian::{Packages, succeed};
use crate::soft_roce::guest::{BY_HAND, MODULES, SCENARIO};
use crate::soft_roce::image::Image;
use crate::soft_roce::plan;
use crate::workspace::Workspace;

/// Debian packages of the guest, unpacked under `target/debian/soft-roce`, besides the kernel. An error names
/// a library that is missing here.
const NAMES: &[&str] = &[
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "libbpf1",
    "libbsd0",
    "libcap2",
    "libelf1",
    "libibumad3",
    "libibverbs1",
    "libmd0",
    "libmnl0",
    "libnl-3-200",
    "libnl-route-3-200",
    "libpci3",
    "librdmacm1",
    "libudev1",
    "libxtables12",
    "perftest",
    "zlib1g",
];
const KERNEL: &str = "linux-image-amd64";

/// Loaded when a guest starts, with what they need.
const WANTED_MODULES: &[&str] = &["crc32_generic", "virtio_pci", "virtio_net", "dummy", "sch_netem", "rdma_rxe"];

/// The guest's path of each tool, and where packages have it.
const TOOLS: &[(&str, &str)] = &[
    ("bin/ip", "bin/ip"),
    ("bin/tc", "sbin/tc"),
    ("bin/rdma", "usr/bin/rdma"),
    ("bin/ibv_devinfo", "usr/bin/ibv_devinfo"),
    ("bin/ib_write_bw", "usr/bin/ib_write_bw"),
    ("bin/ib_write_lat", "usr/bin/ib_write_lat"),
    ("bin/ib_send_lat", "usr/bin/ib_send_lat"),
    ("bin/ib_read_bw", "usr/bin/ib_read_bw"),
    ("bin/ib_send_bw", "usr/bin/ib_send_bw"),
];
/// Linked with nothing.
const BUSYBOX: &str = "bin/busybox";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// Opened by name while a program runs, so no program is linked with them.
const OPENED: &[(&str, &str)] = &[
    ("lib/libibverbs.so.1", "usr/lib/x86_64-linux-gnu/libibverbs.so.1"),
    ("usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so", "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so"),
];
const PROVIDER: (&str, &str) = ("etc/libibverbs.d/rxe.driver", "driver rxe\n");
const HOSTS: (&str, &str) = ("etc/hosts", "127.0.0.1 localhost\n10.9.0.1 server\n10.9.0.2 trainer\n");

/// The files of a machine.
pub(super) struct Furnishing {
    pub(super) kernel: PathBuf,
    image: Image,
}

/// Debian's packages, unpacked.
pub(super) struct Downloads {
    root: PathBuf,
    kernel_version: String,
}

impl Downloads {
    /// An error is a machine that has no such packages.
    pub(super) fn fetch(workspace: &Workspace) -> Result<Self> {
        let kernel = kernel_package()?;
        let names: Vec<_> = NAMES.iter().copied().chain([&*kernel]).collect();
        let root = Packages { folder: "soft-roce", names: &names }.unpack(workspace)?;
        Ok(Self { root, kernel_version: kernel.trim_start_matches("linux-image-").to_owned() })
    }

    /// The folders of libraries.
    pub(super) fn libraries(&self) -> [PathBuf; 2] {
        [self.root.join(LIBRARIES), self.root.join("lib/x86_64-linux-gnu")]
    }
}

impl Furnishing {
    /// Collects what every machine has.
    pub(super) fn collect(downloads: &Downloads) -> Result<Self> {
        let Downloads { root, kernel_version: version } = downloads;
        let mut image = Image::default();
        for folder in ["proc", "sys", "dev", "tmp", "run", "etc"] {
            image.folder(folder);
        }
        image.devices();
        image.file(BUSYBOX, &root.join(BUSYBOX))?;
        // The second is what a C program becomes at its end.
        ["bin/sh", "bin/true"].iter().for_each(|path| image.link(path, "busybox"));
        for (path, text) in [PROVIDER, HOSTS].iter().chain(plan::SCRIPTS) {
            image.bytes(path, *text);
        }
        let libraries = downloads.libraries();
        for (path, source) in TOOLS.iter().chain(OPENED) {
            image.program(path, &root.join(source), &libraries)?;
        }
        let this = std::env::current_exe().context("where is this program?")?;
        image.program("init", &this, &libraries)?;
        add_modules(&mut image, &root.join("lib/modules").join(version))?;
        let kernel = root.join("boot").join(format!("vmlinuz-{version}"));
        Ok(Self { kernel, image })
    }

    /// Adds a program of this workspace, without its symbols.
    pub(super) fn add(&mut self, workspace: &Workspace, name: &str, source: &Path) -> Result<()> {
        let stripped = folder(workspace)?.join(name);
        succeed(Command::new("strip").arg("-o").arg(&stripped).arg(source))?;
        self.image.program(&format!("bin/{name}"), &stripped, &[])
    }

    /// Adds a program that is linked with libraries in these folders.
    pub(super) fn program(&mut self, path: &str, source: &Path, folders: &[PathBuf]) -> Result<()> {
        self.image.program(path, source, folders)
    }

    /// Lets a path of this machine be another in the guest.
    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.image.link(path.trim_start_matches('/'), target);
    }

    /// Adds a file under the path that it has here.
    pub(super) fn same(&mut self, path: &Path) -> Result<()> {
        self.image.file(path.to_string_lossy().trim_start_matches('/'), path)
    }

    /// Adds a folder of this machine, without what is in it.
    pub(super) fn folder(&mut self, path: &Path) {
        self.image.folder(path.to_string_lossy().trim_start_matches('/'));
    }

    /// The line that a person wants to have run.
    pub(super) fn by_hand(&mut self, line: &str) {
        self.image.bytes(BY_HAND, line);
    }

    /// Writes the file that a machine of this scenario starts from.
    pub(super) fn write(&mut self, workspace: &Workspace, scenario: &str) -> Result<PathBuf> {
        self.image.bytes(SCENARIO, scenario);
        let path = folder(workspace)?.join(format!("{scenario}.cpio"));
        fs::write(&path, self.image.archive()).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

/// Where files are put that guests are made of.
pub(super) fn folder(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.root().join("target/soft-roce");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// The package that holds the kernel of today: what Debian's own package of no version depends on.
fn kernel_package() -> Result<String> {
    let depends = succeed(Command::new("apt-cache").args(["depends", KERNEL]))?;
    let mut names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let name = names.find(|name| name.starts_with("linux-image-"));
    name.map(str::to_owned).with_context(|| format!("no package {KERNEL} is known here"))
}

/// Modules in the order in which each finds what it needs.
fn add_modules(image: &mut Image, folder: &Path) -> Result<()> {
    let mut files = BTreeMap::new();
    find_modules(&folder.join("kernel"), &mut files)?;
    let builtin = fs::read_to_string(folder.join("modules.builtin")).context("which modules are in the kernel?")?;
    let mut order = Vec::new();
    for module in WANTED_MODULES {
        add_module(image, module, &files, &builtin, &mut order)?;
    }
    image.bytes(MODULES, order.iter().map(|module| format!("/modules/{module}.ko\n")).collect::<String>());
    Ok(())
}

fn add_module(
    image: &mut Image,
    module: &str,
    files: &BTreeMap<String, PathBuf>,
    builtin: &str,
    order: &mut Vec<String>,
) -> Result<()> {
    if order.iter().any(|known| known == module) {
        return Ok(());
    }
    let Some(path) = files.get(module) else {
        let is_builtin = builtin.lines().any(|line| module_name(Path::new(line)).as_deref() == Some(module));
        ensure!(is_builtin, "this kernel has no module {module}");
        return Ok(());
    };
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    for needed in needed_modules(&bytes).with_context(|| format!("{}", path.display()))? {
        add_module(image, &needed, files, builtin, order)?;
    }
    image.bytes(&format!("modules/{module}.ko"), bytes);
    order.push(module.to_owned());
    Ok(())
}

fn find_modules(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
        if path.is_dir() {
            find_modules(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// The kernel's name of the module in this file, with `_` for `-`.
fn module_name(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_str()?.strip_suffix(".ko")?.replace('-', "_"))
}

/// The dependencies of a module: `depends=ib_core,udp_tunnel`, as text that ends with a zero.
fn needed_modules(module: &[u8]) -> Result<Vec<String>> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        bail!("does not say which modules it needs");
    };
    let text: Vec<u8> = module[at + KEY.len()..].iter().copied().take_while(|byte| *byte != 0).collect();
    let text = String::from_utf8(text).context("needs modules of strange names")?;
    Ok(text.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_of_a_kernel_module_are_read() {
        assert_eq!(needed_modules(b"ELF\0depends=ib_core,udp-tunnel\0x").unwrap(), ["ib_core", "udp_tunnel"]);
        assert!(needed_modules(b"ELF\0depends=\0retpoline=Y\0").unwrap().is_empty());
        assert!(needed_modules(b"ELF").is_err());
        assert_eq!(module_name(Path::new("a/crc32-pclmul.ko")).as_deref(), Some("crc32_pclmul"));
        assert_eq!(module_name(Path::new("a/modules.dep")), None);
    }
}
