//! Certificates of tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use pserver_transport::tls::{EncryptPolicy, Encryption, EncryptionSettings};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use tempfile::TempDir;

/// An authority in a folder of its own, with the certificates that it gives.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

/// A certificate and its key in files.
#[derive(Clone)]
pub(crate) struct CertifiedFiles {
    pub(crate) certificate: PathBuf,
    pub(crate) private_key: PathBuf,
}

/// The years in which a certificate is valid.
pub(crate) type Validity = (i32, i32);

pub(crate) const NOW: Validity = (2020, 2099);

impl Authority {
    pub(crate) fn new() -> Self {
        static AUTHORITIES: AtomicU32 = AtomicU32::new(0);
        let name = format!("authority {}", AUTHORITIES.fetch_add(1, Relaxed));
        let mut params = CertificateParams::new(Vec::new()).expect("no name is wrong");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("there is randomness");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("it can be signed");
        let folder = TempDir::new().expect("there is room");
        fs::write(folder.path().join("authority"), issuer.pem()).expect("there is room");
        Self { issuer, folder }
    }

    /// The file with this authority's own certificate.
    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("authority")
    }

    /// A certificate for this name, in files that begin with `file`.
    pub(crate) fn certify(&self, file: &str, name: &str, (from, to): Validity) -> CertifiedFiles {
        let mut params = CertificateParams::new([name.to_owned()]).expect("it is a name");
        (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
        let key = KeyPair::generate().expect("there is randomness");
        let certificate = params.signed_by(&key, &self.issuer).expect("it can be signed");
        let files = CertifiedFiles {
            certificate: self.folder.path().join(format!("{file}.pem")),
            private_key: self.folder.path().join(format!("{file}.key")),
        };
        replace(&files.private_key, &key.serialize_pem());
        replace(&files.certificate, &certificate.pem());
        files
    }
}

/// Replaces a file at once, as programs do that renew certificates.
pub(crate) fn replace(path: &Path, text: &str) {
    let beside = path.with_extension("new");
    fs::write(&beside, text).expect("there is room");
    fs::rename(&beside, path).expect("it is the same folder");
}

/// Settings of encryption with these files.
pub(crate) fn settings(shown: Option<&CertifiedFiles>, authority: Option<&Authority>) -> EncryptionSettings {
    EncryptionSettings {
        policy: EncryptPolicy::Tcp,
        certificate: shown.map(|files| files.certificate.clone()),
        private_key: shown.map(|files| files.private_key.clone()),
        authority: authority.map(Authority::file),
    }
}

pub(crate) fn of_server(shown: Option<&CertifiedFiles>, authority: Option<&Authority>) -> Option<Encryption> {
    Encryption::of_server(&settings(shown, authority)).expect("the files are right")
}

pub(crate) fn of_client(shown: Option<&CertifiedFiles>, authority: Option<&Authority>) -> Option<Encryption> {
    Encryption::of_client(&settings(shown, authority)).expect("the files are right")
}
