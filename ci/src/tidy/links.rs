//! Links of pages: each leads to a file or folder of the repository, and to a heading that it has.
//!
//! Not here: addresses of other hosts.

use std::collections::{HashMap, HashSet};

use crate::tidy::source::SourceFile;
use crate::tidy::{Finding, Standing};

const RULE: &str = "links";

/// The findings of all pages. `exists` says whether the repository has a path.
pub(super) fn look(files: &[SourceFile], exists: &dyn Fn(&str) -> bool) -> Vec<Finding> {
    let pages = || files.iter().filter(|file| file.is_prose());
    let anchors = pages().map(|page| (page.path.as_str(), anchors(page))).collect();
    pages().flat_map(|page| broken(page, &anchors, exists)).collect()
}

/// Where the links in a line lead to, as they are written.
pub(super) fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

fn broken(page: &SourceFile, anchors: &HashMap<&str, HashSet<String>>, exists: &dyn Fn(&str) -> bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, text) in page.page_lines() {
        for link in targets(text).filter(|link| !link.contains("://")) {
            let (file, heading) = link.split_once('#').map_or((link, None), |(file, heading)| (file, Some(heading)));
            let target = resolved(&page.path, file);
            let fault = match heading {
                _ if !exists(&target) => format!("{link:?} leads to {target:?}, which does not exist"),
                Some(heading) if anchors.get(&*target).is_some_and(|names| !names.contains(heading)) => {
                    format!("{link:?} leads to a heading that {target} does not have")
                }
                _ => continue,
            };
            findings.push(Finding {
                path: page.path.clone(),
                line,
                rule: RULE,
                text: fault,
                standing: Standing::Refused,
            });
        }
    }
    findings
}

/// The path of what a link of a page leads to, from the root.
fn resolved(page: &str, link: &str) -> String {
    if link.is_empty() {
        return page.to_owned();
    }
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.trim_end_matches('/').split('/').filter(|part| *part != ".") {
        match part {
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The names that the headings of a page have in links: lower case, spaces as hyphens, no other punctuation; the
/// second heading of a name ends in `-1`, the third in `-2`.
fn anchors(page: &SourceFile) -> HashSet<String> {
    let mut names = HashSet::new();
    for (_, line) in page.page_lines() {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept =
            heading.trim().chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
        let name = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let numbered = (1..).map(|number| format!("{name}-{number}"));
        let free = std::iter::once(name.clone()).chain(numbered).find(|name| !names.contains(name));
        names.extend(free);
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_to_a_file_and_to_a_heading_that_it_has() {
        let exists = |path: &str| ["docs", "docs/A.md", "docs/reports", "docs/reports/speed.md"].contains(&path);
        let check = |link: &str, expected: Option<&str>| {
            let text = format!("# Title\n\n```\n[code](nowhere)\n# No heading\n```\n\n[one]({link}) and more\n");
            let page = SourceFile::new("docs/A.md", &text);
            let report = SourceFile::new("docs/reports/speed.md", "## TCP, `-D 5`\n\n## TCP, `-D 5`\n");
            let found = look(&[page, report], &exists);
            let texts: Vec<String> = found.iter().map(|one| format!("{}:{}", one.line, one.text)).collect();
            let expected: Vec<String> =
                expected.map(|text| format!("8:{link:?} leads to {text}")).into_iter().collect();
            assert_eq!(texts, expected, "{link}");
        };
        for link in ["https://example.org/none", "reports/speed.md", "reports/", "../docs/A.md", "#title", "."] {
            check(link, None);
        }
        check("reports/speed.md#tcp--d-5", None);
        check("reports/speed.md#tcp--d-5-1", None);
        check("reports/speed.md#tcp--d-5-2", Some("a heading that docs/reports/speed.md does not have"));
        check("reports/speed.md#udp", Some("a heading that docs/reports/speed.md does not have"));
        check("#no-heading", Some("a heading that docs/A.md does not have"));
        check("speed.md", Some("\"docs/speed.md\", which does not exist"));
        check("../../A.md", Some("\"A.md\", which does not exist"));
    }
}
