//! A headless Chromium, driven through the WebDriver protocol of `chromedriver`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::LIMIT;
use super::program::TestProgram;

/// The least contrast of any text with the ground behind it, by the formula of WCAG 2.
const CONTRAST: &str = "
    const part = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((value) => part(value / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let one = element; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if (!/, 0\\)$/.test(colour)) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let least = 21;
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.tagName === 'SCRIPT') continue;
        const two = [light(getComputedStyle(element).color), light(ground(element))].sort((a, b) => b - a);
        least = Math.min(least, (two[0] + 0.05) / (two[1] + 0.05));
    }
    return least;";

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

    /// Shows the page at a width, in light or dark, and checks that no content is wider than the window and that text
    /// stands out from its ground. Returns the colour of the ground.
    pub(crate) fn check_view(&self, width: u32, colours: &str) -> Value {
        let metrics = json!({ "width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500 });
        self.own("Emulation.setDeviceMetricsOverride", &metrics);
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": colours }] });
        self.own("Emulation.setEmulatedMedia", &scheme);
        let widths = "const { scrollWidth, clientWidth } = document.documentElement; return [scrollWidth - clientWidth";
        let widths = self.run(&format!("{widths}, innerWidth]"));
        assert_eq!(widths, json!([0, width]), "{colours}: nothing is beside the window");
        let contrast = self.run(CONTRAST);
        assert!(
            contrast.as_f64().is_some_and(|least| least >= 4.5),
            "{width} {colours}: the least contrast is {contrast}"
        );
        self.run("return getComputedStyle(document.body).backgroundColor")
    }

    /// Writes a picture of the whole page to a file.
    pub(crate) fn picture(&self, path: &str) {
        let taken = self.own("Page.captureScreenshot", &json!({ "captureBeyondViewport": true }));
        let text = taken["data"].as_str().unwrap_or_else(|| panic!("{taken}"));
        let mut command = Command::new("base64");
        command.arg("-d").stdin(Stdio::piped()).stdout(File::create(path).expect("there is room"));
        let mut decoder = command.spawn().expect("coreutils are there");
        decoder.stdin.take().expect("it is piped").write_all(text.as_bytes()).expect("it reads");
        assert!(decoder.wait().expect("it ends").success(), "{path}");
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
