//! Certificates of a process, and what it expects of the other side's.
//!
//! A process without a certificate makes one for itself, as servers do, or shows none, as clients do. A process without
//! an authority accepts every certificate: the token, which is proven inside the session, then authenticates both ends.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use pserver_core::error::Failure;
use pserver_core::wire::Address;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme, SupportedCipherSuite, version,
};

use super::files::ReloadedFiles;
use super::session::{TlsFailure, TlsSession};
use super::{EncryptPolicy, EncryptionSettings};

/// The name in a certificate that a server makes for itself. No client looks at it.
const OWN_NAME: &str = "pserver";

/// The encryption of a process: its certificates, which are read again when their files change. Clones share them.
#[derive(Clone)]
pub struct Encryption(Arc<ProcessCertificates>);

struct ProcessCertificates {
    settings: EncryptionSettings,
    configs: ReloadedFiles<TlsConfigs>,
}

/// A chain of certificates with the private key of its first.
struct CertifiedOwner {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

/// The configurations that follow from the files.
struct TlsConfigs {
    /// None for a process that accepts no connections.
    server: Option<Arc<ServerConfig>>,
    /// The same for HTTP, whose readers are known by a token and show no certificate.
    http: Option<Arc<ServerConfig>>,
    client: Arc<ClientConfig>,
}

impl Encryption {
    /// The encryption of a server: none with the policy `off`. Without a certificate it makes one.
    ///
    /// # Errors
    /// A file that cannot be read or is not what it should be, by name.
    pub fn of_server(settings: &EncryptionSettings) -> Result<Option<Self>, Failure> {
        Self::open(settings, true, provider())
    }

    /// The encryption of a client: none with the policy `off`.
    ///
    /// # Errors
    /// As [`Encryption::of_server`].
    pub fn of_client(settings: &EncryptionSettings) -> Result<Option<Self>, Failure> {
        Self::open(settings, false, provider())
    }

    pub(super) fn open(
        settings: &EncryptionSettings,
        is_server: bool,
        provider: Arc<CryptoProvider>,
    ) -> Result<Option<Self>, Failure> {
        if settings.policy == EncryptPolicy::Off {
            return Ok(None);
        }
        // A server without a configured certificate makes one for itself.
        let own = if is_server && settings.certificate.is_none() { Some(CertifiedOwner::make()?) } else { None };
        let paths = [&settings.certificate, &settings.private_key, &settings.authority];
        let paths = paths.into_iter().flatten().cloned().collect();
        let of_files = settings.clone();
        let read = move || TlsConfigs::read(&of_files, own.as_ref(), is_server, &provider);
        let configs = ReloadedFiles::open(paths, None, read)?;
        Ok(Some(Self(Arc::new(ProcessCertificates { settings: settings.clone(), configs }))))
    }

    /// Whether verbs are refused.
    #[must_use]
    pub fn is_required(&self) -> bool {
        self.0.settings.policy == EncryptPolicy::Required
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> EncryptPolicy {
        self.0.settings.policy
    }

    /// Whether a certificate of the other side is verified.
    #[must_use]
    pub fn verifies(&self) -> bool {
        self.0.settings.authority.is_some()
    }

    /// Whether this side has a certificate from a file.
    #[must_use]
    pub fn is_certified(&self) -> bool {
        self.0.settings.certificate.is_some()
    }

    /// The configuration of a client, for other protocols than this project's.
    #[must_use]
    pub fn client_config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.configs().client)
    }

    /// The configuration of a server's listener for HTTP, with its certificate as it is now.
    ///
    /// # Panics
    /// For the encryption of a client.
    #[must_use]
    pub fn http_config(&self) -> Arc<ServerConfig> {
        Arc::clone(self.configs().http.as_ref().expect("it is the encryption of a server"))
    }

    /// A session with the server at this address.
    pub(crate) fn connect(&self, address: &Address) -> Result<TlsSession, String> {
        // The name of a server that is not verified by it is not sent, and need not be one of DNS.
        let host = if self.verifies() { address.host.as_str() } else { OWN_NAME };
        let wrong = |error: &dyn fmt::Display| format!("TLS with a server of the name \"{host}\": {error}");
        let name = ServerName::try_from(host.to_owned()).map_err(|error| wrong(&error))?;
        TlsSession::of_client(&self.client_config(), name).map_err(|error| wrong(&error))
    }

