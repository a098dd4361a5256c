//! The job's token: a secret that servers and trainers share. Whoever connects shows that it has it, and is shown
//! that the server has it too, before anything else is said; `docs/WIRE.md` has the bytes.
//!
//! Not here: secrecy. What follows travels as it is, and somebody who can change bytes on the way can change them.

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

use super::listener::Refusal;
use super::socket::Unmade;
use crate::refusal::refusal;

/// A shorter secret can be guessed: whoever connects is given a proof to try guesses on.
const BYTES_MIN: usize = 16;
const BYTES_MAX: usize = 1024;
/// More of a file is not looked at.
const FILE_BYTES_MAX: u64 = 4096;
const MAGIC: [u8; 8] = *b"PSTOKEN1";
const NONCE_BYTES: usize = 24;
const PROOF_BYTES: usize = 32;
const NO_TOKEN: &str = "this job has a token, and who connects shows none; expected token_file or PSERVER_TOKEN_FILE";
const NOT_WANTED: &str = "this server has no token, and who connects shows one; expected a server with token_file";
const WRONG: &str = "who connects has another token than this server; expected the one of its token_file";
const GONE: &str = "who connects went when it was shown the token: it has another one, or was lost";
const OTHER: &str = "the server has another token than this side; expected the one of its token_file";

/// The secret of a job.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Arc<[u8]>);

/// Which end a proof is of, so that none can be sent back to who made it.
#[derive(Clone, Copy)]
enum End {
    Connecting,
    Accepting,
}

/// What both ends have said of the moment: nothing that was shown before fits another one.
#[derive(Clone, Copy)]
struct Moment {
    connecting: [u8; NONCE_BYTES],
    accepting: [u8; NONCE_BYTES],
}

/// One of the three messages, as long as a frame's header so that either end may take one for the other.
#[derive(Clone, Copy)]
struct Card {
    nonce: [u8; NONCE_BYTES],
    proof: [u8; PROOF_BYTES],
}

impl Token {
    /// A token of 16 to 1,024 bytes; white space around it is not part of it.
    ///
    /// # Errors
    /// How long it is, when that is not within the bounds.
    pub fn new(secret: &[u8]) -> Result<Self, Failure> {
        let secret = secret.trim_ascii();
        if (BYTES_MIN..=BYTES_MAX).contains(&secret.len()) {
            return Ok(Self(secret.into()));
        }
        let length = secret.len();
        Err(Failure::call(format!(
            "a token of {length} bytes; expected {BYTES_MIN} to {BYTES_MAX} that nobody can guess"
        )))
    }

    /// The token in a file. Says so when others of this machine may read it or write it.
    ///
    /// # Errors
    /// Why the file cannot be read, or what is wrong with what it holds.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let wrong = |why: &dyn fmt::Display| Failure::call(format!("token_file {}: {why}", path.display()));
        let mut secret = Vec::new();
        let file = File::open(path).map_err(|error| wrong(&error))?;
        let is_open = file.metadata().is_ok_and(|facts| facts.permissions().mode() & 0o006 != 0);
        file.take(FILE_BYTES_MAX).read_to_end(&mut secret).map_err(|error| wrong(&error))?;
        if is_open {
            tracing::warn!(path = %path.display(), "every user of this machine may use the token's file (chmod 600)");
        }
        Self::new(&secret).map_err(|failure| wrong(&failure))
    }

    /// Shows it to a server, and is shown that the server has it.
    ///
    /// # Errors
    /// What either side refuses the other with, or why the connection ended.
    pub(super) async fn show(&self, stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<(), Unmade> {
        let connecting = nonce()?;
        stream.write_all(&Card { nonce: connecting, proof: [0; PROOF_BYTES] }.encode()).await?;
        let mut bytes = [0; HEADER_BYTES];
        stream.read_exact(&mut bytes).await?;
        let Some(answer) = Card::decode(&bytes) else { return Err(Unmade::Refused(refused(stream, &bytes).await?)) };
        let moment = Moment { connecting, accepting: answer.nonce };
        if !self.is_proven(End::Accepting, &moment, &answer.proof) {
            return Err(Unmade::Refused(refusal(ErrorCode::Unauthenticated, OTHER)));
        }
        let proof = self.prove(End::Connecting, &moment);
        stream.write_all(&Card { nonce: [0; NONCE_BYTES], proof }.encode()).await?;
        Ok(())
    }

    fn of(&self, end: End, moment: &Moment) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key may have any length");
        mac.update(&MAGIC);
        mac.update(match end {
            End::Connecting => b"connecting",
            End::Accepting => b"accepting_",
        });
        mac.update(&moment.connecting);
        mac.update(&moment.accepting);
        mac
    }

    fn prove(&self, end: End, moment: &Moment) -> [u8; PROOF_BYTES] {
        self.of(end, moment).finalize().into_bytes().into()
    }

    /// Takes as long for any wrong proof.
    fn is_proven(&self, end: End, moment: &Moment, proof: &[u8; PROOF_BYTES]) -> bool {
        self.of(end, moment).verify_slice(proof).is_ok()
    }
}

