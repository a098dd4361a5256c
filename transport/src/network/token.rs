//! The job's token: a secret of servers and trainers. Client and server authenticate each other with it (HMAC-SHA256
//! challenge and response) before the first frame; `docs/WIRE.md` has the bytes.
//!
//! Over TLS the proofs also cover what only the two ends of the session know, so that a relay cannot pass them on. A
//! token may be a list: this side shows the first, and accepts any of the other side.
//!
//! Not here: encryption (`tls`). Without it, later bytes are neither encrypted nor authenticated.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use pserver_core::error::Failure;
use pserver_core::wire::{ErrorCode, Frame, HEADER_BYTES, Kind, Prefix};
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::failures::{ConnectFailure, HelloRefusal};
use crate::refusal::refusal;
use crate::tls::{ChannelBinding, ReloadedFiles};

/// A shorter secret can be guessed offline: every client receives a proof to test guesses on.
const BYTES_MIN: usize = 16;
const BYTES_MAX: usize = 1024;
/// The most bytes of a file.
const FILE_BYTES_MAX: u64 = 4096;
const MAGIC: [u8; 8] = *b"PSTOKEN1";
const NONCE_BYTES: usize = 24;
const PROOF_BYTES: usize = 32;
const NO_TOKEN: &str = "the client shows no token, and this job has one; expected token_file or PSERVER_TOKEN_FILE, \
                        or on loopback the user of the server";
const UNEXPECTED_TOKEN: &str = "the client shows a token, and this server has none; expected a server with token_file";
const WRONG_TOKEN: &str = "the client has another token than this server; expected the one of the server's token_file";
const PEER_CLOSED: &str = "the client closed when the server showed the token: it has another token, or was lost";
const OTHER_TOKEN: &str = "the server has another token than this side; expected the one of its token_file";

/// The secret of a job, or several while it is changed: this side shows the first, and accepts any of the other side.
/// One that is read from a file is read again once the file changes. Clones share it.
#[derive(Clone)]
pub struct JobToken(Arc<TokenSource>);

enum TokenSource {
    Fixed(Arc<TokenSecrets>),
    File(ReloadedFiles<TokenSecrets>),
}

/// The secrets of a token: one at least.
#[derive(PartialEq, Eq)]
struct TokenSecrets(Vec<TokenSecret>);

#[derive(Clone, PartialEq, Eq)]
struct TokenSecret(Box<[u8]>);

/// The content of a proof: nonces of both ends, so that an earlier proof is never valid again, and the session of TLS.
#[derive(Clone, Copy)]
struct TokenChallenge {
    connecting: [u8; NONCE_BYTES],
    /// Zero in a greeting.
    accepting: [u8; NONCE_BYTES],
    binding: ChannelBinding,
}

/// The message that has a proof. A proof is of no use in another.
#[derive(Clone, Copy)]
enum ProvingMessage {
    /// The client's first, by which the server knows which token the client shows.
    Greeting,
    /// The server's.
    Accepting,
    /// The client's second.
    Connecting,
}

/// One of the three messages. It is as long as a frame's header, so that either end can tell the two apart.
#[derive(Clone, Copy)]
struct AuthMessage {
    nonce: [u8; NONCE_BYTES],
    proof: [u8; PROOF_BYTES],
}

impl JobToken {
    /// A token of 16 to 1,024 bytes, without surrounding white space. Text of several lines is a list of tokens.
    ///
    /// # Errors
    /// The length, when it is out of bounds.
    pub fn new(secret: &[u8]) -> Result<Self, Failure> {
        Ok(Self(Arc::new(TokenSource::Fixed(Arc::new(TokenSecrets::new(secret)?)))))
    }