    /// A session with a client.
    pub(crate) fn accept(&self) -> Result<TlsSession, String> {
        let configs = self.configs();
        let config = configs.server.as_ref().ok_or("TLS: this side is a client")?;
        TlsSession::of_server(config).map_err(|error| format!("TLS: {error}"))
    }

    /// The error text of a client whose handshake failed.
    pub(crate) fn explain(&self, failure: &TlsFailure, address: &Address) -> String {
        match failure {
            TlsFailure::Lost(error) => format!("the connection was lost during the TLS handshake: {error}"),
            TlsFailure::NoTls => format!(
                "the server at {address} does not speak TLS; expected one with --encrypt tcp or required, as this \
                 client has encrypt = {}",
                self.policy()
            ),
            TlsFailure::Refused(error @ rustls::Error::InvalidCertificate(_)) => {
                let authority = self.0.settings.authority.as_deref().unwrap_or(Path::new("(none)"));
                format!(
                    "the certificate of the server at {address} is refused: {error}; expected one for \"{}\" that is \
                     valid now and is from the certificate_authority {}",
                    address.host,
                    authority.display()
                )
            }
            TlsFailure::Refused(error @ rustls::Error::AlertReceived(_)) => {
                format!("the server at {address} refuses TLS with this client: {error}")
            }
            TlsFailure::Refused(error) => format!("TLS with the server at {address}: {error}; expected TLS 1.3"),
        }
    }

    /// The error text of a server whose handshake failed.
    pub(crate) fn explain_client(&self, failure: &TlsFailure) -> String {
        let authority = self.0.settings.authority.as_deref().unwrap_or(Path::new("(none)"));
        match failure {
            TlsFailure::Lost(error) => format!("the connection was lost during the TLS handshake: {error}"),
            TlsFailure::NoTls => "the client does not speak TLS".to_owned(),
            TlsFailure::Refused(error @ rustls::Error::NoCertificatesPresented) => format!(
                "the client shows no certificate: {error}; expected one of the certificate_authority {}",
                authority.display()
            ),
            TlsFailure::Refused(error @ rustls::Error::InvalidCertificate(_)) => format!(
                "the client's certificate is refused: {error}; expected one that is valid now and is from the \
                 certificate_authority {}",
                authority.display()
            ),
            TlsFailure::Refused(error @ rustls::Error::AlertReceived(_)) => {
                format!("the client refuses TLS with this server: {error}")
            }
            TlsFailure::Refused(error) => format!("TLS with the client: {error}; expected TLS 1.3"),
        }
    }

    fn configs(&self) -> Arc<TlsConfigs> {
        self.0.configs.current()
    }
}

impl fmt::Debug for Encryption {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Encryption").field(&self.0.settings).finish()
    }
}

/// Two are equal when they are of the same settings.
impl PartialEq for Encryption {
    fn eq(&self, other: &Self) -> bool {
        self.0.settings == other.0.settings
    }
}

impl Eq for Encryption {}

