//! A headless Chromium, driven through the WebDriver protocol of `chromedriver`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::{Value, json};

use super::LIMIT;
use super::program::TestProgram;

/// A browser with one page.
pub(crate) struct Browser {
    driver: SocketAddr,
    session: String,
    _program: TestProgram,
}

impl Browser {
    /// Starts a browser; an error when it is not installed.
    pub(crate) fn start(profile: &str) -> std::io::Result<Self> {
        let mut program = TestProgram::start("chromedriver", &["--port=0"])?;
        let port = program.read_until(|line| {
            line.rsplit_once("successfully on port ").and_then(|(_, port)| port.trim_end_matches('.').parse().ok())
        });
        let driver = SocketAddr::from(([127, 0, 0, 1], port));
        // A browser with its pipe ends with the driver.
        let profile = format!("--user-data-dir={profile}");
        let arguments =
            ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--remote-debugging-pipe", &profile];
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "goog:chromeOptions": { "args": arguments }, "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let made = ask(driver, "POST", "/session", &wanted);
        let session = made["sessionId"].as_str().unwrap_or_else(|| panic!("{made}")).to_owned();
        Ok(Self { driver, session, _program: program })
    }

    pub(crate) fn open(&self, address: &str) {
        self.command("/url", &json!({ "url": address }));
    }

    /// The value of a script's `return`.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.command("/execute/sync", &json!({ "script": script, "args": [] }))
    }

    pub(crate) fn text(&self, selector: &str) -> String {
        let text = self.run(&format!("return document.querySelector({selector:?}).innerText"));
        text.as_str().unwrap_or_else(|| panic!("{text}")).to_owned()
    }

    /// Presses and releases a key.
    pub(crate) fn press(&self, key: &str) {
        let keys = json!([{ "type": "keyDown", "value": key }, { "type": "keyUp", "value": key }]);
        self.command("/actions", &json!({ "actions": [{ "type": "key", "id": "keys", "actions": keys }] }));
    }

    /// A command of Chromium's own protocol.
    pub(crate) fn own(&self, command: &str, parameters: &Value) -> Value {
        self.command("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    /// The errors and warnings of the page so far.
    pub(crate) fn complaints(&self) -> Vec<Value> {
        let log = self.command("/se/log", &json!({ "type": "browser" }));
        let lines = log.as_array().cloned().unwrap_or_else(|| panic!("{log}"));
        lines.into_iter().filter(|line| line["level"] != "INFO" && line["level"] != "DEBUG").collect()
    }

    /// A picture of the page, encoded in base64.
    pub(crate) fn picture(&self) -> String {
        let picture = ask(self.driver, "GET", &format!("/session/{}/screenshot", self.session), &Value::Null);
        picture.as_str().unwrap_or_else(|| panic!("{picture}")).to_owned()
    }

    fn command(&self, path: &str, body: &Value) -> Value {
        ask(self.driver, "POST", &format!("/session/{}{path}", self.session), body)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            ask(self.driver, "DELETE", &format!("/session/{}", self.session), &Value::Null);
        }
    }
}

/// Sends a command to the driver; the value of its answer.
fn ask(driver: SocketAddr, method: &str, path: &str, body: &Value) -> Value {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let length = body.len();
    let mut stream = TcpStream::connect(driver).expect("the driver listens");
    stream.set_read_timeout(Some(LIMIT)).expect("it is a time");
    let head = format!("{method} {path} HTTP/1.1\r\nHost: {driver}\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all((head + &body).as_bytes()).expect("the driver reads");
    let mut answer = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        answer.read_line(&mut line).expect("the driver answers");
        let (name, value) = line.split_once(':').unwrap_or_default();
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().expect("a number");
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    answer.read_exact(&mut body).expect("the driver answers");
    let answer: Value = serde_json::from_slice(&body).expect("the driver answers in JSON");
    assert!(answer["value"]["error"].is_null(), "{path}: {answer:#}");
    answer["value"].clone()
}