    /// The token in a file. Logs a warning when other users may read or write the file.
    ///
    /// # Errors
    /// The file cannot be read, or its content is no token.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        Self::followed(path, None)
    }

    /// The token in a file whose content was read already.
    ///
    /// # Errors
    /// As [`JobToken::new`].
    pub fn of_file(path: &Path, content: &[u8]) -> Result<Self, Failure> {
        Self::followed(path, Some(TokenSecrets::new(content)?))
    }

    fn followed(path: &Path, first: Option<TokenSecrets>) -> Result<Self, Failure> {
        let file = path.to_owned();
        let secrets = ReloadedFiles::open(vec![path.to_owned()], first, move || TokenSecrets::read(&file))?;
        Ok(Self(Arc::new(TokenSource::File(secrets))))
    }

    /// The secrets now, one on each line.
    pub(super) fn text(&self) -> Vec<u8> {
        self.secrets().0.iter().map(|secret| &*secret.0).collect::<Vec<_>>().join(&b'\n')
    }

    /// Whether `shown` is this token, compared in constant time; for readers that send the token itself.
    #[must_use]
    pub fn is(&self, shown: &[u8]) -> bool {
        let mac_of = |secret: &[u8]| {
            let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key may have any length");
            mac.update(&MAGIC);
            mac
        };
        let shown = mac_of(shown).finalize().into_bytes();
        self.secrets().0.iter().any(|secret| mac_of(&secret.0).verify_slice(&shown).is_ok())
    }

    /// Authenticates to a server, and verifies that the server has the token.
    ///
    /// # Errors
    /// The refusal by either side, or the reason why the connection ended.
    pub(super) async fn authenticate_to_server(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        binding: ChannelBinding,
    ) -> Result<(), ConnectFailure> {
        let secrets = self.secrets();
        let greeting = TokenChallenge { connecting: nonce()?, accepting: [0; NONCE_BYTES], binding };
        let proof = secrets.first().proof_of(ProvingMessage::Greeting, &greeting);
        send(stream, &AuthMessage { nonce: greeting.connecting, proof }.encode()).await?;
        let mut bytes = [0; HEADER_BYTES];
        stream.read_exact(&mut bytes).await?;
        let Some(answer) = AuthMessage::decode(&bytes) else {
            return Err(ConnectFailure::Refused(refused(stream, &bytes).await?));
        };
        let challenge = TokenChallenge { accepting: answer.nonce, ..greeting };
        let Some(secret) = secrets.proven(ProvingMessage::Accepting, &challenge, &answer.proof) else {
            return Err(ConnectFailure::Refused(refusal(ErrorCode::Unauthenticated, OTHER_TOKEN)));
        };
        let proof = secret.proof_of(ProvingMessage::Connecting, &challenge);
        send(stream, &AuthMessage { nonce: [0; NONCE_BYTES], proof }.encode()).await?;
        Ok(())
    }

    fn secrets(&self) -> Arc<TokenSecrets> {
        match &*self.0 {
            TokenSource::Fixed(secrets) => Arc::clone(secrets),
            TokenSource::File(secrets) => secrets.current(),
        }
    }
}

impl PartialEq for JobToken {
    fn eq(&self, other: &Self) -> bool {
        self.secrets() == other.secrets()
    }
}

impl Eq for JobToken {}

impl TokenSecrets {
    fn new(content: &[u8]) -> Result<Self, Failure> {
        let content = content.trim_ascii();
        // A secret of random bytes may have any byte.
        let is_text = content.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
        let lines = content.split(|byte| is_text && *byte == b'\n').map(<[u8]>::trim_ascii);
        let secrets = lines.filter(|line| !line.is_empty()).map(TokenSecret::new).collect::<Result<Vec<_>, _>>()?;
        if secrets.is_empty() { TokenSecret::new(b"").map(|secret| Self(vec![secret])) } else { Ok(Self(secrets)) }
    }