impl TlsConfigs {
    fn read(
        settings: &EncryptionSettings,
        own: Option<&CertifiedOwner>,
        is_server: bool,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, Failure> {
        let configured = match (&settings.certificate, &settings.private_key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some(CertifiedOwner::read(certificate, key)?),
            (Some(found), None) => return Err(alone("certificate", found, "private_key")),
            (None, Some(found)) => return Err(alone("private_key", found, "certificate")),
        };
        let authority = settings.authority.as_deref().map(roots).transpose()?;
        // A wrong pair of certificate and key is an error of the one file or of the other.
        let wrong = |error: rustls::Error| {
            let named =
                |path: &Option<PathBuf>| path.as_deref().map_or_else(String::new, |one| one.display().to_string());
            Failure::call(format!(
                "certificate {} with private_key {}: {error}; expected a certificate and its own key",
                named(&settings.certificate),
                named(&settings.private_key)
            ))
        };
        let shown = configured.as_ref().or(own);
        let serving = |authority: Option<&Arc<RootCertStore>>| match shown.filter(|_| is_server) {
            Some(shown) => server_config(shown, authority, provider).map(|config| Some(Arc::new(config))),
            None => Ok(None),
        };
        let (server, http) = (serving(authority.as_ref()).map_err(wrong)?, serving(None).map_err(wrong)?);
        let client = Arc::new(client_config(configured.as_ref(), authority.as_ref(), provider).map_err(wrong)?);
        Ok(Self { server, http, client })
    }
}

fn alone(setting: &str, found: &Path, missing: &str) -> Failure {
    Failure::call(format!("found {setting} {} and no {missing}; expected both or neither", found.display()))
}

fn server_config(
    shown: &CertifiedOwner,
    authority: Option<&Arc<RootCertStore>>,
    provider: &Arc<CryptoProvider>,
) -> Result<ServerConfig, rustls::Error> {
    let builder =
        ServerConfig::builder_with_provider(Arc::clone(provider)).with_protocol_versions(&[&version::TLS13])?;
    let builder = match authority {
        None => builder.with_no_client_auth(),
        Some(roots) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider)).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| rustls::Error::General(error.to_string()))?)
        }
    };
    let mut config = builder.with_single_cert(shown.chain.clone(), shown.key.clone_key())?;
    // No session is resumed: every connection proves everything, and a recorded one is worth nothing.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}

fn client_config(
    shown: Option<&CertifiedOwner>,
    authority: Option<&Arc<RootCertStore>>,
    provider: &Arc<CryptoProvider>,
) -> Result<ClientConfig, rustls::Error> {
    let builder =
        ClientConfig::builder_with_provider(Arc::clone(provider)).with_protocol_versions(&[&version::TLS13])?;
    let builder = match authority {
        Some(roots) => {
            let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider)).build();
            builder.with_webpki_verifier(verifier.map_err(|error| rustls::Error::General(error.to_string()))?)
        }
        None => {
            let verifier = Arc::new(AnyCertificate(Arc::clone(provider)));
            builder.dangerous().with_custom_certificate_verifier(verifier)
        }
    };
    let mut config = match shown {
        Some(shown) => builder.with_client_auth_cert(shown.chain.clone(), shown.key.clone_key())?,
        None => builder.with_no_client_auth(),
    };
    config.resumption = Resumption::disabled();
    Ok(config)
}

impl CertifiedOwner {
    /// A certificate that is signed by its own key, which stays in memory.
    fn make() -> Result<Self, Failure> {
        let made = rcgen::generate_simple_self_signed([OWN_NAME.to_owned()]);
        let made = made.map_err(|error| Failure::Node(format!("making a certificate: {error}")))?;
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()).into();
        Ok(Self { chain: vec![made.cert.der().clone()], key })
    }

    fn read(certificate: &Path, key: &Path) -> Result<Self, Failure> {
        let chain = certificates("certificate", certificate)?;
        let found = PrivateKeyDer::from_pem_file(key).map_err(|error| {
            let (key, expected) = (key.display(), "expected a PEM file with the certificate's private key");
            Failure::call(format!("private_key {key}: {error}; {expected}"))
        })?;
        Ok(Self { chain, key: found })
    }
}

/// The certificates in a file.
fn certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let wrong = |found: &dyn fmt::Display| {
        Failure::call(format!("{setting} {}: {found}; expected a PEM file with certificates", path.display()))
    };
    let found = CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))?;
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(|error| wrong(&error))?;
    if found.is_empty() { Err(wrong(&"found no certificate")) } else { Ok(found) }
}

/// The authorities in a file.
fn roots(path: &Path) -> Result<Arc<RootCertStore>, Failure> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("certificate_authority", path)? {
        roots.add(certificate).map_err(|error| {
            let path = path.display();
            Failure::call(format!("certificate_authority {path}: {error}; expected certificates of authorities"))
        })?;
    }
    Ok(Arc::new(roots))
}

/// Algorithms of TLS 1.3, the fastest on processors with instructions for AES first.
pub(super) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    Arc::clone(PROVIDER.get_or_init(|| {
        let mut provider = rustls::crypto::ring::default_provider();
        provider.cipher_suites.sort_by_key(|suite: &SupportedCipherSuite| {
            *suite != rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256
        });
        Arc::new(provider)
    }))
}

/// Accepts every certificate whose key has signed the handshake. The token authenticates the server.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
