//! Tests of sessions with few records for each key: transports keep their promises while keys change under them.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use pserver_core::wire::Address;
use rustls::crypto::CryptoProvider;
use rustls::crypto::cipher::{
    AeadKey, Iv, MessageDecrypter, MessageEncrypter, Tls13AeadAlgorithm, UnsupportedOperationError,
};
use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::{ConnectionTrafficSecrets, SupportedCipherSuite, Tls13CipherSuite};

use super::certificates::provider;
use super::{EncryptPolicy, Encryption, EncryptionSettings};
use crate::conformance::{self, TransportPair};
use crate::network::{JobToken, Lanes, Listener, Network, NetworkOptions, Stop};

/// Records that a key encrypts.
const RECORDS_PER_KEY: u64 = 64;

/// Counts the keys that are made for sending.
struct CountedKeys {
    algorithm: &'static dyn Tls13AeadAlgorithm,
    keys: AtomicUsize,
}

impl Tls13AeadAlgorithm for CountedKeys {
    fn encrypter(&self, key: AeadKey, iv: Iv) -> Box<dyn MessageEncrypter> {
        self.keys.fetch_add(1, Relaxed);
        self.algorithm.encrypter(key, iv)
    }

    fn decrypter(&self, key: AeadKey, iv: Iv) -> Box<dyn MessageDecrypter> {
        self.algorithm.decrypter(key, iv)
    }

    fn key_len(&self) -> usize {
        self.algorithm.key_len()
    }

    fn extract_keys(&self, key: AeadKey, iv: Iv) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        self.algorithm.extract_keys(key, iv)
    }
}

/// One suite, whose keys encrypt few records, and the count of its keys.
fn short_lived_keys() -> (Arc<CryptoProvider>, &'static CountedKeys) {
    let suite = TLS13_AES_128_GCM_SHA256.tls13().expect("it is of TLS 1.3");
    let counted: &'static CountedKeys =
        Box::leak(Box::new(CountedKeys { algorithm: suite.aead_alg, keys: AtomicUsize::new(0) }));
    let short = Tls13CipherSuite {
        common: rustls::crypto::CipherSuiteCommon {
            suite: suite.common.suite,
            hash_provider: suite.common.hash_provider,
            confidentiality_limit: RECORDS_PER_KEY,
        },
        hkdf_provider: suite.hkdf_provider,
        aead_alg: counted,
        quic: None,
    };
    let cipher_suites = vec![SupportedCipherSuite::Tls13(Box::leak(Box::new(short)))];
    (Arc::new(CryptoProvider { cipher_suites, ..(*provider()).clone() }), counted)
}

/// Stops a listener when dropped.
struct KeyTestListener(Stop, Option<thread::JoinHandle<()>>);

impl Drop for KeyTestListener {
    fn drop(&mut self) {
        self.0.stop();
        if let Some(thread) = self.1.take() {
            thread.join().expect("the listener ends well");
        }
    }
}

fn pair(provider: &Arc<CryptoProvider>) -> TransportPair {
    let settings = EncryptionSettings { policy: EncryptPolicy::Tcp, ..EncryptionSettings::default() };
    let encryption = Encryption::open(&settings, true, Arc::clone(provider)).expect("a certificate can be made");
    let token = JobToken::new(b"nobody can guess this").ok();
    let options = NetworkOptions { token, encryption, ..NetworkOptions::default() };
    let address = Address::parse("tcp://127.0.0.1:0").expect("an address");
    let (near, far) = (Network::new(options.clone()), Network::new(options.clone()));
    let (near, far) = (near.expect("a transport"), far.expect("a transport"));
    let listener = Listener::bind(&address, options).expect("a free port");
    let address = listener.local_address();
    let (stop, lanes) = (Stop::new(), Lanes::from([(0, far.connection_sender())]));
    let run = {
        let stop = stop.clone();
        move || listener.run(lanes, stop).expect("the listener runs")
    };
    let keep = Box::new(KeyTestListener(stop, Some(thread::spawn(run))));
    TransportPair { keep, ..TransportPair::new(Box::new(near), Box::new(far), address) }
}

#[test]
fn every_promise_is_kept_while_keys_change() {
    let (provider, counted) = short_lived_keys();
    let connections = AtomicUsize::new(0);
    conformance::check(|| {
        connections.fetch_add(1, Relaxed);
        pair(&provider)
    });
    // Of each connection both sides have keys of the handshake and of the session.
    let (keys, first) = (counted.keys.load(Relaxed), 4 * connections.into_inner());
    assert!(first + 50 < keys, "{keys} keys were made, of which about {first} with the connections");
}