    fn read(path: &Path) -> Result<Self, Failure> {
        let wrong = |why: &dyn fmt::Display| Failure::call(format!("token_file {}: {why}", path.display()));
        let mut secret = Vec::new();
        let file = File::open(path).map_err(|error| wrong(&error))?;
        let is_open = file.metadata().is_ok_and(|facts| facts.permissions().mode() & 0o006 != 0);
        let read = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut secret).map_err(|error| wrong(&error))?;
        if read as u64 > FILE_BYTES_MAX {
            return Err(wrong(&format!("more than {FILE_BYTES_MAX} bytes; expected tokens, one in each line")));
        }
        if is_open {
            tracing::warn!(path = %path.display(), "every user of this machine may use the token's file (chmod 600)");
        }
        Self::new(&secret).map_err(|failure| wrong(&failure))
    }

    /// The one that this side shows.
    fn first(&self) -> &TokenSecret {
        self.0.first().expect("a token has one secret at least")
    }

    /// The one by which the other side has made this proof.
    fn proven(
        &self,
        message: ProvingMessage,
        challenge: &TokenChallenge,
        proof: &[u8; PROOF_BYTES],
    ) -> Option<&TokenSecret> {
        self.0.iter().find(|secret| secret.is_proven(message, challenge, proof))
    }
}

impl TokenSecret {
    fn new(secret: &[u8]) -> Result<Self, Failure> {
        if (BYTES_MIN..=BYTES_MAX).contains(&secret.len()) {
            return Ok(Self(secret.into()));
        }
        let length = secret.len();
        Err(Failure::call(format!(
            "a token of {length} bytes; expected {BYTES_MIN} to {BYTES_MAX} that cannot be guessed"
        )))
    }

    fn mac_of(&self, message: ProvingMessage, challenge: &TokenChallenge) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key may have any length");
        mac.update(&MAGIC);
        mac.update(match message {
            ProvingMessage::Greeting => b"greeting__",
            ProvingMessage::Connecting => b"connecting",
            ProvingMessage::Accepting => b"accepting_",
        });
        mac.update(&challenge.connecting);
        mac.update(&challenge.accepting);
        if let ChannelBinding(Some(binding)) = &challenge.binding {
            mac.update(binding);
        }
        mac
    }

    fn proof_of(&self, message: ProvingMessage, challenge: &TokenChallenge) -> [u8; PROOF_BYTES] {
        self.mac_of(message, challenge).finalize().into_bytes().into()
    }

    /// Compares in constant time.
    fn is_proven(&self, message: ProvingMessage, challenge: &TokenChallenge, proof: &[u8; PROOF_BYTES]) -> bool {
        self.mac_of(message, challenge).verify_slice(proof).is_ok()
    }
}

/// Authenticates a client, if the job has a token. `header` holds the first bytes of the connection; afterwards it
/// holds the first bytes after the authentication.
///
/// # Errors
/// The reason for the refusal.
pub(super) async fn authenticate_client(
    token: Option<&JobToken>,
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    (header, binding): (&mut [u8; HEADER_BYTES], ChannelBinding),
) -> Result<(), HelloRefusal> {
    let unauthenticated = |text: &str| HelloRefusal { code: ErrorCode::Unauthenticated, text: text.to_owned() };
    let (token, greeting) = match (token, AuthMessage::decode(header)) {
        (None, None) => return Ok(()),
        (None, Some(_)) => return Err(unauthenticated(UNEXPECTED_TOKEN)),
        // A client of another protocol is told that first.
        (Some(_), None) => {
            return Err(Prefix::decode(header).err().map_or(unauthenticated(NO_TOKEN), HelloRefusal::invalid));
        }
        (Some(token), Some(greeting)) => (token, greeting),
    };
    let secrets = token.secrets();
    let greeted = TokenChallenge { connecting: greeting.nonce, accepting: [0; NONCE_BYTES], binding };
    let challenge = TokenChallenge { accepting: nonce().map_err(HelloRefusal::invalid)?, ..greeted };
    // A client that shows another token is shown this side's: it may have that one too.
    let secret = secrets.proven(ProvingMessage::Greeting, &greeted, &greeting.proof).unwrap_or(secrets.first());
    let proof = secret.proof_of(ProvingMessage::Accepting, &challenge);
    let answer = AuthMessage { nonce: challenge.accepting, proof };
    send(stream, &answer.encode()).await.map_err(HelloRefusal::invalid)?;
    stream.read_exact(header).await.map_err(|error| match error.kind() {
        // A record of TLS was refused.
        io::ErrorKind::InvalidData => HelloRefusal::invalid(error),
        _ => HelloRefusal::invalid(PEER_CLOSED),
    })?;
    let shown = AuthMessage::decode(header);
    if !shown.is_some_and(|shown| secret.is_proven(ProvingMessage::Connecting, &challenge, &shown.proof)) {
        return Err(unauthenticated(WRONG_TOKEN));
    }
    stream.read_exact(header).await.map_err(HelloRefusal::invalid)?;
    Ok(())
}