/// Asks somebody who has connected for the token, if the job has one. What comes first of a connection is `header`;
/// afterwards that is what comes first of what it says.
///
/// # Errors
/// Why the connection is refused.
pub(super) async fn ask(
    token: Option<&Token>,
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    header: &mut [u8; HEADER_BYTES],
) -> Result<(), Refusal> {
    let stranger = |text: &str| Refusal { code: ErrorCode::Unauthenticated, text: text.to_owned() };
    let (token, greeting) = match (token, Card::decode(header)) {
        (None, None) => return Ok(()),
        (None, Some(_)) => return Err(stranger(NOT_WANTED)),
        // Whoever speaks another protocol is told that first.
        (Some(_), None) => return Err(Prefix::decode(header).err().map_or(stranger(NO_TOKEN), Refusal::invalid)),
        (Some(token), Some(greeting)) => (token, greeting),
    };
    let moment = Moment { connecting: greeting.nonce, accepting: nonce().map_err(Refusal::invalid)? };
    let answer = Card { nonce: moment.accepting, proof: token.prove(End::Accepting, &moment) };
    stream.write_all(&answer.encode()).await.map_err(Refusal::invalid)?;
    stream.read_exact(header).await.map_err(|_| Refusal::invalid(GONE))?;
    let shown = Card::decode(header);
    if !shown.is_some_and(|shown| token.is_proven(End::Connecting, &moment, &shown.proof)) {
        return Err(stranger(WRONG));
    }
    stream.read_exact(header).await.map_err(Refusal::invalid)?;
    Ok(())
}

/// The refusal that begins with `header`.
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

impl Card {
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

fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(secret)")
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use pserver_core::wire::{ErrorMessage, Head};
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    const HELLO: Kind = Kind::Hello;

    fn token(secret: &str) -> Token {
        Token::new(secret.as_bytes()).expect("long enough")
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(future)
    }

