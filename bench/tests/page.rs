//! The page of a report in a real browser: curves, bars with names, tables; wide and narrow, light and dark.

mod browsing;

use std::path::Path;
use std::process::Command;

use browsing::browser::Browser;
use pserver_kernels::conformance::skips::skip;
use serde_json::{Value, json};

/// Subcommands at a small size, with whether their pages have curves and how many bars the first chart has.
const PAGES: [(&[&str], bool, u64); 3] = [
    (&["pushpull", "--bytes", "4KiB,64KiB,1MiB", "-n", "45"], true, 3),
    (&["kernels", "--elements", "100003", "-n", "9", "--rule", "sgd,adam"], false, 4),
    (&["rows", "--rows", "2000", "--batch", "512", "--width", "8", "-n", "18"], false, 4),
];

#[test]
fn a_report_fits_every_width_and_both_colour_schemes_and_labels_its_bars() {
    let folder = tempfile::tempdir().expect("there is room");
    let browser = match Browser::start(folder.path().join("profile").to_str().expect("it is text")) {
        Ok(browser) => browser,
        Err(error) => return skip("chromium", &format!("Debian's package chromium-driver has chromedriver: {error}")),
    };
    for (arguments, has_curves, bars) in PAGES {
        let page = folder.path().join(format!("{}.html", arguments[0]));
        measure(arguments, &page);
        browser.open(&format!("file://{}", page.display()));
        check_content(&browser, arguments, has_curves, bars);
        let grounds = [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")].map(|(width, colours)| {
            let ground = browser.check_view(width, colours);
            names_are_seen(&browser, width);
            if let Ok(folder) = std::env::var("PSERVER_TEST_PICTURES") {
                browser.picture(&format!("{folder}/{}-{width}-{colours}.png", arguments[0]));
            }
            ground
        });
        assert_ne!(grounds[0], grounds[1], "dark is another ground than light");
        assert_eq!(browser.complaints(), Vec::<Value>::new(), "the console is empty");
        let loaded = browser.run("return performance.getEntriesByType('resource').map((one) => one.name)");
        let is_elsewhere = |one: &Value| !one.as_str().is_some_and(|name| name.starts_with("data:"));
        assert!(!loaded.as_array().expect("a list").iter().any(is_elsewhere), "{loaded}");
    }
}

fn measure(arguments: &[&str], page: &Path) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_psbench"));
    let output = command.args(arguments).arg("--html").arg(page).output().expect("the program can be run");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The page shows the measured command, the machine and the settings. Each bar has a name, each curve a legend entry.
fn check_content(browser: &Browser, arguments: &[&str], has_curves: bool, bars: u64) {
    let text = browser.text("body");
    for expected in [arguments.join(" ").as_str(), "none was wrong", "cpu", "kernel", "git revision"] {
        assert!(text.contains(expected), "{expected} is not in\n{text}");
    }
    let count = |selector: &str| browser.run(&format!("return document.querySelectorAll({selector:?}).length"));
    let of_bars = browser.run("return [...document.querySelectorAll('ol.bars')].map((one) => one.children.length)");
    assert_eq!(of_bars[0], bars, "{arguments:?}: {of_bars}");
    assert_eq!(count("ol.bars li"), count("ol.bars li .name:not(:empty)"), "{arguments:?}");
    assert_eq!(count("svg") != 0, has_curves, "{arguments:?}");
    if has_curves {
        let axis =
            browser.run("return [...document.querySelectorAll('svg.wide .below')].map((one) => one.textContent)");
        assert_eq!(axis, json!(["4 KiB", "64 KiB", "1 MiB"]));
        assert_eq!(count("ul.legend li"), count("svg.wide polyline"));
        assert_eq!(count("svg.wide polygon:not([points=''])"), json!(2), "both curves have a band");
        assert!(text.contains("quartiles"), "the page says what a band is");
        assert!(text.contains("95 % interval"), "and what a mark is");
    } else {
        assert!(count("ol.bars .spread").as_u64().is_some_and(|count| count >= bars), "{arguments:?}");
    }
}

/// Checks that the name of every bar is within the window, and that one of both forms of each curve is shown.
fn names_are_seen(browser: &Browser, width: u32) {
    let hidden = browser.run(
        "return [...document.querySelectorAll('.bars .name, .bars .value, ul.legend li')].filter((one) => {
            const { left, right, height } = one.getBoundingClientRect();
            return !one.checkVisibility() || left < 0 || innerWidth < right || height < 10;
        }).map((one) => one.textContent)",
    );
    assert_eq!(hidden, json!([]), "{width}");
    let shown = browser.run(
        "return [...document.querySelectorAll('svg')].filter((one) => one.checkVisibility())
            .map((one) => one.getAttribute('class'))",
    );
    let expected = if width < 960 { "narrow" } else { "wide" };
    let forms = shown.as_array().expect("a list");
    assert!(forms.iter().all(|form| form == expected), "{width}: {shown}");
}
