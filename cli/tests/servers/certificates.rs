//! An authority of tests, and certificates in files.

use std::fs;
use std::path::{Path, PathBuf};

use pserver_transport::tls::{EncryptPolicy, Encryption, EncryptionSettings};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// An authority in a folder.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
}

impl Authority {
    pub(crate) fn new(folder: &Path) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no name is wrong");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("there is randomness");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("it can be signed");
        fs::write(folder.join("authority.pem"), issuer.pem()).expect("there is room");
        Self { issuer, folder: folder.to_owned() }
    }

    /// The file with the authority's own certificate.
    pub(crate) fn file(&self) -> String {
        self.folder.join("authority.pem").display().to_string()
    }

    /// The files with a certificate for this name and with its key.
    pub(crate) fn certify(&self, name: &str) -> [String; 2] {
        let key = KeyPair::generate().expect("there is randomness");
        let params = CertificateParams::new([name.to_owned()]).expect("it is a name");
        let certificate = params.signed_by(&key, &self.issuer).expect("it can be signed");
        let files = ["pem", "key"].map(|end| self.folder.join(format!("{name}.{end}")).display().to_string());
        fs::write(&files[0], certificate.pem()).expect("there is room");
        fs::write(&files[1], key.serialize_pem()).expect("there is room");
        files
    }
}

/// Encryption of a client that verifies nothing but the token.
pub(crate) fn by_token(policy: EncryptPolicy) -> Option<Encryption> {
    let settings = EncryptionSettings { policy, ..EncryptionSettings::default() };
    Encryption::of_client(&settings).expect("there is no file to be wrong")
}

/// Encryption of a client with a certificate, which verifies that of the server.
pub(crate) fn by_certificate(authority: &Authority, [certificate, key]: &[String; 2]) -> Option<Encryption> {
    let settings = EncryptionSettings {
        policy: EncryptPolicy::Tcp,
        certificate: Some(certificate.into()),
        private_key: Some(key.into()),
        authority: Some(authority.file().into()),
    };
    Encryption::of_client(&settings).expect("the files are right")
}