    /// A server's side: what comes after the token, or the refusal that it wrote.
    async fn serve(token: Option<Token>, mut stream: DuplexStream) -> Result<Kind, Refusal> {
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header).await.expect("somebody speaks");
        let asked = ask(token.as_ref(), &mut stream, &mut header).await;
        if let Err(Refusal { code, text }) = &asked {
            // Who was refused may be gone.
            let _ = stream.write_all(&refusal(*code, text.as_str()).encode()).await;
        }
        asked.map(|()| Prefix::decode(&header).expect("a frame").head().kind)
    }

    /// A client's side, which says hello afterwards.
    async fn connect(token: Option<Token>, mut stream: DuplexStream) -> Result<(), String> {
        if let Some(token) = token {
            token.show(&mut stream).await.map_err(text)?;
        }
        stream.write_all(&Frame::bare(Head::new(HELLO)).encode()).await.expect("somebody listens");
        Ok(())
    }

    fn text(unmade: Unmade) -> String {
        match unmade {
            Unmade::Lost(text) => format!("lost: {text}"),
            Unmade::Refused(frame) => ErrorMessage::decode(frame.control.as_slice()).expect("a refusal").text,
        }
    }

    #[test]
    fn both_ends_have_the_same_token_or_each_says_what_is_wrong() {
        let check =
            |server: Option<&str>, client: Option<&str>, served: Result<(), &str>, connected: Result<(), &str>| {
                let (near, far) = duplex(4096);
                let (server, client) = (server.map(token), client.map(token));
                let found = run(async { tokio::join!(serve(server, far), connect(client, near)) });
                assert_eq!(found.0, served.map(|()| HELLO).map_err(stranger));
                assert_eq!(found.1, connected.map_err(str::to_owned));
            };
        let (one, other) = (Some("0123456789abcdef"), Some("0123456789abcdeF"));
        check(None, None, Ok(()), Ok(()));
        check(one, one, Ok(()), Ok(()));
        check(one, Some(" 0123456789abcdef\n"), Ok(()), Ok(()));
        check(one, None, Err(NO_TOKEN), Ok(()));
        check(None, one, Err(NOT_WANTED), Err(NOT_WANTED));
        let (near, far) = duplex(4096);
        let client = connect(other.map(token), near);
        let (served, connected) = run(async { tokio::join!(serve(one.map(token), far), client) });
        assert_eq!((served, connected), (Err(Refusal::invalid(GONE)), Err(OTHER.to_owned())));
    }

    fn stranger(text: &str) -> Refusal {
        Refusal { code: ErrorCode::Unauthenticated, text: text.to_owned() }
    }

    /// What a server says to somebody who sends `first`, and then what `second` makes of the server's answer.
    fn rogue(first: [u8; HEADER_BYTES], second: impl Fn([u8; HEADER_BYTES]) -> Vec<u8>) -> Result<Kind, Refusal> {
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
    fn nobody_comes_in_with_what_was_shown_before() {
        let key = token("0123456789abcdef");
        let greeting = Card { nonce: [7; NONCE_BYTES], proof: [0; PROOF_BYTES] };
        let moment = |answer: &[u8; HEADER_BYTES]| {
            let accepting = Card::decode(answer).expect("a card").nonce;
            Moment { connecting: greeting.nonce, accepting }
        };
        let proof = |end, moment: &Moment| Card { nonce: [0; NONCE_BYTES], proof: key.prove(end, moment) }.encode();
        let wrong = Err(stranger(WRONG));
        assert_eq!(rogue(greeting.encode(), |answer| proof(End::Connecting, &moment(&answer)).to_vec()), Ok(HELLO));
        // The server's own proof, sent back.
        assert_eq!(rogue(greeting.encode(), |answer| answer.to_vec()), wrong);
        assert_eq!(rogue(greeting.encode(), |answer| proof(End::Accepting, &moment(&answer)).to_vec()), wrong);
        // One of another conversation with the same greeting.
        let old = Moment { connecting: greeting.nonce, accepting: [9; NONCE_BYTES] };
        assert_eq!(rogue(greeting.encode(), |_| proof(End::Connecting, &old).to_vec()), wrong);
        // A hello instead of a proof, and one bit of a proof.
        assert_eq!(rogue(greeting.encode(), |_| Vec::new()), wrong);
        for bit in [0, 100, 255] {
            let spoil = |answer| {
                let mut bytes = proof(End::Connecting, &moment(&answer));
                bytes[MAGIC.len() + NONCE_BYTES + bit / 8] ^= 1 << (bit % 8);
                bytes.to_vec()
            };
            assert_eq!(rogue(greeting.encode(), spoil), wrong, "bit {bit}");
        }
    }

    /// What a trainer makes of a server that answers its greeting like this, and the greeting.
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
    fn nobody_is_taken_for_a_server_by_what_was_shown_before() {
        let key = token("0123456789abcdef");
        let answer = |end, greeting: &[u8; HEADER_BYTES], accepting| {
            let moment = Moment { connecting: Card::decode(greeting).expect("a card").nonce, accepting };
            Card { nonce: accepting, proof: key.prove(end, &moment) }.encode().to_vec()
        };
        let refused = Err(OTHER.to_owned());
        let (_, first) = impostor(|greeting| greeting.to_vec());
        assert_eq!(impostor(|greeting| greeting.to_vec()).0, refused, "its own greeting, sent back");
        assert_eq!(impostor(|_| answer(End::Accepting, &first, [9; NONCE_BYTES])).0, refused, "an old answer");
        assert_eq!(impostor(|greeting| answer(End::Connecting, &greeting, [9; NONCE_BYTES])).0, refused);
        assert_ne!(impostor(|greeting| greeting.to_vec()).1, first, "no two greetings are alike");
        // What is neither a server's answer nor its refusal is tried again.
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
    fn no_two_answers_are_alike() {
        let greeting = Card { nonce: [7; NONCE_BYTES], proof: [0; PROOF_BYTES] };
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
    fn a_secret_is_long_enough_and_is_shown_to_nobody() {
        let check = |secret: &[u8], expected: Result<(), &str>| {
            let found = Token::new(secret).map(|token| assert_eq!(format!("{token:?}"), "Token(secret)"));
            assert_eq!(found.map_err(|failure| failure.to_string()), expected.map_err(str::to_owned));
        };
        check(b"0123456789abcdef", Ok(()));
        check(&[b'x'; BYTES_MAX], Ok(()));
        check(b"", Err("a token of 0 bytes; expected 16 to 1024 that nobody can guess"));
        check(b"  0123456789abcde \n", Err("a token of 15 bytes; expected 16 to 1024 that nobody can guess"));
        check(&[b'x'; BYTES_MAX + 1], Err("a token of 1025 bytes; expected 16 to 1024 that nobody can guess"));
        let absent = Token::read(Path::new("/nowhere/token")).expect_err("there is none").to_string();
        assert!(absent.starts_with("token_file /nowhere/token: No such file"), "{absent}");
    }
}