/// Reads the refusal that begins with `header`.
async fn refused(stream: &mut (impl AsyncRead + Unpin), header: &[u8; HEADER_BYTES]) -> io::Result<Frame> {
    let wrong =
        |error: &dyn fmt::Display| io::Error::new(io::ErrorKind::InvalidData, format!("showing a token: {error}"));
    let prefix = Prefix::decode(header).map_err(|error| wrong(&error))?;
    let kind = prefix.head().kind;
    if kind != Kind::Refused {
        return Err(wrong(&format!("the server answers with a {kind:?}")));
    }
    let mut rest = vec![0; prefix.rest_bytes()];
    stream.read_exact(&mut rest).await?;
    prefix.finish(&rest).map_err(|error| wrong(&error))
}

impl AuthMessage {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let (magic, rest) = bytes.split_at_mut(MAGIC.len());
        let (nonce, proof) = rest.split_at_mut(NONCE_BYTES);
        magic.copy_from_slice(&MAGIC);
        nonce.copy_from_slice(&self.nonce);
        proof.copy_from_slice(&self.proof);
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let (nonce, proof) = bytes.strip_prefix(&MAGIC)?.split_first_chunk()?;
        Some(Self { nonce: *nonce, proof: proof.try_into().ok()? })
    }
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> io::Result<()> {
    stream.write_all(message).await?;
    stream.flush().await
}

fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

