//! The image of containers: built without a registry, and two servers of it train.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};

use super::{Site, TEXT_ARGUMENTS, job, trainers};
use crate::debian::succeed;
use crate::install::VERSION;
use crate::install::image::{NAME, Store};

/// Builds the image, looks at its user and at its files, and trains against servers in containers of it.
pub(super) fn check(site: &Site<'_>) -> Result<()> {
    let store = Store::new(site.workspace)?;
    store.build(&site.binaries)?;
    let container = succeed(store.buildah().args(["from", "--pull-never", &format!("{NAME}:{VERSION}")]))?;
    let container = container.trim();
    let user = succeed(store.buildah().args(["inspect", "--format", "{{.OCIv1.Config.User}}", container]))?;
    ensure!(user.trim() == "1000:1000", "the image's user is {user:?}");
    let within = |arguments: &[&str]| {
        let mut run = store.buildah();
        run.args(["run", "--isolation", "chroot", container, "--", "/usr/bin/pserver"]).args(arguments);
        run
    };
    let version = succeed(&mut within(&["--version"]))?;
    ensure!(version.trim() == format!("pserver {VERSION}"), "the program says {version:?}");

    let server = within(&[]);
    let words = std::iter::once(server.get_program()).chain(server.get_args());
    let server: Vec<OsString> = words.map(Into::into).collect();
    let folder = site.examples("image")?;
    site.make(&folder, &["digits_c"])?;
    // Servers are another user than trainers.
    let token = folder.join("token");
    fs::write(&token, "the same for servers and trainers").context("the token")?;
    fs::set_permissions(&token, Permissions::from_mode(0o600)).context("the token")?;
    let mut copy = store.buildah();
    copy.args(["copy", "--quiet", "--chown", "1000:1000", "--chmod", "400", container]);
    succeed(copy.arg(&token).arg("/run/token"))?;
    let mut trainers = trainers(&folder, "digits_c", TEXT_ARGUMENTS);
    for trainer in &mut trainers {
        trainer.env("PSERVER_TOKEN_FILE", &token);
    }
    job::train(&server, &["--checkpoint-dir", "/var/lib/pserver", "--token-file", "/run/token"], trainers)?;
    // The servers wrote as the image's user, to the folder that belongs to it.
    let report =
        succeed(&mut within(&["inspect", "--short", "/var/lib/pserver"])).context("no checkpoint was taken")?;
    ensure!(report.starts_with("sound: 8 shards of 2 servers"), "the checkpoints are {report:?}");
    Ok(())
}