impl fmt::Debug for JobToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JobToken(secret)")
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use pserver_core::wire::{ErrorMessage, Head};
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    const HELLO: Kind = Kind::Hello;

    fn token(secret: &str) -> JobToken {
        JobToken::new(secret.as_bytes()).expect("long enough")
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(future)
    }

    /// The server: the kind of the frame after the token, or the refusal that it sent.
    async fn serve(token: Option<JobToken>, mut stream: DuplexStream) -> Result<Kind, HelloRefusal> {
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header).await.expect("somebody speaks");
        let binding = ChannelBinding::default();
        let asked = authenticate_client(token.as_ref(), &mut stream, (&mut header, binding)).await;
        if let Err(HelloRefusal { code, text }) = &asked {
            // A refused client may have closed.
            let _ = stream.write_all(&refusal(*code, text.as_str()).encode()).await;
        }
        asked.map(|()| Prefix::decode(&header).expect("a frame").head().kind)
    }

    /// The client, which sends its hello afterwards.
    async fn connect(token: Option<JobToken>, mut stream: DuplexStream) -> Result<(), String> {
        if let Some(token) = token {
            token.authenticate_to_server(&mut stream, ChannelBinding::default()).await.map_err(text)?;
        }
        stream.write_all(&Frame::bare(Head::new(HELLO)).encode()).await.expect("somebody listens");
        Ok(())
    }

    fn text(unmade: ConnectFailure) -> String {
        match unmade {
            ConnectFailure::Failed(text) => format!("lost: {text}"),
            ConnectFailure::Refused(frame) => ErrorMessage::decode(frame.control.as_slice()).expect("a refusal").text,
        }
    }

    #[test]
    fn both_ends_have_the_same_token_or_each_reports_the_difference() {
        let check =
            |server: Option<&str>, client: Option<&str>, served: Result<(), &str>, connected: Result<(), &str>| {
                let (near, far) = duplex(4096);
                let (server, client) = (server.map(token), client.map(token));
                let found = run(async { tokio::join!(serve(server, far), connect(client, near)) });
                assert_eq!(found.0, served.map(|()| HELLO).map_err(unauthenticated));
                assert_eq!(found.1, connected.map_err(str::to_owned));
            };
        let (one, other) = (Some("0123456789abcdef"), Some("0123456789abcdeF"));
        check(None, None, Ok(()), Ok(()));
        check(one, one, Ok(()), Ok(()));
        check(one, Some(" 0123456789abcdef\n"), Ok(()), Ok(()));
        check(one, None, Err(NO_TOKEN), Ok(()));
        check(None, one, Err(UNEXPECTED_TOKEN), Err(UNEXPECTED_TOKEN));
        let (near, far) = duplex(4096);
        let client = connect(other.map(token), near);
        let (served, connected) = run(async { tokio::join!(serve(one.map(token), far), client) });
        assert_eq!((served, connected), (Err(HelloRefusal::invalid(PEER_CLOSED)), Err(OTHER_TOKEN.to_owned())));
    }

    fn unauthenticated(text: &str) -> HelloRefusal {
        HelloRefusal { code: ErrorCode::Unauthenticated, text: text.to_owned() }
    }

    /// The server's result for a client that sends `first`, and then `second` of the server's answer.
    fn rogue(first: [u8; HEADER_BYTES], second: impl Fn([u8; HEADER_BYTES]) -> Vec<u8>) -> Result<Kind, HelloRefusal> {
        let (mut near, far) = duplex(4096);
        let rogue = async {
            near.write_all(&first).await.expect("it listens");
            let mut answer = [0; HEADER_BYTES];
            near.read_exact(&mut answer).await.expect("it answers");
            near.write_all(&second(answer)).await.expect("it listens");
            near.write_all(&Frame::bare(Head::new(HELLO)).encode()).await.expect("it listens");
        };
        run(async { tokio::join!(serve(Some(token("0123456789abcdef")), far), rogue) }).0
    }

    #[test]
    fn a_replayed_proof_does_not_authenticate_a_client() {
        let key = token("0123456789abcdef").secrets().first().clone();
        let greeting = AuthMessage { nonce: [7; NONCE_BYTES], proof: [0; PROOF_BYTES] };
        let nonces = |answer: &[u8; HEADER_BYTES]| {
            let accepting = AuthMessage::decode(answer).expect("a card").nonce;
            TokenChallenge { connecting: greeting.nonce, accepting, binding: ChannelBinding::default() }
        };
        let proof = |end, nonces: &TokenChallenge| {
            AuthMessage { nonce: [0; NONCE_BYTES], proof: key.proof_of(end, nonces) }.encode()
        };
        let wrong = Err(unauthenticated(WRONG_TOKEN));
        assert_eq!(
            rogue(greeting.encode(), |answer| proof(ProvingMessage::Connecting, &nonces(&answer)).to_vec()),
            Ok(HELLO)
        );
        // The server's own proof, reflected.
        assert_eq!(rogue(greeting.encode(), |answer| answer.to_vec()), wrong);
        assert_eq!(
            rogue(greeting.encode(), |answer| proof(ProvingMessage::Accepting, &nonces(&answer)).to_vec()),
            wrong
        );
        // A proof of another exchange with the same greeting.
        let accepting = [9; NONCE_BYTES];
        let old = TokenChallenge { connecting: greeting.nonce, accepting, binding: ChannelBinding::default() };
        assert_eq!(rogue(greeting.encode(), |_| proof(ProvingMessage::Connecting, &old).to_vec()), wrong);
        // A hello instead of a proof, and one bit of a proof.
        assert_eq!(rogue(greeting.encode(), |_| Vec::new()), wrong);
        for bit in [0, 100, 255] {
            let spoil = |answer| {
                let mut bytes = proof(ProvingMessage::Connecting, &nonces(&answer));
                bytes[MAGIC.len() + NONCE_BYTES + bit / 8] ^= 1 << (bit % 8);
                bytes.to_vec()
            };
            assert_eq!(rogue(greeting.encode(), spoil), wrong, "bit {bit}");
        }
    }

    /// The client's result for a server that answers its greeting like this, and the greeting.
    fn impostor(answer: impl Fn([u8; HEADER_BYTES]) -> Vec<u8>) -> (Result<(), String>, [u8; HEADER_BYTES]) {
        let (near, mut far) = duplex(4096);
        let impostor = async {
            let mut greeting = [0; HEADER_BYTES];
            far.read_exact(&mut greeting).await.expect("it greets");
            far.write_all(&answer(greeting)).await.expect("it listens");
            drop(far);
            greeting
        };
        run(async { tokio::join!(connect(Some(token("0123456789abcdef")), near), impostor) })
    }

    #[test]
    fn a_replayed_proof_does_not_authenticate_a_server() {
        let key = token("0123456789abcdef").secrets().first().clone();
        let answer = |end, greeting: &[u8; HEADER_BYTES], accepting| {
            let connecting = AuthMessage::decode(greeting).expect("a card").nonce;
            let nonces = TokenChallenge { connecting, accepting, binding: ChannelBinding::default() };
            AuthMessage { nonce: accepting, proof: key.proof_of(end, &nonces) }.encode().to_vec()
        };
        let refused = Err(OTHER_TOKEN.to_owned());
        let (_, first) = impostor(|greeting| greeting.to_vec());
        assert_eq!(impostor(|greeting| greeting.to_vec()).0, refused, "its own greeting, sent back");
        assert_eq!(
            impostor(|_| answer(ProvingMessage::Accepting, &first, [9; NONCE_BYTES])).0,
            refused,
            "an old answer"
        );
        assert_eq!(impostor(|greeting| answer(ProvingMessage::Connecting, &greeting, [9; NONCE_BYTES])).0, refused);
        assert_ne!(impostor(|greeting| greeting.to_vec()).1, first, "no two greetings are alike");
        // Other answers are errors that the client retries.
        let frame = |kind| Frame::bare(Head::new(kind)).encode();
        let lost = |answer: Vec<u8>, expected: &str| {
            let text = impostor(|_| answer.clone()).0.expect_err("it is no server");
            assert!(text.starts_with("lost: ") && text.contains(expected), "{text}; expected {expected}");
        };
        lost(b"HTTP/1.1 400 Bad Request".repeat(9), "not a pserver frame");
        lost(frame(Kind::Welcome), "the server answers with a Welcome");
        lost(frame(Kind::Welcome)[..63].to_vec(), "early eof");
        lost(refusal(ErrorCode::Invalid, "no").encode()[..65].to_vec(), "early eof");
    }

    #[test]
    fn no_two_answers_of_a_server_are_equal() {
        let greeting = AuthMessage { nonce: [7; NONCE_BYTES], proof: [0; PROOF_BYTES] };
        let answers = std::cell::RefCell::new(Vec::new());
        for _ in 0..2 {
            let _ = rogue(greeting.encode(), |answer| {
                answers.borrow_mut().push(answer);
                Vec::new()
            });
        }
        let answers = answers.into_inner();
        assert_ne!(answers[0], answers[1]);
    }

    #[test]
    fn a_secret_has_a_minimum_length_and_is_never_printed() {
        let check = |secret: &[u8], expected: Result<(), &str>| {
            let found = JobToken::new(secret).map(|token| assert_eq!(format!("{token:?}"), "JobToken(secret)"));
            assert_eq!(found.map_err(|failure| failure.to_string()), expected.map_err(str::to_owned));
        };
        check(b"0123456789abcdef", Ok(()));
        check(&[b'x'; BYTES_MAX], Ok(()));
        check(b"", Err("a token of 0 bytes; expected 16 to 1024 that cannot be guessed"));
        check(b"  0123456789abcde \n", Err("a token of 15 bytes; expected 16 to 1024 that cannot be guessed"));
        check(&[b'x'; BYTES_MAX + 1], Err("a token of 1025 bytes; expected 16 to 1024 that cannot be guessed"));
        let token = token("0123456789abcdef");
        assert!(token.is(b"0123456789abcdef"));
        let others: [&[u8]; 4] = [b"", b"0123456789abcdeF", b"0123456789abcde", b"0123456789abcdef0"];
        assert!(others.iter().all(|other| !token.is(other)));
        let absent = JobToken::read(Path::new("/nowhere/token")).expect_err("there is none").to_string();
        assert!(absent.starts_with("token_file /nowhere/token: No such file"), "{absent}");
    }
}
